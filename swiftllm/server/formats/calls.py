"""The forms of tool calls, by family of models, and their reader."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from swiftllm.server.formats.parts import HoldingReader, Part, Reader, first_mark, num_sure

# What comes before the arguments of a call that a grammar has made.
HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
MISTRAL_HEAD = re.compile(HEAD.pattern + r"|([\w.:-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")
# Of ids of calls. A generator of its own, which no library seeds.
ID_BITS = random.Random()
Call = tuple[str, str]
"""Name of the tool, and its arguments in JSON."""


@dataclass(frozen=True)
class CallFormat:
    """How a family of models writes calls."""

    name: str
    begins: tuple[str, ...]
    """Marks that begin calls anywhere in the text."""
    opens: tuple[str, ...]
    """Texts that begin calls where nothing but blanks comes before; they belong to the calls."""
    end: str | None
    """The mark that ends calls; without one they go on to the end of the output."""
    read: Callable[[str], list[Call] | None]
    """The calls in a text; None if it holds none."""
    head: re.Pattern[str] = HEAD


def as_float(written: str) -> float:
    """A number of JSON; what no float can hold is the largest one, as Python would write infinity, which is no JSON."""
    value = float(written)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_float=as_float, parse_constant=refuse_constant)


def read_json(text: str) -> list[Call] | None:
    """Calls written as JSON objects, one after another, in a list, or with semicolons between them.

    Of a list that was cut within a call, the calls before that one.
    """
    place, found = 0, list[Call]()
    is_list = text.lstrip().startswith("[")
    between = " \t\r\n;" + (",[]" if is_list else "")
    while place < len(text):
        if text[place] in between:
            place += 1
            continue
        try:
            value, place = DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            return found if found and is_list and text[place] == "{" else None
        call = call_of(value)
        if call is None:
            return None
        found.append(call)
    return found or None


def call_of(item: Any) -> Call | None:
    """The call that an object describes, if it does."""
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
        return None
    if not is_text(item["name"]):
        return None
    if not item.keys() & {"arguments", "parameters"} and item.keys() - {"name", "id", "type"}:
        return None  # an answer about something that has a name
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        return (item["name"], arguments) if is_text(arguments) and object_of(arguments) is not None else None
    if arguments is not None and not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments or {}, ensure_ascii=False)
    return item["name"], text if is_text(text) else json.dumps(arguments)


def is_text(text: str) -> bool:
    """Whether it can be sent: JSON may hold half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def ends_in_string(text: str) -> bool:
    """Whether a beginning of JSON ends within a string."""
    is_inside = is_escaped = False
    for char in text:
        if is_escaped:
            is_escaped = False
        elif char == "\\":
            is_escaped = is_inside
        elif char == '"':
            is_inside = not is_inside
    return is_inside


