"""What clients and test suites of other servers expect, beyond the fields of the API."""

from __future__ import annotations

import re

import pytest

from swiftllm.model.tokenizer import Tokenizer
from tests.reference.tiny_tokenizer import BEYOND_ASCII
from tests.swiftllm.server.api.test_errors import CHAT, COMPLETIONS, HELLO, error_of
from tests.swiftllm.server.http_server import TIMEOUT_S

PROMPT = "Once upon a time"


# -- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_max_tokens_are_cut_to_what_fits_beside_the_prompt(server, field):
    endless = {"ignore_eos": True, "temperature": 0}
    prompts = [[5] * 500, [5] * 510]
    if field == "max_tokens":
        answer = server.post(COMPLETIONS, {"prompt": prompts, field: 16, **endless}).json()
        assert answer["usage"]["completion_tokens"] == 12 + 2
    answer = server.post(CHAT, {"messages": HELLO, field: 512, **endless}).json()
    assert answer["usage"]["total_tokens"] == 512 and answer["choices"][0]["finish_reason"] == "length"
    error = error_of(server.post(CHAT, {"messages": HELLO, field: 513}))
    assert error["param"] == field and "512" in error["message"], "no prompt leaves so many"


def test_a_prompt_that_is_too_long_is_said_in_the_words_that_clients_know(server):
    known = "the prompt is too long: this model's maximum context length is 512 tokens; "
    chat = {"messages": [{"role": "user", "content": "a" * 600}]}
    for path, body in ((COMPLETIONS, {"prompt": [5] * 512}), (COMPLETIONS, {"prompt": "a" * 512}), (CHAT, chat)):
        error = error_of(server.post(path, body))
        assert error["message"].startswith(known) and error["code"] == "context_length_exceeded"


def test_langchain_and_litellm_know_that_message(server):
    chat_models = pytest.importorskip("langchain_openai")
    mapping = pytest.importorskip("litellm.litellm_core_utils.exception_mapping_utils")
    model = chat_models.ChatOpenAI(model="tiny-chat", base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(Exception, match="prompt is too long") as caught:
        model.invoke("a" * 600)
    assert "ContextOverflow" in type(caught.value).__name__
    assert mapping.ExceptionCheckers.is_error_str_context_window_exceeded(str(caught.value))


def test_what_has_too_many_characters_is_refused_before_it_is_tokenized(server, monkeypatch):
    tokenizer = server.service.engine.tokenizer
    encoded = []
    encode = Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, *how: encoded.append(text) or encode(self, text, *how))
    longest = max(map(len, tokenizer._rust.get_vocab()))
    most = longest * 511
    for path, body in (
        (COMPLETIONS, {"prompt": "1" * (most + 1)}),
        (CHAT, {"messages": [{"role": "user", "content": "1" * most}]}),
    ):
        error = error_of(server.post(path, body))
        assert re.search(r"characters are at least 5\d\d tokens", error["message"])
        assert error["code"] == "context_length_exceeded" and not encoded
    error_of(server.post(COMPLETIONS, {"prompt": "1" * most}))
    assert encoded, "it might fit"
    text = "1" * (most + 1)
    assert server.post("/tokenize", {"prompt": text}).json()["count"] == most + 1
    cut = {"truncate_prompt_tokens": 5, "max_tokens": 1}
    assert server.post(COMPLETIONS, {"prompt": text, **cut}).json()["usage"]["prompt_tokens"] == 5
    encoded.clear()
    text = "1" * (4 * longest * 512)
    messages = [{"role": "user", "content": text}]
    for path, body in (
        ("/tokenize", {"prompt": text}),
        ("/tokenize", {"messages": messages}),
        (COMPLETIONS, {"prompt": text, **cut}),
        (CHAT, {"messages": messages, **cut}),
    ):
        error = error_of(server.post(path, body))
        assert error["code"] == "context_length_exceeded" and error["param"] == next(iter(body)) and not encoded


# -- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "application/jsonp", None])
def test_bodies_of_another_type_are_not_read(server, kind):
    headers = {} if kind is None else {"Content-Type": kind}
    described = server.http.get("/openapi.json").json()["paths"]
    paths = {path for path, methods in described.items() if "requestBody" in methods.get("post", {})}
    assert paths == {COMPLETIONS, CHAT, "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize",
                     "/v1/responses/input_tokens",
                     "/detokenize"}  # fmt: skip
    for path in paths:
        error = server.http.post(path, content=b'{"prompt": "a"}', headers=headers)
        assert error.status_code == 415 and error.json()["error"]["code"] == "unsupported_media_type"
        assert "application/json" in error.json()["error"]["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_bodies_of_json_are_read(server, kind):
    answer = server.http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "path"),
    [
        ("echo", True, CHAT),
        ("logprob_token_ids", [5], COMPLETIONS),
        ("repetition_detection", {"max_pattern_size": 3}, COMPLETIONS),
        ("grammar", 'root ::= "a"', COMPLETIONS),
        ("json_schema", {"type": "object"}, COMPLETIONS),
    ],
)
def test_what_would_change_the_output_is_refused_by_name(server, field, value, path):
    error = error_of(server.post(path, {"prompt": "a", "messages": HELLO, field: value}))
    assert error["param"] == field and error["code"] == "unsupported_parameter"


def test_all_bad_keys_of_logit_bias_are_named(server):
    message = error_of(server.post(COMPLETIONS, {"prompt": "a", "logit_bias": {"x": 1, "5": 1, "y": 2}}))["message"]
    assert "'x', 'y'" in message and "'5'" not in message
    message = error_of(server.post(COMPLETIONS, {"prompt": "a", "logit_bias": {"128": 1, "5": 1, "-3": 2}}))["message"]
    assert "token ids 128, -3 are outside the vocabulary of 128" in message
    many = {f"x{number}": 1 for number in range(1000)}
    assert "and 980 more" in error_of(server.post(COMPLETIONS, {"prompt": "a", "logit_bias": many}))["message"]


