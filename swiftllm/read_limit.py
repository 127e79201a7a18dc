"""How fast memory can be read: the limit that the speed of CPU attention and of CPU products is held against."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import pacpu
from swiftllm.kv.pools import host_tensor
from swiftllm.machine import available_host_bytes, last_level_cache_bytes

MIN_BYTES = 512 << 20
CACHES = 4
"""So many times the last-level cache are read: a small part of what a pass leaves there is still there in the next."""


def read_limit_bytes() -> int:
    """Bytes that :func:`read_limit` reads where it is given no memory."""
    return max(MIN_BYTES, CACHES * last_level_cache_bytes())


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
