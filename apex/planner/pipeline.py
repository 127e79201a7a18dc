"""The two batches of asymmetric pipelining and how CPU decodes are put into them (NEO section 3.2, step 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import attrgetter

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

    def fill(self, ready: Sequence[Request]) -> None:
        """Put each request into batch-1 or batch-0, wherever the CPU stays hidden; leave it out otherwise.

        A request more makes its batch's CPU time longer and, its linear time being longer too, hides more of the
        other batch's: so only its own batch's inequality can break. The batches take turns, each taking the longest
        run that keeps its inequality, until neither can take the next request. Batches only fill up: what is as long
        as a request left out is left out too.
        """
        queue = _Queue(ready)
        while queue:
            taken = 0
            for batch in reversed(self.batches):
                run = self._hidden_run(batch, queue)
                tokens = queue.context(run)
                batch.add(queue.take(run), tokens)
                taken += run
            if not taken:
                queue.leave_out(self._longest_fit(queue))

    def _hidden_run(self, batch: CpuBatch, queue: _Queue) -> int:
        """How many of the next requests a batch can take and stay hidden."""
        cpu_attention_s, context, hidden_s = self.model.cpu_attention_s, queue.context, self._hidden_s(batch)
        size, tokens = batch.size, batch.context_tokens
        return longest_run(lambda n: cpu_attention_s(size + n, tokens + context(n)) <= hidden_s, len(queue))

    def _hidden_s(self, batch: CpuBatch) -> float:
        """For how long a batch's CPU attention stays hidden: T_l0 for batch-1, T_l1 + T_ga0 for batch-0."""
        first, second = self.batches
        if batch is second:
            return self.model.linear_s(self.load.tokens + first.size)
        return self.model.linear_s(second.size) + self._lane_attention_s

    def _longest_fit(self, queue: _Queue) -> int:
        """The longest request that one of the batches can take; too short for all that wait if neither can."""
        cpu_attention_s, shorter = self.model.cpu_attention_s, queue.shortest() - 1
        hidden = [(batch.size + 1, batch.context_tokens + shorter, self._hidden_s(batch)) for batch in self.batches]
        more = longest_run(
            lambda n: any(cpu_attention_s(size, tokens + n) <= hidden_s for size, tokens, hidden_s in hidden),
            queue.context(1) - shorter,
        )
        return shorter + more

    def split_evenly(self, ready: Sequence[Request]) -> None:
        """Take all requests, the longest first, into the batch with less to read, hidden or not."""
        first, second = self.batches
        ahead = first.context_tokens - second.context_tokens
        for request in sorted(ready, key=attrgetter("num_tokens"), reverse=True):
            tokens = request.num_tokens
            if ahead <= 0:
                first.requests.append(request)
                ahead += tokens
            else:
                second.requests.append(request)
                ahead -= tokens
        total = first.context_tokens + second.context_tokens + context_tokens(ready)
        first.context_tokens = (total + ahead) // 2  # their sum and their difference are known
        second.context_tokens = (total - ahead) // 2


class _Queue:
    """CPU decodes on their way into the batches, oldest first."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._start_with(requests, [request.num_tokens for request in requests])

    def _start_with(self, requests: Sequence[Request], tokens: list[int]) -> None:
        self._requests = requests
        self._tokens = tokens
        self._sums = [0, *accumulate(tokens)]
        self._next = 0

    def __len__(self) -> int:
        return len(self._requests) - self._next

    def context(self, count: int) -> int:
        """Tokens of the next requests together."""
        return self._sums[self._next + count] - self._sums[self._next]

    def shortest(self) -> int:
        """Tokens of the shortest request that waits."""
        return min(self._tokens[self._next :])

    def take(self, count: int) -> Sequence[Request]:
        start, self._next = self._next, self._next + count
        return self._requests[start : self._next]

    def leave_out(self, longest_fit: int) -> None:
        """Go on to the next request of at most ``longest_fit`` tokens, without all that those before it rule out."""
        requests, tokens = self._requests[self._next :], self._tokens[self._next :]
        skipped = next((i for i, count in enumerate(tokens) if count <= longest_fit), len(tokens))
        shortest_left_out = min(tokens[:skipped])
        rest = [i for i in range(skipped, len(tokens)) if tokens[i] < shortest_left_out]
        self._start_with([requests[i] for i in rest], [tokens[i] for i in rest])


def longest_run(fits: Callable[[int], bool], most: int) -> int:
    """The largest count up to ``most`` that fits; what does not fit, does not fit with more. Few questions are asked:
    counts double until one does not fit, and bisection finds where that began."""
    reach = 1
    while reach <= most and fits(reach):
        reach *= 2
    low, high = reach // 2, min(reach - 1, most)
    while low < high:
        middle = (low + high) // 2 + 1
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
