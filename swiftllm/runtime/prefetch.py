"""How CPU attention prefetches on this machine: measured at the first start, then read from the cache directory.

What is fastest depends on the processor, and not by its maker: it is timed. Every way gives the same results.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch

import pacpu
from swiftllm.files import cache_dir, write_atomically
from swiftllm.kv.pools import host_tensor
from swiftllm.machine import available_host_bytes, cpu_model, last_level_cache_bytes, usable_cores

logger = logging.getLogger(__name__)

FORMAT = 1
DTYPES = ("float16", "bfloat16", "float32")
NUM_HEADS, HEAD_DIM, BLOCK_SIZE, BATCH = 32, 128, 16, 8
KV_HEADS = {"MHA": 32, "GQA": 8}
SAMPLE_BYTES = 32 << 20
"""K and V that a timed call reads: milliseconds on one core."""
CACHES = 3
"""The calls go round in so many times the last-level cache."""
MIN_BYTES = 128 << 20
ROUNDS = 15
NOISE = 0.02
"""Of a rate: ways that differ by less count as equal, and the one that asks for most comes first."""
FILLING = 0x3C
"""A byte that makes numbers between 0.01 and 1.1 of every type."""

Rates = Mapping[str, Mapping[str, float]]
"""GB/s of K and V by the way of prefetching, by the calls, such as ``float16 MHA``."""


def use_fastest_prefetch(*, measure_again: bool = False) -> None:
    """Have CPU attention of this process prefetch in the way that is fastest here: from the cache, else measured now.

    Measuring takes less than a second, once for each processor and instruction set. Where it would take more than a
    quarter of the memory that is available, nothing changes.
    """
    rates = None if measure_again else kept_rates()
    if rates is None:
        num_bytes = max(MIN_BYTES, CACHES * last_level_cache_bytes())
        if num_bytes > available_host_bytes() // 4:
            logger.info("how CPU attention should prefetch is not measured: that takes %d MiB", num_bytes >> 20)
            return
        rates = measure_rates(host_tensor((num_bytes,), torch.uint8).fill_(FILLING), usable_cores())
        try:
            write_atomically(rates_path(), json.dumps({"identity": identity(), "rates": rates}, indent=1))
        except OSError as error:
            logger.warning("how CPU attention prefetches best is not kept: %s", error)
    for calls, by_way in rates.items():
        pacpu.set_prefetch(*calls.split(), fastest(by_way))


def fastest(by_way: Mapping[str, float]) -> str:
    enough = (1 - NOISE) * max(by_way.values())
    return next(way for way in reversed(pacpu.PREFETCHES) if by_way[way] >= enough)


def identity() -> dict[str, str]:
    """What the fastest way depends on."""
    return {"format": str(FORMAT), "cpu": cpu_model(), "isa": pacpu.isa()}


def rates_path() -> Path:
    """Where the rates of this processor and instruction set are kept."""
    key = hashlib.sha256(json.dumps(identity(), sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{key}.prefetch"


def kept_rates() -> Rates | None:
    """The rates measured on this machine; None if there are none that can be read."""
    try:
        rates = json.loads(rates_path().read_text())["rates"]
        kinds = (f"{dtype} {heads}" for dtype in DTYPES for heads in KV_HEADS)
        return {kind: {way: float(rates[kind][way]) for way in pacpu.PREFETCHES} for kind in kinds}
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
        return None


def measure_rates(memory: torch.Tensor, num_threads: int, *, rounds: int = ROUNDS) -> Rates:
    """Time every way in every kind of call over uint8 ``memory``, which holds moderate numbers and no cache holds.

    The ways take turns. Seconds are those of the process's threads on their cores, so that other work that takes cores
    away decides nothing, and of each way the fastest call counts. Afterwards the ways are those of before.
    """
    return {
        f"{dtype} {heads}": _rates_of(memory.view(getattr(torch, dtype)), dtype, heads, num_threads, rounds)
        for dtype in DTYPES
        for heads in KV_HEADS
    }


def _rates_of(memory: torch.Tensor, dtype: str, heads: str, num_threads: int, rounds: int) -> dict[str, float]:
    block = (KV_HEADS[heads], 2, BLOCK_SIZE, HEAD_DIM)
    block_bytes = torch.Size(block).numel() * memory.itemsize
    num_blocks = memory.nbytes // block_bytes
    cache = memory[: num_blocks * block_bytes // memory.itemsize].view(num_blocks, *block)
    per_request = max(1, min(SAMPLE_BYTES // block_bytes, num_blocks) // BATCH)
    # Blocks lie anywhere, as in a cache that has been in use.
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    blocks_of_call = BATCH * per_request
    tables = order[: num_blocks // blocks_of_call * blocks_of_call].view(-1, BATCH, per_request)
    seq_lens = torch.full((BATCH,), per_request * BLOCK_SIZE, dtype=torch.int32)
    q = torch.full((BATCH, NUM_HEADS, HEAD_DIM), 0.01, dtype=cache.dtype)
    k = cache[0, :, 0, 0].expand(BATCH, -1, -1).contiguous()
    out = torch.empty_like(q)
    before = pacpu.prefetch(dtype, heads)
    taken: dict[str, list[float]] = {way: [] for way in pacpu.PREFETCHES}
    turn = 0
    try:
        for _ in range(rounds):
            for way, seconds in taken.items():
                pacpu.set_prefetch(dtype, heads, way)
                table, turn = tables[turn % len(tables)], turn + 1
                start_s = time.process_time()
                pacpu.paged_attention(q, k, k, cache, table, seq_lens, out, 1.0, num_threads=num_threads)
                seconds.append((time.process_time() - start_s) / num_threads)
    finally:
        pacpu.set_prefetch(dtype, heads, before)
    return {way: blocks_of_call * block_bytes / min(seconds) / 1e9 for way, seconds in taken.items()}
