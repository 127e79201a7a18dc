"""Measures the operations of a backend into a profile table, on the machine and in the state in which they will run.

All sizes of all operations run in rounds, one after the other. Other activity on the machine then affects all of them
alike, and data of the previous round has left the caches. The result is the mean of the rounds without the fastest and
the slowest: iteration times are sums, and a median would ignore that every operation is sometimes slow.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from apex.perf.model import FREE, Curve, ProfileTable, Surface
from apex.perf.workbench import TimedOperation, Workbench
from swiftllm.core.request import Tier

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
