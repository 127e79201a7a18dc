"""The parts of an answer, and what reads them from a model's text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

Kind = Literal["content", "reasoning", "tool_call"]


class Part(NamedTuple):
    """What a piece of text adds to an answer."""

    kind: Kind
    text: str
    """Text to append; of a call: to its arguments, which are JSON."""
    index: int = 0
    """Number of the call in the answer."""
    call_id: str = ""
    """Where a call begins, its id."""
    name: str = ""
    """Where a call begins, the name of the tool."""


class Reader(Protocol):
    """Reads the parts of one output. It never raises: what has no known form is content."""

    def push(self, text: str) -> list[Part]:
        """The parts that are certain after ``text``."""
        ...

    def finish(self) -> list[Part]:
        """The rest."""
        ...


class HoldingReader(ABC):
    """A reader that holds text back until it knows what it is."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    @abstractmethod
    def _advance(self, parts: list[Part]) -> bool:
        """Read on and add to ``parts``; whether there may be more to read."""


def first_mark(marks: Iterable[str], text: str) -> tuple[int, str] | None:
    """Where the first of these marks stands in ``text``, and which it is."""
    places = [(place, mark) for mark in marks if (place := text.find(mark)) >= 0]
    return min(places, key=lambda found: found[0], default=None)


def num_sure(marks: Iterable[str], text: str) -> int:
    """Number of characters of ``text`` before what may be the beginning of a mark at its end."""
    return len(text) - max((begun(mark, text) for mark in marks), default=0)


def begun(mark: str, text: str) -> int:
    """Number of characters at the end of ``text`` that are a beginning of ``mark``."""
    most = min(len(mark) - 1, len(text))
    return next((length for length in range(most, 0, -1) if text.endswith(mark[:length])), 0)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind made one; a part with a call's id begins another."""
    found: list[Part] = []
    for part in parts:
        if found and found[-1].kind == part.kind and not part.call_id:
            found[-1] = found[-1]._replace(text=found[-1].text + part.text)
        elif part.text or part.call_id:
            found.append(part)
    return found
