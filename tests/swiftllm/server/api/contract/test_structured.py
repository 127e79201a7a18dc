"""`response_format` and `structured_outputs` over HTTP: every finished output is valid; what cannot be is refused."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.swiftllm.server.api.test_errors import CHAT, COMPLETIONS, HELLO, error_of


def random_schema(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose outputs are short."""
    kind = draw.choice(["integer", "string", "boolean", "enum", "array", "object"][: 4 if depth > 1 else 6])
    if kind == "enum":
        return {"enum": draw.sample([1, "one", None, False, "two words"], draw.randint(1, 4))}
    if kind == "string":
        return {"type": "string", "maxLength": draw.randint(0, 8)}
    if kind == "integer":
        return {"type": "integer", "minimum": -9, "maximum": draw.randint(0, 99)}
    if kind == "array":
        return {"type": "array", "items": random_schema(draw, depth + 1), "maxItems": 2}
    if kind == "object":
        names = draw.sample("abcd", draw.randint(1, 3))
        return {"type": "object", "properties": {name: random_schema(draw, depth + 1) for name in names},
                "required": names, "additionalProperties": False}  # fmt: skip
    return {"type": "boolean"}


def test_finished_outputs_are_valid(server):
    jsonschema = pytest.importorskip("jsonschema")
    draw, finished = random.Random(1), 0
    for number in range(60):
        schema = random_schema(draw)
        body = {"messages": HELLO, "max_tokens": 120, "seed": number, "n": 2, "logit_bias": {}}
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
        if number % 2:
            wanted = {"structured_outputs": {"json": schema if number % 4 == 1 else json.dumps(schema)}}
        else:
            wanted = {"response_format": form}
        answer = server.post(CHAT, body | wanted)
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            if choice["finish_reason"] == "stop":
                finished += 1
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert finished > 60


@pytest.mark.parametrize("stream", [False, True])
def test_other_forms(server, stream):
    for wanted, pattern in (
        ({"regex": "[ab]{5}"}, "[ab]{5}"),
        ({"choice": ["red", "green"]}, "red|green"),
        ({"grammar": 'start: "<" /[0-9]+/ ">"'}, r"<[0-9]+>"),
    ):
        options = {"max_tokens": 300, "seed": 1, "stream": stream, "extra_body": {"structured_outputs": wanted}}
        answer = server.client().completions.create(model="tiny-chat", prompt="a", **options)
        text = "".join(chunk.choices[0].text for chunk in (answer if stream else [answer]))
        assert re.fullmatch(pattern, text), wanted
    answer = server.post(
        CHAT, {"messages": HELLO, "max_tokens": 200, "response_format": {"type": "json_object"}}
    ).json()
    assert answer["choices"][0]["message"]["content"].lstrip().startswith("{")
    for harmless in ({"response_format": {"type": "text"}}, {"structured_outputs": None}):
        assert server.post(COMPLETIONS, {"prompt": "a", **harmless}).status_code == 200


class Answer(BaseModel):
    is_right: bool
    mark: int


def test_the_openai_client_parses(server):
    parse = server.client().chat.completions.parse
    try:
        answer = parse(model="tiny-chat", messages=HELLO, response_format=Answer, max_tokens=400, seed=2)
    except openai.LengthFinishReasonError:
        pytest.fail("the form of the answer is short")
    assert isinstance(answer.choices[0].message.parsed, Answer)


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "required"),
        ({"response_format": {"type": "xml"}}, "response_format", "'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objec"}}}}, "response_format",
         "objec"),
        ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 9999991}}}, "structured_outputs",
         "more than 1 s of CPU time"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed group"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs", "cannot be followed after 0 tokens"),
        ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs", "cannot be followed"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one of"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "at least 1"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag is not implemented"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs",
         "one of"),
        ({"structured_outputs": {"regex": "a"}, "allowed_token_ids": [5]}, "allowed_token_ids", "beside a grammar"),
    ],
)  # fmt: skip
def test_what_is_no_form_is_refused(server, body, param, told):
    error = error_of(server.post(COMPLETIONS, {"prompt": "a", **body}))
    assert told in error["message"] and error["param"] == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_with_a_dead_end_is_the_requests_fault_and_others_go_on(server, stream):
    """The dead end lies behind the first token, where no trial looks."""
    wanted = {"grammar": 'start: "a" nothing\nnothing: nothing'}
    num_failed = server.service.snapshot().step_failures
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(server.post, COMPLETIONS, {"prompt": "a", "max_tokens": 60, "ignore_eos": True})
        answer = server.post(COMPLETIONS, {"prompt": "a", "structured_outputs": wanted, "stream": stream})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if '"error"' in line]
    error = json.loads(lines[0])["error"] if stream else error_of(answer)
    assert error["code"] == "invalid_grammar" and "cannot be followed after 1 tokens" in error["message"]
    assert other.result().json()["usage"]["completion_tokens"] == 60
    assert server.service.snapshot().step_failures == num_failed + 1, "blamed at once"


SCHEMA = {"type": "object", "properties": {"a": {"const": "z"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
@pytest.mark.parametrize("where", [{"schema": SCHEMA}, {"json_schema": {"name": "a", "schema": SCHEMA}}])
def test_a_schema_is_followed_wherever_it_is(server, kind, where):
    """llama.cpp, Together and Fireworks take one for `json_object`; vLLM and OpenAI's responses, beside the type."""
    body = {"messages": HELLO, "response_format": {"type": kind, **where}}
    assert json.loads(server.post(CHAT, body).json()["choices"][0]["message"]["content"]) == {"a": "z"}


@pytest.mark.parametrize("schema", [None, {}])
def test_a_json_object_without_a_schema_is_any_object(server, schema):
    how = {"messages": HELLO, "max_tokens": 200, "seed": 1}
    form = {"type": "json_object", "schema": schema}
    choice = server.post(CHAT, {**how, "response_format": form}).json()["choices"][0]
    assert choice["message"]["content"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"type": "text", "schema": SCHEMA}, "a schema needs the type 'json_schema'"),
        (
            {"type": "json_schema", "schema": SCHEMA, "json_schema": {"schema": {}}},
            "give one of schema and json_schema",
        ),
        ({"type": "json_schema"}, "response_format.schema: Field required"),
        ({"type": "regex", "pattern": "a"}, "response_format.type: Input should be"),
    ],
)
def test_a_form_that_would_be_left_out_is_refused(server, form, message):
    assert message in error_of(server.post(CHAT, {"messages": HELLO, "response_format": form}))["message"]
