"""Tools and reasoning over HTTP. A grammar with one choice makes the tiny model say what a test wants it to say."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from swiftllm.llm import LLM
from swiftllm.server.engine_process import EngineService, ServiceLimits
from swiftllm.server.settings import ServerSettings
from tests.swiftllm.server.api.test_errors import CHAT, HELLO, error_of
from tests.swiftllm.server.conftest import OPTIONS
from tests.swiftllm.server.http_server import RunningServer, running

TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]<tool_call>{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}"
    "{% if not reasoning_effort %}{{ message.reasoning_content or '' }}{% endif %};{% endfor %}assistant:</think>"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("weather", "news")]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
SAID = f"<think>Look it up</think>I look.{CALL}{CALL.replace('Paris', 'Rome')}"


@pytest.fixture(scope="module")
def thinker(tiny_chat_dir, tmp_path_factory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    engine = LLM(str(tiny_chat_dir), **OPTIONS).engine
    with running(EngineService(engine, ServiceLimits()), ServerSettings(chat_template=str(template))) as server:
        yield server
    engine.kv.check_blocks()


def allowed(mode: str, *names: str) -> dict:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}


def body_of(said: str | None = None, **fields: object) -> dict:
    choice = {} if said is None else {"structured_outputs": {"choice": [said]}}
    return {"messages": HELLO, "max_tokens": 400, "tools": TOOLS, **choice, **fields}


def test_reasoning_content_and_calls_of_a_whole_answer(thinker) -> None:
    choice = thinker.post(CHAT, body_of(SAID)).json()["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == message["reasoning"] == "Look it up" and message["content"] == "I look."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "weather"]
    assert [json.loads(call["function"]["arguments"])["city"] for call in message["tool_calls"]] == ["Paris", "Rome"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    hidden = thinker.post(CHAT, body_of(SAID, include_reasoning=False)).json()["choices"][0]["message"]
    assert "reasoning_content" not in hidden and hidden["content"] == "I look."


def test_a_stream_adds_up_to_the_whole_answer(thinker) -> None:
    stream = thinker.client().chat.completions.create(
        model="", messages=HELLO, tools=TOOLS, stream=True, max_tokens=400,
        extra_body={"structured_outputs": {"choice": [SAID]}},
    )  # fmt: skip
    content, reasoning, calls, reasons = "", "", {}, []
    for chunk in stream:
        (choice,) = chunk.choices
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", "")
        reasons.append(choice.finish_reason)
        for call in choice.delta.tool_calls or ():
            name, arguments = calls.get(call.index, ("", ""))
            calls[call.index] = name + (call.function.name or ""), arguments + call.function.arguments
    assert (content, reasoning) == ("I look.", "Look it up")
    assert [(name, json.loads(text)) for name, text in calls.values()] == [
        ("weather", {"city": "Paris"}),
        ("weather", {"city": "Rome"}),
    ]
    assert [reason for reason in reasons if reason] == ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_tool_gets_arguments_that_follow_its_schema(thinker, stream) -> None:
    named = {"type": "function", "function": {"name": "news"}}
    client = thinker.client().chat.completions
    how = {"model": "", "messages": HELLO, "tools": TOOLS, "tool_choice": named, "max_tokens": 100}
    for seed in range(3):
        if stream:
            deltas = [chunk.choices[0].delta for chunk in client.create(**how, seed=seed, stream=True)]
            parts = [call.function for delta in deltas for call in delta.tool_calls or ()]
            name, arguments = "".join(p.name or "" for p in parts), "".join(p.arguments for p in parts)
        else:
            choice = client.create(**how, seed=seed).choices[0]
            (call,) = choice.message.tool_calls
            name, arguments = call.function.name, call.function.arguments
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
        assert name == "news" and json.loads(arguments)["city"] in ("Paris", "Rome")


def test_a_required_call_is_one_of_the_tools(thinker) -> None:
    for seed in range(4):
        for is_parallel in (False, None):
            body = body_of(tool_choice="required", parallel_tool_calls=is_parallel, seed=seed, max_tokens=60)
            choice = thinker.post(CHAT, body).json()["choices"][0]
            assert choice["finish_reason"] == "tool_calls" or is_parallel is None  # a list may be cut
            calls = choice["message"]["tool_calls"]
            assert len(calls) == 1 or is_parallel is None
            assert {call["function"]["name"] for call in calls} <= {"weather", "news"}
            whole = calls if choice["finish_reason"] == "tool_calls" else calls[:-1]  # the last may be cut
            assert all(json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome") for call in whole)


def test_a_forced_call_has_no_content_that_a_form_would_be_of(thinker) -> None:
    """vLLM lets the choice of a tool override `response_format`, and OpenAI takes both."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": 1}}}
    for choice in ("required", {"type": "function", "function": {"name": "news"}}, allowed("required", "news")):
        body = body_of(tool_choice=choice, response_format=form, parallel_tool_calls=False)
        (call,) = thinker.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


