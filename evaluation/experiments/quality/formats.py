"""Formats of the CPU tier, each as what one layer's decode attention of the same rows makes of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import pacpu
from pacpu import int8, rows

EXACT, FORMATS = "exact", ("exact", "exact-rotated", "int8", "int8-rotated")
BLOCK_SIZE = 16


def hadamard(size: int) -> torch.Tensor:
    """The orthonormal Hadamard matrix, float32 ``[size, size]``; it is its own inverse.

    Raises:
        ValueError: the size is no power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"a Hadamard rotation needs a head size that is a power of two, not {size}")
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix * size**-0.5


class TierCache:
    """The K and V of one layer in a format: ``exact`` or ``int8``, and either ``-rotated``.

    Rotated: Q, K and V are multiplied with a Hadamard matrix before, the output after. It leaves products of Q and K as
    they are and spreads channels that are larger than others. ``exact-rotated`` shows what rounding alone changes.
    """

    def __init__(self, name: str, num_rows: int, num_tokens: int, heads: tuple[int, int], dtype: torch.dtype) -> None:
        """Room for ``num_tokens`` of each of ``num_rows`` requests; ``heads``: KV heads and the size of a head.

        Raises:
            ValueError: there is no such format, or none for this head size.
        """
        if name not in FORMATS:
            raise ValueError(f"format {name!r} must be one of {', '.join(FORMATS)}")
        num_kv_heads, head_dim = heads
        self.scale, self._rotation = head_dim**-0.5, hadamard(head_dim).to(dtype) if name.endswith("-rotated") else None
        blocks_each = -(-num_tokens // BLOCK_SIZE)
        self._tables = torch.arange(num_rows * blocks_each, dtype=torch.int32).view(num_rows, blocks_each)
        shape = (num_rows * blocks_each, num_kv_heads)
        if name.startswith(EXACT):
            self.content = torch.zeros(*shape, 2, BLOCK_SIZE, head_dim, dtype=dtype)
        else:
            self.content = torch.zeros(*shape, int8.head_bytes(BLOCK_SIZE, head_dim), dtype=torch.uint8)

    def attend(self, qkv: Sequence[torch.Tensor], context_len: int, num_threads: int) -> torch.Tensor:
        """Store the new token of every row and attend over ``context_len`` tokens, it included.

        ``qkv``: ``[rows, heads, head_dim]`` each. Returns the output in the shape of q.
        """
        q, k, v = (part if self._rotation is None else part @ self._rotation for part in qkv)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        lens = torch.full((len(q),), context_len, dtype=torch.int32)
        pacpu.paged_attention(
            q, k, v, self.content, self._tables, lens, out, self.scale, num_threads=num_threads, kernel="native"
        )
        return out if self._rotation is None else out @ self._rotation

    def become(self, exact: TierCache) -> None:
        """Take over the content of an exact cache of the same size."""
        blocks, content = torch.arange(len(exact.content)), exact.content
        if self._rotation is not None:
            content = content @ self._rotation
        rows.scatter_blocks(content[None], self.content[None], blocks)
