"""Sampling parameters: how output tokens are chosen, when the output ends, and which log-probabilities it has."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Protocol, SupportsIndex

MIN_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20
MAX_BIAS = 100
NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


class GrammarProgress(Protocol):
    """How far one output is in its grammar."""

    def allowed(self, output: Sequence[int]) -> bytes:
        """One bit for each token of the vocabulary, the lowest first: whether it may come after ``output``."""
        ...


class Grammar(Protocol):
    """A rule that outputs follow, of :mod:`swiftllm.sampling.grammar`."""

    def start(self) -> GrammarProgress:
        """An output that has no tokens yet."""
        ...


class Biases(tuple[tuple[int, float], ...]):
    """Pairs of token id and bias."""

    @cached_property
    def arrays(self) -> tuple[array, array]:
        """Token ids (int64) and biases (float32), once for all requests that share these pairs."""
        return array("q", [token for token, _ in self]), array("f", [bias for _, bias in self])


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    Raises:
        ValueError: a field lies outside its range; the message names the field and the value.
    """

    max_tokens: int = 16
    """Maximum number of output tokens."""
    min_tokens: int = 0
    """Minimum number of output tokens: before it no end-of-sequence or stop token is chosen."""
    temperature: float = 0.0
    """0 is greedy decoding."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Keep the tokens at least min_p times as probable as the likeliest; 0 keeps all."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that are in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of a token once for each time it is in the output."""
    repetition_penalty: float = 1.0
    """Divides positive logits of tokens in prompt or output and multiplies negative ones; 1 changes nothing."""
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    """Added to the logits of these tokens: numbers in [-100, 100] by token id. Stored as :class:`Biases`."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids of which the output never has a whole one."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that the output may have; None allows all. They come before ``min_tokens`` and ``bad_words``,
    which are left aside where they would leave no token."""
    grammar: Grammar | None = None
    """What the output follows; it comes before all other rules, like ``allowed_token_ids``."""
    seed: int | None = None
    """Makes sampling reproducible, independently of the batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the output, beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Continue to max_tokens, or as long as a grammar lets it: neither end-of-sequence nor stop tokens end it."""
    logprobs: int | None = None
    """Return log-probabilities of each output token and of this many of the most likely tokens. None returns none.
    They are the model's own, before logit_bias, penalties, temperature, min_p, top_k and top_p."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens after the first."""

    def __post_init__(self) -> None:
        whole: dict[str, object] = {
            name: whole_number(name, getattr(self, name)) for name in ("max_tokens", "min_tokens", "top_k")
        }
        for name in ("seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            whole[name] = None if value is None else whole_number(name, value)
        whole["stop_token_ids"] = token_ids("stop_token_ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            whole["allowed_token_ids"] = token_ids("allowed_token_ids", self.allowed_token_ids)
        if not isinstance(self.bad_words, Iterable):
            raise ValueError(f"bad_words={self.bad_words!r} must be sequences of token ids")
        whole["bad_words"] = tuple(token_ids("bad_words", word) for word in self.bad_words)
        for name, value in whole.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "logit_bias", _bias_pairs(self.logit_bias))
        for name in NUMBERS:
            if not isinstance(getattr(self, name), (int, float)):
                raise ValueError(f"{name}={getattr(self, name)!r} must be a number")
        checks = (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"in 0..max_tokens={self.max_tokens}"),
            ("bad_words", all(self.bad_words), "of one token id at least each"),
            ("allowed_token_ids", self.allowed_token_ids != (), "one token id at least"),
            ("allowed_token_ids", not (self.grammar and self.allowed_token_ids), "left out beside a grammar"),
            ("temperature", 0.0 <= self.temperature < float("inf"), "finite and at least 0"),
            ("top_k", 0 <= self.top_k < 2**63, "at least 0 (0 keeps all tokens), and a signed 64-bit number"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("presence_penalty", abs(self.presence_penalty) <= 2.0, "in [-2, 2]"),
            ("frequency_penalty", abs(self.frequency_penalty) <= 2.0, "in [-2, 2]"),
            ("repetition_penalty", 0.0 < self.repetition_penalty < math.inf, "finite and above 0 (1 is none)"),
            ("seed", self.seed is None or -(2**63) <= self.seed < 2**63, "a signed 64-bit number"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"in 0..{MAX_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"in 0..{MAX_LOGPROBS}"),
        )
        for name, holds, mode in checks:
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)!r} must be {mode}")

    def varied(self, **changes: Any) -> SamplingParams:
        """The same but for ``changes``, which are not checked. All other values are shared, however large."""
        other = object.__new__(SamplingParams)
        other.__dict__.update({name: self.__dict__[name] for name in FIELD_NAMES} | changes)
        return other

    @property
    def biases(self) -> Biases:
        """``logit_bias`` as it is stored."""
        assert isinstance(self.logit_bias, Biases)
        return self.logit_bias

    @property
    def is_greedy(self) -> bool:
        """Whether the temperature is too small for any but the likeliest token, and for a division in float32."""
        return self.temperature < MIN_TEMPERATURE

    @cached_property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @cached_property
    def adjusts_logits(self) -> bool:
        """Whether the model's logits are changed before tokens are chosen."""
        return bool(
            self.logit_bias or self.has_penalties or self.restricts_tokens or (self.min_p and not self.is_greedy)
        )

    @cached_property
    def restricts_tokens(self) -> bool:
        """Whether some tokens must not be chosen, whatever their logits."""
        return bool(self.min_tokens or self.bad_words or self.allowed_token_ids is not None or self.grammar)

    @cached_property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the likeliest one by the model's own logits."""
        return self.is_greedy and not self.adjusts_logits


FIELD_NAMES = tuple(field.name for field in fields(SamplingParams))


def token_ids(name: str, values: object) -> tuple[int, ...]:
    """``values`` as ints.

    Raises:
        ValueError: they are no token ids; the message has the name.
    """
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} must be a list of token ids")
    return tuple(whole_number(name, value) for value in values)


def whole_number(name: str, value: SupportsIndex) -> int:
    """``value`` as an int. Integers of any type are accepted, numpy's included.

    Raises:
        ValueError: it is not an integer; the message has name and value.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} must be a whole number") from None


def _bias_pairs(biases: Mapping[int, float] | Iterable[tuple[int, float]]) -> Biases:
    try:
        pairs = dict(biases).items()
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias={biases!r} must map token ids to numbers") from None
    for token, bias in pairs:
        if not isinstance(bias, (int, float)) or not abs(bias) <= MAX_BIAS:
            raise ValueError(f"logit_bias={bias!r} of token id {token} must be a number in [-{MAX_BIAS}, {MAX_BIAS}]")
    return Biases((whole_number("logit_bias", token), float(bias)) for token, bias in pairs)
