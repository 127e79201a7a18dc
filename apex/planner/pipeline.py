"""The two batches of asymmetric pipelining and how CPU decodes are put into them (NEO section 3.2, step 4)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from apex.inequality import pipelined_layer_s
from apex.perf_model import PerfModel
from swiftllm.plan import LaneItem
from swiftllm.plan_draft import PlanDraft
from swiftllm.request import Request


@dataclass(frozen=True)
class LaneLoad:
    """What a lane asks of the GPU: counts of tokens and requests."""

    tokens: int
    requests: int
    decodes: int
    decode_context: int
    chunks: tuple[tuple[int, int], ...]  # (new tokens, tokens cached before) of each prefill

    @staticmethod
    def of(lane: Sequence[LaneItem]) -> LaneLoad:
        prefills = [item for item in lane if item.is_prefill]
        context = sum([item.start for item in lane if not item.is_prefill])
        num_decodes = len(lane) - len(prefills)
        return LaneLoad._of_parts(num_decodes, context + num_decodes, prefills)

    @staticmethod
    def of_draft(draft: PlanDraft) -> LaneLoad:
        return LaneLoad._of_parts(len(draft.decodes), context_tokens(draft.decodes), draft.prefills)

    @staticmethod
    def _of_parts(num_decodes: int, decode_context: int, prefills: Sequence[LaneItem]) -> LaneLoad:
        return LaneLoad(
            tokens=num_decodes + sum([item.num_tokens for item in prefills]),
            requests=num_decodes + len(prefills),
            decodes=num_decodes,
            decode_context=decode_context,
            chunks=tuple([(item.num_tokens, item.start) for item in prefills]),
        )

    def without(self, chunk: LaneItem) -> LaneLoad:
        """The load if a prefill did not run."""
        chunks = list(self.chunks)
        chunks.remove((chunk.num_tokens, chunk.start))
        return replace(self, tokens=self.tokens - chunk.num_tokens, requests=self.requests - 1, chunks=tuple(chunks))

    def gpu_attention_s(self, model: PerfModel) -> float:
        """One layer's attention in the lane, prefills and decodes."""
        decode_s = model.gpu_attention_s(self.decodes, self.decode_context)
        return decode_s + model.prefill_attention_s(self.chunks)


@dataclass
class CpuBatch:
    """CPU decodes of one batch, and their context summed."""

    requests: list[Request] = field(default_factory=list)
    context_tokens: int = 0
    num_under_way: int = 0  # requests of cohorts under way: they step beside the batch

    @property
    def size(self) -> int:
        return len(self.requests) + self.num_under_way

    def add(self, requests: Sequence[Request], tokens: int) -> None:
        """Take requests of so many tokens together."""
        self.requests += requests
        self.context_tokens += tokens


MAX_GUESSES = 6  # of a search; 3 to 5 find the end where predictions are straight


class CpuDecodes:
    """CPU decodes, oldest first, and their lengths: reading those of a thousand requests takes longer than most of what
    is done with them, so it is done once. ``tokens`` is int64 ``[len(requests)]``.
    """

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.tokens = np.fromiter([request.num_tokens for request in requests], np.int64, len(requests))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def context_tokens(self) -> int:
        return int(self.tokens.sum())

    def at(self, positions: Sequence[int]) -> list[Request]:
        requests = self.requests
        return [requests[position] for position in positions]


def context_tokens(requests: Sequence[Request]) -> int:
    """What a decode of all of them attends to."""
    return sum([request.num_tokens for request in requests])


