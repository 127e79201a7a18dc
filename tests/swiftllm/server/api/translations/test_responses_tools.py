"""Tools of `/v1/responses` that are no functions, namespaces of functions, and the choice among them.

Names in namespaces are vLLM's: `NAMESPACE__NAME` for the model, and the two apart in calls.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from swiftllm.llm import LLM
from swiftllm.server import translation
from swiftllm.server.engine_process import EngineService, ServiceLimits
from swiftllm.server.parsing import parse_body
from swiftllm.server.responses import ResponsesRequest
from swiftllm.server.settings import ServerSettings
from tests.swiftllm.server.api.test_errors import error_of
from tests.swiftllm.server.conftest import OPTIONS
from tests.swiftllm.server.http_server import RunningServer, running

RESPONSES = "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
WEB_SEARCH = {"type": "web_search", "external_web_access": False}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "name": name, "parameters": SCHEMA, "strict": False}


def namespace(name: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "description": "Some tools", "tools": list(tools)}


PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
TOOLS = [function("shell"), WEB_SEARCH, PATCH, {"type": "local_shell"}, namespace("mcp__x", function("f"), PATCH)]
AGENT = {  # what coding agents send
    "instructions": "You are a coding agent",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files"}]}],
    "tools": TOOLS,
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "k",
    "max_output_tokens": 100,
}


@pytest.fixture(scope="module")
def caller(tiny_chat_dir, tmp_path_factory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(
        "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
        "{% for message in messages %}{{ message.role }}: {{ message.content }};"
        "{% for call in message.tool_calls or [] %}({{ call.function.name }}){% endfor %}{% endfor %}assistant:"
    )
    engine = LLM(str(tiny_chat_dir), **OPTIONS).engine
    settings = ServerSettings(tool_call_parser="json", chat_template=str(template))
    with running(EngineService(engine, ServiceLimits()), settings) as server:
        yield server


def chat_of(**body: Any) -> dict[str, Any]:
    chat = parse_body(ResponsesRequest, json.dumps({"input": "a", **body}).encode()).as_chat()
    return chat.model_dump(exclude_unset=True)


def choose(*tools: dict[str, Any], mode: str = "required") -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": mode, "tools": list(tools)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [TOOLS, TOOLS[1:]], ids=["all", "namespace"])
def test_the_request_of_a_coding_agent_ends_in_a_call_of_one_of_its_functions(caller, stream, tools) -> None:
    how = {**AGENT, "tools": tools, "tool_choice": "required", "model": ""}
    if stream:
        events = list(caller.client().responses.create(**how, stream=True))
        done = next(event for event in events if event.type == "response.function_call_arguments.done")
        response = events[-1].response
        assert done.name == response.output[0].name
    else:
        response = caller.client().responses.create(**how)
    (call,) = response.output
    assert (call.name, call.namespace) in [("shell", None), ("f", "mcp__x")][len(TOOLS) - len(tools) :]
    assert response.status == "completed" and json.loads(call.arguments) == {"a": "x"}
    assert [tool.type for tool in response.tools] == [tool["type"] for tool in tools]
    back = {"type": "function_call_output", "call_id": call.call_id, "output": "README.md"}
    follow_up = {**how, "input": [*AGENT["input"], call.to_dict(), back], "tool_choice": "none", "max_output_tokens": 4}
    assert caller.client().responses.create(**follow_up).output[0].type == "message"


def test_functions_alone_reach_the_model_and_those_of_namespaces_by_whole_names() -> None:
    names = [tool["function"]["name"] for tool in chat_of(tools=TOOLS)["tools"]]
    assert names == ["shell", "mcp__x__f"]
    items = [{"type": "function_call", "call_id": "1", "name": "f", "namespace": "mcp__x", "arguments": "{}"}]
    (message,) = chat_of(tools=TOOLS, input=items)["messages"]
    assert message["tool_calls"][0]["function"]["name"] == "mcp__x__f"
    assert "tools" not in chat_of(tools=[WEB_SEARCH])


def test_the_log_says_once_what_is_left_out(caplog, monkeypatch) -> None:
    monkeypatch.setattr(translation, "_left_out", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            chat_of(tools=[WEB_SEARCH, WEB_SEARCH, {"type": "mcp", "server_label": "x"}])
    assert [record.args[0] for record in caplog.records] == ["web_search", "mcp"]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "shell"}, "shell"),
        ({"type": "function", "name": "f", "namespace": "mcp__x"}, "mcp__x__f"),
        ({"type": "function", "name": "mcp__x__f"}, "mcp__x__f"),
        ({"type": "function", "name": "f"}, "mcp__x__f"),
        (choose({"type": "function", "name": "f"}, WEB_SEARCH), {"mcp__x__f"}),
        (choose({"type": "namespace", "name": "mcp__x"}), {"mcp__x__f"}),
        (choose(WEB_SEARCH, mode="auto"), set()),
    ],
)
def test_a_choice_names_functions(choice, names) -> None:
    chat = parse_body(ResponsesRequest, json.dumps({"input": "a", "tools": TOOLS, "tool_choice": choice}).encode())
    chat = chat.as_chat()
    offered = {tool.function.name for tool in chat.tools_offered}
    assert chat.named_tool == names if isinstance(names, str) else offered == names
    assert chat.must_call is (choice.get("mode") != "auto")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tool_choice": {"type": "web_search"}}, "tool_choice: type 'web_search' is not implemented"),
        ({"tool_choice": {"type": "custom", "name": "apply_patch"}}, "tool_choice: type 'custom' is not implemented"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice: type 'mcp' is not implemented"),
        ({"tool_choice": {"type": "function", "name": "none"}}, "names 'none', which is not among tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name: Field required"),
        ({"tool_choice": choose(WEB_SEARCH)}, "tool_choice.tools has no function"),
        ({"tool_choice": choose(mode="some")}, "mode: Input should be 'auto' or 'required'"),
        ({"tool_choice": "required", "tools": [WEB_SEARCH]}, "tool_choice=required needs tools"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools.0.name: Field required"),
        ({"tools": [namespace("a", {"type": "function"})]}, "tools.0.tools.0.name: Field required"),
        ({"tools": [namespace("a", function("b")), function("a__b")]}, "two have the same name"),
    ],
)
def test_what_cannot_be_chosen_is_refused_by_name(caller, fields, message) -> None:
    error = error_of(caller.post(RESPONSES, {**AGENT, **fields}))
    assert message in error["message"] and error["param"] == next(iter(fields))
