"""The fields of a request that say which form its output must have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from swiftllm.sampling.grammar import Kind
from swiftllm.sampling.schemas import lenient
from swiftllm.server.api.contract.parsing import Lenient
from swiftllm.server.api.errors import ApiError

Source = tuple[Kind, Any]
ANY_OBJECT: Source = ("json_schema", {"type": "object"})


class JsonSchema(Lenient):
    """OpenAI's: a name, and a schema. Outputs follow it; one that is not ``strict`` may say what no grammar can."""

    json_schema: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Lenient):
    """OpenAI's form of the answer. A schema may lie beside the type, as in its API for responses, and other servers
    take one for ``json_object``, too."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    json_schema: JsonSchema | None = None
    schema_beside: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None
    """Of the schema beside the type."""

    def source(self, name: str) -> Source | None:
        """The grammar; None if there is none. ``name`` is the field's.

        Raises:
            ApiError: the schema is missing, there are two, or one that a text would not follow.
        """
        nested, strict = self.schema_beside, self.strict
        if self.json_schema is not None:
            if nested is not None:
                raise ApiError(400, f"{name}: give one of schema and json_schema", name, "invalid_value")
            nested, strict = self.json_schema.json_schema, self.json_schema.strict
        if self.type == "text":
            if nested is not None:
                raise ApiError(400, f"{name}: a schema needs the type 'json_schema'", name, "invalid_value")
            return None
        if nested is None and self.type == "json_schema":
            raise ApiError(400, f"{name}.schema: Field required", name, "missing")
        if nested is None or (not nested and self.type == "json_object"):
            return ANY_OBJECT
        return "json_schema", nested if strict else lenient(nested)


class StructuredOutputs(Lenient):
    """vLLM's: one of these."""

    json_source: str | dict[str, Any] | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1)
    grammar: str | None = None

    def source(self, name: str) -> Source | None:
        """The grammar; None if there is none. ``name`` is the field's.

        Raises:
            ApiError: there are several, or options that are not implemented.
        """
        known: dict[Kind, Any] = {
            "json_schema": self.json_source, "regex": self.regex, "choice": self.choice, "grammar": self.grammar
        }  # fmt: skip
        found: list[Source] = [(kind, source) for kind, source in known.items() if source is not None]
        found += [ANY_OBJECT] * bool(self.json_object)
        others = [option for option, value in (self.model_extra or {}).items() if value]
        if others:
            message = f"{name}.{others[0]} is not implemented: leave it out"
            raise ApiError(400, message, name, "unsupported_parameter")
        if len(found) > 1:
            raise ApiError(400, f"{name}: give one of json, regex, choice and grammar", name, "invalid_value")
        return found[0] if found else None
