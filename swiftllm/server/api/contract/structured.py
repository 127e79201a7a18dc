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
    """OpenAI's form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def source(self, name: str) -> Source | None:
        """The grammar; None if there is none. ``name`` is the field's.

        Raises:
            ApiError: the schema is missing.
        """
        if self.type != "json_schema":
            return ANY_OBJECT if self.type == "json_object" else None
        if self.json_schema is None:
            raise ApiError(400, f"{name}.json_schema: a schema is required", name, "missing")
        wanted = self.json_schema
        return "json_schema", wanted.json_schema if wanted.strict else lenient(wanted.json_schema)


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
