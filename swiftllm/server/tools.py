"""Tools of a request: its fields about them, and what they make of its output."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.grammar import BLANKS, OPTIONS, lenient, prepared
from swiftllm.server.parsing import ApiError, Lenient
from swiftllm.server.tool_calls import CallFormat, Tools

# -- what outputs with calls follow ------------------------------------------------------------------------------------
# What outputs with calls follow: a JSON schema where a call is forced, a grammar of the answer where it is not.

MAX_TOOLS = 128
LIST = '"[" W call (W "," W call)* W "]"'
CALLS = {
    "hermes": "W call W </tool_call>",
    "llama3_json": 'W call (W ";" W call)* W',
    "mistral": f"W {LIST} W | named ([TOOL_CALLS] named)*",
    "granite": f"W {LIST} W",
    "json": f"W call (W call)* W | W {LIST} W",
}
"""The calls of a form behind its mark, in llguidance's dialect of Lark; marks are as they are written. Forms whose
arguments are no JSON, or that begin without a mark of their own, have no grammar."""


def call_schema(tools: Tools, arguments: str = "arguments") -> dict[str, Any]:
    """The schema of one call: an object with the name of a tool and, in the field ``arguments``, its arguments."""
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, arguments: {"$ref": f"#/$defs/{number}"}},
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for number, name in enumerate(tools)
    ]
    definitions = {str(n): moved_to(f"#/$defs/{n}", schema) for n, schema in enumerate(tools.values())}
    return {"anyOf": calls, "$defs": definitions}


def forced_schema(tools: Tools, is_parallel: bool) -> dict[str, Any]:
    """The schema of an output that must call: a call, in a list where several may come."""
    one = call_schema(tools)
    definitions = one.pop("$defs")
    whole = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_TOOLS} if is_parallel else one
    return compact({**whole, "$defs": definitions})


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema for JSON without blanks."""
    options = {"whitespace_flexible": False, "whitespace_pattern": None}
    return {**schema, OPTIONS: {**schema.get(OPTIONS, {}), **options}}