def test_allowed_tools_are_the_only_ones(thinker) -> None:
    """OpenAI's form of a choice: some of the tools, one of which may or must be called."""
    for seed in range(3):
        body = body_of(tool_choice=allowed("required", "news"), parallel_tool_calls=False, seed=seed)
        (call,) = thinker.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
        assert call["function"]["name"] == "news"
    choices = (allowed("auto", "news", "weather"), allowed("auto", "weather"), allowed("auto"))
    counts = [thinker.post("/tokenize", body_of(tool_choice=choice)).json()["count"] for choice in choices]
    assert counts == sorted(set(counts), reverse=True)
    for choice, calls in zip(choices[1:], (True, False), strict=True):
        answer = thinker.post(CHAT, body_of(CALL, tool_choice=choice)).json()["choices"][0]
        assert ("tool_calls" in answer["message"]) is calls


def test_usage_tells_the_tokens_of_reasoning(thinker) -> None:
    """In OpenAI's field, of all choices together, in a stream as in a whole answer."""
    how = {"structured_outputs": {"choice": ["<think>Look it up</think>Hi"]}, "temperature": 0}
    one, two = (thinker.post(CHAT, body_of(**how, n=n)).json()["usage"] for n in (1, 2))
    details = one["completion_tokens_details"]
    assert 3 <= details["reasoning_tokens"] < one["completion_tokens"]
    assert two["completion_tokens_details"] == {"reasoning_tokens": 2 * details["reasoning_tokens"]}
    stream = thinker.client().chat.completions.create(
        model="", messages=HELLO, tools=TOOLS, stream=True, stream_options={"include_usage": True}, extra_body=how
    )
    assert list(stream)[-1].usage.completion_tokens_details.reasoning_tokens == details["reasoning_tokens"]
    plain = thinker.post(CHAT, body_of("</think>Hi")).json()["usage"]
    assert plain["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_without_parallel_calls_the_first_alone_is_shown(thinker, stream) -> None:
    fields = {"structured_outputs": {"choice": [SAID]}, "parallel_tool_calls": False, "stream": stream}
    functions = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    tools = [{"name": "weather", "input_schema": PARAMETERS}]
    of_choice = {"type": "auto", "disable_parallel_tool_use": True}
    for path, body in (
        (CHAT, body_of(**fields)),
        ("/v1/responses", {"input": "Hi", "tools": functions, "max_output_tokens": 400, **fields}),
        ("/v1/messages", {"messages": HELLO, "tools": tools, "max_tokens": 400, **fields, "tool_choice": of_choice}),
    ):
        text = thinker.post(path, body).text
        cities = re.findall("city:(Paris|Rome)", re.sub(r'[\\" ]', "", text))
        assert set(cities) == {"Paris"}, (path, text)


@pytest.fixture(scope="module")
def strict_caller(tiny_chat_dir) -> Iterator[RunningServer]:
    engine = LLM(str(tiny_chat_dir), **OPTIONS).engine
    with running(EngineService(engine, ServiceLimits()), ServerSettings(tool_call_parser="json")) as server:
        yield server


def test_a_strict_tool_is_called_by_its_schema_where_it_need_not_be_called(strict_caller) -> None:
    opening = strict_caller.front.tokenizer.encode("{")[0]
    how = {"logit_bias": {opening: 50, 2: 100}, "min_tokens": 1}  # begins a call, and ends behind it
    for is_strict in (True, False):
        tools = [{"type": "function", "function": {**tool["function"], "strict": is_strict}} for tool in TOOLS]
        for seed in range(3):
            body = body_of(tools=tools, seed=seed, **how)
            message = strict_caller.post(CHAT, body).json()["choices"][0]["message"]
            calls = message.get("tool_calls", [])
            assert len(calls) == is_strict
            assert all(json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome") for call in calls)
    tools = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    stream = strict_caller.client().chat.completions.create(
        model="", messages=HELLO, tools=tools, stream=True, temperature=0, max_tokens=60, logit_bias=how["logit_bias"],
        extra_body={"min_tokens": 1},
    )  # fmt: skip
    deltas = [call.function for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert [delta.name for delta in deltas if delta.name] in (["weather"], ["news"]) and len(deltas) > 3
    assert json.loads("".join(delta.arguments for delta in deltas))["city"] in ("Paris", "Rome")
    free = {"messages": HELLO, "max_tokens": 20, "temperature": 0, "skip_special_tokens": False}
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    texts = [strict_caller.post(CHAT, {**free, **how}).json()["choices"][0]["message"]["content"]
             for how in ({}, {"tools": tools})]  # fmt: skip
    assert texts[0] == texts[1], "text is free"
    wrong = tool_of("f", {"type": "objec"})
    wrong["function"]["strict"] = True
    assert error_of(strict_caller.post(CHAT, body_of(tools=[wrong])), 400)["code"] == "invalid_grammar"


def tool_of(name: str, parameters: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"enum": [1]}}, "required": ["a"]},
        {"type": ["object", "null"], "properties": {}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": {"a": {"enum": [1]}}}}},
    ],
)
def test_arguments_are_an_object_even_if_their_schema_does_not_say_so(thinker, parameters) -> None:
    tools = [tool_of("f", {**parameters, "additionalProperties": False})]
    for seed in range(4):
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            body = body_of(tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=seed)
            (call,) = thinker.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) in ({}, {"a": 1})