def object_of(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, if it is one."""
    try:
        value = DECODER.decode(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_mistral(text: str) -> list[Call] | None:
    """A list of calls, or since version 11 `name[ARGS]{...}`, one after another."""
    if "[ARGS]" not in text:
        return read_json(text)
    found = []
    for written in text.split("[TOOL_CALLS]"):
        name, _, arguments = written.partition("[ARGS]")
        if not name.strip() or object_of(arguments) is None:
            return None
        found.append((name.strip().partition("[CALL_ID]")[0], arguments.strip()))
    return found


FORMATS = {
    found.name: found
    for found in (
        CallFormat("hermes", ("<tool_call>",), (), "</tool_call>", read_json),
        CallFormat("llama3_json", ("<|python_tag|>",), ("{",), None, read_json),
        CallFormat("mistral", ("[TOOL_CALLS]",), ("[{",), None, read_mistral, MISTRAL_HEAD),
        CallFormat("json", (), ("{", "[{"), None, read_json),
    )
}


def format_of(template: str) -> CallFormat | None:
    """The format of a model by its chat template; None if the template has no place for tools."""
    marks = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json", "tools": "json"}
    if "<|start_header_id|>" in template and "tools" in template:  # Llama 3.2's does not show the mark
        return FORMATS["llama3_json"]
    return next((FORMATS[name] for mark, name in marks.items() if mark in template and "tools" in template), None)


class GrowingObject:
    """A JSON object that comes in pieces."""

    def __init__(self) -> None:
        self.is_over = False
        self._depth = 0
        self._is_in_string = self._is_escaped = False

    def take(self, text: str) -> int:
        """Number of characters of ``text``, which goes on with it, that belong to the object."""
        for place, char in enumerate(text):
            if self._is_in_string:
                self._is_in_string = self._is_escaped or char != '"'
                self._is_escaped = char == "\\" and not self._is_escaped
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "]}":
                self._depth -= 1
                if not self._depth:
                    self.is_over = True
                    return place + 1
        return len(text)


class CallReader(HoldingReader):
    """Reads text with calls. A call becomes a part once it is complete, and what is no call stays content. Where a
    grammar makes calls what they must be, ``is_guided``, arguments become parts as they come."""

    def __init__(self, form: CallFormat, is_guided: bool = False) -> None:
        super().__init__()
        self._form, self._is_guided = form, is_guided
        self._arguments: GrowingObject | None = None  # under way
        self._has_begun = False  # a call, behind the mark
        self._mark: str | None = None  # that began the calls being read
        self._blanks = ""  # before it
        self._is_blank = True  # so far
        self.num_calls = 0

    def finish(self) -> list[Part]:
        parts: list[Part] = []
        if self._mark is not None and self._has_begun:
            pass  # the text was cut
        elif self._mark is not None:
            self._end_calls(self._held, "", parts)
        elif self._held.strip() or (self._held and not self.num_calls):
            parts.append(Part("content", self._held))
        self._held = ""
        return parts

    def _advance(self, parts: list[Part]) -> bool:
        if self._mark is not None:
            return self._read_pieces(parts) if self._is_guided else self._read_to_end(parts)
        form, text = self._form, self._held
        blanks = len(text) - len(text.lstrip())
        if self._is_blank and form.opens:
            if any(text.startswith(opening, blanks) for opening in form.opens):
                self._begin("", text[:blanks], text[blanks:], parts)
                return True
            if any(opening.startswith(text[blanks:]) for opening in form.opens):
                return False  # the rest decides
        if (found := first_mark(form.begins, text)) is not None:
            place, mark = found
            self._begin(mark, text[:place], text[place + len(mark) :], parts)
            return True
        content = text[: num_sure(form.begins, text)].rstrip()  # blanks before a call say nothing
        if content:
            self._add_content(content, parts)
            self._held = text[len(content) :]
        return False

    def _begin(self, mark: str, before: str, rest: str, parts: list[Part]) -> None:
        content = before.rstrip()
        if content:
            self._add_content(content, parts)
        self._blanks, self._mark, self._held = before[len(content) :], mark, rest

    def _read_pieces(self, parts: list[Part]) -> bool:
        held = self._held
        if self._arguments is not None:
            taken = self._arguments.take(held)
            if taken:
                parts.append(Part("tool_call", held[:taken], self.num_calls - 1))
            if self._arguments.is_over:
                self._arguments = None
            self._held = held[taken:]
            return bool(self._held)
        head = self._form.head.search(held)
        if head is not None:
            parts += new_call(self.num_calls, head[head.lastindex], "")
            self.num_calls += 1
            self._has_begun, self._is_blank = True, False
            self._arguments, self._held = GrowingObject(), held[head.end() :]
            return True
        end = self._form.end
        if not self._has_begun or end is None or end not in held:
            return False
        self._mark, self._has_begun = None, False
        self._held = held.partition(end)[2]
        return bool(self._held)

    def _read_to_end(self, parts: list[Part]) -> bool:
        end = self._form.end
        if end is None:
            return False
        place = self._held.find(end)
        while place >= 0 and ends_in_string(self._held[:place]):
            place = self._held.find(end, place + 1)
        if place < 0:
            return False
        rest = self._held[place + len(end) :]
        self._end_calls(self._held[:place], end, parts)
        self._held = rest
        return bool(rest)

    def _end_calls(self, text: str, end: str, parts: list[Part]) -> None:
        calls = self._form.read(text)
        if calls is None:
            self._add_content(f"{self._blanks}{self._mark}{text}{end}", parts)
        for name, arguments in calls or ():
            parts += new_call(self.num_calls, name, arguments)
            self.num_calls += 1
            self._is_blank = False
        self._mark = None

    def _add_content(self, text: str, parts: list[Part]) -> None:
        self._is_blank = self._is_blank and not text.strip()
        parts.append(Part("content", text))


class ForcedCall:
    """Reads an output that a grammar makes the arguments of one tool, as they come; the end of the output may be in it,
    too."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._arguments = GrowingObject()
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        text = "" if self._arguments.is_over else text[: self._arguments.take(text)]
        if not text:
            return []
        if self.num_calls:
            return [Part("tool_call", text)]
        self.num_calls = 1
        return new_call(0, self._name, text)

    def finish(self) -> list[Part]:
        return []


class FirstCallReader:
    """Leaves out the calls behind the first that another reader finds."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def push(self, text: str) -> list[Part]:
        return [part for part in self._reader.push(text) if part.index == 0]

    def finish(self) -> list[Part]:
        return [part for part in self._reader.finish() if part.index == 0]


def new_call(index: int, name: str, arguments: str) -> list[Part]:
    return [Part("tool_call", arguments, index, f"call_{ID_BITS.getrandbits(96):024x}", name)]
