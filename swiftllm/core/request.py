"""A request, its state on the way through the engine, and its output."""

from __future__ import annotations

import enum
import math
import operator
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple, Protocol, SupportsIndex

# -- sampling parameters -----------------------------------------------------------------------------------------------
# Sampling parameters: how output tokens are chosen, when the output ends, and which log-probabilities it has.

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
    """``values`` as ints."""
    if not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} must be a list of token ids")
    return tuple(whole_number(name, value) for value in values)


def whole_number(name: str, value: SupportsIndex) -> int:
    """``value`` as an int. Integers of any type are accepted, numpy's included."""
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


# -- requests ----------------------------------------------------------------------------------------------------------

NO_TOKENS: frozenset[int] = frozenset()
MAX_NAMED = 20


def first_of(values: Sequence[object]) -> str:
    """``values`` with commas, for a message; only the first of very many."""
    more = f" and {len(values) - MAX_NAMED} more" if len(values) > MAX_NAMED else ""
    return ", ".join(repr(value)[:100] for value in values[:MAX_NAMED]) + more


class RequestRefused(ValueError):
    """The request can never be served. The message names the limit that it exceeds.

    ``about`` is the part of the request at fault: ``prompt`` or a field of its sampling parameters. None: neither.
    """

    def __init__(self, message: str, about: str | None = None) -> None:
        super().__init__(message)
        self.about = about


class RequestRefusedForNow(RequestRefused):
    """The request could be served in about ``retry_after_s`` seconds, but not within its targets now."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type, tuple[str, float]]:  # so that it can cross processes
        return type(self), (str(self), self.retry_after_s)


class Tier(enum.Enum):
    """Where a request's KV cache lives: never in both tiers, except during a swap."""

    GPU = "gpu"
    CPU = "cpu"

    __hash__ = object.__hash__  # Enum's own hash is computed in Python at every dict lookup by tier

    @property
    def other(self) -> Tier:
        return Tier.CPU if self is Tier.GPU else Tier.GPU


class ServiceClass(enum.Enum):
    """How urgent a request is. The classes are in order of service: schedulers serve the first before the second."""

    LATENCY_SENSITIVE = "latency-sensitive"
    BEST_EFFORT = "best-effort"  # uses what latency-sensitive requests leave, and is preempted for them

    __hash__ = object.__hash__  # as for Tier

    @property
    def rank(self) -> int:
        return 0 if self is ServiceClass.LATENCY_SENSITIVE else 1


class RequestStatus(enum.Enum):
    WAITING = "waiting"  # holds no blocks: new, or preempted by recompute
    RUNNING = "running"  # holds blocks in one tier: prefilling or decoding
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"  # end-of-sequence or one of the request's stop tokens
    LENGTH = "length"  # max_tokens reached
    ABORT = "abort"


@dataclass(frozen=True)
class TokenLogprob:
    """The model's log-probability (natural logarithm) of one token of prompt or output.

    ``rank`` is 1 where no token is likelier. ``top`` has pairs of token id and log-probability, most likely first.
    """

    token_id: int
    logprob: float
    rank: int = 1
    top: tuple[tuple[int, float], ...] = ()


