"""How one model writes its answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from swiftllm.server.tool_calls import (
    FORMATS,
    NO_TOOLS,
    CallFormat,
    CallReader,
    FirstCallReader,
    ForcedCall,
    HoldingReader,
    Kind,
    Part,
    Reader,
    Tools,
    first_mark,
    long_id,
    new_call,
    num_sure,
    object_of,
)

# -- reasoning ---------------------------------------------------------------------------------------------------------
# Reasoning that a model writes before its answer, between <think> and </think>.

BEGIN, END = "<think>", "</think>"


def reasons(template: str) -> bool:
    """Whether a model writes reasoning, by its chat template."""
    return END in template


class ReasoningReader:
    """Splits reasoning from the answer, which goes on to another reader."""

    def __init__(self, answer: Reader, has_begun: bool) -> None:
        """``has_begun``: the prompt has opened the reasoning already."""
        self._answer = answer
        self._held = ""
        self._stage = "reasoning" if has_begun else "before"

    def push(self, text: str) -> list[Part]:
        if self._stage == "answer":
            return self._answer.push(text)
        self._held += text
        if self._stage == "before":
            rest = self._held.lstrip()
            if BEGIN.startswith(rest) and rest != BEGIN:
                return []
            if not rest.startswith(BEGIN):
                return self._begin_answer(self._held)
            self._stage, self._held = "reasoning", rest[len(BEGIN) :]
        reasoning, end, rest = self._held.partition(END)
        if end:
            return [Part("reasoning", reasoning)] * bool(reasoning) + self._begin_answer(rest)
        sure = num_sure((END,), reasoning)
        self._held = reasoning[sure:]
        return [Part("reasoning", reasoning[:sure])] * bool(sure)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._stage == "reasoning":  # it was cut
            return [Part("reasoning", held)] * bool(held)
        return (self._answer.push(held) if held else []) + self._answer.finish()

    def _begin_answer(self, text: str) -> list[Part]:
        self._stage, self._held = "answer", ""
        return self._answer.push(text) if text else []


class ContentReader:
    """Reads an answer that is content alone."""

    num_calls = 0

    def push(self, text: str) -> list[Part]:
        return [Part("content", text)] * bool(text)

    def finish(self) -> list[Part]:
        return []


# -- gpt-oss -----------------------------------------------------------------------------------------------------------
# gpt-oss' form of answers: messages with a header each, whose channel tells what they are.
#
# `<|start|>assistant<|channel|>analysis<|message|>...<|end|>` is reasoning. The channels `commentary` and `final` are
# content, but ` to=functions.NAME` in a header makes the message the arguments of a call. The prompt ends within the
# first header, and the end of the output ends the last message.

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START, CHANNEL)
"""Marks behind which a message is over; a model may leave one out."""
FIRST_WORDS = (START, CHANNEL, MESSAGE, " to=", "to=")
"""With which the rest of the first header begins. An output that begins otherwise has none: a grammar made it."""
LONGEST_HEADER = 1000  # characters; what goes on longer is no header
RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")


def is_harmony(template: str) -> bool:
    """Whether a model writes this form, by its chat template."""
    return CHANNEL in template


class HarmonyReader(HoldingReader):
    """See :class:`~swiftllm.server.tool_calls.Reader`. Text that follows no header is content."""

    def __init__(self, prompt: str, has_tools: bool) -> None:
        """``prompt`` may end within a message, which then goes on."""
        self._has_tools = has_tools
        super().__init__()
        header, is_within, _ = prompt.rpartition(START)[2].partition(MESSAGE)
        self._stage = "message" if is_within and START in prompt else "begin"
        self._kind: Kind
        self._called: str | None
        self._kind, self._called = self._read_header(header)
        self._given: set[Kind] = set()
        self._joint = ""  # before the next text, where another message of its kind was before it
        self._num_calls = 0

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        held, self._held = self._held, ""
        if self._stage == "message":
            self._end_message(held, parts)
        elif self._stage == "begin" or (self._stage == "header" and START not in held and CHANNEL not in held):
            self._add("content", held.strip() and held, parts)
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        held = self._held
        if self._stage == "begin":
            if any(word != held and word.startswith(held) for word in FIRST_WORDS):
                return False  # the rest decides
            self._stage = "header" if held.startswith(FIRST_WORDS) else "message"
            self._kind, self._called = "content", None
            return True
        if self._stage == "header":
            place = held.find(MESSAGE, 0, LONGEST_HEADER)
            if place < 0 and len(held) < LONGEST_HEADER:
                return False
            self._stage, self._held = "message", held[place + len(MESSAGE) if place >= 0 else LONGEST_HEADER :]
            self._kind, self._called = self._read_header(held[:place]) if place >= 0 else ("content", None)
            self._joint = "\n" if self._kind in self._given else ""
            if place < 0:
                self._add("content", held[:LONGEST_HEADER], parts)
            return True
        if (found := first_mark(ENDS, held)) is not None:
            place, mark = found
            self._end_message(held[:place], parts)
            self._stage, self._held = "header", held[place if mark in (START, CHANNEL) else place + len(mark) :]
            return True
        if self._called is None:
            sure = num_sure(ENDS, held)
            self._add(self._kind, held[:sure], parts)
            self._held = held[sure:]
        return False

    def _read_header(self, header: str) -> tuple[Kind, str | None]:
        """What a message is, and the tool that it calls."""
        recipient = RECIPIENT.search(header) if self._has_tools else None
        channel = header.partition(CHANNEL)[2].lstrip()
        return "reasoning" if channel.startswith("analysis") else "content", recipient and recipient[1]

    def _end_message(self, text: str, parts: list[Part]) -> None:
        if self._called is not None and object_of(text or "{}") is not None:
            parts += new_call(self._num_calls, self._called, text.strip() or "{}")
            self._num_calls += 1
        else:
            self._add(self._kind, text, parts)
        self._called = None

    def _add(self, kind: Kind, text: str, parts: list[Part]) -> None:
        if text:
            parts.append(Part(kind, self._joint + text))
            self._given.add(kind)
            self._joint = ""


# -- the format of a model ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formats:
    """The format of tool calls, if it is known, and whether answers begin with reasoning. Harmony has both."""

    calls: CallFormat | None = None
    has_reasoning: bool = False
    is_harmony: bool = False
    has_unknown_calls: bool = False
    """Whether the chat template has a place for tools, and its form is not known."""

    @property
    def calls_name(self) -> str | None:
        """Of the format of tool calls; None: tools are refused."""
        return "harmony" if self.is_harmony else self.calls and self.calls.name

    @property
    def reasoning_name(self) -> str | None:
        return "harmony" if self.is_harmony else "think" if self.has_reasoning else None

    def reader(
        self,
        prompt: str,
        *,
        has_tools: bool,
        named: str | None,
        is_required: bool,
        is_parallel: bool,
        is_guided: bool = False,
        is_bound: bool = False,
        tools: Tools = NO_TOOLS,
    ) -> Reader | None:
        """What reads an answer to ``prompt``; None if all of it is content. A grammar makes the whole output the
        arguments of the tool ``named``, or calls in JSON where one ``is_required``. Of several calls only the first is
        read unless they are ``is_parallel``. ``is_guided``: calls follow a grammar. ``is_bound``: the whole
        output follows another one, so that it goes on with nothing that the prompt has begun. ``tools`` tell which
        names and types the arguments of calls have."""
        has_begun = not is_bound and prompt.rstrip().endswith(BEGIN)
        reader = self._reader(prompt, has_tools, named, is_required, is_guided, has_begun, tools)
        return reader if is_parallel or reader is None else FirstCallReader(reader)

    def _reader(
        self,
        prompt: str,
        has_tools: bool,
        named: str | None,
        is_required: bool,
        is_guided: bool,
        has_begun: bool,
        tools: Tools,
    ) -> Reader | None:
        form = self.calls
        make_id = long_id if form is None else form.make_id
        if named is not None:
            return ForcedCall(named, make_id)
        if is_required:
            return CallReader(replace(FORMATS["json"], make_id=make_id), is_guided)
        if self.is_harmony:
            return HarmonyReader(prompt, has_tools)
        if self.has_reasoning and form is not None and form.opens:
            is_guided = False  # behind reasoning the grammar does not see where calls begin
        answer = CallReader(form, is_guided, tools) if has_tools and form is not None else ContentReader()
        if self.has_reasoning:
            return ReasoningReader(answer, has_begun)
        return answer if has_tools else None