class Pipeline:
    """A lane and two CPU batches, with the times the model predicts for one layer of them."""

    def __init__(self, model: PerfModel, load: LaneLoad) -> None:
        self.model = model
        self.batches = (CpuBatch(), CpuBatch())
        self.set_load(load)

    def set_load(self, load: LaneLoad) -> None:
        self.load = load
        self._lane_attention_s = load.gpu_attention_s(self.model)

    def add_under_way(self, requests: Sequence[Request]) -> None:
        """Requests that are part of the way through their token; they step with batch-1."""
        self.batches[1].num_under_way += len(requests)
        self.batches[1].context_tokens += context_tokens(requests)

    @property
    def num_requests(self) -> int:
        return self.load.requests + self.batches[0].size + self.batches[1].size

    def _times(self) -> tuple[float, float, float, float, float]:
        first, second = self.batches
        return (
            self.model.linear_s(self.load.tokens + first.size),
            self.model.linear_s(second.size),
            self._lane_attention_s,
            self.model.cpu_attention_s(first.size, first.context_tokens),
            self.model.cpu_attention_s(second.size, second.context_tokens),
        )

    def hides_cpu(self) -> bool:
        """Whether the lane never waits: T_ca0 <= T_l1 + T_ga0 and T_ca1 <= T_l0."""
        linear_0, linear_1, gpu_attention_0, cpu_0, cpu_1 = self._times()
        return cpu_0 <= linear_1 + gpu_attention_0 and cpu_1 <= linear_0

    def iteration_s(self) -> float:
        """All layers and both ends: the lane and batch-1 each have their own, but for the host's work in any case."""
        model, second = self.model, self.batches[1].size
        rows = self.num_requests - second
        ends_s = model.ends_s(rows) + model.ends_s(second)
        if rows and second:
            ends_s -= model.iteration_s(0)
        return model.num_layers * pipelined_layer_s(*self._times()) + ends_s

    def fill(self, ready: CpuDecodes) -> None:
        """Put each request into batch-1 or batch-0, wherever the CPU stays hidden; leave it out otherwise.

        A request more makes its batch's CPU time longer and, its linear time being longer too, hides more of the
        other batch's: so only its own batch's inequality can break. The batches take turns, each taking the longest
        run that keeps its inequality, until neither can take the next request. Batches only fill up: what is as long
        as a request left out is left out too.
        """
        queue = _Queue(ready)
        while queue:
            runs = [self._take_hidden_run(batch, queue) for batch in reversed(self.batches)]
            if not any(runs):
                queue.leave_out(self._fits_a_batch())

    def _take_hidden_run(self, batch: CpuBatch, queue: _Queue) -> int:
        """Put as many of the next requests into a batch as it can take and stay hidden; returns how many."""
        cpu_attention_s, context = self.model.cpu_attention_s, queue.context
        size, tokens = batch.size, batch.context_tokens
        run = longest_run(lambda n: cpu_attention_s(size + n, tokens + context(n)), self._hidden_s(batch), len(queue))
        if run:
            batch.context_tokens += context(run)
            batch.requests += queue.take(run)
        return run

    def _fits_a_batch(self) -> Callable[[int], bool]:
        """Whether one of the batches can take a request of so many tokens and stay hidden."""
        cpu_attention_s = self.model.cpu_attention_s
        hidden = [(batch.size + 1, batch.context_tokens, self._hidden_s(batch)) for batch in self.batches]
        return lambda n: any(cpu_attention_s(size, tokens + n) <= hidden_s for size, tokens, hidden_s in hidden)

    def _hidden_s(self, batch: CpuBatch) -> float:
        """For how long a batch's CPU attention stays hidden: T_l0 for batch-1, T_l1 + T_ga0 for batch-0."""
        first, second = self.batches
        if batch is second:
            return self.model.linear_s(self.load.tokens + first.size)
        return self.model.linear_s(second.size) + self._lane_attention_s

    def split_evenly(self, ready: CpuDecodes) -> None:
        """Take all requests, the longest first, into the batch with less to read, hidden or not."""
        first, second = self.batches
        ahead = first.context_tokens - second.context_tokens
        longest_first = np.argsort(-ready.tokens, kind="stable")
        to_first: list[int] = []
        to_second: list[int] = []
        for position, tokens in zip(longest_first.tolist(), ready.tokens[longest_first].tolist(), strict=True):
            if ahead <= 0:
                to_first.append(position)
                ahead += tokens
            else:
                to_second.append(position)
                ahead -= tokens
        first.requests += ready.at(to_first)
        second.requests += ready.at(to_second)
        total = first.context_tokens + second.context_tokens + ready.context_tokens
        first.context_tokens = (total + ahead) // 2  # their sum and their difference are known
        second.context_tokens = (total - ahead) // 2


class _Queue:
    """CPU decodes on their way into the batches, oldest first."""

    def __init__(self, decodes: CpuDecodes) -> None:
        self._decodes = decodes
        self._start_with(np.arange(len(decodes)))

    def _start_with(self, positions: np.ndarray) -> None:
        """Let these decodes wait, and no others."""
        self._positions = positions
        self._tokens = self._decodes.tokens[positions]
        self._sums = [0, *self._tokens.cumsum().tolist()]
        self._next = 0

    def __len__(self) -> int:
        return len(self._positions) - self._next

    def context(self, count: int) -> int:
        """Tokens of the next requests together."""
        return self._sums[self._next + count] - self._sums[self._next]

    def take(self, count: int) -> list[Request]:
        start, self._next = self._next, self._next + count
        return self._decodes.at(self._positions[start : self._next].tolist())

    def leave_out(self, fits: Callable[[int], bool]) -> None:
        """Go on to the next request whose length ``fits``, without all that are as long as one that does not.

        Only a request shorter than all before it can be the next that fits: no others are asked about.
        """
        tokens = self._tokens[self._next :]
        shortest_so_far = np.minimum.accumulate(tokens)
        shorter = np.flatnonzero(shortest_so_far[1:] < shortest_so_far[:-1]) + 1
        too_long = bisect_left(shorter, True, key=lambda position: fits(tokens.item(position)))
        if too_long == len(shorter):
            self._next += len(tokens)
            return
        first = shorter[too_long]
        rest = np.flatnonzero(tokens[first:] < shortest_so_far[first - 1]) + first
        self._start_with(self._positions[self._next + rest])


def longest_run(seconds: Callable[[int], float], limit_s: float, most: int) -> int:
    """The largest count up to ``most`` that takes no longer than the limit; more never takes less.

    Predictions cost, so few are asked for: what they give is almost a straight line, and the next guess is where one
    through the ends of what is left crosses the limit. Bisection ends what is less straight.
    """
    if most < 1 or (low_s := seconds(1)) > limit_s:
        return 0
    if most == 1 or (high_s := seconds(most)) <= limit_s:
        return most
    low, high, guesses = 1, most, 0
    while high - low > 1:
        middle = (low + high) // 2
        if guesses < MAX_GUESSES:
            guesses += 1
            crossing = low + int((limit_s - low_s) / (high_s - low_s) * (high - low))
            middle = min(max(crossing, low + 1), high - 1)
        middle_s = seconds(middle)
        if middle_s <= limit_s:
            low, low_s = middle, middle_s
        else:
            high, high_s = middle, middle_s
    return low
