"""The two batches of asymmetric pipelining, and how CPU decodes are assigned to them (NEO section 3.2, step 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from apex.perf.gpu_batch_load import GpuBatchLoad, context_tokens
from apex.perf.model import PerfModel
from apex.schedulers.cpu_decodes import CpuDecodeQueue, CpuDecodes, longest_run
from apex.schedulers.inequality import pipelined_layer_s
from swiftllm.core.request import Request

Window = tuple[Callable[[int, int], float], float]
"""The seconds of a batch by its size and its context, and the seconds into which they must fit."""


@dataclass
class PipelineBatch:
    """CPU decodes of one batch, and the sum of their context in tokens."""

    requests: list[Request] = field(default_factory=list)
    context_tokens: int = 0
    num_under_way: int = 0  # requests of CPU batches under way, which run alone beside the batch

    @property
    def size(self) -> int:
        return len(self.requests) + self.num_under_way

    def add_requests(self, requests: Sequence[Request], tokens: int) -> None:
        """Add requests whose context is ``tokens`` in total."""
        self.requests += requests
        self.context_tokens += tokens


class Pipeline:
    """A GPU batch and two CPU batches, with the times that the model predicts for one layer."""

    def __init__(self, model: PerfModel, load: GpuBatchLoad) -> None:
        self.model = model
        self.batches = (PipelineBatch(), PipelineBatch())
        self.set_load(load)

    def set_load(self, load: GpuBatchLoad) -> None:
        self.load = load
        self._gpu_batch_attention_s = load.gpu_attention_s(self.model)

    def add_under_way(self, requests: Sequence[Request]) -> None:
        """Add requests that are part of the way through their token; they run alone, with batch-1."""
        self.batches[1].num_under_way += len(requests)
        self.batches[1].context_tokens += context_tokens(requests)

    @property
    def num_requests(self) -> int:
        return self.load.requests + self.batches[0].size + self.batches[1].size

    def hides(self, batch: PipelineBatch, size: int, context: int) -> bool:
        """Whether the CPU attention of a layer stays hidden if the batch has these sizes."""
        return any(seconds(size, context) <= window_s for seconds, window_s in self._windows(batch))

    def hides_cpu(self) -> bool:
        """Whether the GPU batch never waits for CPU attention."""
        return all(self.hides(batch, batch.size, batch.context_tokens) for batch in self.batches)

    def _windows(self, batch: PipelineBatch) -> list[Window]:
        """What must fit into what: T_c0 into T_l1 + T_ga0 for batch-0, T_c1 into T_l0 for batch-1.

        Where weights are streamed, the GPU batch waits for a layer's before batch-0's stage. So batch-1's attention is
        also hidden if it ends with the wait: T_c1 + T_l1 + T_ga0 within the time between layers. One window is enough.
        """
        model, (first, second) = self.model, self.batches
        cpu_attention_s = model.cpu_attention_s
        if batch is first:
            return [(cpu_attention_s, model.linear_s(second.size) + self._gpu_batch_attention_s)]
        windows: list[Window] = [(cpu_attention_s, model.linear_s(self.load.tokens + first.size))]
        if model.stream_s:

            def with_stage_s(size: int, context: int) -> float:
                return cpu_attention_s(size, context) + model.linear_s(size)

            windows.append((with_stage_s, model.stream_s - self._gpu_batch_attention_s))
        return windows

    def iteration_s(self) -> float:
        """All layers and the end stages of GPU batch and batch-1; the host's fixed work counts once."""
        model, (first, second) = self.model, self.batches
        layer_s = pipelined_layer_s(
            linear_0_s=model.linear_s(self.load.tokens + first.size),
            linear_1_s=model.linear_s(second.size),
            gpu_attention_0_s=self._gpu_batch_attention_s,
            cpu_attention_0_s=model.cpu_attention_s(first.size, first.context_tokens),
            cpu_attention_1_s=model.cpu_attention_s(second.size, second.context_tokens),
        )
        gpu_batch_rows = self.num_requests - second.size
        ends_s = model.outside_layers_s(gpu_batch_rows) + model.outside_layers_s(second.size)
        if gpu_batch_rows and second.size:
            ends_s -= model.host_work_s(0)
        return model.num_layers * model.layer_s(layer_s) + ends_s

    def add_hidden(self, ready: CpuDecodes) -> None:
        """Add each request to batch-1 or batch-0 if the CPU stays hidden there; leave it out otherwise.

        One more request makes its batch's CPU time longer. It also makes the batch's linear time longer, which hides
        more of the other batch. So only its own batch's inequality can break. The batches alternate: each takes the
        longest run that keeps its inequality, until neither can take the next request. Batches never shrink, so any
        request as long as one left out is left out too.
        """
        queue = CpuDecodeQueue(ready)
        while queue:
            runs = [self._take_hidden_run(batch, queue) for batch in reversed(self.batches)]
            if not any(runs):
                queue.skip_too_long(self._fits_a_batch())

    def _take_hidden_run(self, batch: PipelineBatch, queue: CpuDecodeQueue) -> int:
        """Add as many of the next requests to a batch as stay hidden there; returns how many."""
        context, size, tokens, run = queue.context_of_next, batch.size, batch.context_tokens, 0
        for seconds, window_s in self._windows(batch):
            longest = longest_run(lambda n, s=seconds: s(size + n, tokens + context(n)), window_s, len(queue))
            run = max(run, longest)
        if run:
            run_tokens = context(run)
            batch.add_requests(queue.take_requests(run), run_tokens)
        return run

    def _fits_a_batch(self) -> Callable[[int], bool]:
        """A test of lengths: whether a request of n tokens stays hidden in either batch."""
        grown = [
            (seconds, batch.size + 1, batch.context_tokens, window_s)
            for batch in self.batches
            for seconds, window_s in self._windows(batch)
        ]
        return lambda n: any(seconds(size, tokens + n) <= window_s for seconds, size, tokens, window_s in grown)

    def add_overdue(self, request: Request) -> None:
        """Add a request to batch-1 unless a batch has it, hidden or not."""
        if not any(request in batch.requests for batch in self.batches):
            self.batches[1].add_requests([request], request.num_tokens)

    def split_evenly(self, ready: CpuDecodes) -> None:
        """Add every request, the longest first, to the batch with less context, hidden or not."""
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
        first.requests += ready.requests_at(to_first)
        second.requests += ready.requests_at(to_second)
        total = first.context_tokens + second.context_tokens + ready.context_tokens
        first.context_tokens = (total + ahead) // 2  # their sum and their difference are known
        second.context_tokens = (total - ahead) // 2
