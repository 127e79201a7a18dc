"""The parts of an answer, and calls of tools as models write them, by family of models."""

from __future__ import annotations

import ast
import json
import math
import random
import re
import string
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from swiftllm.sampling.grammar import as_list, target_of

# -- parts of an answer ------------------------------------------------------------------------------------------------
# The parts of an answer, and what reads them from a model's text.

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


# -- calls -------------------------------------------------------------------------------------------------------------
# Calls of tools as models write them, by family of models.

# -- JSON in what models write -----------------------------------------------------------------------------------------
# JSON in what models write, which may be cut, or lenient as Python's.


def as_float(written: str) -> float:
    """A number of JSON; what no float can hold is the largest one, as Python would write infinity, which is no JSON."""
    value = float(written)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_float=as_float, parse_constant=refuse_constant)


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


# -- arguments ---------------------------------------------------------------------------------------------------------
# Arguments of calls that models write as plain text: what they are, by the tool's schema.

MOST_REFERENCES = 8  # one behind another
KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def typed_arguments(values: Mapping[str, str], schema: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by the schema of the tool's parameters."""
    properties, others = schema.get("properties"), schema.get("additionalProperties")
    known = properties if isinstance(properties, dict) else {}
    return {name: typed(text, kinds_of(known.get(name, others), schema)) for name, text in values.items()}


def typed(text: str, kinds: list[str]) -> Any:
    """A value that is a text, as the first of ``kinds`` that it can be; as a text where it can be none."""
    written = text.strip()
    may_be_null = "null" in kinds or (kinds and "string" not in kinds)  # templates write null for what is left out
    if may_be_null and written.lower() in ("null", "none"):
        return None
    if written.lower() in ("true", "false") and "boolean" in kinds:
        values = [written.lower() == "true"]
    else:
        values = [value for read in (from_json, from_python) if (value := read(written)) is not None]
    for kind in kinds:
        if kind == "string":
            return text
        for value in values:
            if kind == "integer" and isinstance(value, float) and value.is_integer():
                return int(value)
            if KINDS.get(type(value)) in (kind, "integer" if kind == "number" else kind):
                return value
    return text


def from_json(text: str) -> Any:
    """A value of JSON; None if it is none."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def from_python(text: str) -> Any:
    """A list or an object as Python writes it: some templates show models no other. None if it is none of JSON's."""
    if not text.startswith(("[", "{")):
        return None
    try:
        return json.loads(json.dumps(ast.literal_eval(text), allow_nan=False))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def kinds_of(schema: Any, root: dict[str, Any], references: int = MOST_REFERENCES) -> list[str]:
    """The types that a schema names, in its order; none if it names none."""
    if not isinstance(schema, dict):
        return []
    kinds = [kind for kind in [schema.get("type"), *as_list(schema.get("type"))] if isinstance(kind, str)]
    literals = [*as_list(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    if not kinds:
        kinds = [KINDS[type(value)] for value in literals]
    for word in ("anyOf", "oneOf", "allOf"):
        kinds += [kind for option in as_list(schema.get(word)) for kind in kinds_of(option, root, references)]
    if "$ref" in schema and references:
        kinds += kinds_of(target_of(root, schema["$ref"]), root, references - 1)
    return list(dict.fromkeys(kinds))


# -- calls in whole texts ----------------------------------------------------------------------------------------------
# Calls of tools in whole texts, in each form that models write. A text that has not the form holds none.

Call = tuple[str, str]
"""Name of the tool, and its arguments in JSON."""
Tools = Mapping[str, dict[str, Any]]
"""The JSON schema of each tool's arguments."""

FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>")
PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>")
END_OF_VALUE = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
END_OF_FUNCTION = re.compile(r"\s*</function>\s*")
NAME_LINE = re.compile(r"\s*([\w.:-]+)[ \t]*\r?\n\s*(?=\{)")
BEGUN_NAME_LINE = re.compile(r"([\w.:-]*)([ \t]*(?:\r?\n?\s*)?)")
TURNS = re.compile(r"\s*(?:<\|(?:assistant|observation)\|>\s*)*")  # GLM-4's marks between calls


def read_json(text: str, tools: Tools) -> list[Call] | None:
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
    return item["name"], as_text(arguments or {})


def as_text(arguments: dict[str, Any]) -> str:
    """Arguments in JSON, with letters as they are where they can be sent."""
    text = json.dumps(arguments, ensure_ascii=False)
    return text if is_text(text) else json.dumps(arguments)


def read_mistral(text: str, tools: Tools) -> list[Call] | None:
    """A list of calls, or since version 11 `name[ARGS]{...}`, one after another."""
    if "[ARGS]" not in text:
        return read_json(text, tools)
    found = []
    for written in text.split("[TOOL_CALLS]"):
        name, _, arguments = written.partition("[ARGS]")
        if not name.strip() or object_of(arguments) is None:
            return None
        found.append((name.strip().partition("[CALL_ID]")[0], arguments.strip()))
    return found


def read_functions(text: str, tools: Tools) -> list[Call] | None:
    """`<function=NAME><parameter=KEY>VALUE</parameter>...</function>`, one after another. Values are plain text; the
    tool's schema tells what they are. Of functions of which the last was cut, those before it."""
    place, found = 0, list[Call]()
    while place < len(text):
        head = FUNCTION.match(text, place)
        if head is None:
            return None
        place, values = head.end(), dict[str, str]()
        while (parameter := PARAMETER.match(text, place)) and (end := END_OF_VALUE.search(text, parameter.end())):
            values[parameter[1].strip()] = text[parameter.end() : end.start()].removeprefix("\n").removesuffix("\n")
            place = end.end()
        end = END_OF_FUNCTION.match(text, place)
        if end is None:
            was_cut = "</function>" not in text[place:]
            return (found or None) if was_cut else None
        name, place = head[1].strip(), end.end()
        found.append((name, as_text(typed_arguments(values, tools.get(name, {})))))
    return found or None


def is_within_value(text: str) -> bool:
    """Whether a beginning of functions ends within a value."""
    return text.rfind("<parameter=") > text.rfind("</parameter>")


def read_name_lines(text: str, tools: Tools) -> list[Call] | None:
    """The name of a tool in a line, and its arguments in JSON behind it. Of several of which the last was cut, those
    before it."""
    place, found = 0, list[Call]()
    while (turn := TURNS.match(text, place)) is not None and (place := turn.end()) < len(text):
        head = NAME_LINE.match(text, place)
        if head is None or (tools and head[1] not in tools):
            return None
        try:
            arguments, place = DECODER.raw_decode(text, head.end())
        except (ValueError, RecursionError):
            return found or None
        found.append((head[1], as_text(arguments)))
    return found or None


def begins_name_line(text: str, tools: Tools) -> bool | None:
    """Whether a text begins as :func:`read_name_lines` reads it; None: the rest of it decides."""
    head = NAME_LINE.match(text)
    if head is not None:
        return not tools or head[1] in tools
    begun = BEGUN_NAME_LINE.fullmatch(text)
    if begun is None or (begun[2] and not begun[1]):
        return False
    is_possible = begun[1] in tools if begun[2] else any(name.startswith(begun[1]) for name in tools)
    return None if is_possible or not tools else False


# -- calls of earlier turns --------------------------------------------------------------------------------------------
# Calls of a conversation as the templates of their models read them, where that is not OpenAI's form.

Message = dict[str, Any]


def with_name_lines(messages: Sequence[Message]) -> list[Message]:
    """As GLM-4's templates read them: each call is a message with the tool's name as its ``metadata``, and the role of
    what it returned is ``observation``. Of messages in OpenAI's form they would show neither."""
    return [found for message in messages for found in split(message)]


def split(message: Message) -> Iterator[Message]:
    calls = message.get("tool_calls")
    if message["role"] == "tool":
        yield {**message, "role": "observation"}
    elif not isinstance(calls, list):
        yield message
    else:
        if message["content"]:
            yield {name: value for name, value in message.items() if name != "tool_calls"}
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if isinstance(function, dict):
                arguments = function.get("arguments", "{}")
                written = as_text(arguments) if isinstance(arguments, dict) else arguments
                yield {"role": message["role"], "metadata": function.get("name", ""), "content": written}


# -- forms of calls and their reader -----------------------------------------------------------------------------------
# The forms of tool calls, by family of models, and their reader.

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
