"""The fields of a request that are about tools, and what they make of its output."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Discriminator, Field, Tag

from swiftllm.sampling.schemas import lenient
from swiftllm.server.api.contract.parsing import Lenient
from swiftllm.server.api.errors import ApiError
from swiftllm.server.formats.call_grammars import MAX_TOOLS
from swiftllm.server.formats.written_calls import Tools

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
    """Check that tools and the choice among them fit.

    Raises:
        ApiError: there are too many tools, two of one name, or none of the name that is wanted.
    """
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
    not ``strict`` may say what no grammar can.

    Raises:
        ApiError: it says that they are none.
    """
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