class TokenCounts:
    """How often each distinct token is in a growing output. Tokens of ``prompt`` start with a count of zero.

    Counting is incremental, one dict lookup per new token: penalties need the counts at every step.

    Attributes: ``ids`` (int64) and ``counts`` (float32), parallel, in the order in which tokens first appeared.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self.ids = array("q", self._places)
        self.counts = array("f", bytes(4 * len(self.ids)))
        self._num_counted = 0

    def catch_up(self, output: Sequence[int]) -> None:
        """Count the tokens added to the output since the last call."""
        for token in output[self._num_counted :]:
            place = self._places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(1.0)
            else:
                self.counts[place] += 1.0
        self._num_counted = len(output)


@dataclass(eq=False, slots=True)
class Request:
    """One request on its way through the engine. Times are seconds of the engine's clock.

    ``num_tokens`` counts prompt and output. It is stored because schedulers read it a thousand times an iteration.
    ``num_uncomputed`` of these tokens have no K and V in the cache: all at first, only the newest during decoding.
    ``num_kv_slots`` is the number of tokens that the request's blocks can hold; the KV cache manager updates it.
    ``arrival_order`` is the rank of the service class, then the arrival index: requests are served in this order.
    ``block_hashes`` are those of its full blocks so far, which may hold K and V or not; of these blocks the first
    ``num_hashed`` are findable by others in the request's tier. None: the request has no part in a prefix cache.
    ``cached_tokens`` tells by tier how many tokens were found there when the prompt was started.

    An iteration touches up to a thousand requests, and cache misses dominate that time. So the class has slots, and
    the fields needed for every token are adjacent.
    """

    request_id: str
    prompt_token_ids: Sequence[int]  # a tuple, or an array of 32 bits where it came in a message
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    arrival_s: float = 0.0
    arrival_index: int = 0

    output_token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    num_tokens: int = field(init=False)
    _most_tokens: int = field(init=False, repr=False)
    _stop_token_ids: frozenset[int] = field(init=False, repr=False)
    num_kv_slots: int = 0
    cpu_batch_id: int | None = None  # set while a CPU batch computes its next token
    last_served: int = 0  # the iteration that last advanced it; set by schedulers that decode in the CPU tier
    finish_reason: FinishReason | None = None

    status: RequestStatus = RequestStatus.WAITING
    tier: Tier | None = None
    num_uncomputed: int = field(init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one per output token, if requested
    # One per prompt token after the first, if requested. The backend appends each when it has computed the token
    # before. They stay valid if the step fails, and are not computed again.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_preemptions: int = 0
    finish_s: float | None = None
    tier_history: list[tuple[float, str]] = field(default_factory=list)
    service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE
    arrival_order: tuple[int, int] = field(init=False)
    cache_salt: str | None = None
    block_hashes: list[bytes] | None = None
    num_hashed: int = 0
    cached_tokens: Mapping[Tier, int] | None = None
    _token_counts: TokenCounts | None = field(default=None, init=False, repr=False)
    _progress: GrammarProgress | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_uncomputed = len(self.prompt_token_ids) + len(self.output_token_ids)
        self._most_tokens = len(self.prompt_token_ids) + self.sampling.max_tokens
        self.arrival_order = (self.service_class.rank, self.arrival_index)
        eos, others = self.eos_token_ids, self.sampling.stop_token_ids
        if self.sampling.ignore_eos:  # but with its grammar the output ends
            self._stop_token_ids = NO_TOKENS if self.sampling.grammar is None else eos
        else:  # most requests share one set, which so stays in the CPU's caches
            self._stop_token_ids = eos.union(others) if others else eos

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_len(self) -> int:
        return len(self.output_token_ids)

    @property
    def max_kv_tokens(self) -> int:
        """Cache slots needed at most. The last output token is never fed back, so its K and V are never stored."""
        return self.prompt_len + self.sampling.max_tokens - 1

    @property
    def is_prefilling(self) -> bool:
        """Whether K and V are missing for more than the newest token: of a prompt, or of a preempted request."""
        return self.num_uncomputed > 1 or self.num_uncomputed == self.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V are in the cache."""
        return self.num_tokens - self.num_uncomputed

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed, since their K and V were cached."""
        return sum(self.cached_tokens.values()) if self.cached_tokens else 0

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of the concatenated prompt and output."""
        prompt_len = self.prompt_len
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : stop - prompt_len]
        head = list(self.prompt_token_ids[start:stop])
        return head + self.output_token_ids[: stop - prompt_len] if stop > prompt_len else head

    def count_tokens(self) -> TokenCounts:
        """Token counts of the output, for penalties. They include the prompt's tokens where repetition is penalised."""
        if self._token_counts is None:
            prompt = self.prompt_token_ids if self.sampling.repetition_penalty != 1.0 else ()
            self._token_counts = TokenCounts(prompt)
        self._token_counts.catch_up(self.output_token_ids)
        return self._token_counts

    def forbidden_tokens(self) -> list[int]:
        """Tokens that must not come next: those that end the output too early, and the last ones of bad words."""
        how, output = self.sampling, self.output_token_ids
        tokens = list(self._stop_token_ids) if how.ignore_eos or len(output) < how.min_tokens else []
        for *head, last in how.bad_words:
            if output[max(0, len(output) - len(head)) :] == head:
                tokens.append(last)
        allowed = how.allowed_token_ids
        return [] if allowed is not None and set(tokens).issuperset(allowed) else tokens

    def tokens_by_grammar(self) -> bytes:
        """One bit for each token of the vocabulary, the lowest first: whether the request's grammar lets it come next.
        It follows from the output alone."""
        if self._progress is None:
            grammar = self.sampling.grammar
            assert grammar is not None, "a request without a grammar"
            self._progress = grammar.start()
        return self._progress.allowed(self.output_token_ids)

    def append_token(self, token_id: int, now_s: float) -> None:
        """Append an output token, once all tokens before it are computed. Finishes the request if the token ends it."""
        self.num_uncomputed = 1
        append_tokens([self], [token_id], now_s)

    def start_over(self) -> None:
        """Reset to waiting, with nothing computed, after the blocks are gone. The output stays."""
        self.status = RequestStatus.WAITING
        self.tier = self.cpu_batch_id = None
        self.num_kv_slots = self.num_hashed = 0
        self.num_tokens = self.num_uncomputed = self.prompt_len + self.output_len
        del self.logprobs[self.output_len :]

    def finish(self, reason: FinishReason, now_s: float) -> None:
        assert self.num_tokens == self.prompt_len + self.output_len
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.finish_s = now_s


