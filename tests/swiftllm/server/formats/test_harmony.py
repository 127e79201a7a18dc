"""gpt-oss' form of answers: each message goes where its header says, however the text is cut."""

from __future__ import annotations

import json
import random

import pytest

from swiftllm.server import answer_formats
from swiftllm.server.answer_formats import LONGEST_HEADER, Formats, HarmonyReader, is_harmony
from swiftllm.server.tool_calls import Part
from tests.swiftllm.server.formats.test_readers import calls_in, cut, read

PROMPT = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>a <b|> c<|end|>"
NEXT = "<|start|>assistant"
CALL = ' to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": "<|x"}<|call|>'
FINAL = "<|channel|>final<|message|>It is <|3|>."


def shown(parts: list[Part]) -> list[tuple[str, str]]:
    return [(part.kind, part.text) for part in parts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (THOUGHT + NEXT + FINAL, [("reasoning", "a <b|> c"), ("content", "It is <|3|>.")]),
        (FINAL + "<|return|>", [("content", "It is <|3|>.")]),
        (THOUGHT + NEXT + CALL, [("reasoning", "a <b|> c"), ("tool_call", '{"a": "<|x"}')]),
        (  # the recipient behind the channel, no mark at the end, and a blank before the channel's name
            '<|channel|> commentary to=functions.f json<|message|>{"a": 1}',
            [("tool_call", '{"a": 1}')],
        ),
        ("<|channel|>commentary to=functions.f<|message|><|call|>", [("tool_call", "{}")]),
        (  # words to the user before a call
            f"<|channel|>commentary<|message|>I look.<|end|>{NEXT}{CALL}",
            [("content", "I look."), ("tool_call", '{"a": "<|x"}')],
        ),
        (THOUGHT + NEXT + THOUGHT + NEXT + FINAL, [("reasoning", "a <b|> c\na <b|> c"), ("content", "It is <|3|>.")]),
        ("<|channel|>analysis<|message|>cut <|e", [("reasoning", "cut <|e")]),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [("reasoning", "a"), ("content", "b")]),
        ("<|channel|>commentary to=functions.f<|message|>{bad<|call|>", [("content", "{bad")]),
        ("<|channel|>commentary to=functions.f<|message|>[1]<|call|>", [("content", "[1]")]),
        ("<|channel|>commentary to=browser.run<|message|>{}<|call|>", [("content", "{}")]),
        ("<|channel|>ana", []),
        ('{"a": 1}', [("content", '{"a": 1}')]),  # as a grammar makes it
        ("t", [("content", "t")]),
        ("<|chan", [("content", "<|chan")]),
        ("<|channel|>" + "x" * 2 * LONGEST_HEADER, [("content", "<|channel|>" + "x" * 2 * LONGEST_HEADER)]),
        ("", []),
    ],
)
def test_messages_go_where_their_headers_say(text: str, expected: list[tuple[str, str]]) -> None:
    draw = random.Random(0)
    for _ in range(20):
        assert shown(read(HarmonyReader(PROMPT, has_tools=True), cut(draw, text))) == expected


def test_calls_have_names_ids_and_numbers_and_need_tools() -> None:
    text = CALL + NEXT + CALL.replace("functions.f", "functions.g.h")
    parts = read(HarmonyReader(PROMPT, has_tools=True), [text])
    assert calls_in(parts) == [("f", {"a": "<|x"}), ("g.h", {"a": "<|x"})]
    assert [part.index for part in parts] == [0, 1] and len({part.call_id for part in parts}) == 2
    assert shown(read(HarmonyReader(PROMPT, has_tools=False), [CALL])) == [("content", '{"a": "<|x"}')]


def test_a_message_that_the_prompt_began_goes_on() -> None:
    for header, kind in (("<|channel|>analysis", "reasoning"), ("<|channel|>final", "content"), ("", "content")):
        reader = HarmonyReader(f"{PROMPT}{header}<|message|>Well", has_tools=True)
        assert shown(read(reader, [", yes<|end|>", NEXT, THOUGHT]))[0][0] == kind
    call = HarmonyReader(f"{PROMPT} to=functions.f<|message|>", has_tools=True)
    assert calls_in(read(call, ['{"b": 2}'])) == [("f", {"b": 2})]


def test_text_comes_as_soon_as_it_is_certain() -> None:
    reader = HarmonyReader(PROMPT, has_tools=True)
    assert reader.push("<|channel|>analysis<|mess") == []
    assert reader.push("age|>one ") == [Part("reasoning", "one ")]
    assert reader.push("two<|") == [Part("reasoning", "two")]
    assert reader.push("x|>") == [Part("reasoning", "<|x|>")]


WORDS = (
    *answer_formats.ENDS, "<|message|>", "<|constrain|>json", "analysis", "final", "commentary", " to=functions.f",
    "to=", "assistant", " ", "\n", "a", "<", "<|", "{}", '{"a": 1}', "{", "é", THOUGHT, FINAL, NEXT, CALL,
    *[NEXT + CALL] * 5,
)  # fmt: skip


def test_random_text_is_read_the_same_in_any_pieces(monkeypatch) -> None:
    draw, found = random.Random(2), 0
    monkeypatch.setattr(answer_formats, "LONGEST_HEADER", 90)
    for _ in range(4000):
        text, prompt = (
            "".join(draw.choices(WORDS, k=draw.randint(0, 8))),
            draw.choice([PROMPT, "", PROMPT + "<|message|>"]),
        )
        whole, pieces = (read(HarmonyReader(prompt, True), cuts) for cuts in ([text], cut(draw, text)))
        assert [part._replace(call_id="") for part in whole] == [part._replace(call_id="") for part in pieces], text
        found += len(calls_in(whole))
        assert all(isinstance(json.loads(part.text), dict) for part in whole if part.kind == "tool_call")
    assert found > 100


def test_the_template_tells_the_form() -> None:
    assert is_harmony("<|start|>assistant<|channel|>analysis") and not is_harmony("<|start|>assistant")
    formats = Formats(is_harmony=True)
    assert formats.calls_name == formats.reasoning_name == "harmony"
    how = {"has_tools": True, "named": None, "is_required": False, "is_parallel": True}
    assert isinstance(formats.reader(PROMPT, **how), HarmonyReader)
    assert not isinstance(formats.reader(PROMPT, **{**how, "named": "f"}), HarmonyReader)


def test_a_mark_of_the_next_header_ends_a_message_and_belongs_to_that_header() -> None:
    """A model may leave out `<|end|>`, and the role of the next message too."""
    for between in ("<|end|>" + NEXT, NEXT, ""):
        text = "<|channel|>final<|message|>a" + between + "<|channel|>analysis<|message|>b"
        assert shown(read(HarmonyReader(PROMPT, has_tools=True), [*text])) == [("content", "a"), ("reasoning", "b")]


def test_what_may_begin_a_header_at_the_end_of_an_output_is_content_but_for_a_blank() -> None:
    for text, expected in ((" ", []), (" to", [("content", " to")]), ("<|start", [("content", "<|start")])):
        assert shown(read(HarmonyReader(PROMPT, has_tools=True), [text])) == expected
