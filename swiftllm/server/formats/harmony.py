"""gpt-oss' form of answers: messages with a header each, whose channel tells what they are.

`<|start|>assistant<|channel|>analysis<|message|>...<|end|>` is reasoning. The channels `commentary` and `final` are
content, but ` to=functions.NAME` in a header makes the message the arguments of a call. The prompt ends within the
first header, and the end of the output ends the last message.
"""

from __future__ import annotations

import re

from swiftllm.server.formats.calls import new_call
from swiftllm.server.formats.json_text import object_of
from swiftllm.server.formats.parts import HoldingReader, Kind, Part, first_mark, num_sure

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
    """See :class:`~swiftllm.server.formats.parts.Reader`. Text that follows no header is content."""

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
