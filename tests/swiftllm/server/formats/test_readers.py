"""Answers are read the same however they are cut, and what has no known form stays content."""

from __future__ import annotations

import json
import random
import sys

import pytest

from swiftllm.server.answer_formats import ContentReader, Formats, ReasoningReader, reasons
from swiftllm.server.tool_calls import FORMATS, CallReader, FirstCallReader, ForcedCall, Part, Reader, joined

ONE, TWO = '{"name": "f", "arguments": {"a": "<x>"}}', '{"name": "g", "parameters": {}}'
CALLS = [("f", {"a": "<x>"}), ("g", {})]


def read(reader: Reader, pieces: list[str]) -> list[Part]:
    return joined([part for piece in pieces for part in reader.push(piece)] + reader.finish())


def cut(draw: random.Random, text: str) -> list[str]:
    pieces = []
    while text:
        size = draw.choice((1, 1, 2, 5, 30))
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def calls_in(parts: list[Part]) -> list[tuple[str, dict]]:
    return [(part.name, json.loads(part.text)) for part in parts if part.kind == "tool_call"]


WRITTEN = [
    ("hermes", f"I look.\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>{TWO}</tool_call>\n", "I look."),
    ("llama3_json", f"<|python_tag|>{ONE}; {TWO}", ""),
    ("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]", ""),
    ("mistral", 'Look[TOOL_CALLS]f[CALL_ID]x1[ARGS] {"a": "<x>"}[TOOL_CALLS]g[ARGS]{}', "Look"),
    ("json", f"[{ONE}, {TWO}]", ""),
    ("granite", f"<|tool_call|>[{ONE}, {TWO}]", ""),
    ("granite", f"Look\n<tool_call>[{ONE},{TWO}]", "Look"),
    ("json", f"{ONE}\n{TWO}", ""),
]
"""A form, both calls written in it, and the content beside them."""
NOT_BY_A_GRAMMAR = [
    ("hermes", f"<tool_call>{ONE}</tool_call><tool_call>{TWO}", ""),  # cut before the end
    ("llama3_json", f"\n{ONE};{TWO}", ""),
    ("mistral", f" [{ONE}, {TWO}]", ""),
    ("json", f'[{ONE}, {TWO}, {{"name": "f", "arg', ""),  # cut within a call
    ("granite", f" [{ONE}, {TWO}]", ""),
]


@pytest.mark.parametrize(("name", "text", "content"), WRITTEN + NOT_BY_A_GRAMMAR)
def test_calls_of_each_form(name: str, text: str, content: str) -> None:
    draw = random.Random(0)
    for _ in range(20):
        parts = read(CallReader(FORMATS[name]), cut(draw, text))
        assert calls_in(parts) == CALLS
        assert "".join(part.text for part in parts if part.kind == "content") == content
        calls = [part for part in parts if part.kind == "tool_call"]
        assert [part.index for part in calls] == [0, 1] and len({part.call_id for part in calls}) == 2


@pytest.mark.parametrize(("name", "text", "content"), WRITTEN)
def test_where_calls_follow_a_grammar_their_arguments_come_as_they_are_written(name, text, content) -> None:
    draw = random.Random(2)
    for _ in range(20):
        parts = read(CallReader(FORMATS[name], is_guided=True), cut(draw, text))
        assert calls_in(parts) == CALLS and [part.index for part in parts if part.kind == "tool_call"] == [0, 1]
        assert "".join(part.text for part in parts if part.kind == "content") == content
    reader = FirstCallReader(CallReader(FORMATS[name], is_guided=True))
    assert calls_in(read(reader, [*text])) == CALLS[:1], "each part has its call's number"
    reader, end = CallReader(FORMATS[name], is_guided=True), text.index("<x>") + 2
    parts = [part for char in text[:end] for part in reader.push(char)]
    arguments = "".join(part.text for part in parts if part.kind == "tool_call")
    assert arguments == '{"a": "<x' and [part.name for part in parts if part.call_id] == ["f"]
    assert reader.finish() == [], "the text was cut within a call"


def test_guided_arguments_end_where_their_object_does() -> None:
    draw = random.Random(5)
    for _ in range(200):
        inner = "".join(draw.choices('{}[]",\\:é </tool_call>', k=draw.randrange(20)))
        arguments = {"a": inner, inner: [{"b": {}}, [inner]]}
        call = json.dumps({"name": "f", "arguments": arguments}, indent=draw.choice((None, 1)))
        text = f"<tool_call>{call}</tool_call>ok"
        parts = read(CallReader(FORMATS["hermes"], is_guided=True), cut(draw, text))
        assert calls_in(parts) == [("f", arguments)] and parts[-1] == Part("content", "ok")


