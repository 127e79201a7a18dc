"""The two batches of asymmetric pipelining and how CPU decodes are put into them (NEO section 3.2, step 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from apex.inequality import pipelined_layer_s
from apex.perf_model import PerfModel
from swiftllm.plan import LaneItem
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
        decodes = [item for item in lane if not item.is_prefill]
        return LaneLoad(
            tokens=sum(item.num_tokens for item in lane),
            requests=len(lane),
            decodes=len(decodes),
            decode_context=sum(item.context_len for item in decodes),
            chunks=tuple((item.num_tokens, item.start) for item in lane if item.is_prefill),
        )

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

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.context_tokens += request.num_tokens


class Pipeline:
    """A lane and two CPU batches, with the times the model predicts for one layer of them."""

    def __init__(self, model: PerfModel, lane: Sequence[LaneItem]) -> None:
        self.model = model
        self.batches = (CpuBatch(), CpuBatch())
        self.set_lane(lane)

    def set_lane(self, lane: Sequence[LaneItem]) -> None:
        self.load = LaneLoad.of(lane)
        self._lane_attention_s = self.load.gpu_attention_s(self.model)

    def add_under_way(self, requests: Iterable[Request]) -> None:
        """Requests that are part of the way through their token; they step with batch-1."""
        for request in requests:
            self.batches[1].num_under_way += 1
            self.batches[1].context_tokens += request.num_tokens

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
        return self.model.num_layers * pipelined_layer_s(*self._times()) + self.model.ends_s(self.num_requests)

    def fill(self, ready: Sequence[Request]) -> None:
        """Put each request into batch-1, else batch-0, wherever the CPU stays hidden; leave it out otherwise.

        A request more makes its batch's CPU time longer and, its linear time being longer too, hides more of the
        other batch's: so only its own batch's inequality can break.
        """
        first, second = self.batches
        linear_0, linear_1, gpu_attention_0, _, _ = self._times()
        cpu_attention_s = self.model.cpu_attention_s
        shortest_refused = float("inf")  # batches only fill up: what is as long as a refused request is refused too
        for request in ready:
            tokens = request.num_tokens
            if tokens >= shortest_refused:
                continue
            if cpu_attention_s(second.size + 1, second.context_tokens + tokens) <= linear_0:
                second.add(request)
                linear_1 = self.model.linear_s(second.size)
            elif cpu_attention_s(first.size + 1, first.context_tokens + tokens) <= linear_1 + gpu_attention_0:
                first.add(request)
                linear_0 = self.model.linear_s(self.load.tokens + first.size)
            else:
                shortest_refused = tokens

    def split_evenly(self, ready: Sequence[Request]) -> None:
        """Take all requests, the longest first, into the batch with less to read, hidden or not."""
        for request in sorted(ready, key=lambda r: -r.num_tokens):
            min(self.batches, key=lambda batch: batch.context_tokens).add(request)
