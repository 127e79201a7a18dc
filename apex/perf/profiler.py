"""Measures the operations of a backend into a profile table, on the machine and in the state in which they will run.

All sizes of all operations run in rounds, one after the other. Other activity on the machine then affects all of them
alike, and data of the previous round has left the caches. The result is the mean of the rounds without the fastest and
the slowest: iteration times are sums, and a median would ignore that every operation is sometimes slow.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from apex.perf.model import FREE, Curve, ProfileTable, Surface
from swiftllm.core.plan import ALONE, JOINED, CpuBatchPlan, GpuBatchItem, IterationPlan, Swap
from swiftllm.core.request import Request, SamplingParams, Tier, TokenLogprob
from swiftllm.engine.engine import Engine
from swiftllm.engine.executor import Executor
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.runtime.model_input import CpuBatchTensors, GpuBatchTensors
from swiftllm.runtime.torch_backend import TorchBackend
from swiftllm.scheduling.validation import SchedulerLimits
from swiftllm.systems import Platform, build, find_system

# -- an engine that computes nothing -----------------------------------------------------------------------------------
# An engine on a backend that does nothing: its iterations take the host's time alone.


class _NoWork:
    """What decodes on the GPU alone ask of a backend. Its operations return at once."""

    worker_restarts = 0

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.now = time.perf_counter

    def swap(self, swaps: Sequence[Swap]) -> None:
        pass

    def open_gpu_batch(self, items: Sequence[GpuBatchItem]) -> list[str]:
        return [item.request.request_id for item in items]

    def run_stage(self, layer: int, batches: Sequence[list[str]]) -> Mapping[str, int]:
        return dict.fromkeys(batches[0], 0) if layer == self.num_layers - 1 else {}

    def gpu_attention(self, layer: int, gpu_batch: list[str]) -> None:
        pass

    def run_full_graph(self, gpu_batch: list[str]) -> None:
        pass

    def holds_weights(self, layer: int) -> bool:
        return True

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        return {}


def idle_engine(num_layers: int, requests: int) -> Engine:
    """An engine of that many endless decodes, without any computation."""
    backend = _NoWork(num_layers)
    limits = SchedulerLimits(requests, requests, 1 << 20)
    kv = KVCacheManager(2 * requests, 0, limits.max_model_len)
    platform = Platform(backend, limits, kv, {}, vocab_size=1)  # pyright: ignore[reportArgumentType]  # not all of it
    engine = build(find_system("swiftllm"), platform)
    endless = SamplingParams(max_tokens=limits.max_model_len - 1, ignore_eos=True)
    for i in range(requests):
        engine.add(engine.make_request(str(i), (0,), endless))
    engine.step()  # the prefills
    return engine


# -- operations to be timed --------------------------------------------------------------------------------------------
# Synthetic work for the profiler: each operation of a backend at a given size, ready to be timed repeatedly.
#
# A method prepares an operation and returns a function that runs it once and returns its seconds. The layer changes
# from run to run, so that weights and KV caches come from memory, as in a serving engine.

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
        self.slots: dict[str, int] = {}
        self._states = None if backend.model_config.linear is None else backend.model.states
        self._synchronize = torch.cuda.synchronize if backend.device.type == "cuda" else lambda: None
        self._random = random.Random(0)
        self._prompts = random.Random(0)  # of its own: block tables do not depend on tokens
        vocabulary = range(backend.model_config.vocab_size)
        self._tokens = self._prompts.choices(vocabulary, k=PROMPTS + max_model_len)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Give the backend the synthetic block tables meanwhile, and drop them afterwards."""
        saved, self.backend.block_tables = self.backend.block_tables, self.tables
        slots = self.backend.state_slots if self._states is not None else None
        if self._states is not None:
            self.backend.state_slots = self.slots
            self.backend.draw_states()
        try:
            yield
        finally:
            self.backend.block_tables = saved
            self.tables.clear()
            if self._states is not None:
                self.backend.state_slots = slots
                self.slots.clear()

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
        if self._states is not None:  # of more requests than there are slots some share one
            self.slots[request.request_id] = len(self.slots) % self._states.recurrent.shape[1]
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


# -- measuring ---------------------------------------------------------------------------------------------------------

ROUNDS = 7
LEAST_ROOM = 3
"""Tokens of a tier in which prefills are timed: chunks of two lengths, with and without a past."""