def test_a_guided_text_that_is_cut_before_a_call_has_a_name_is_content() -> None:
    text = '<tool_call>{"name": "f'
    assert read(CallReader(FORMATS["hermes"], is_guided=True), [*text]) == [Part("content", text)]


def test_arguments_may_hold_anything_that_json_can() -> None:
    draw, arguments = random.Random(4), {"a": '</tool_call> "é" \\', "b": "\ud800", "c": [{}, None, 1.5]}
    text = f"<tool_call>{json.dumps({'name': 'f', 'arguments': arguments})}</tool_call>"
    for _ in range(20):
        (part,) = read(CallReader(FORMATS["hermes"]), cut(draw, text))
        assert part.text.encode() and json.loads(part.text) == arguments
    unsendable = '<tool_call>{"name": "\\ud800"}</tool_call>'
    assert read(CallReader(FORMATS["hermes"]), [unsendable]) == [Part("content", unsendable)]


def test_arguments_are_json_where_python_is_more_lenient() -> None:
    (part,) = read(CallReader(FORMATS["json"]), ['{"name": "f", "arguments": {"a": [1e999, -1e999, 1.5]}}'])
    most = sys.float_info.max
    assert json.loads(part.text, parse_constant=pytest.fail) == {"a": [most, -most, 1.5]}
    for arguments in ('{"a": NaN}', '"{\\"a\\": Infinity}"'):
        text = f'{{"name": "f", "arguments": {arguments}}}'
        assert read(CallReader(FORMATS["json"]), [text]) == [Part("content", text)]


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_no_call_is_content(name: str) -> None:
    draw = random.Random(1)
    for text in (
        '{"name": "Ann", "age": 3}',
        '{"name": 3}', '{"name": "f", "arguments": [1]}', "<tool_call>{</tool_call>", "a < b {1} [2]", "<tool", "[TOOL",
        '<|python_tag|>print("a")', "  ", "", '{"a": 1} and so on', "[" * 5000, "[TOOL_CALLS]f[ARGS]1",
    ):  # fmt: skip
        parts = read(CallReader(FORMATS[name]), cut(draw, text))
        assert parts == ([Part("content", text)] if text else [])


FUNCTION = "<function=g></function>"
WORDS = (
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>",
    ONE, TWO, "{", "}", "[", "]", ";", " ", "\n", "a", "<", "</", "é", '"', f"<tool_call>{ONE}</tool_call>",
    f"{ONE};{TWO}", f"<tool_call>{FUNCTION}</tool_call>", f"<seed:tool_call>{FUNCTION}{FUNCTION}", "a\n{}",
)  # fmt: skip


def without_calls(text: str) -> str:
    """What is left of a text that was read, when marks and calls are taken out."""
    marks = ("<tool_call>", "</tool_call>", "<seed:tool_call>", "<|python_tag|>", "<|tool_call|>", "[TOOL_CALLS]")
    for mark in (ONE, TWO, FUNCTION, "a\n{}", *marks, "<think>", "</think>"):
        text = text.replace(mark, "")
    return "".join(char for char in text if char not in " \n;[]")


def test_random_text_is_read_the_same_in_any_pieces_and_nothing_is_lost() -> None:
    draw = random.Random(2)
    found = 0
    for _ in range(5000):
        text = "".join(draw.choices(WORDS, k=draw.randint(0, 6)))
        form, has_begun = draw.choice([None, *FORMATS.values()]), draw.random() < 0.3

        def reader() -> Reader:
            answer = CallReader(form) if form else ContentReader()  # noqa: B023
            return ReasoningReader(answer, has_begun)  # noqa: B023

        whole, pieces = read(reader(), [text]), read(reader(), cut(draw, text))
        assert [part._replace(call_id="") for part in whole] == [part._replace(call_id="") for part in pieces], text
        found += len(calls_in(whole))
        texts = "".join(part.text for part in whole if part.kind != "tool_call")
        if form is None or (form.name != "mistral" and "[" not in text):  # a list may be cut
            assert without_calls(texts) == without_calls(text), text
    assert found > 100


