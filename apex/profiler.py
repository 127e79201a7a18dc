"""Measures the operations of a backend into a profile table, on the machine and in the state they will run in.

Every size is run a few times over different layers, so that weights and caches come from memory and not from the
processor's cache, and the lower quartile counts: whatever else runs on the machine only ever adds time. CPU attention
is measured while the lane computes, since both share the memory's bandwidth.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from apex.perf_model import Curve, ProfileTable, Surface
from swiftllm.backend import Backend, Batch
from swiftllm.plan import LaneItem, Swap
from swiftllm.request import Request, SamplingParams, Tier

LINEAR_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
DECODE_REQUESTS = (1, 4, 16, 64)
DECODE_CONTEXTS = (32, 128, 512, 2048)
PREFILL_TOKENS = (1, 16, 64, 256, 512)
PREFILL_CACHED = (0, 256, 1024)
SAMPLED_ROWS = (1, 8, 32, 128)
SWAPPED_BLOCKS = (1, 8, 32)
REPEATS = 8


class Profiler:
    """``backend.block_tables`` is the profiler's while it runs: profile before the first request."""

    def __init__(
        self,
        backend: Backend,
        *,
        num_blocks: Mapping[Tier, int],
        block_size: int,
        max_tokens: int,
        max_model_len: int,
        vocab_size: int,
        progress: Callable[[float, str], None] = lambda done, what: None,
    ) -> None:
        self.backend = backend
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self._progress = progress
        self._random = random.Random(0)
        self._tables: dict[str, list[int]] = {}

    def measure(self, identity: Mapping[str, str]) -> ProfileTable:
        """Run all operations; takes some seconds. The pools' contents are overwritten."""
        steps = (
            ("linear layers", self._linear),
            ("embedding and logits", self._ends),
            ("swaps", self._swap),
            ("prefill attention", self._prefill_attention),
            ("GPU decode attention", self._gpu_attention),
            ("CPU decode attention", self._cpu_attention),
        )
        names = ("linear", "ends", "swap", "prefill_attention", "gpu_attention", "cpu_attention")
        saved, self.backend.block_tables = self.backend.block_tables, self._tables
        parts = {}
        try:
            for i, (name, (what, step)) in enumerate(zip(names, steps, strict=True)):
                self._progress(i / len(steps), what)
                parts[name] = step()
        finally:
            self.backend.block_tables = saved
            self._tables.clear()
        self._progress(1.0, "done")
        return ProfileTable(dict(identity), **parts)

    # -- operations -------------------------------------------------------------------------------------------------

    def _linear(self) -> Curve:
        return self._curve(_up_to(LINEAR_TOKENS, self.max_tokens), self._linear_s)

    def _linear_s(self, tokens: int) -> float:
        lane = self._lane(self._prefill_items(tokens))
        layers = self._layers()
        return self._time_s(lambda: self.backend.boundary(next(layers), [lane]))

    def _ends(self) -> Curve:
        return self._curve(_up_to(SAMPLED_ROWS, self.max_tokens), self._ends_s)

    def _ends_s(self, rows: int) -> float:
        """Both end boundaries, less the layer of linear work that they make up between them."""
        items = [item for _ in range(rows) for item in self._prefill_items(1)]
        last = self.backend.num_layers - 1
        samples = []
        for _ in range(REPEATS):
            start_s = time.perf_counter()
            lane = self.backend.open_lane(items)
            self.backend.boundary(-1, [lane])
            opened_s = time.perf_counter()
            self.backend.gpu_attention(0, lane)
            logits_start_s = time.perf_counter()
            self.backend.boundary(last, [lane])
            samples.append(opened_s - start_s + time.perf_counter() - logits_start_s)
        return max(0.0, _lower_quartile(samples) - self._linear_s(rows))

    def _swap(self) -> Curve:
        most = min(self.num_blocks.values())
        if most < 2:
            return Curve((1, 2), (0.0, 0.0))
        return self._curve(_up_to(SWAPPED_BLOCKS, most), self._swap_s)

    def _swap_s(self, blocks: int) -> float:
        request = self._request(1, Tier.GPU)
        gpu, cpu = (self._random.sample(range(self.num_blocks[tier]), blocks) for tier in (Tier.GPU, Tier.CPU))
        swap = Swap(request, Tier.GPU, tuple(gpu), tuple(cpu))
        return self._time_s(lambda: self.backend.swap([swap]))

    def _prefill_attention(self) -> Surface:
        longest = min(self.max_tokens, self.max_model_len // 2)
        tier = max(self.num_blocks, key=lambda t: self.num_blocks[t])
        room = self.num_blocks[tier] * self.block_size
        tokens = _up_to(PREFILL_TOKENS, min(longest, room // 2))
        cached = _up_to(PREFILL_CACHED, min(self.max_model_len, room) - tokens[-1])

        def seconds(new: int, before: int) -> float:
            request = self._request(new + before, tier)
            return self._attention_s(self._lane([LaneItem(request, before, new, tier, True)]))

        return self._surface(tokens, lambda _: cached, seconds)

    def _gpu_attention(self) -> Surface:
        def seconds(batch: int, context: int) -> float:
            items = [LaneItem(self._request(context, Tier.GPU), context - 1, 1, Tier.GPU, False) for _ in range(batch)]
            return self._attention_s(self._lane(items))

        return self._decode_surface(Tier.GPU, seconds)

    def _cpu_attention(self) -> Surface:
        return self._decode_surface(Tier.CPU, self._cpu_attention_s)

    def _cpu_attention_s(self, batch: int, context: int) -> float:
        backend = self.backend
        cohort = backend.open_cohort([self._request(context, Tier.CPU) for _ in range(batch)])
        backend.boundary(-1, [cohort])
        lane = self._lane(self._prefill_items(1))
        lane_layers, cohort_layers = self._layers(), self._layers()
        samples = []
        for _ in range(REPEATS + 1):
            ticket = backend.submit_cpu_attention(next(cohort_layers), cohort)
            while not ticket.ready():
                backend.boundary(next(lane_layers), [lane])
            busy_s = ticket.wait()
            start_s = time.perf_counter()
            idle_busy_s = backend.submit_cpu_attention(next(cohort_layers), cohort).wait()
            hand_over_s = time.perf_counter() - start_s - idle_busy_s
            samples.append(busy_s + max(0.0, hand_over_s))
        return _lower_quartile(samples[1:])

    def _attention_s(self, lane: Batch) -> float:
        layers = self._layers(self.backend.num_layers)
        return self._time_s(lambda: self.backend.gpu_attention(next(layers), lane))

    # -- made-up work -----------------------------------------------------------------------------------------------

    def _request(self, tokens: int, tier: Tier) -> Request:
        """A request of so many tokens whose blocks lie scattered over its tier."""
        prompt = tuple(self._random.randrange(self.vocab_size) for _ in range(tokens))
        request = Request(f"profile-{len(self._tables)}", prompt, SamplingParams(max_tokens=1), tier=tier)
        count = -(-tokens // self.block_size)
        pool = range(self.num_blocks[tier])
        blocks = self._random.sample(pool, count) if count <= len(pool) else []
        self._tables[request.request_id] = blocks
        return request

    def _prefill_items(self, tokens: int) -> list[LaneItem]:
        """Prefill chunks of so many tokens together, each within one of the pools."""
        tier = max(self.num_blocks, key=lambda t: self.num_blocks[t])
        longest = min(self.max_model_len, self.num_blocks[tier] * self.block_size)
        sizes = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
        return [LaneItem(self._request(size, tier), 0, size, tier, True) for size in sizes]

    def _lane(self, items: Sequence[LaneItem]) -> Batch:
        lane = self.backend.open_lane(items)
        self.backend.boundary(-1, [lane])
        self.backend.gpu_attention(0, lane)
        return lane

    def _decode_surface(self, tier: Tier, seconds: Callable[[int, int], float]) -> Surface:
        """Over batch sizes and contexts that fit the tier all at once; zero if it holds next to nothing."""
        blocks = self.num_blocks[tier]
        requests = [n for n in DECODE_REQUESTS if 2 * n <= blocks]
        if len(requests) < 2:
            flat = Curve((1, 2), (0.0, 0.0))
            return Surface((1, 2), (flat, flat))
        longest = {n: min(blocks // n * self.block_size, self.max_model_len) for n in requests}
        return self._surface(requests, lambda n: _up_to(DECODE_CONTEXTS, longest[n]), seconds)

    # -- timing -----------------------------------------------------------------------------------------------------

    def _layers(self, stop: int | None = None) -> Iterator[int]:
        """Layers in turn for ever; by default those whose boundary has a next layer."""
        count = max(1, self.backend.num_layers - 1 if stop is None else stop)
        i = 0
        while True:
            yield i % count
            i += 1

    def _time_s(self, run: Callable[[], object]) -> float:
        run()
        samples = []
        for _ in range(REPEATS):
            start_s = time.perf_counter()
            run()
            samples.append(time.perf_counter() - start_s)
        return _lower_quartile(samples)

    def _curve(self, sizes: Sequence[int], seconds: Callable[[int], float]) -> Curve:
        return Curve(tuple(sizes), tuple(seconds(size) for size in sizes))

    def _surface(
        self, firsts: Sequence[int], seconds_at: Callable[[int], Sequence[int]], seconds: Callable[[int, int], float]
    ) -> Surface:
        curves = []
        for first in firsts:
            sizes = tuple(seconds_at(first))
            curves.append(Curve(sizes, tuple(seconds(first, second) for second in sizes)))
            self._tables.clear()
        return Surface(tuple(firsts), tuple(curves))


def _lower_quartile(samples: Sequence[float]) -> float:
    return sorted(samples)[len(samples) // 4]


def _up_to(sizes: Sequence[int], most: int) -> list[int]:
    """The sizes up to ``most``, and ``most`` itself if it lies between them; at least two, to draw a line through."""
    kept = sorted({size for size in sizes if size < most} | {max(0, min(most, sizes[-1]))})
    return kept if len(kept) > 1 else [kept[0], kept[0] + 1]
