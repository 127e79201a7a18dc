"""How one model writes its answers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swiftllm.server.formats.calls import (
    FORMATS,
    NO_TOOLS,
    CallFormat,
    CallReader,
    FirstCallReader,
    ForcedCall,
    long_id,
)
from swiftllm.server.formats.harmony import HarmonyReader
from swiftllm.server.formats.parts import Reader
from swiftllm.server.formats.reasoning import BEGIN, ContentReader, ReasoningReader
from swiftllm.server.formats.written_calls import Tools


@dataclass(frozen=True)
class Formats:
    """The format of tool calls, if it is known, and whether answers begin with reasoning. Harmony has both."""

    calls: CallFormat | None = None
    has_reasoning: bool = False
    is_harmony: bool = False
    has_unknown_calls: bool = False
    """Whether the chat template has a place for tools, and its form is not known."""

    @property
    def calls_name(self) -> str | None:
        """Of the format of tool calls; None: tools are refused."""
        return "harmony" if self.is_harmony else self.calls and self.calls.name

    @property
    def reasoning_name(self) -> str | None:
        return "harmony" if self.is_harmony else "think" if self.has_reasoning else None

    def reader(
        self,
        prompt: str,
        *,
        has_tools: bool,
        named: str | None,
        is_required: bool,
        is_parallel: bool,
        is_guided: bool = False,
        is_bound: bool = False,
        tools: Tools = NO_TOOLS,
    ) -> Reader | None:
        """What reads an answer to ``prompt``; None if all of it is content. A grammar makes the whole output the
        arguments of the tool ``named``, or calls in JSON where one ``is_required``. Of several calls only the first is
        read unless they are ``is_parallel``. ``is_guided``: calls follow a grammar. ``is_bound``: the whole
        output follows another one, so that it goes on with nothing that the prompt has begun. ``tools`` tell which
        names and types the arguments of calls have."""
        has_begun = not is_bound and prompt.rstrip().endswith(BEGIN)
        reader = self._reader(prompt, has_tools, named, is_required, is_guided, has_begun, tools)
        return reader if is_parallel or reader is None else FirstCallReader(reader)

    def _reader(
        self,
        prompt: str,
        has_tools: bool,
        named: str | None,
        is_required: bool,
        is_guided: bool,
        has_begun: bool,
        tools: Tools,
    ) -> Reader | None:
        form = self.calls
        make_id = long_id if form is None else form.make_id
        if named is not None:
            return ForcedCall(named, make_id)
        if is_required:
            return CallReader(replace(FORMATS["json"], make_id=make_id), is_guided)
        if self.is_harmony:
            return HarmonyReader(prompt, has_tools)
        if self.has_reasoning and form is not None and form.opens:
            is_guided = False  # behind reasoning the grammar does not see where calls begin
        answer = CallReader(form, is_guided, tools) if has_tools and form is not None else ContentReader()
        if self.has_reasoning:
            return ReasoningReader(answer, has_begun)
        return answer if has_tools else None
