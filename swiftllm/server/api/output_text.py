"""From the tokens of one output to its text: detokenizing, and the strings that end it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swiftllm.core.request import TokenLogprob
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.server.service.service import Delta


class StopStrings:
    """Ends a growing text at the first of some strings; what may become one of them is held back."""

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = stops
        self._include = include_in_output
        self._held = ""
        self.found: str | None = None

    @property
    def has_any(self) -> bool:
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Take new text, return what is sure to stay. Once ``found`` is set, that was the last."""
        if not self._stops:
            return text
        text = self._held + text
        places = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            place, self.found = min(places, key=lambda found: found[0])
            self._held = ""
            return text[: place + len(self.found)] if self._include else text[:place]
        sure = len(text) - max(begun(stop, text) for stop in self._stops)
        self._held = text[sure:]
        return text[:sure]

    def finish(self) -> str:
        """The text is over: what was held back did not become a stop string."""
        text, self._held = self._held, ""
        return text


def begun(stop: str, text: str) -> int:
    """How many characters at the end of ``text`` may be the beginning of ``stop``."""
    most = min(len(stop) - 1, len(text))
    return next((length for length in range(most, 0, -1) if text.endswith(stop[:length])), 0)


class Piece(NamedTuple):
    """What a delta adds to an output. ``stop_reason`` is the stop string or stop token that ended it (vLLM)."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class NoText:
    """Stands in for a text stream where there is no tokenizer."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class OutputText:
    """The text of one output while it grows. ``num_tokens`` counts the tokens so far, none after a stop string.

    A token that ends the output (end-of-sequence or stop token) is no part of the text unless stop strings shall be.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stops: Sequence[str] = (),
        include_stops: bool = False,
        skip_special_tokens: bool = True,
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        self.num_tokens = 0
        self._stream = NoText() if tokenizer is None else tokenizer.stream(skip_special_tokens)
        self._stops = StopStrings(stops, include_stops)
        self._include_stops = include_stops
        self._stop_token_ids = frozenset(stop_token_ids)

    def take(self, delta: Delta) -> Piece:
        """Take new tokens; a piece with a ``finish_reason`` is the last one, and may come before the engine's end."""
        tokens, logprobs, reason, _ = delta
        if reason is None and not self._stops.has_any:  # the rule
            self.num_tokens += len(tokens)
            return Piece(self._stream.push(tokens), logprobs)
        shown = tokens[:-1] if reason == "stop" and not self._include_stops else tokens
        stops, text = self._stops, ""
        for number, token in enumerate(shown, 1):
            text += stops.push(self._stream.push((token,)))
            if stops.found is not None:
                self.num_tokens += number
                return Piece(text, logprobs[:number], "stop", stops.found)
        self.num_tokens += len(tokens)
        if reason is None:
            return Piece(text, logprobs)
        text += stops.push(self._stream.finish())
        if stops.found is not None:
            return Piece(text, logprobs, "stop", stops.found)
        stop_token = tokens[-1] if reason == "stop" and tokens[-1] in self._stop_token_ids else None
        return Piece(text + stops.finish(), logprobs, reason, stop_token)


class NoOutput(OutputText):
    """Of an output that nobody wants, only its end."""

    def take(self, delta: Delta) -> Piece:
        return Piece("", finish_reason=delta.finish_reason)
