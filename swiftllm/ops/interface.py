"""The interface of the operations between the GEMMs, which CPU, GPU and reference implement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Linear = Callable[..., torch.Tensor]


class Ops(Protocol):
    """Rows are tokens. A KV layer is ``[num_blocks, num_kv_heads, 2, block_size, head_dim]``, K at index 0, V at 1.

    All tensors of a call are on one device and, where not said otherwise, of one dtype; sums run in float32. The
    operations for a GPU take tensors in host memory where a cache may lie there: ``store_kv``, ``gather_kv``,
    ``gather_blocks``, ``scatter_blocks``.
    Slots that hold no token of the request are never read: the cache need not be initialised.
    """

    takes_empty_rows: bool
    """Whether ``decode_attention`` stores nothing for rows of ``seq_lens`` 0 and looks at no table of theirs: what a
    captured graph is filled up with."""

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """``x [rows, in]`` to ``x weight^T + bias [rows, out]``; may keep the weight in a layout of its own. Where
        graphs are captured the result can be given memory, ``out=``."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""

    def add_rms_norm_(
        self, residual: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """``residual += addend`` in place, rounded to its dtype; returns ``rms_norm`` of that."""

    def norm_heads_(self, x: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        """``rms_norm`` of each head of ``x [rows, heads, head_dim]`` in place, with its row of ``weights [heads,
        head_dim]``."""

    def rotary_(self, x: torch.Tensor, rotary_rows: torch.Tensor) -> None:
        """Turn ``x [rows, heads, head_dim]`` in place by ``rotary_rows``, float32 ``[rows, 2, head_dim]``."""

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[rows, 2 n]`` to ``[rows, n]``: SiLU of the first half times the second."""

    def store_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        """Write row i of k and v ``[rows, num_kv_heads, head_dim]`` to slot ``offsets[i]`` of block ``blocks[i]``."""

    def gather_kv(self, kv_layer: torch.Tensor, blocks: torch.Tensor, context_len: int) -> torch.Tensor:
        """K and V of one request, ``[2, num_kv_heads, context_len, head_dim]``, from its ``blocks`` in order."""

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy ``blocks`` (int64, distinct) of all layers into a buffer that one transfer can move to the other tier.

        ``pool [num_layers, num_blocks, ...]`` to ``staging [num_layers, len(blocks), ...]``, both contiguous, bit by
        bit.
        """

    def scatter_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        """The way back: ``staging[:, i]`` becomes block ``blocks[i]`` of the pool; its others stay."""

    def prefill_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """Attention of one request's chunk: ``q [rows, num_heads, head_dim]`` to the same shape.

        k and v are ``[num_kv_heads, context, head_dim]``. Without a mask the chunk is the whole context, causal;
        else bool ``mask [rows, context]`` says what each row sees.
        """

    def decode_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        """Store each request's new k and v at position ``seq_lens - 1`` and attend over its whole context.

        One row per request; ``block_tables`` int32 ``[rows, max_blocks]``, ``seq_lens`` int32 ``[rows]``;
        writes ``out [rows, num_heads, head_dim]``.
        """