RARE = {"type": "object", "properties": {"a": {"enum": [1]}, "b": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize("schema", [RARE, {**RARE, "not": {"required": ["b"]}, "if": {}, "then": {}}])
def test_only_where_a_schema_is_strict_it_may_not_say_what_no_grammar_can(thinker, schema) -> None:
    """OpenAI takes any schema where strict is false."""
    named = {"type": "function", "function": {"name": "f"}}
    for is_strict, status in ((None, 200), (False, 200), (True, 400)):
        tool = tool_of("f", schema)
        tool["function"]["strict"] = is_strict
        form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema, "strict": is_strict}}
        bodies = [({"tools": [tool], "tool_choice": choice}, "tools") for choice in ("required", named)]
        bodies += [({"tools": None, "response_format": form}, "response_format")]
        for fields, field in bodies:
            answer = thinker.post(CHAT, body_of(max_tokens=4, **fields))
            assert answer.status_code == status
            if is_strict:
                error = error_of(answer, 400)
                assert error["param"] == field and "Unimplemented keys" in error["message"]
    structured = {"tools": None, "structured_outputs": {"json": schema}}
    assert "Unimplemented keys" in error_of(thinker.post(CHAT, body_of(**structured)), 400)["message"]


def test_arguments_and_answers_have_no_keys_but_those_that_are_named(thinker) -> None:
    """As in vLLM, whose grammars close objects by default."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    for seed in range(3):
        body = body_of(tools=[tool_of("f", schema)], tool_choice="required", parallel_tool_calls=False, seed=seed)
        (call,) = thinker.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
        body = body_of(tools=None, response_format=form, seed=seed)
        content = thinker.post(CHAT, body).json()["choices"][0]["message"]["content"]
        assert json.loads(call["function"]["arguments"]) == json.loads(content) == {"a": 1}


def test_an_included_end_is_no_part_of_arguments(thinker) -> None:
    named = {"type": "function", "function": {"name": "news"}}
    body = body_of(tool_choice=named, include_stop_str_in_output=True)
    (call,) = thinker.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "news"}}])
def test_a_call_that_a_stop_string_cuts_is_none_to_run(thinker, choice) -> None:
    body = body_of(tool_choice=choice, parallel_tool_calls=False)
    for stream in (False, True):
        cut = thinker.post(CHAT, {**body, "stop": ["ity"], "stream": stream}).text
        assert '"finish_reason":"stop","stop_reason":"ity"' in cut and "tool_calls" in cut
    over = thinker.post(CHAT, {**body, "stop": ["}"], "include_stop_str_in_output": True}).json()["choices"][0]
    assert over["finish_reason"] == "tool_calls", "the arguments are whole"
    tools = [{"name": "news", "input_schema": PARAMETERS}]
    wanted = {"type": "any"} if choice == "required" else {"type": "tool", "name": "news"}
    body = {"messages": HELLO, "max_tokens": 60, "tools": tools, "tool_choice": wanted, "stop_sequences": ["ity"]}
    message = thinker.post("/v1/messages", body).json()
    assert message["stop_reason"] == "stop_sequence" and message["stop_sequence"] == "ity"


PERSON = {
    "type": "object",
    "properties": {"name": {"const": "Ann"}},
    "required": ["name"],
    "additionalProperties": False,
}
PERSONS = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_in_a_given_form_is_content_whatever_it_looks_like(strict_caller, stream) -> None:
    body = body_of(response_format=PERSONS, stream=stream, include_stop_str_in_output=True)
    text = strict_caller.post(CHAT, body).text
    assert "tool_calls" not in text and "</s>" not in text and '"finish_reason":"stop"' in text


def test_an_answer_in_a_given_form_does_not_go_on_with_reasoning(tiny_chat_dir, tmp_path) -> None:
    (tmp_path / "template.jinja").write_text("{% if messages[-1].reasoning_content %}</think>{% endif %}<think>\n")
    engine = LLM(str(tiny_chat_dir), **OPTIONS).engine
    settings = ServerSettings(chat_template=str(tmp_path / "template.jinja"))
    with running(EngineService(engine, ServiceLimits()), settings) as server:
        body = {"messages": HELLO, "max_tokens": 60}
        message = server.post(CHAT, {**body, "response_format": PERSONS}).json()["choices"][0]["message"]
        assert json.loads(message["content"]) == {"name": "Ann"} and "reasoning_content" not in message
        message = server.post(CHAT, body).json()["choices"][0]["message"]
        assert message["reasoning_content"] and not message["content"]


def test_references_in_tools_are_to_their_own_parameters(thinker) -> None:
    tools = [
        tool_of(name, {
            "$defs": {"Place": {"enum": [place]}}, "type": "object", "required": ["a"], "additionalProperties": False,
            "properties": {"a": {"$ref": "#/$defs/Place"}, "b": {"$ref": "#"}, "c": {"$ref": "#/properties/a"}},
        })
        for name, place in (("f", "Paris"), ("g", "Rome"))
    ]  # fmt: skip
    has_inner = False
    for seed in range(2):
        for choice in ("required", {"type": "function", "function": {"name": "g"}}):
            body = body_of(tools=tools, tool_choice=choice, parallel_tool_calls=False, seed=seed)
            (call,) = thinker.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
            name, arguments = call["function"]["name"], json.loads(call["function"]["arguments"])
            place = {"f": "Paris", "g": "Rome"}[name]
            has_inner |= "b" in arguments
            while arguments:
                assert arguments["a"] == place == arguments.get("c", place)
                arguments = arguments.get("b")
    assert has_inner


def test_tools_and_calls_are_in_the_prompt(thinker) -> None:
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    called = {"role": "assistant", "content": None, "reasoning_content": "Hm",
              "tool_calls": [{"id": "1", "type": "function", "function": function}]}  # fmt: skip
    messages = [*HELLO, called, {"role": "tool", "tool_call_id": "1", "content": "Sun"}]

    def prompt(**fields: object) -> str:
        tokens = thinker.post("/tokenize", {"messages": messages, "add_special_tokens": False, **fields}).json()
        return thinker.post("/detokenize", {"tokens": tokens["tokens"]}).json()["prompt"]

    text = prompt(tools=TOOLS)
    assert text.startswith("[weather]<tool_call>[news]<tool_call>") and "assistant: ParisHm;tool: Sun;" in text
    assert "[weather]" not in prompt(tools=TOOLS, tool_choice="none")
    assert "ParisHm" not in prompt(reasoning_effort="low")


def test_without_tools_a_call_is_content(thinker) -> None:
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        message = thinker.post(CHAT, body_of(CALL, **fields)).json()["choices"][0]["message"]
        assert message["content"] == CALL and "tool_calls" not in message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": [TOOLS[0]] * 2}, "two have the same name"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "not among tools"),
        ({"tools": [], "tool_choice": "required"}, "needs tools"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tool_choice": "any"}, "should be 'auto', 'none', 'required', or of type 'function' or 'allowed_tools'"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "x"}}}, "of type 'function' or 'allowed_tools'"),
        ({"tool_choice": {"type": "function", "name": "news"}}, "tool_choice.function: Field required"),
        ({"tool_choice": allowed("required", "x")}, "names 'x', which is not among tools"),
        ({"tool_choice": allowed("required")}, "needs tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [tool_of("f", {"type": "string"})], "tool_choice": "required"}, "'f' must have the type 'object'"),
        ({"tools": [tool_of("f", {"$defs": 3, "$ref": "#/$defs/a"})], "tool_choice": "required"}, "tools"),
    ],
)
def test_what_does_not_fit_is_refused(thinker, fields, words) -> None:
    assert words in error_of(thinker.post(CHAT, body_of(**fields)), 400)["message"]


def test_without_a_known_form_tools_are_refused_and_the_forms_are_named(server) -> None:
    error = error_of(server.post(CHAT, body_of()), 400)
    assert error["param"] == "tools" and "hermes, llama3_json, mistral, granite, qwen3_coder" in error["message"]
    for choice in ("required", {"type": "function", "function": {"name": "news"}}):
        body = body_of(tool_choice=choice, parallel_tool_calls=False)
        (call,) = server.post(CHAT, body).json()["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome"), "as in vLLM"
    assert server.post(CHAT, body_of(tool_choice="none", max_tokens=2)).status_code == 200
