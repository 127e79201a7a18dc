"""Tensors larger than memory: address space without pages, of which what is touched takes memory. It reads as 0."""

from __future__ import annotations

import math
import mmap

import torch

NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE; a name in Python's mmap from 3.13 on


def reserved(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    space = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(space, dtype=dtype).view(shape)


class WidePool:
    """A KV pool of 16-bit elements whose high blocks begin beyond 2^31 elements, and beyond 2^32, where 32 bits would
    name another block of the pool. Beside it the blocks that are used, side by side, for a reference to compute on.

    Attributes: ``pool`` and ``small``, ``[2, blocks, num_kv_heads, 2, block_size, head_dim]``; ``ids``, of the pool's
    blocks that ``small`` holds, in order.
    """

    def __init__(self, num_kv_heads: int = 2, block_size: int = 16, head_dim: int = 64) -> None:
        block = num_kv_heads, 2, block_size, head_dim
        wide = 2**32 // math.prod(block)  # blocks of 2^32 elements
        self.ids = torch.tensor([wide + 3, wide // 2 + 5, 1, wide // 2 + 1, wide - 1])
        self.pool = reserved(2, wide + 8, *block, dtype=torch.float16)
        self.small = torch.randn(2, len(self.ids), *block).half()
        for layer, content in zip(self.pool, self.small, strict=True):
            for block_id, values in zip(self.ids.tolist(), content, strict=True):
                layer[block_id] = values

    def used(self) -> torch.Tensor:
        """The blocks in use, as ``small`` has them."""
        return torch.stack([torch.stack([layer[i] for i in self.ids.tolist()]) for layer in self.pool])
