"""The vocabulary of requests: what a user asks for, where it stands, and what comes back."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from swiftllm.core.sampling_params import SamplingParams

NO_TOKENS: frozenset[int] = frozenset()


class RequestRefused(ValueError):
    """A request that can never be served; the message names the limit it hits.

    ``about``: what of the request it is, ``prompt`` or a field of its sampling; None for what no user chooses.
    """

    def __init__(self, message: str, about: str | None = None) -> None:
        super().__init__(message)
        self.about = about


class Tier(enum.Enum):
    """Where a request's KV cache lives: never in both, except while a swap is under way."""

    GPU = "gpu"
    CPU = "cpu"

    __hash__ = object.__hash__  # the base class computes one in Python at every look into a dict by tier

    @property
    def other(self) -> Tier:
        return Tier.CPU if self is Tier.GPU else Tier.GPU


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
    """What the model thought of a token of prompt or output: natural logarithms of probabilities.

    ``rank`` is 1 where no token is likelier; ``top`` has the most likely tokens, most likely first, with theirs.
    """

    token_id: int
    logprob: float
    rank: int = 1
    top: tuple[tuple[int, float], ...] = ()


class TokenCounts:
    """The distinct tokens of an output that grows, and how often each is in it; those of ``prompt`` are there from the
    beginning, zero times.

    A token costs one look into a dict, once: penalties are needed at every step, and outputs are long.

    Attributes: ``ids`` (int64) and ``counts`` (float32), side by side in the order in which tokens first came.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self.ids = array("q", self._places)
        self.counts = array("f", bytes(4 * len(self.ids)))
        self._num_counted = 0

    def catch_up(self, output: Sequence[int]) -> None:
        """Count what has been added to the output since the last time."""
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

    ``num_tokens`` is prompt and output together, kept as a number because schedulers read it a thousand times an
    iteration. ``num_uncomputed`` of them lack K and V in the cache: all of them at first, and the newest one alone
    while the request decodes, so that a decode leaves this number as it is. ``num_kv_slots`` is how many tokens the
    blocks it holds can take; the KV cache manager keeps it.

    A thousand requests are touched in every iteration, and most of that time is waiting for memory: so there are slots,
    and what each token needs stands together.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
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
    cohort_id: int | None = None  # set while its token is under way through the layers in a cohort
    last_served: int = 0  # the scheduler's iteration that last brought it on, where the CPU tier decodes
    finish_reason: FinishReason | None = None

    status: RequestStatus = RequestStatus.WAITING
    tier: Tier | None = None
    num_uncomputed: int = field(init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one for each output token, where asked for
    # One for each token of the prompt after its first, where asked for. The backend adds them when it has computed the
    # token before; they stay true, and are not computed again, whatever becomes of the step.
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    num_preemptions: int = 0
    finish_s: float | None = None
    tier_history: list[tuple[float, str]] = field(default_factory=list)
    _token_counts: TokenCounts | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_uncomputed = len(self.prompt_token_ids) + len(self.output_token_ids)
        self._most_tokens = len(self.prompt_token_ids) + self.sampling.max_tokens
        eos, others = self.eos_token_ids, self.sampling.stop_token_ids
        if self.sampling.ignore_eos:
            self._stop_token_ids = NO_TOKENS
        else:  # most requests share one set, which then stays in the caches
            self._stop_token_ids = eos.union(others) if others else eos

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def output_len(self) -> int:
        return len(self.output_token_ids)

    @property
    def max_kv_tokens(self) -> int:
        """Cache slots needed at most: the last output token is never fed back, so its K and V are never stored."""
        return self.prompt_len + self.sampling.max_tokens - 1

    @property
    def is_prefilling(self) -> bool:
        """More than one token still lacks K and V: a prompt, or a preempted request's prompt and output."""
        return self.num_uncomputed > 1 or self.num_uncomputed == self.num_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V are in the cache."""
        return self.num_tokens - self.num_uncomputed

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together."""
        prompt_len = self.prompt_len
        if start >= prompt_len:
            return self.output_token_ids[start - prompt_len : stop - prompt_len]
        head = list(self.prompt_token_ids[start:stop])
        return head + self.output_token_ids[: stop - prompt_len] if stop > prompt_len else head

    def count_tokens(self) -> TokenCounts:
        """Its distinct tokens and how often it has put them out, as its penalties need them: tokens of the prompt are
        among them where repetition is penalised."""
        if self._token_counts is None:
            prompt = self.prompt_token_ids if self.sampling.repetition_penalty != 1.0 else ()
            self._token_counts = TokenCounts(prompt)
        self._token_counts.catch_up(self.output_token_ids)
        return self._token_counts

    def append_token(self, token_id: int, now_s: float) -> None:
        """Take one new output token, which all tokens before it have led to; finishes the request where it ends."""
        self.num_uncomputed = 1
        append_tokens([self], [token_id], now_s)

    def start_over(self) -> None:
        """Forget what has been computed: it holds no blocks any more. Its output stays."""
        self.status = RequestStatus.WAITING
        self.tier = self.cohort_id = None
        self.num_kv_slots = 0
        self.num_tokens = self.num_uncomputed = self.prompt_len + self.output_len
        del self.logprobs[self.output_len :]

    def finish(self, reason: FinishReason, now_s: float) -> None:
        assert self.num_tokens == self.prompt_len + self.output_len
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.finish_s = now_s


def append_tokens(requests: Sequence[Request], token_ids: Collection[int], now_s: float) -> list[Request]:
    """Give each decoding request its next output token; returns those that it ends.

    A thousand requests get a token in each iteration, and what takes its time is memory: a short loop over one thing
    of each request waits for that of several requests at once.
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


class RequestOutput(NamedTuple):  # a frozen dataclass takes three times as long to make, for each token
    """What one engine step gave one request; ``text`` comes where a tokenizer is at hand."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    new_token_ids: tuple[int, ...]
    finish_reason: str | None
    """stop, length or abort; None while the request runs."""
    token_ids: tuple[int, ...] = ()
    """The whole output, once it is finished: copying it at every step would cost more than the scheduling."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """Of the new tokens, where the request asked for them."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """Of the prompt's tokens after its first, once the request is finished, where it asked for them."""
    text: str = ""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None
