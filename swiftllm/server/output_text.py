"""Turns the tokens of one output into text: detokenizing, and stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from swiftllm.core.request import TokenLogprob
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.server.messages import Delta
from swiftllm.server.tool_calls import Part, Reader, first_mark, joined, num_sure, object_of


class StopStrings:
    """Ends a growing text at the first stop string; text that may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str], include_in_output: bool) -> None:
        self._stops = stops
        self._include = include_in_output
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add text and return the part that is certain to stay. Once ``found`` is set the text has ended."""
        if not self._stops:
            return text
        text = self._held + text
        if (found := first_mark(self._stops, text)) is not None:
            place, self.found = found
            self._held = ""
            return text[: place + len(self.found)] if self._include else text[:place]
        sure = num_sure(self._stops, text)
        self._held = text[sure:]
        return text[:sure]

    def finish(self) -> str:
        """End the text and return the part held back: it did not become a stop string."""
        text, self._held = self._held, ""
        return text


class Piece(NamedTuple):
    """The part of an output that a delta adds. ``stop_reason``, vLLM's, is the stop string or token that ended it."""

    text: str
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: Sequence[int] = ()
    parts: Sequence[Part] | None = None
    """Parts of the answer, where something reads them; otherwise the text is content."""
    num_reasoning_tokens: int = 0
    """Tokens that gave reasoning, alone or beside something else."""


def parts_of(piece: Piece) -> Sequence[Part]:
    """The parts of an answer that a piece adds."""
    return (Part("content", piece.text),) if piece.parts is None else piece.parts


class TokenTexts:
    """The texts of the tokens of one output; joined they are its text.

    A character of several tokens is the text of the last, and the others have none.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._stream = None if tokenizer is None else tokenizer.stream(skip_special_tokens=False)

    def push(self, token_id: int) -> str:
        """The text of the next token."""
        return f"token_id:{token_id}" if self._stream is None else self._stream.push((token_id,))

    def finish(self) -> str:
        """What an incomplete character at the end adds to the text of the last token."""
        return "" if self._stream is None else self._stream.finish()


class NoText:
    """A text stream for models without a tokenizer: it is always empty."""

    def push(self, token_ids: Sequence[int]) -> str:
        return ""

    def finish(self) -> str:
        return ""


class OutputText:
    """The growing text of one output. ``num_tokens`` counts its tokens so far, up to a stop string.

    A token that ends the output (end-of-sequence or stop token) is part of the text only if ``include_stops`` is set.
    The text of the first ``min_tokens`` tokens is not searched for stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        stops: Sequence[str] = (),
        include_stops: bool = False,
        skip_special_tokens: bool = True,
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self._stream = NoText() if tokenizer is None else tokenizer.stream(skip_special_tokens)
        self._has_stops = bool(stops)
        self._stops = StopStrings(stops, include_stops)
        self._include_stops = include_stops
        self._stop_token_ids = frozenset(stop_token_ids)
        self._min_tokens = min_tokens

    def append_delta(self, delta: Delta) -> Piece:
        """Add new tokens. A piece with a ``finish_reason`` is the last one; a stop string may end the output early."""
        tokens, logprobs, reason = delta.token_ids, delta.logprobs, delta.finish_reason
        if reason is None and not self._has_stops:  # the common case
            self.num_tokens += len(tokens)
            return Piece(self._stream.push(tokens), logprobs, token_ids=tokens)
        shown = tokens[:-1] if reason == "stop" and not self._include_stops else tokens
        stops, text = self._stops, ""
        for number, token in enumerate(shown, 1):
            new = self._stream.push((token,))
            text += new if self.num_tokens + number <= self._min_tokens else stops.push(new)
            if stops.found is not None:
                self.num_tokens += number
                return Piece(text, logprobs[:number], "stop", stops.found, tokens[:number])
        self.num_tokens += len(tokens)
        if reason is None:
            return Piece(text, logprobs, token_ids=tokens)
        text += stops.push(self._stream.finish())
        if stops.found is not None:
            return Piece(text, logprobs, "stop", stops.found, tokens)
        stop_token = tokens[-1] if reason == "stop" and tokens[-1] in self._stop_token_ids else None
        return Piece(text + stops.finish(), logprobs, reason, stop_token, tokens)


class NoOutput(OutputText):
    """For a request that wants only its prompt back: no text, just the finish reason."""

    def append_delta(self, delta: Delta) -> Piece:
        return Piece("", finish_reason=delta.finish_reason)


class ReadText:
    """The growing text of one output, in parts that a reader finds. A call ends it with the reason ``tool_calls``,
    unless a stop string has cut that."""

    def __init__(self, text: OutputText, reader: Reader) -> None:
        self._text, self._reader = text, reader
        self._arguments: list[str] | None = None  # of the last call

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def append_delta(self, delta: Delta) -> Piece:
        """Add new tokens; see :meth:`OutputText.append_delta`. They are read one by one, so that what is counted of
        them does not depend on how many come at once."""
        pieces: list[Piece] = []
        for one in single_tokens(delta):
            pieces.append(self._append(one))
            if pieces[-1].finish_reason is not None:
                break
        if len(pieces) == 1:
            return pieces[0]
        return pieces[-1]._replace(
            text="".join(piece.text for piece in pieces),
            logprobs=[entry for piece in pieces for entry in piece.logprobs],
            token_ids=[token for piece in pieces for token in piece.token_ids],
            parts=joined(part for piece in pieces for part in piece.parts or ()),
            num_reasoning_tokens=sum(piece.num_reasoning_tokens for piece in pieces),
        )

    def _append(self, delta: Delta) -> Piece:
        piece = self._text.append_delta(delta)
        parts = self._reader.push(piece.text)
        if piece.finish_reason is not None:
            parts += self._reader.finish()
        for part in parts:
            if part.call_id:
                self._arguments = [part.text]
            elif part.kind == "tool_call" and self._arguments is not None:
                self._arguments.append(part.text)
        if piece.finish_reason == "stop" and self._arguments is not None:
            is_cut = piece.stop_reason is not None and object_of("".join(self._arguments)) is None
            piece = piece if is_cut else piece._replace(finish_reason="tool_calls")
        has_reasoning = any(part.kind == "reasoning" for part in parts)
        return piece._replace(parts=parts, num_reasoning_tokens=len(piece.token_ids) if has_reasoning else 0)


def single_tokens(delta: Delta) -> list[Delta]:
    """A delta as one for each of its tokens; the last one has what ends the output."""
    if len(delta.token_ids) <= 1:
        return [delta]
    logprobs = [(entry,) for entry in delta.logprobs] or [()] * len(delta.token_ids)
    singles = [Delta((token,), own) for token, own in zip(delta.token_ids, logprobs, strict=True)]
    singles[-1].finish_reason = delta.finish_reason
    return singles