Size = int | tuple[int, int]
"""A number, or for some operations a pair of numbers."""
Operations = dict[str, dict[Size, TimedOperation]]
Seconds = dict[str, dict[Size, float]]


@dataclass(frozen=True)
class SizeGrid:
    """The sizes to measure, as far as limits and pools allow."""

    linear_tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
    sampled_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
    swapped_blocks: tuple[int, ...] = (1, 8, 32)
    prefill_tokens: tuple[int, ...] = (1, 15, 31, 63, 127, 191, 255, 383, 511)
    """Odd, as half of all prompts are: on a CPU, attention of 32 tokens takes a quarter less time than of 31."""
    prefill_cached: tuple[int, ...] = (0, 1, 256, 1024)
    """0 has the neighbour 1 because a chunk that is the whole context needs no mask and no gathering."""
    decode_requests: tuple[int, ...] = (1, 4, 16, 64)
    decode_contexts: tuple[int, ...] = (32, 128, 512, 2048)
    prefill_chunks_counts: tuple[int, ...] = (8,)
    """Chunks in a full GPU batch; measures what chunks share."""
    iteration_requests: tuple[int, ...] = (1, 16, 64, 256)


def measure_seconds(
    bench: Workbench,
    max_tokens: int,
    *grids: SizeGrid,
    progress: Callable[[float, str], None] = lambda done, what: None,
) -> list[Seconds]:
    """Mean seconds of each operation at each size, one mapping per grid, all measured in the same rounds.

    It takes some seconds. The block tables and the pools' contents are overwritten. ``max_tokens``: the most tokens of
    a GPU batch in an iteration.
    """
    with bench.in_use():
        operations = [_operations(bench, max_tokens, grid) for grid in grids]
        samplers = [
            (i, name, size, sample)
            for i, by_name in enumerate(operations)
            for name, by_size in by_name.items()
            for size, sample in by_size.items()
        ]
        taken: list[list[float]] = [[] for _ in samplers]
        for done in range(ROUNDS + 1):  # the first round warms up
            progress(done / (ROUNDS + 1), f"round {done + 1} of {ROUNDS + 1}")
            for seconds, (_, _, _, sample) in zip(taken, samplers, strict=True):
                seconds.append(sample())
    progress(1.0, "done")
    result: list[Seconds] = [{name: {} for name in by_name} for by_name in operations]
    for seconds, (i, name, size, _) in zip(taken, samplers, strict=True):
        result[i][name][size] = statistics.fmean(sorted(seconds[1:])[1:-1])
    return result