def append_tokens(requests: Sequence[Request], token_ids: Collection[int], now_s: float) -> list[Request]:
    """Append its next output token to each decoding request. Returns the requests that end with it.

    Memory latency dominates here. Short loops over one field let the CPU load that field for several requests at once.
    """
    for request, token_id in zip(requests, token_ids, strict=True):
        request.output_token_ids.append(token_id)
    for request in requests:
        request.token_times_s.append(now_s)
    ended = []
    for request, token_id in zip(requests, token_ids, strict=True):
        request.num_tokens = num_tokens = request.num_tokens + 1
        if token_id in request._stop_token_ids:
            request.finish(FinishReason.STOP, now_s)
            ended.append(request)
        elif num_tokens >= request._most_tokens:
            request.finish(FinishReason.LENGTH, now_s)
            ended.append(request)
    return ended


class RequestOutput(NamedTuple):  # created for each token; a frozen dataclass takes three times as long
    """The output of one engine step for one request."""

    request_id: str
    prompt_token_ids: Sequence[int]
    new_token_ids: tuple[int, ...]
    finish_reason: str | None
    """``stop``, ``length`` or ``abort``; None while the request runs."""
    token_ids: tuple[int, ...] = ()
    """The whole output once finished, else empty: a copy at every step would cost more than the scheduling."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the new tokens, if the request asked for them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens after the first, once the request is finished, if it asked for them."""
    text: str = ""
    """The decoded output, set only where a tokenizer is available."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


# -- targets of latency-sensitive requests -----------------------------------------------------------------------------
# Targets of latency-sensitive requests.


@dataclass(frozen=True)
class Slo:
    """Targets of a latency-sensitive request: time to first token (S_p), time per output token (S_d), in seconds.

    ``margin`` is the share of both targets that predictions must leave unused, since they have errors.
    """

    ttft_s: float
    tpot_s: float
    margin: float

    @property
    def iteration_s(self) -> float:
        """The longest iteration that may be planned beside best-effort work: each one yields a token."""
        return (1 - self.margin) * self.tpot_s

    @property
    def first_token_s(self) -> float:
        """The longest predicted time to the first token with which a request is admitted."""
        return (1 - self.margin) * self.ttft_s

    def met_by(self, request: Request) -> Mapping[str, bool]:
        """Whether a request kept each target that its tokens so far can tell of, by name: ``ttft`` and ``tpot``."""
        times_s = request.token_times_s
        met = {}
        if times_s:
            met["ttft"] = times_s[0] - request.arrival_s <= self.ttft_s
        if len(times_s) > 1:
            met["tpot"] = (times_s[-1] - times_s[0]) / (len(times_s) - 1) <= self.tpot_s
        return met
