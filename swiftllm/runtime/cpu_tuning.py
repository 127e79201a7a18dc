"""How fast memory can be read on this machine, and how CPU attention is fastest on it."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

import pacpu
from pacpu import int8
from swiftllm.files import cache_dir, keep
from swiftllm.kv.tensors import host_tensor
from swiftllm.machine import available_host_bytes, cpu_model, last_level_cache_bytes, usable_cores

# -- how fast memory can be read ---------------------------------------------------------------------------------------
# How fast memory can be read: the limit that the speed of CPU attention and of CPU products is held against.

LIMIT_MIN_BYTES = 512 << 20
LIMIT_CACHES = 4
"""So many times the last-level cache are read: a small part of what a pass leaves there is still there in the next."""


def read_limit_bytes() -> int:
    """Bytes that :func:`read_limit` reads where it is given no memory."""
    return max(LIMIT_MIN_BYTES, LIMIT_CACHES * last_level_cache_bytes())


def read_limit(num_threads: int, memory: torch.Tensor | None = None, *, passes: int = 10) -> float:
    """Bytes/s of streaming reads: the best of so many passes over ``memory``.

    A pass reads everything once, each thread a share of its own. Seconds count while a thread has its core. Other work
    that reads memory still lowers the limit, so the best pass counts. ``memory`` is contiguous, written before, and
    much larger than the last-level cache; by default as much as :func:`read_limit_bytes` is taken for the time of the
    call, or a quarter of what is available.
    """
    if memory is None:
        memory = host_tensor((min(read_limit_bytes(), available_host_bytes() // 4),), torch.uint8)
        # A page lies on the NUMA node of the thread that touches it first.
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(lambda part: part.fill(1), np.array_split(memory.numpy(), num_threads)))
    return max(pacpu.read_bandwidth(memory, num_threads=num_threads) for _ in range(passes))


# -- how CPU attention is fastest --------------------------------------------------------------------------------------
# How CPU attention is fastest on this machine: measured at the first start, then read from the cache directory.
#
# How it prefetches, for int8 MHA also how wide its vectors are, and what a further row costs in blocks that rows share.
# This depends on the processor, and not by its maker: it is timed. Prefetches change no result, the others its last
# bits.

logger = logging.getLogger(__name__)
Way = TypeVar("Way")

FORMAT = 4
INT8 = "int8"
DTYPES = ("float16", "bfloat16", "float32", INT8)
NUM_HEADS, HEAD_DIM, BLOCK_SIZE, BATCH = 32, 128, 16, 8
KV_HEADS = {"MHA": 32, "GQA": 8}
SAMPLE_BYTES = 32 << 20
"""K and V that a timed call reads: milliseconds on one core."""
SHARERS, SHARED_TOKENS = 4, 1024
"""Rows and context of the calls that share blocks, at most as many as fit the sample."""
CACHES = 3
"""The calls go round in so many times the last-level cache."""
MIN_BYTES = 128 << 20
ROUNDS = 15
SETTLED_S = 1e-3
"""After a call: pacpu's helpers sleep by then. While a thread runs, the system counts its time tick by tick, and a call
takes less than a tick."""
NOISE = 0.02
"""Of a rate: ways that differ by less count as equal, and the one that asks for most comes first."""
LEAST_COST = 1 / 8
"""Of a further row: what pacpu takes at least."""
FILLING = 0x3C
"""A byte that makes numbers between 0.01 and 1.1 of every type, scales of int8 among them."""

Rates = Mapping[str, dict[str, float]]
"""GB/s of K and V by the way of prefetching, by the calls, such as ``float16 MHA``."""


@dataclass(frozen=True)
class Measured:
    """What was timed on this machine, by the calls.

    Attributes:
        shared_row_costs: see :func:`pacpu.shared_row_cost`, not rounded.
    """

    rates: Rates
    shared_row_costs: Mapping[str, float]


def use_fastest_attention(*, measure_again: bool = False) -> None:
    """Have CPU attention of this process work in the way that is fastest here: from the cache, else measured now.

    Measuring takes a few seconds, once for each processor and instruction set. Where it would take more than a
    quarter of the memory that is available, nothing changes.
    """
    measured = None if measure_again else kept()
    if measured is None:
        num_bytes = max(MIN_BYTES, CACHES * last_level_cache_bytes())
        if num_bytes > available_host_bytes() // 4:
            logger.info("how CPU attention is fastest is not measured: that takes %d MiB", num_bytes >> 20)
            return
        measured = measure(host_tensor((num_bytes,), torch.uint8).fill_(FILLING), usable_cores())
        keep(kept_path(), json.dumps({"identity": identity(), **asdict(measured)}, indent=1))
    for calls, by_way in measured.rates.items():
        kernel, kind = calls.split()
        pacpu.set_prefetch(kernel, kind, fastest(by_way))
        pacpu.set_shared_row_cost(kernel, kind, measured.shared_row_costs[calls])


def fastest(by_way: dict[str, float]) -> str:
    enough = (1 - NOISE) * max(by_way.values())
    return next(way for way in reversed(by_way) if by_way[way] >= enough)


def identity() -> dict[str, str]:
    """What the fastest way depends on."""
    return {"format": str(FORMAT), "cpu": cpu_model(), "isa": pacpu.isa()}


def kept_path() -> Path:
    """Where the measurements on this processor and instruction set are kept."""
    key = hashlib.sha256(json.dumps(identity(), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{key}.attention"


def kept() -> Measured | None:
    """What was measured on this machine; None if there is nothing that can be read."""
    try:
        found = json.loads(kept_path().read_text())
        rates, costs = found["rates"], found["shared_row_costs"]
        kinds = [f"{dtype} {heads}" for dtype in DTYPES for heads in KV_HEADS]
        return Measured(
            {kind: {way: float(rates[kind][way]) for way in pacpu.prefetches(*kind.split())} for kind in kinds},
            {kind: _cost_within_limits(float(costs[kind])) for kind in kinds},
        )
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
        return None


def measure(memory: torch.Tensor, num_threads: int, *, rounds: int = ROUNDS) -> Measured:
    """Time every kind of call over uint8 ``memory``, which holds moderate numbers and no cache holds.

    Ways take turns. Seconds are those of the process's threads on their cores, so that other work that takes cores away
    decides nothing, and of each way the fastest call counts. Afterwards the settings are those of before.
    """
    rates, costs = {}, {}
    for dtype in DTYPES:
        for heads in KV_HEADS:
            calls = f"{dtype} {heads}"
            before = pacpu.prefetch(dtype, heads), pacpu.shared_row_cost(dtype, heads)
            typed = memory if dtype == INT8 else memory.view(getattr(torch, dtype))
            try:
                rates[calls] = _rates_of(typed, dtype, heads, num_threads, rounds)
                pacpu.set_prefetch(dtype, heads, fastest(rates[calls]))
                costs[calls] = _shared_row_cost_of(typed, dtype, heads, num_threads, rounds)
            finally:
                pacpu.set_prefetch(dtype, heads, before[0])
                pacpu.set_shared_row_cost(dtype, heads, before[1])
    return Measured(rates, costs)


def _rates_of(memory: torch.Tensor, dtype: str, heads: str, num_threads: int, rounds: int) -> dict[str, float]:
    cache = _cache_in(memory, KV_HEADS[heads])
    per_request = max(1, min(SAMPLE_BYTES // cache[0].nbytes, len(cache)) // BATCH)
    tables = [table.view(BATCH, per_request) for table in _scattered(len(cache), BATCH * per_request)]
    ways = {way: lambda way=way: pacpu.set_prefetch(dtype, heads, way) for way in pacpu.prefetches(dtype, heads)}
    seconds = _fastest_s(ways, cache, tables, num_threads, rounds)
    return {way: tables[0].numel() * cache[0].nbytes / seconds[way] / 1e9 for way in ways}


def _shared_row_cost_of(memory: torch.Tensor, dtype: str, heads: str, num_threads: int, rounds: int) -> float:
    """Rows whose contexts are all the same blocks, with and without sharing them."""
    cache = _cache_in(memory, KV_HEADS[heads])
    num_blocks = max(1, min(SHARED_TOKENS // BLOCK_SIZE, SAMPLE_BYTES // cache[0].nbytes, len(cache)))
    tables = [table.expand(SHARERS, -1).contiguous() for table in _scattered(len(cache), num_blocks)]
    ways = {cost: lambda cost=cost: pacpu.set_shared_row_cost(dtype, heads, cost) for cost in (LEAST_COST, 1.0)}
    seconds = _fastest_s(ways, cache, tables, num_threads, rounds)
    shared_blocks = SHARERS * seconds[LEAST_COST] / seconds[1.0]  # how many of a row's own take as long as a shared one
    return _cost_within_limits((shared_blocks - 1) / (SHARERS - 1))


def _cost_within_limits(cost: float) -> float:
    return min(max(cost, LEAST_COST), 1.0)


def _cache_in(memory: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    is_int8 = memory.dtype == torch.uint8
    block = (num_kv_heads, *((int8.head_bytes(BLOCK_SIZE, HEAD_DIM),) if is_int8 else (2, BLOCK_SIZE, HEAD_DIM)))
    num_blocks = memory.numel() // torch.Size(block).numel()
    return memory[: num_blocks * torch.Size(block).numel()].view(num_blocks, *block)


def _scattered(num_blocks: int, per_call: int) -> list[torch.Tensor]:
    """Block ids of call after call. They lie anywhere, as in a cache that has been in use."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    return list(order[: num_blocks // per_call * per_call].view(-1, per_call))