def test_behind_reasoning_calls_that_begin_without_a_mark_are_not_taken_to_follow_a_grammar() -> None:
    written = '{"name": "f", "arguments": {"a": oops}}'
    for form, kind in (("json", "content"), ("hermes", "tool_call")):
        text = f"<tool_call>{written}</tool_call>" if form == "hermes" else written
        how = {"has_tools": True, "named": None, "is_required": False, "is_parallel": True, "is_guided": True}
        reader = Formats(FORMATS[form], has_reasoning=True).reader("", **how)
        assert [part.kind for part in read(reader, ["<think>a</think>", text])] == ["reasoning", kind]


def test_no_beginning_of_a_mark_is_shown() -> None:
    reader = CallReader(FORMATS["hermes"])
    assert reader.push("yes <tool") == [Part("content", "yes")]
    assert reader.push("_box>") == [Part("content", " <tool_box>")]


def test_reasoning_comes_before_the_answer() -> None:
    draw = random.Random(3)
    for has_begun, text in ((False, "\n<think>a < b</think>c</think>"), (True, "a < b</think>c</think>")):
        parts = read(ReasoningReader(ContentReader(), has_begun), cut(draw, text))
        assert parts == [Part("reasoning", "a < b"), Part("content", "c</think>")]
    assert read(ReasoningReader(ContentReader(), True), ["cut </thi"]) == [Part("reasoning", "cut </thi")]
    assert read(ReasoningReader(ContentReader(), False), ["no <think>"]) == [Part("content", "no <think>")]


def test_the_arguments_of_a_forced_call_come_as_they_are_written() -> None:
    reader = ForcedCall("f")
    first, second = reader.push('{"a"'), reader.push(": 1}")
    assert (first[0].name, first[0].text, bool(first[0].call_id)) == ("f", '{"a"', True)
    assert second == [Part("tool_call", ": 1}")] and reader.push("") == reader.finish() == []


@pytest.mark.parametrize(
    ("template", "thinks"), [("{% if tools %}<tool_call>{% endif %}</think>", True), ("<|start_header_id|>", False)]
)
def test_whether_a_model_reasons_follows_from_the_template(template: str, thinks: bool) -> None:
    assert reasons(template) is thinks


def test_whole_calls_before_a_cut_one_are_kept() -> None:
    """Of a list; one object after another says nothing about where a call ends, so they stay text."""
    for end in ('{"name": "h", "arg', '{"name": "h", "arguments": {"a": [1', "{"):
        parts = read(CallReader(FORMATS["json"]), [f"[{ONE}, {TWO}, {end}"])
        assert calls_in(parts) == CALLS
    for text in (f"{ONE}\n{{", f"[{ONE}, x", "[{"):
        assert read(CallReader(FORMATS["json"]), [text]) == [Part("content", text)]


def test_nothing_behind_the_arguments_of_a_forced_call_is_sent() -> None:
    """A model may go on until its end token: clients read the arguments as one JSON object."""
    for texts in (['{"a": 1} and', " more", ' {"b": 2}'], ['{"a": 1}', '{"b"', ": 2}"], ['{"a"', ": 1}}", "}"]):
        (part,) = read(ForcedCall("f"), texts)
        assert part.text == '{"a": 1}'


def test_arguments_may_be_a_text_that_is_json() -> None:
    """As in OpenAI's own messages, from which some models have learnt."""
    text = json.dumps({"name": "f", "arguments": '{"a": [1, "é"]}'})
    assert calls_in(read(CallReader(FORMATS["json"]), [text])) == [("f", {"a": [1, "é"]})]
    for no_object in ("[1]", "a", ""):
        text = json.dumps({"name": "f", "arguments": no_object})
        assert read(CallReader(FORMATS["json"]), [text]) == [Part("content", text)]


def test_content_that_looked_like_a_call_keeps_its_blanks() -> None:
    for text in ("I look. \n\n<tool_call>nothing</tool_call>\n ok", "\n <tool_call>[1]</tool_call>"):
        for pieces in ([text], [*text]):
            assert read(CallReader(FORMATS["hermes"]), pieces) == [Part("content", text)]


def test_of_several_calls_at_the_end_of_a_text_the_first_alone_may_be_wanted() -> None:
    """`parallel_tool_calls` is false."""
    for name, text in (("json", f"[{ONE}, {TWO}]"), ("mistral", f"[TOOL_CALLS][{ONE}, {TWO}]")):
        assert calls_in(read(FirstCallReader(CallReader(FORMATS[name])), [text])) == CALLS[:1]
