"""Synthetic work for the profiler: each operation of a backend at a given size, ready to be timed repeatedly.

A method prepares an operation and returns a function that runs it once and returns its seconds. The layer changes from
run to run, so that weights and KV caches come from memory, as in a serving engine.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from apex.perf.idle_engine import idle_engine
from swiftllm.core.plan import ALONE, JOINED, CpuBatchPlan, GpuBatchItem, IterationPlan, Swap
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.engine.executor import Executor
from swiftllm.runtime.batch import CpuBatchTensors, GpuBatchTensors
from swiftllm.runtime.torch_backend import TorchBackend

TimedOperation = Callable[[], float]

MOST_BLOCKS = 8192
"""Blocks of a tier in use, unless a request needs more: enough for a large batch of long contexts."""

SMALL_TOKENS = 64
"""Operations up to this size run several times a sample."""
SHORT_S = 2e-3
"""So do stages of any size that take no longer than this."""
DECODES = 256
"""Up to so many, rows are of requests of their own: those of one prompt attend to the same tokens, become alike and
pick fewer experts than a batch of decodes."""
HAND_OVERS = 3
"""Pairs of stages a sample: a hand-over is a small difference of two times."""
PROMPTS = 1 << 14
"""Places of the random tokens at which a prompt may begin. Requests with equal tokens would have equal rows, which pick
equal experts: the weights of all others would not be read."""


class Workbench:
    """Makes timed operations. They run within :meth:`in_use`, without requests, and overwrite the pools' contents."""

    def __init__(self, backend: TorchBackend, max_model_len: int) -> None:
        """The caller has written the first ``MOST_BLOCKS`` blocks of each tier: host memory that was never written
        reads as one page of zeros, which stays in the caches.
        """
        self.backend = backend
        self.num_blocks = {Tier.GPU: backend.num_gpu_blocks, Tier.CPU: backend.num_cpu_blocks}
        self.layer_groups = backend.layer_groups
        self.max_model_len = max_model_len
        self.tables: dict[str, list[int]] = {}
        self._synchronize = torch.cuda.synchronize if backend.device.type == "cuda" else lambda: None
        self._random = random.Random(0)
        self._prompts = random.Random(0)  # of its own: block tables do not depend on tokens
        vocabulary = range(backend.model_config.vocab_size)
        self._tokens = self._prompts.choices(vocabulary, k=PROMPTS + max_model_len)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the backend the synthetic block tables meanwhile, and drop them afterwards."""
        saved, self.backend.block_tables = self.backend.block_tables, self.tables
        try:
            yield
        finally:
            self.backend.block_tables = saved
            self.tables.clear()

    # -- the GPU batch
    # ---------------------------------------------------------------------------------------------------

    def linear(self, tokens: int) -> TimedOperation:
        """A stage between two layers."""
        items = self._single_rows(tokens) if tokens <= DECODES else self._prefill_items(tokens)
        return self._stage(self._gpu_batch(items), self._layers(), tokens)

    def first_stage(self, rows: int) -> TimedOperation:
        """The stage before all layers."""
        return self._stage(self._gpu_batch(self._single_rows(rows)), itertools.repeat(-1), rows)

    def last_stage(self, rows: int) -> TimedOperation:
        """The stage after all layers, with a token sampled in every row."""
        return self._stage(
            self._gpu_batch(self._single_rows(rows)), itertools.repeat(self.backend.num_layers - 1), rows
        )

    def prefill_attention(self, chunks: Sequence[tuple[int, int]], tier: Tier) -> TimedOperation:
        """One layer's attention of prefill chunks: (new tokens, tokens cached before) each. K and V go to the ``tier``.

        What is cached in host memory is gathered a layer ahead. So each layer comes after the one before it, which is
        not timed if it is not the last that was, and the first layer after its GPU batch opened.
        """
        items = [GpuBatchItem(self._request(new + cached, tier), cached, new, tier, True) for new, cached in chunks]
        gpu_batch, last = self._gpu_batch(items), 0

        def gpu_batch_before(layer: int) -> GpuBatchTensors:
            nonlocal gpu_batch, last
            if layer == 0:
                gpu_batch = self._opened(items)
            elif layer != last + 1:
                self.backend.gpu_attention(layer - 1, gpu_batch)
            last = layer
            return gpu_batch

        return self._attention(gpu_batch_before, sum(new for new, _ in chunks), self._gpu_batch(self._single_rows(1)))

    def gpu_attention(self, requests: int, context: int) -> TimedOperation:
        """One layer's decode attention in the GPU batch."""
        items = [
            GpuBatchItem(self._request(context, Tier.GPU), context - 1, 1, Tier.GPU, False) for _ in range(requests)
        ]
        gpu_batch = self._gpu_batch(items)
        return self._attention(lambda layer: gpu_batch, requests, gpu_batch)

    def _attention(
        self, gpu_batch_before: Callable[[int], GpuBatchTensors], rows: int, sweeper: GpuBatchTensors
    ) -> TimedOperation:
        """Time attention after a stage, which replaces the caches' contents as in a run; the mean over the groups of
        layers.

        ``gpu_batch_before`` gives the GPU batch where a layer comes next. The stage's batch is ``sweeper``. Prefills
        use a GPU batch of one row. Decodes use their own GPU batch, which leaves it where captured graphs expect it.
        """
        stages, layers = self._layers(), self._layers(self.backend.num_layers)

        def sample() -> float:
            seconds = []
            for _ in range(max(self.layer_groups.growth, 2 if rows <= SMALL_TOKENS else 1)):
                layer = next(layers)
                gpu_batch = gpu_batch_before(layer)
                self.backend.run_stage(next(stages), [sweeper])
                seconds.append(
                    self._time_s(lambda layer=layer, gpu_batch=gpu_batch: self.backend.gpu_attention(layer, gpu_batch))
                )
            return statistics.fmean(seconds)

        return sample

    # -- the CPU worker ---------------------------------------------------------------------------------------------

    def cpu_attention(self, requests: int, context: int) -> TimedOperation:
        """One layer's decode attention while the GPU batch computes, plus the delay until an idle GPU batch sees its
        end."""
        backend, cpu_batch = self.backend, self._cpu_batch(requests, context)
        gpu_batch, gpu_batch_layers = self._gpu_batch(self._single_rows(1)), self._layers()
        layers = self._layers(backend.num_layers)

        def sample() -> float:
            busy_s = []
            for _ in range(self.layer_groups.growth):
                future = backend.submit_cpu_attention(next(layers), cpu_batch)
                while not future.ready():
                    backend.run_stage(next(gpu_batch_layers), [gpu_batch])
                busy_s.append(future.wait())
            self._synchronize()
            start_s = time.perf_counter()
            idle_busy_s = backend.submit_cpu_attention(next(layers), cpu_batch).wait()
            return statistics.fmean(busy_s) + max(0.0, time.perf_counter() - start_s - idle_busy_s)

        return sample

    def hand_over(self, requests: int, context: int) -> TimedOperation:
        """What an attention task costs the GPU batch: a stage just after submitting one, less a stage alone."""
        backend, cpu_batch = self.backend, self._cpu_batch(requests, context)
        gpu_batch, gpu_batch_layers = self._gpu_batch(self._single_rows(1)), self._layers()
        layers = self._layers(backend.num_layers)

        def sample() -> float:
            lost = []
            for _ in range(HAND_OVERS):
                alone_s = self._time_s(self._crossing(next(gpu_batch_layers), gpu_batch))
                crossing = self._crossing(next(gpu_batch_layers), gpu_batch)
                self._synchronize()
                start_s = time.perf_counter()
                future = backend.submit_cpu_attention(next(layers), cpu_batch)
                crossing()
                self._synchronize()
                lost.append(time.perf_counter() - start_s - alone_s)
                future.wait()
            return statistics.median(lost)

        return sample

    # -- beside the layers ------------------------------------------------------------------------------------------

    def swap(self, blocks: int) -> TimedOperation:
        """Blocks from the GPU tier to the CPU tier."""
        request = self._request(1, Tier.GPU)
        gpu, cpu = (self._random.sample(self._pool(tier, blocks), blocks) for tier in (Tier.GPU, Tier.CPU))
        out = Swap(request, Tier.GPU, tuple(gpu), tuple(cpu))
        back = Swap(request, Tier.CPU, tuple(cpu), tuple(gpu))

        def sample() -> float:
            seconds = self._time_s(lambda: self._swap(out))
            # Swapping back waits for the worker's writes. Otherwise the prefill measured next would wait for them.
            self._swap(back)
            return seconds

        return sample

    def _swap(self, swap: Swap) -> None:
        self.backend.swap([swap])
        self.backend.await_swaps()

    def host_work(self, requests: int) -> TimedOperation:
        """The host's work in an iteration of decodes: scheduling, opening the GPU batch, layer loop, taking tokens
        in."""
        engine = idle_engine(self.backend.num_layers, requests)
        items = []
        for _ in range(requests):
            request = self._request(2, Tier.GPU)
            self.tables[request.request_id] = [0] * self.layer_groups.growth  # opening a GPU batch reads the table only
            items.append(GpuBatchItem(request, 1, 1, Tier.GPU, False))

        def sample() -> float:
            return self._time_s(engine.step) + self._time_s(lambda: self.backend.open_gpu_batch(items))

        return sample

    def decodes(self, on_gpu: int, on_cpu: int, context: int) -> TimedOperation:
        """A whole iteration of decodes, each with ``context`` tokens.

        Requests of the GPU tier are in the GPU batch, those of the CPU tier in the two batches of asymmetric
        pipelining.
        """
        tiers = [Tier.GPU] * on_gpu + [Tier.CPU] * on_cpu
        requests = [self._request(context, tier) for tier in tiers]
        for request in requests:
            request.num_uncomputed = 1
        gpu_batch, joining, alone = requests[:on_gpu], requests[on_gpu::2], requests[on_gpu + 1 :: 2]
        rules = ((joining, JOINED), (alone, ALONE))
        cpu_batches = [CpuBatchPlan(i, tuple(batch), mode) for i, (batch, mode) in enumerate(rules) if batch]
        executor, plan = Executor(self.backend), IterationPlan(decodes=tuple(gpu_batch), cpu_batches=tuple(cpu_batches))
        return lambda: self._time_s(lambda: executor.run(plan))

    # -- requests and batches ---------------------------------------------------------------------------------------

    @property
    def larger_tier(self) -> Tier:
        return max(self.num_blocks, key=lambda tier: self.num_blocks[tier])

    def room(self, tier: Tier) -> int:
        """The most tokens of a request there."""
        return self.layer_groups.tokens_in(self.num_blocks[tier])

    def _request(self, tokens: int, tier: Tier) -> Request:
        """A request of ``tokens`` random tokens, with blocks at random places of its tier."""
        start = self._prompts.randrange(PROMPTS)
        prompt = tuple(self._tokens[start : start + tokens])
        request = Request(f"profile-{len(self.tables)}", prompt, SamplingParams(max_tokens=1), tier=tier)
        count = self.layer_groups.blocks_for(tokens)
        pool = self._pool(tier, count)
        self.tables[request.request_id] = self._random.sample(pool, count) if count <= len(pool) else []
        return request

    def _pool(self, tier: Tier, count: int) -> range:
        """The blocks from which ``count`` are drawn."""
        return range(min(self.num_blocks[tier], max(count, MOST_BLOCKS)))

    def _prefill_items(self, tokens: int) -> list[GpuBatchItem]:
        """Prefill chunks of ``tokens`` tokens in total, each short enough for the larger tier."""
        tier = self.larger_tier
        longest = min(self.max_model_len, self.room(tier))
        sizes = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
        return [GpuBatchItem(self._request(size, tier), 0, size, tier, True) for size in sizes]

    def _single_rows(self, rows: int) -> list[GpuBatchItem]:
        return [item for _ in range(rows) for item in self._prefill_items(1)]

    def _opened(self, items: Sequence[GpuBatchItem]) -> GpuBatchTensors:
        """A GPU batch before the first layer."""
        gpu_batch = self.backend.open_gpu_batch(items)
        self.backend.run_stage(-1, [gpu_batch])
        return gpu_batch

    def _gpu_batch(self, items: Sequence[GpuBatchItem]) -> GpuBatchTensors:
        """A GPU batch after the first layer's attention."""
        gpu_batch = self._opened(items)
        self.backend.gpu_attention(0, gpu_batch)
        return gpu_batch

    def _cpu_batch(self, requests: int, context: int) -> CpuBatchTensors:
        cpu_batch = self.backend.open_cpu_batch([self._request(context, Tier.CPU) for _ in range(requests)])
        self.backend.run_stage(-1, [cpu_batch])
        return cpu_batch

    # -- timing -----------------------------------------------------------------------------------------------------

    def _layers(self, stop: int | None = None) -> Iterator[int]:
        """Cycles over the layers, from group to group; by default those whose stage has a next layer."""
        layers = range(max(1, self.backend.num_layers - 1 if stop is None else stop))
        return itertools.cycle(sorted(layers, key=lambda layer: self.layer_groups.place_of[layer]))

    def _stage(self, gpu_batch: GpuBatchTensors, layers: Iterator[int], rows: int) -> TimedOperation:
        """The GPU batch at one of these stages after the other. Short ones are run three times, and two count.

        The first time brings the code back into the caches, and the GPU batch to where captured graphs expect it.
        """

        def cross_s() -> float:
            return self._time_s(self._crossing(next(layers), gpu_batch))

        def sample() -> float:
            first_s = cross_s()
            if rows > SMALL_TOKENS and first_s > SHORT_S:
                return first_s
            return (cross_s() + cross_s()) / 2

        return sample

    def _crossing(self, layer: int, gpu_batch: GpuBatchTensors) -> Callable[[], object]:
        """The GPU batch at a stage whose weights are there: times of stages leave out their way to the device.

        Streamed ones stay until another stage is run.
        """
        if not self.backend.holds_weights(layer):
            self.backend.run_stage(layer, [gpu_batch])
        return lambda: self.backend.run_stage(layer, [gpu_batch])

    def _time_s(self, run: Callable[[], object]) -> float:
        self._synchronize()
        start_s = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - start_s
