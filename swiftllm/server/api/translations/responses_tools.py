"""The tools of `/v1/responses`: functions, alone or in namespaces, and the choice among them in chat's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from swiftllm.server.api.contract.parsing import Lenient
from swiftllm.server.api.errors import ApiError
from swiftllm.server.api.translations.request import log_left_out, not_implemented, required


class ResponsesTool(Lenient):
    """A tool: a function, as its fields are beside its type and not below it, or a namespace of tools."""

    type: str
    name: str | None = None
    tools: list[ResponsesTool] | None = None
    """Of a namespace."""


class ResponsesChoice(Lenient):
    """A tool that must be called, or some that may or must be."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: str | None = None
    tools: list[ResponsesChoice] | None = None


class NamespacedFunction(NamedTuple):
    """A function by its own name, and what its namespace is called, if it is in one."""

    name: str
    namespace: str | None = None

    @property
    def flat(self) -> str:
        """Its name for the model, vLLM's."""
        return self.name if self.namespace is None else f"{self.namespace}__{self.name}"

    @property
    def in_namespace(self) -> dict[str, str]:
        """The field of a call that says so."""
        return {} if self.namespace is None else {"namespace": self.namespace}


class ResponsesTools:
    """The functions among tools; the others, which this server cannot run, are left out with a line in the log.

    Raises:
        ApiError: one has no name.
    """

    def __init__(self, tools: Sequence[ResponsesTool]) -> None:
        self.functions: dict[str, NamespacedFunction] = {}
        """By their names for the model."""
        self.for_chat: list[dict[str, Any]] = []
        self._add(tools, "tools", None)

    def _add(self, tools: Sequence[ResponsesTool], where: str, namespace: str | None) -> None:
        for number, tool in enumerate(tools):
            place = f"{where}.{number}"
            if tool.type == "function":
                function = NamespacedFunction(required(tool.name, f"{place}.name", "tools"), namespace)
                self.functions[function.flat] = function
                self.for_chat.append(
                    {"type": "function", "function": {**(tool.model_extra or {}), "name": function.flat}}
                )
            elif tool.type == "namespace" and namespace is None:
                self._add(tool.tools or (), f"{place}.tools", required(tool.name, f"{place}.name", "tools"))
            else:
                log_left_out(tool.type)

    def choice(self, chosen: ResponsesChoice | str | None) -> Any:
        """A choice in chat's form.

        Raises:
            ApiError: it names a tool that is left out, or none.
        """
        if not isinstance(chosen, ResponsesChoice):
            return chosen
        if chosen.type == "function":
            return as_named(self._found(chosen, "tool_choice.name"))
        if chosen.type != "allowed_tools":
            raise not_implemented("tool_choice", chosen.type, "tool_choice")
        mode = required(chosen.mode, "tool_choice.mode", "tool_choice")
        names = self._allowed(required(chosen.tools, "tool_choice.tools", "tool_choice"))
        if not names and mode == "required":
            message = "tool_choice.tools has no function, and this server calls nothing else"
            raise ApiError(400, message, "tool_choice", "unsupported_parameter")
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [as_named(name) for name in names]}}

    def _allowed(self, tools: Sequence[ResponsesChoice]) -> list[str]:
        names: list[str] = []
        for number, tool in enumerate(tools):
            if tool.type == "function":
                names.append(self._found(tool, f"tool_choice.tools.{number}.name"))
            elif tool.type == "namespace":
                names += [flat for flat, function in self.functions.items() if function.namespace == tool.name]
        return names

    def _found(self, chosen: ResponsesChoice, where: str) -> str:
        """A function's name for the model. Its namespace need not be said if no other function has its name."""
        wanted = NamespacedFunction(required(chosen.name, where, "tool_choice"), chosen.namespace)
        if wanted.flat in self.functions or wanted.namespace is not None:
            return wanted.flat
        found = [flat for flat, function in self.functions.items() if function.name == wanted.name]
        return found[0] if len(found) == 1 else wanted.flat


def as_named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