def _operations(bench: Workbench, max_tokens: int, grid: SizeGrid) -> Operations:
    rows = sizes_up_to(grid.sampled_rows, max_tokens)
    pool = min(bench.num_blocks.values())
    gpu, cpu = (_decode_sizes(bench, tier, grid) for tier in (Tier.GPU, Tier.CPU))
    shortest = {requests: min(c for r, c in cpu if r == requests) for requests, _ in cpu}
    tiers = [tier for tier in (Tier.GPU, Tier.CPU) if bench.room(tier) >= LEAST_ROOM] or [bench.larger_tier]
    of_tiers: list[dict[Size, TimedOperation]] = [
        {size: bench.prefill_attention([size], tier) for size in _prefill_sizes(bench, tier, max_tokens, grid)}
        for tier in tiers
    ]
    # GPU batches of several chunks have in total as many tokens as the longest that the table has.
    longest = max(tokens for tokens, _ in _prefill_sizes(bench, tiers[0], max_tokens, SizeGrid()))
    gpu_batches = [(n, longest // n) for n in grid.prefill_chunks_counts if n <= longest]
    return {
        "linear": {n: bench.linear(n) for n in sizes_up_to(grid.linear_tokens, max_tokens)},
        "first": {n: bench.first_stage(n) for n in rows},
        "last": {n: bench.last_stage(n) for n in rows},
        "swap": {n: bench.swap(n) for n in (sizes_up_to(grid.swapped_blocks, pool) if pool > 1 else ())},
        "prefill_attention": of_tiers[0],
        "prefill_attention_cpu_tier": of_tiers[1] if len(tiers) > 1 else {},
        "prefill_chunks": {(n, new): bench.prefill_attention([(new, 0)] * n, tiers[0]) for n, new in gpu_batches},
        "gpu_attention": {size: bench.gpu_attention(*size) for size in gpu},
        "cpu_attention": {size: bench.cpu_attention(*size) for size in cpu},
        "hand_over": {requests: bench.hand_over(requests, context) for requests, context in shortest.items()},
        "iteration": {n: bench.host_work(n) for n in grid.iteration_requests},
    }


def _prefill_sizes(bench: Workbench, tier: Tier, max_tokens: int, grid: SizeGrid) -> list[tuple[int, int]]:
    room = bench.room(tier)
    tokens = sizes_up_to(grid.prefill_tokens, min(max_tokens, bench.max_model_len // 2, room // 2))
    cached = sizes_up_to(grid.prefill_cached, min(bench.max_model_len, room) - tokens[-1])
    return [(n, c) for n in tokens for c in cached]


def _decode_sizes(bench: Workbench, tier: Tier, grid: SizeGrid) -> list[tuple[int, int]]:
    """(requests, context tokens of each) that fit the tier together; none if the tier is too small."""
    blocks = bench.num_blocks[tier]
    requests = [n for n in grid.decode_requests if 2 * n <= blocks]
    if len(requests) < 2:
        return []
    longest = {n: min(bench.layer_groups.tokens_in(blocks // n), bench.max_model_len) for n in requests}
    return [(n, context) for n in requests for context in sizes_up_to(grid.decode_contexts, longest[n])]


def table_from_seconds(seconds: Seconds, identity: Mapping[str, str]) -> ProfileTable:
    """The profile table of measured seconds, by operation and size."""
    first, last, linear = _by_number(seconds["first"]), _by_number(seconds["last"]), _curve(seconds["linear"])
    # Both end stages, less the one layer of linear work that they add up to.
    ends: dict[Size, float] = {rows: max(0.0, first[rows] + last[rows] - linear(rows)) for rows in first}
    prefill, in_cpu_tier = _surface(seconds["prefill_attention"]), seconds["prefill_attention_cpu_tier"]
    gpu_batches = _by_pair(seconds["prefill_chunks"])
    shared = [(n * prefill(new, 0) - gpu_batch_s) / (n - 1) for (n, new), gpu_batch_s in gpu_batches.items()]
    return ProfileTable(
        dict(identity),
        linear=linear,
        ends=_curve(ends),
        swap=_curve(seconds["swap"]),
        prefill_attention=prefill,
        prefill_attention_cpu_tier=_surface(in_cpu_tier) if in_cpu_tier else None,
        gpu_attention=_surface(seconds["gpu_attention"]),
        cpu_attention=_surface(seconds["cpu_attention"]),
        first_share=min(1.0, sum(first.values()) / sum(linear(rows) for rows in first)),
        prefill_shared_s=max(0.0, statistics.fmean(shared)) if shared else 0.0,
        hand_over=_curve({size: max(0.0, s) for size, s in seconds["hand_over"].items()}),
        iteration=_curve(seconds["iteration"]),
    )


def _curve(seconds: Mapping[Size, float]) -> Curve:
    """A curve; :data:`FREE_RUNNING` for what could not be measured because a tier is too small."""
    sizes = sorted(_by_number(seconds))
    return Curve(tuple(sizes), tuple(seconds[size] for size in sizes)) if sizes else FREE


def _surface(seconds: Mapping[Size, float]) -> Surface:
    by_pair = _by_pair(seconds)
    firsts = sorted({first for first, _ in by_pair})
    if not firsts:
        return Surface((1, 2), (FREE, FREE))
    curves = [_curve({second: s for (f, second), s in by_pair.items() if f == first}) for first in firsts]
    return Surface(tuple(firsts), tuple(curves))


def _by_number(seconds: Mapping[Size, float]) -> dict[int, float]:
    return {size: s for size, s in seconds.items() if isinstance(size, int)}


def _by_pair(seconds: Mapping[Size, float]) -> dict[tuple[int, int], float]:
    return {size: s for size, s in seconds.items() if isinstance(size, tuple)}


def sizes_up_to(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes below ``most``, and ``most`` itself within their range; at least two, which a line needs."""
    kept = sorted({size for size in sizes if size < most} | {max(0, min(most, sizes[-1]))})
    if len(kept) > 1:
        return kept
    least = kept[0] - 1 if kept[0] > 1 else kept[0]  # a context beyond the longest request has no rotary row
    return [least, least + 1]
