"""The forms of tool calls, by family of models, and their reader."""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from swiftllm.server.formats.histories import Message, with_name_lines
from swiftllm.server.formats.json_text import GrowingObject, ends_in_string
from swiftllm.server.formats.parts import HoldingReader, Part, Reader, first_mark, num_sure
from swiftllm.server.formats.written_calls import (
    Call,
    Tools,
    begins_name_line,
    is_within_value,
    read_functions,
    read_json,
    read_mistral,
    read_name_lines,
)

# What comes before the arguments of a call that a grammar has made.
HEAD = re.compile(r'\{\s*"name"\s*:\s*"([^"]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
MISTRAL_HEAD = re.compile(HEAD.pattern + r"|([\w.:-]+)(?:\[CALL_ID\]\w+)?\[ARGS\]\s*(?=\{)")
# Of ids of calls. A generator of its own, which no library seeds.
ID_BITS = random.Random()
NO_TOOLS: Tools = MappingProxyType({})


def long_id() -> str:
    return f"call_{ID_BITS.getrandbits(96):024x}"


def short_id() -> str:
    """Mistral's templates refuse others: nine letters and digits."""
    return "".join(ID_BITS.choices(string.ascii_letters + string.digits, k=9))


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
    read: Callable[[str, Tools], list[Call] | None]
    """The calls of these tools in a text; None if it holds none."""
    head: re.Pattern[str] = HEAD
    is_within: Callable[[str], bool] = ends_in_string
    """Whether a beginning of calls ends within a text that may hold anything, the end mark too."""
    begins_with_name: bool = False
    """Whether calls begin with a tool's name in a line, where nothing but blanks comes before."""
    make_id: Callable[[], str] = long_id
    history: Callable[[Sequence[Message]], list[Message]] = list
    """Messages in OpenAI's form as the models' templates read them."""

    def opens_with(self, text: str, tools: Tools) -> bool | None:
        """Whether a text, with nothing but blanks before, begins calls; None: the rest of it decides."""
        if self.begins_with_name:
            return begins_name_line(text, tools)
        if text.startswith(self.opens):
            return True
        return None if any(opening.startswith(text) for opening in self.opens) else False


FORMATS = {
    found.name: found
    for found in (
        CallFormat("hermes", ("<tool_call>",), (), "</tool_call>", read_json),
        CallFormat("llama3_json", ("<|python_tag|>",), ("{",), None, read_json),
        CallFormat("mistral", ("[TOOL_CALLS]",), ("[{",), None, read_mistral, MISTRAL_HEAD, make_id=short_id),
        CallFormat("granite", ("<|tool_call|>", "<tool_call>"), ("[{",), None, read_json),
        CallFormat(
            "qwen3_coder", ("<tool_call>", "<function="), ("<function=",), "</tool_call>", read_functions,
            is_within=is_within_value,
        ),
        CallFormat(
            "seed_oss", ("<seed:tool_call>",), (), "</seed:tool_call>", read_functions, is_within=is_within_value
        ),
        CallFormat("glm4", (), (), None, read_name_lines, begins_with_name=True, history=with_name_lines),
        CallFormat("json", (), ("{", "[{"), None, read_json),
    )
}  # fmt: skip
MARKS: tuple[tuple[str | None, str], ...] = (
    (None, "<arg_key>|<tool_sep>|<function name=|<invoke"),  # GLM-4.5's and others within <tool_call>
    ("seed_oss", "<seed:tool_call>"),
    ("qwen3_coder", "<tool_call>.*<function=|<function=.*<tool_call>"),
    ("granite", r"<\|start_of_role\|>.*<\|tool_call\|>"),
    ("hermes", "<tool_call>"),
    ("granite", r"<\|start_of_role\|>available_tools"),
    ("mistral", r"\[TOOL_CALLS\]"),
    ("llama3_json", r"<\|python_tag\|>"),
    ("glm4", r"\[gMASK\].*(metadata|<\|observation\|>)"),
    (None, r"(?i)<[^\s<>]*tool_?calls?[^\s<>]*>"),  # of models made from Llama 3
    ("llama3_json", r"<\|start_header_id\|>"),  # 3.2's template does not show the mark of calls
)
"""Each form with what only templates of its models have, the first that fits being right; None: not known."""


def format_of(template: str) -> CallFormat | None:
    """The format of a model by its chat template; None if that has no place for tools, or no form that is known."""
    if not has_tools(template):
        return None
    return next((FORMATS.get(name or "") for name, mark in MARKS if re.search(mark, template, re.DOTALL)), None)


def has_tools(template: str) -> bool:
    return "tools" in template


class CallReader(HoldingReader):
    """Reads text with calls. A call becomes a part once it is complete, and what is no call stays content. Where a
    grammar makes calls what they must be, ``is_guided``, arguments become parts as they come. ``tools`` are those that
    the model may call, if that is known."""

    def __init__(self, form: CallFormat, is_guided: bool = False, tools: Tools = NO_TOOLS) -> None:
        super().__init__()
        self._form, self._is_guided, self._tools = form, is_guided, tools
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
        if self._is_blank:
            is_opened = form.opens_with(text[blanks:], self._tools)
            if is_opened:
                self._begin("", text[:blanks], text[blanks:], parts)
            if is_opened is not False:
                return bool(is_opened)
        if (found := first_mark(form.begins, text)) is not None:
            place, mark = found
            belongs = mark in form.opens
            self._begin("" if belongs else mark, text[:place], text[place + len(mark) * (not belongs) :], parts)
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
            assert head.lastindex is not None  # each form names the tool in a group
            parts += self._new_call(head[head.lastindex], "")
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
        while place >= 0 and self._form.is_within(self._held[:place]):
            place = self._held.find(end, place + 1)
        if place < 0:
            return False
        rest = self._held[place + len(end) :]
        self._end_calls(self._held[:place], end, parts)
        self._held = rest
        return bool(rest)

    def _end_calls(self, text: str, end: str, parts: list[Part]) -> None:
        calls = self._form.read(text, self._tools)
        if calls is None:
            self._add_content(f"{self._blanks}{self._mark}{text}{end}", parts)
        for name, arguments in calls or ():
            parts += self._new_call(name, arguments)
            self._is_blank = False
        self._mark = None

    def _new_call(self, name: str, arguments: str) -> list[Part]:
        self.num_calls += 1
        return new_call(self.num_calls - 1, name, arguments, self._form.make_id)

    def _add_content(self, text: str, parts: list[Part]) -> None:
        self._is_blank = self._is_blank and not text.strip()
        parts.append(Part("content", text))


class ForcedCall:
    """Reads an output that a grammar makes the arguments of one tool, as they come; the end of the output may be in it,
    too."""

    def __init__(self, name: str, make_id: Callable[[], str] = long_id) -> None:
        self._name, self._make_id = name, make_id
        self._arguments = GrowingObject()
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        text = "" if self._arguments.is_over else text[: self._arguments.take(text)]
        if not text:
            return []
        if self.num_calls:
            return [Part("tool_call", text)]
        self.num_calls = 1
        return new_call(0, self._name, text, self._make_id)

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


def new_call(index: int, name: str, arguments: str, make_id: Callable[[], str] = long_id) -> list[Part]:
    return [Part("tool_call", arguments, index, make_id(), name)]
