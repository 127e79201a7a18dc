"""The interface of the operations between the GEMMs, implemented for CPU, for GPU and as a reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from swiftllm.ops.quantised_matrix import QuantisedMatrix

Linear = Callable[..., torch.Tensor]
Crossing = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class CrossingParts:
    """The work between two attentions, part by part. Linears are of :meth:`Ops.make_linear`."""

    o: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear
    norm: torch.Tensor
    projection: Linear
    head_norms: torch.Tensor | None
    rotated_heads: int
    """Heads of the projection that are normed and rotated, from the first on; 0 for the vocabulary's."""
    head_dim: int
    eps: float


@dataclass(frozen=True)
class ChunkAttention:
    """Attention of one request's chunk, which is the end of its context. It is causal."""

    q: torch.Tensor
    """``[rows, num_heads, head_dim]``"""
    k: torch.Tensor
    """``[num_kv_heads, context, head_dim]``, as ``v``."""
    v: torch.Tensor
    mask: torch.Tensor | None
    """Bool ``[rows, context]``, true where a row attends; None where the chunk is all of the context."""
    out: torch.Tensor
    """``[rows, num_heads, head_dim]``, overwritten."""


class MakesLinears(Protocol):
    """Makes functions of matrices."""

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A function from ``x [rows, in]`` to ``x weight^T + bias [rows, out]``; it may repack the weight. Where graphs
        are captured, it also accepts ``out=``."""

    def make_quantised_linear(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Linear:
        """The same for a quantised matrix; ``x`` has its inputs in their own order."""


class Ops(MakesLinears, Protocol):
    """Rows are tokens. A KV layer is ``[num_blocks, num_kv_heads, 2, block_size, head_dim]``, K at index 0, V at 1.

    All tensors of a call are on one device and, unless stated otherwise, of one dtype. Sums are in float32. GPU
    implementations also accept host tensors in the operations on caches: ``store_kv``, ``gather_kv``,
    ``gather_blocks``, ``scatter_blocks``.
    Slots without a token of the request are never read, so the cache need not be initialised.
    """

    takes_empty_rows: bool
    """Whether ``decode_attention`` accepts rows of ``seq_lens`` 0, stores nothing for them and ignores their block
    tables. Captured graphs are padded with such rows."""

    in_place: MakesLinears
    """Makes linears that read their matrix where it is, call by call; others may have a copy in another layout."""

    by_library: str | None
    """The optional library, with its version, that multiplies 4-bit matrices made linears so far; None without."""

    def make_crossing(self, parts: CrossingParts) -> Crossing | None:
        """All parts in one call, with the bits of the separate calls; None where there is no such call.

        A function of ``attention_out [rows, num_heads * head_dim]``, ``residual [rows, hidden_size]``, which it
        overwrites, and the rows' angles (see :meth:`rotary_`); returns the projection.
        """

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
        """Rotate ``x [rows, heads, head_dim]`` in place by ``rotary_rows``, float32 ``[rows, 2, head_dim]``."""

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
        """K and V of one request, ``[2, num_kv_heads, context_len, head_dim]``, from its ordered ``blocks``."""

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy ``blocks`` (int64, distinct) of all layers into a buffer, for one transfer to the other tier.

        ``pool [num_layers, num_blocks, ...]`` to ``staging [num_layers, len(blocks), ...]``, both contiguous. All bits
        are kept.
        """

    def scatter_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        """The reverse: copy ``staging[:, i]`` to block ``blocks[i]`` of the pool. Other blocks do not change."""

    def prefill_attention(self, chunks: Sequence[ChunkAttention], scale: float) -> None:
        """Attention of chunks of several requests; writes the ``out`` of each."""

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
        """Store each request's new k and v at position ``seq_lens - 1`` and attend to its whole context.

        One row per request; ``block_tables`` int32 ``[rows, max_blocks]``, ``seq_lens`` int32 ``[rows]``;
        writes ``out [rows, num_heads, head_dim]``.
        """