def _fastest_s(
    ways: Mapping[Way, Callable[[], None]],
    cache: torch.Tensor,
    tables: list[torch.Tensor],
    num_threads: int,
    rounds: int,
) -> dict[Way, float]:
    """Seconds of the fastest call in each way, which a function chooses. The calls go round in the block tables."""
    batch, per_row = tables[0].shape
    seq_lens = torch.full((batch,), per_row * BLOCK_SIZE, dtype=torch.int32)
    dtype = torch.float16 if cache.dtype == torch.uint8 else cache.dtype
    q = torch.full((batch, NUM_HEADS, HEAD_DIM), 0.01, dtype=dtype)
    k = torch.full((batch, cache.shape[1], HEAD_DIM), 0.01, dtype=dtype)
    out = torch.empty_like(q)
    seconds: dict[Way, list[float]] = {way: [] for way in ways}
    turn = 0
    for _ in range(rounds):
        for way, choose in ways.items():
            choose()
            table, turn = tables[turn % len(tables)], turn + 1
            start_s = time.process_time()
            pacpu.paged_attention(q, k, k, cache, table, seq_lens, out, 1.0, num_threads=num_threads)
            time.sleep(SETTLED_S)
            seconds[way].append((time.process_time() - start_s) / num_threads)
    return {way: min(taken) for way, taken in seconds.items()}
