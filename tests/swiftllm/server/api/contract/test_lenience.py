"""Bodies as clients and their languages write them, which mean what other bodies mean.

JSON schema counts 2.0 as an integer (6.1.1), and vLLM takes it, since pydantic does. Marks before a text, and UTF-16,
come from programs for Windows; vLLM takes them, since Python's json does.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from swiftllm.server.anthropic import MessagesRequest
from swiftllm.server.parsing import ApiError, parse_body
from swiftllm.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest
from swiftllm.server.responses import ResponsesRequest
from tests.swiftllm.server.api.test_errors import CHAT, COMPLETIONS, HELLO, error_of

LEAST = {
    CompletionRequest: {"prompt": "a"},
    ChatRequest: {"messages": HELLO},
    ResponsesRequest: {"input": "a"},
    MessagesRequest: {"messages": HELLO},
    DetokenizeRequest: {"tokens": [5]},
}
HAVE_WHOLES = [
    (kind, name)
    for kind in LEAST
    for name, field in kind.model_fields.items()
    if re.search(r"\bint\b", str(field.annotation))
]


def parsed(kind: type, **fields: Any) -> Any:
    return parse_body(kind, json.dumps({**LEAST[kind], **fields}).encode())


@pytest.mark.parametrize(("kind", "name"), HAVE_WHOLES, ids=lambda value: getattr(value, "__name__", value))
def test_every_integer_may_be_written_with_a_point(kind, name) -> None:
    value = {"logit_bias": {"5": 1}}.get(name, 1)
    if name in ("allowed_token_ids", "stop_token_ids", "tokens"):
        assert getattr(parsed(kind, **{name: [1.0, 2]}), name) == [1, 2]
        value = [1, 2]
    elif name != "logit_bias":
        taken = getattr(parsed(kind, **{name: 1.0}), name)
        assert (taken, type(taken)) == (1, int)
        for wrong in (1.5, "1", True, float("inf")):
            with pytest.raises(ApiError, match=name):
                parsed(kind, **{name: wrong})
    assert parsed(kind, **{name: value})


@pytest.mark.parametrize("prompt", [[5.0, 6], [[5.0], [6, 7.0]]])
def test_token_ids_of_prompts_may_be_written_with_a_point(prompt) -> None:
    whole = json.loads(json.dumps(prompt).replace(".0", ""))
    assert parsed(CompletionRequest, prompt=prompt).prompts == parsed(CompletionRequest, prompt=whole).prompts


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_the_encoding_of_a_body_is_seen_as_json_sees_it(server, encoding) -> None:
    word = "caf\N{LATIN SMALL LETTER E WITH ACUTE}"
    body = f'{{"prompt": "{word}", "max_tokens": 2.0, "n": 1.0, "seed": 3.0, "temperature": 0}}'
    headers = {"content-type": "application/json"}
    answers = [server.http.post(COMPLETIONS, content=body.encode(name), headers=headers) for name in ("utf8", encoding)]
    first, second = (answer.json()["choices"][0]["text"] for answer in answers)
    assert first == second


@pytest.mark.parametrize("body", [b"\xff\xfe{", b"\xef\xbb\xbf", b"\xef\xbb\xbf\xff", b"{\x00"])
def test_bodies_that_are_none_are_refused(server, body) -> None:
    answer = server.http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert "JSON" in error_of(answer)["message"]


def test_empty_lists_and_nulls_of_clients_are_nothing(server) -> None:
    """What OpenAI's Python client sends back of a message that it has parsed."""
    said = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
    }
    body = {"messages": [*HELLO, said, *HELLO], "max_tokens": 2, "temperature": 0}
    plain = server.post(CHAT, {**body, "messages": [*HELLO, {"role": "assistant", "content": "a"}, *HELLO]}).json()
    nothing = {"tools": [], "stop": [], "logit_bias": {}, "bad_words": [], "functions": [], "metadata": None}
    nulls = {"response_format": None, "tool_choice": None, "top_logprobs": None, "user": None, "n": None}
    assert server.post(CHAT, body | nothing | nulls).json()["choices"] == plain["choices"]


@pytest.mark.parametrize("name", ["format", "regex", "ebnf", "response_schema", "output_format", "structural_tag"])
def test_other_servers_names_of_forms_are_refused_and_not_left_out(server, name) -> None:
    error = error_of(server.post(CHAT, {"messages": HELLO, name: {"type": "object"}}))
    assert error["param"] == name and error["code"] == "unsupported_parameter"