def moved_to(place: str, schema: Any) -> Any:
    """The same schema, whose references are right where it is no longer the root but lies at ``place``."""
    if isinstance(schema, list):
        return [moved_to(place, item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: moved_to(place, item) for name, item in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference[1:]
    return moved


class AnswerGrammar:
    """Grammars of answers in which the model may call. Text is free until a call begins: with the mark of the form,
    where that is one token, or with the answer's first character. Both are sets of tokens, so that the mask of free
    text costs some 10 us; where the mark is text of several tokens, it would be a millisecond."""

    def __init__(self, form: CallFormat, tokenizer: Tokenizer) -> None:
        """Looks at the whole vocabulary, which takes a tenth of a second."""
        self._form, self._tokenizer = form, tokenizer
        tokens = {mark: tokenizer.token_id(mark) for mark in form.begins}
        self._marks = {mark: token for mark, token in tokens.items() if token is not None}
        texts = tokenizer.texts() if form.opens else {}
        firsts = tuple({opening[0] for opening in form.opens})
        self._blanks = [token for token, text in texts.items() if text.isspace()]
        self._openings = [token for token, text in texts.items() if text.lstrip().startswith(firsts)]

    def following(self, tools: Tools) -> str | None:
        """The grammar, in Lark's form, of an answer whose calls are of ``tools``; None: calls cannot be told."""
        form, marks = self._form, list(self._marks.values())
        if form.name not in CALLS or not (marks or self._openings):
            return None
        begin = " | ".join(map(self._token, self._marks))
        if form.end is not None:
            start = f"free* ({begin} calls free*)*"
        else:
            opened = "blank* (calls | other free*)?" if self._openings else "free*"
            start = f"{opened} (({begin}) calls)?" if marks else opened
        calls = CALLS[form.name]
        for mark in ("</tool_call>", "[TOOL_CALLS]"):
            calls = calls.replace(mark, self._token(mark))
        key = "parameters" if form.name == "llama3_json" else "arguments"
        rules = {"start": start, "free": but(marks), "calls": calls, "call": as_rule(call_schema(tools, key))}
        if self._openings:
            rules |= {"blank": f"<[{listed(self._blanks)}]>", "other": but([*marks, *self._blanks, *self._openings])}
        if "named" in calls:
            behind_name = f"({self._token('[CALL_ID]')} /[a-zA-Z0-9]+/)? {self._token('[ARGS]')}"
            named = [f"{json.dumps(name)} {behind_name} {as_rule(schema)}" for name, schema in tools.items()]
            rules["named"] = " | ".join(named)
        rules["W"] = "/[ \\t\\r\\n]*/"
        return "%llguidance {}\n" + "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _token(self, mark: str) -> str:
        """A mark in a grammar: its token, or its text if it is none."""
        token = self._tokenizer.token_id(mark)
        return json.dumps(mark) if token is None else f"<[{token}]>"


def as_rule(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps({**prepared(schema), 'x-guidance': {'whitespace_pattern': BLANKS}})}"


def but(tokens: list[int]) -> str:
    """Any token but these."""
    return f"<[^{listed(tokens)}]>" if tokens else "<[*]>"


def listed(tokens: list[int]) -> str:
    return ",".join(map(str, tokens))


# -- fields ------------------------------------------------------------------------------------------------------------
# The fields of a request that are about tools, and what they make of its output.

NAME = "^[a-zA-Z0-9_.:-]{1,258}$"  # 128 each for a namespace and a function in it
ANY_OBJECT = {"type": "object"}
NO_ARGUMENTS = {**ANY_OBJECT, "properties": {}, "additionalProperties": False}


class Function(Lenient):
    name: Annotated[str, Field(pattern=NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Lenient):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)


class FunctionName(Lenient):
    name: str


class NamedTool(Lenient):
    type: Literal["function"]
    function: FunctionName

    @property
    def names(self) -> set[str]:
        return {self.function.name}


class AllowedNames(Lenient):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedTools(Lenient):
    """The model may call, or must call, some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedNames

    @property
    def mode(self) -> str:
        return self.allowed_tools.mode

    @property
    def names(self) -> set[str]:
        return {tool.function.name for tool in self.allowed_tools.tools}


Word = Literal["auto", "none", "required"]
WORDS = get_args(Word)
CHOICES = {**dict.fromkeys(WORDS, "a word"), "function": "a function", "allowed_tools": "allowed tools"}


def form_of_choice(value: Any) -> str | None:
    """Which of the forms of a choice this is, so that errors are about that one."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", value)
    return CHOICES.get(kind) if isinstance(kind, str) and isinstance(value, str) is (kind in WORDS) else None


ToolChoice = Annotated[
    Annotated[Word, Tag("a word")]
    | Annotated[NamedTool, Tag("a function")]
    | Annotated[AllowedTools, Tag("allowed tools")],
    Discriminator(
        form_of_choice,
        custom_error_type="tool_choice",
        custom_error_message="it should be 'auto', 'none', 'required', or of type 'function' or 'allowed_tools'",
    ),
]


def check_tools(tools: list[Tool], choice: ToolChoice | None) -> None:
    """Check that tools and the choice among them fit."""
    names = [tool.function.name for tool in tools]
    if len(names) > MAX_TOOLS:
        raise ApiError(400, f"tools must be at most {MAX_TOOLS}", "tools", "invalid_value")
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two have the same name", "tools", "invalid_value")
    wanted = choice.names if isinstance(choice, NamedTool | AllowedTools) else set()
    if unknown := sorted(wanted - set(names)):
        message = f"tool_choice names {unknown[0][:100]!r}, which is not among tools"
        raise ApiError(400, message, "tool_choice", "invalid_value")
    mode, offered = (choice.mode, wanted) if isinstance(choice, AllowedTools) else (choice, names)
    if mode == "required" and not offered:
        message = "tool_choice=required needs tools, and they must be functions"
        raise ApiError(400, message, "tool_choice", "invalid_value")


def schemas_of(tools: list[Tool]) -> Tools:
    """The schema of each tool's arguments, which are an object even where it does not say so; that of a tool that is
    not ``strict`` may say what no grammar can."""
    schemas = {tool.function.name: tool.function.parameters or NO_ARGUMENTS for tool in tools}
    for name, schema in schemas.items():
        kind = schema.get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            message = f"tools: the parameters of {name!r} must have the type 'object'"
            raise ApiError(400, message, "tools", "invalid_grammar")
    objects = {name: {**schema, "type": "object"} for name, schema in schemas.items()}
    return objects | {t.function.name: lenient(objects[t.function.name]) for t in tools if not t.function.strict}


def parameters_of(tools: list[Tool]) -> Tools:
    """The schema of each tool's arguments, as it was given."""
    return {tool.function.name: tool.function.parameters or {} for tool in tools}


def may_follow(tools: list[Tool]) -> Tools | None:
    """What calls must follow that the model need not make; None if no tool is ``strict``."""
    if not any(tool.function.strict for tool in tools):
        return None
    return {
        name: schema if tool.function.strict else ANY_OBJECT
        for tool, (name, schema) in zip(tools, schemas_of(tools).items(), strict=True)
    }
