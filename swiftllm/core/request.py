"""A request, its state on the way through the engine, and its output."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from swiftllm.core.sampling_params import GrammarProgress, SamplingParams

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