def test_content_comes_in_parts_of_many_kinds(server, llm):
    parts = ["Wh", {"type": "input_text", "text": "o a"}, {"type": "refusal", "refusal": "re"}]
    parts += [{"type": "output_text", "text": " y"}, {"type": "text", "text": "ou?"}]
    whole, split = (server.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()["tokens"]
                    for content in ("Who are you?", parts))  # fmt: skip
    assert whole == split
    for part in ({"type": "refusal", "text": "a"}, {"type": "text", "refusal": "a"}):
        assert (
            "is not implemented"
            in error_of(server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]}))["message"]
        )


def test_tools_that_must_not_be_called_need_no_parser(server):
    body = {"messages": HELLO, "max_tokens": 8, "temperature": 0}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    plain, with_tools = (
        server.post(CHAT, body | more).json()["choices"][0]["message"]
        for more in ({}, {"tools": tools, "tool_choice": "none"})
    )
    assert plain == with_tools and plain["content"]
    assert error_of(server.post(CHAT, {**body, "tools": tools}))["param"] == "tools"


# -- answers ----------------------------------------------------------------------------------------------------------


def test_usage_comes_only_to_those_who_ask(server):
    body = {"prompt": PROMPT, "messages": HELLO, "max_tokens": 4, "stream": True}
    for options, expected in (({"continuous_usage_stats": True}, False), ({"include_usage": True}, True)):
        for path in (COMPLETIONS, CHAT):
            text = server.post(path, {**body, "stream_options": options}).text
            assert ('"usage"' in text) is expected


def test_prompt_logprobs_are_null_where_nobody_asked(server):
    assert server.post(COMPLETIONS, {"prompt": "a"}).json()["choices"][0]["prompt_logprobs"] is None
    assert server.post(CHAT, {"messages": HELLO, "max_tokens": 1}).json()["prompt_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_the_tokens_of_logprobs_are_the_text(server, llm, stream):
    """Characters of several tokens included: the last has the character. One that is cut off is no character."""
    tokenizer = llm.engine.tokenizer
    cake = tokenizer.encode("🍰")
    assert len(cake) == 4
    body = {"prompt": [*tokenizer.encode("a" + BEYOND_ASCII + "b"), cake[0]], "max_tokens": 3, "logprobs": 1}
    body |= {"logit_bias": {str(cake[0]): 100}, "echo": True, "stream": stream}
    create = server.client().completions.create
    bias = {"logit_bias": body.pop("logit_bias")}
    answer = create(model="tiny-chat", **body, **bias)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    parts = [choice.logprobs for choice in choices if choice.logprobs is not None]
    tokens, offsets = ([value for part in parts for value in getattr(part, name)] for name in ("tokens", "text_offset"))
    assert text == "a" + BEYOND_ASCII + "b" + "�" * 4 == "".join(tokens)
    assert tokens[:3] == ["a", "", "é"] and tokens.count("🍰") == 1
    assert offsets == [len("".join(tokens[:number])) for number in range(len(tokens))]
    tops = [top for part in parts for top in part.top_logprobs]
    assert all(token in top for token, top in list(zip(tokens, tops, strict=True))[1:])


def test_chat_logprobs_have_the_bytes_of_every_token(server, llm):
    cake = llm.engine.tokenizer.encode("🍰")
    for token, value in zip(cake, "🍰".encode(), strict=True):
        body = {"messages": HELLO, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
        body |= {"logit_bias": {str(token): 100}, "temperature": 0}
        (entry,) = server.post(CHAT, body).json()["choices"][0]["logprobs"]["content"]
        assert entry["bytes"] == [value]
        assert all(isinstance(top["bytes"], list) for top in entry["top_logprobs"])


# -- the description of all paths -------------------------------------------------------------------------------------


def test_all_paths_are_described(server):
    schema = server.http.get("/openapi.json").json()
    assert set(schema["paths"]) >= {COMPLETIONS, CHAT, "/v1/models", "/tokenize", "/detokenize", "/health", "/version"}
    body = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
    assert {"messages", "temperature", "max_completion_tokens", "stream_options"} <= fields.keys()
    forms = schema["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]["anyOf"]
    assert [form["type"] for form in forms] == ["string", "array", "array", "array"]
    named = str(schema)
    for reference in {part.split("'")[0] for part in named.split("#/components/schemas/")[1:]}:
        assert reference in schema["components"]["schemas"]


def test_no_request_of_that_description_fails_in_the_server(server):
    """Of bodies that fit the schemas and of such that do not, none gets 500, and the server goes on."""
    schemathesis = pytest.importorskip("schemathesis")
    hypothesis = pytest.importorskip("hypothesis")
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses = set()

    def run(operation) -> None:
        @hypothesis.given(case=operation.as_strategy())
        @hypothesis.settings(max_examples=40, suppress_health_check=list(hypothesis.HealthCheck))
        def call(case) -> None:
            if isinstance(case.body, dict):
                for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                    value = case.body.get(limit) or 3
                    case.body[limit] = min(value, 3) if isinstance(value, int) else value
            answer = case.call(timeout=TIMEOUT_S)
            statuses.add(answer.status_code)
            assert answer.status_code < 500 or answer.status_code == 504, answer.text  # a deadline may be now

        call()

    for result in schema.get_all_operations():
        run(result.ok())
    assert {200, 400} <= statuses
    assert server.post(COMPLETIONS, {"prompt": "a"}).status_code == 200
