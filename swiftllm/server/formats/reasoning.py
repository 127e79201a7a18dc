"""Reasoning that a model writes before its answer, between <think> and </think>."""

from __future__ import annotations

from swiftllm.server.formats.parts import Part, Reader, num_sure

BEGIN, END = "<think>", "</think>"


def reasons(template: str) -> bool:
    """Whether a model writes reasoning, by its chat template."""
    return END in template


class ReasoningReader:
    """Splits reasoning from the answer, which goes on to another reader."""

    def __init__(self, answer: Reader, has_begun: bool) -> None:
        """``has_begun``: the prompt has opened the reasoning already."""
        self._answer = answer
        self._held = ""
        self._stage = "reasoning" if has_begun else "before"

    def push(self, text: str) -> list[Part]:
        if self._stage == "answer":
            return self._answer.push(text)
        self._held += text
        if self._stage == "before":
            rest = self._held.lstrip()
            if BEGIN.startswith(rest) and rest != BEGIN:
                return []
            if not rest.startswith(BEGIN):
                return self._begin_answer(self._held)
            self._stage, self._held = "reasoning", rest[len(BEGIN) :]
        reasoning, end, rest = self._held.partition(END)
        if end:
            return [Part("reasoning", reasoning)] * bool(reasoning) + self._begin_answer(rest)
        sure = num_sure((END,), reasoning)
        self._held = reasoning[sure:]
        return [Part("reasoning", reasoning[:sure])] * bool(sure)

    def finish(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._stage == "reasoning":  # it was cut
            return [Part("reasoning", held)] * bool(held)
        return (self._answer.push(held) if held else []) + self._answer.finish()

    def _begin_answer(self, text: str) -> list[Part]:
        self._stage, self._held = "answer", ""
        return self._answer.push(text) if text else []


class ContentReader:
    """Reads an answer that is content alone."""

    num_calls = 0

    def push(self, text: str) -> list[Part]:
        return [Part("content", text)] * bool(text)

    def finish(self) -> list[Part]:
        return []
