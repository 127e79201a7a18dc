"""The fields of a request that are about tools, and what they make of its output."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from swiftllm.server.api.errors import ApiError
from swiftllm.server.api.parsing import Lenient

MAX_TOOLS = 128
NAME = "^[a-zA-Z0-9_.:-]{1,128}$"


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


ToolChoice = Literal["auto", "none", "required"] | NamedTool


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
    if choice == "required" and not names:
        raise ApiError(400, "tool_choice=required needs tools", "tool_choice", "invalid_value")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        message = f"tool_choice names {choice.function.name[:100]!r}, which is not among tools"
        raise ApiError(400, message, "tool_choice", "invalid_value")


def forced_schema(tools: list[Tool], choice: ToolChoice | None, is_parallel: bool) -> dict[str, Any] | None:
    """The JSON schema of an output that must call: arguments alone of a named tool, else names with arguments, in a
    list where several calls may come. None if nothing is forced."""
    if isinstance(choice, NamedTool):
        return compact(next(parameters_of(tool) for tool in tools if tool.function.name == choice.function.name))
    if choice != "required":
        return None
    calls, definitions = [], {}
    for number, tool in enumerate(tools):
        place = f"#/$defs/{number}"
        definitions[str(number)] = moved_to(place, parameters_of(tool))
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": {"$ref": place}},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    one = {"anyOf": calls} if len(calls) > 1 else calls[0]
    whole = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_TOOLS} if is_parallel else one
    return compact({**whole, "$defs": definitions})


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


def parameters_of(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def compact(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema for JSON without blanks."""
    return {**schema, "x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}}
