"""The operations between the GEMMs: what each does, and all of them in plain torch.

Faster operations of CPU and GPU are subclasses, and are tested against these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from swiftllm.ops.experts import ClampedSwiGLU, ExpertByExpert, Experts, ExpertWeights
from swiftllm.ops.int8_blocks import pack, unpack
from swiftllm.ops.quantised_matrix import QuantisedMatrix

Linear = Callable[..., torch.Tensor]
"""From ``x [rows, in]`` to ``[rows, out]``. Where graphs are captured, it also accepts ``out=``."""
Crossing = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""See :meth:`Ops.make_crossing`."""

# Rows in a block of torch's memory-efficient kernel, or half of them. If K and V are broadcast and the last block is a
# single row, the kernel treats heads as rows. Up to torch 2.12 it then reads the mask beyond its end for all heads but
# the first (pytorch #191937). So such a row is duplicated.
QUERY_BLOCK = 32
LEAST_WINDOWED_ROWS = 512  # of a piece of a chunk with a window: fewer rows would be many calls
MASK_ALIGNMENT = 16  # elements: rows of a mask lie so far apart that torch's memory-efficient kernel can read them
MASK_ELEMENTS_AT_ONCE = 1 << 26  # torch turns a mask into numbers of q's dtype, and pads it: up to 256 MiB in 16 bits


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
    """Attention of one request's chunk, which is the end of its context. It is causal.

    ``k`` and ``v`` hold the context's last tokens: at least those that the rows attend to.
    """

    q: torch.Tensor
    """``[rows, num_heads, head_dim]``"""
    k: torch.Tensor
    """``[num_kv_heads, context, head_dim]``, as ``v``."""
    v: torch.Tensor
    mask: torch.Tensor | None
    """Bool ``[rows, context]``, true where a row attends; None where the chunk is all of the context, and allowed with
    a window."""
    out: torch.Tensor
    """``[rows, num_heads, head_dim]``, overwritten."""
    window: int | None = None
    """How many tokens a row attends to at most, its own included. A mask says the same."""

    def pieces(self) -> Iterator[tuple[slice, slice, torch.Tensor | None]]:
        """Rows, the tokens that they reach, and the mask between the two. Only a window makes several pieces."""
        rows, context = self.q.shape[0], self.k.shape[1]
        if self.window is None or self.window >= context == rows:
            yield slice(rows), slice(context), self.mask
            return
        before, rows_at_once = context - rows, max(self.window, LEAST_WINDOWED_ROWS)
        for first in range(0, rows, rows_at_once):
            last = min(first + rows_at_once, rows)
            tokens = slice(max(0, before + first + 1 - self.window), before + last)
            if self.mask is not None:
                yield slice(first, last), tokens, self.mask[first:last, tokens]
                continue
            age = torch.arange(before + first, before + last, device=self.q.device)[:, None]
            age = age - torch.arange(tokens.start, tokens.stop, device=self.q.device)
            yield slice(first, last), tokens, (age >= 0) & (age < self.window)


class Ops:
    """Rows are tokens. A KV layer is ``[num_blocks, num_kv_heads, 2, block_size, head_dim]``, K at index 0, V at 1.

    All tensors of a call are on one device and, unless stated otherwise, of one dtype. Sums are in float32. GPU
    implementations also accept host tensors in the operations on caches: ``store_kv``, ``gather_kv``,
    ``gather_blocks``, ``scatter_blocks``.
    Slots without a token of the request are never read, so the cache need not be initialised.

    Attention may have ``sinks``, float32 ``[num_heads]``: each is the score of one more token, whose value is zero.
    """

    takes_empty_rows = False
    """Whether ``decode_attention`` accepts rows of ``seq_lens`` 0, stores nothing for them and ignores their block
    tables. Captured graphs are padded with such rows."""

    by_library: str | None = None
    """The optional library, with its version, that multiplies 4-bit matrices made linears so far; None without."""

    num_threads = 1
    """Of pacpu's operations in host memory."""

    @property
    def in_place(self) -> Ops:
        """Operations whose linears read their matrix where it is, call by call; others may have a copy in another
        layout."""
        return self

    def embed(self, token_ids: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Rows ``[tokens, hidden_size]`` of ``embedding``, which may be in host memory (``Device.mapped``)."""
        return F.embedding(token_ids, embedding)

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A function from ``x [rows, in]`` to ``x weight^T + bias [rows, out]``; it may repack the weight."""
        transposed = weight.t()
        return lambda x, out=None: multiply(x, transposed, bias, out)

    def make_quantised_linear(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Linear:
        """The same for a quantised matrix; ``x`` has its inputs in their own order. The matrix stays packed."""
        return lambda x, out=None: multiply(x, matrix.dequantise().t(), bias, out)

    def make_experts(self, weights: ExpertWeights) -> Experts:
        """A function of rows; see :data:`~swiftllm.ops.experts.Experts`."""

        def make_linear(matrix: torch.Tensor | QuantisedMatrix, bias: torch.Tensor | None) -> Linear:
            is_plain = isinstance(matrix, torch.Tensor)
            return self.make_linear(matrix, bias) if is_plain else self.make_quantised_linear(matrix, bias)

        return ExpertByExpert(weights, make_linear, self.activation_of(weights))

    def activation_of(self, weights: ExpertWeights) -> Callable[[torch.Tensor], torch.Tensor]:
        """From an expert's ``[rows, 2 n]`` of gate and up to ``[rows, n]``."""
        is_silu = weights.activation is None
        return self.silu_and_mul if is_silu else partial(self.clamped_swiglu, activation=weights.activation)

    def make_crossing(self, parts: CrossingParts) -> Crossing | None:
        """All parts in one call, with the bits of the separate calls; None where there is no such call.

        A function of ``attention_out [rows, num_heads * head_dim]``, ``residual [rows, hidden_size]``, which it
        overwrites, and the rows' angles (see :meth:`rotary_`); returns the projection.
        """
        return None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension."""
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm_(
        self, residual: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """``residual += addend`` in place, rounded to its dtype; returns ``rms_norm`` of that."""
        return F.rms_norm(residual.add_(addend), weight.shape, weight, eps)

    def norm_heads_(self, x: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        """``rms_norm`` of each head of ``x [rows, heads, head_dim]`` in place, with its row of ``weights [heads,
        head_dim]``."""
        torch.mul(F.rms_norm(x.float(), x.shape[-1:], None, eps), weights, out=x)

    def rotary_(self, x: torch.Tensor, rotary_rows: torch.Tensor) -> None:
        """Rotate ``x [rows, heads, head_dim]`` in place by ``rotary_rows``, float32 ``[rows, 2, head_dim]``."""
        wide = x.float()
        exchanged = wide.roll(x.shape[-1] // 2, -1)
        cos, signed_sin = rotary_rows.unsqueeze(2).unbind(1)
        torch.addcmul(wide * cos, exchanged, signed_sin, out=x)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[rows, 2 n]`` to ``[rows, n]``: SiLU of the first half times the second."""
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def clamped_swiglu(self, gate_up: torch.Tensor, activation: ClampedSwiGLU) -> torch.Tensor:
        """``[rows, 2 n]`` to ``[rows, n]``: gate is the first half, up the second; computed in float32."""
        gate, up = gate_up.float().chunk(2, -1)
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return ((up + 1) * gate * torch.sigmoid(activation.alpha * gate)).to(gate_up.dtype)

    def store_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        """Write row i of k and v ``[rows, num_kv_heads, head_dim]`` to slot ``offsets[i]`` of block ``blocks[i]``."""
        kv_layer[blocks, :, 0, offsets] = k
        kv_layer[blocks, :, 1, offsets] = v

    def gather_kv(self, kv_layer: torch.Tensor, blocks: torch.Tensor, context_len: int) -> torch.Tensor:
        """K and V of one request, ``[2, num_kv_heads, context_len, head_dim]``, from its ordered ``blocks``."""
        gathered = kv_layer.index_select(0, blocks).permute(2, 1, 0, 3, 4)
        return gathered.flatten(2, 3)[:, :, :context_len]

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """Copy ``blocks`` (int64, distinct) of all layers into a buffer, for one transfer to the other tier.

        ``pool [num_layers, num_blocks, ...]`` to ``staging [num_layers, len(blocks), ...]``, both contiguous. All bits
        are kept.
        """
        torch.index_select(pool, 1, blocks, out=staging)

    def scatter_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        """The reverse: copy ``staging[:, i]`` to block ``blocks[i]`` of the pool. Other blocks do not change."""
        if pool.device.type != "cpu":
            pool.index_copy_(1, blocks, staging)
            return
        # On a CPU index_copy_ copies single elements, which takes four times as long in 16 bits.
        for place, block in enumerate(blocks.tolist()):
            pool[:, block].copy_(staging[:, place])

    def quantise_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        """The same as ``gather_blocks``, with codes for elements: ``staging`` is uint8 ``[num_layers, len(blocks),
        num_kv_heads, head_bytes]``, as :mod:`pacpu.int8` lays it out, bit by bit."""
        staging.copy_(pack(pool.index_select(1, blocks)))

    def dequantise_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        """The reverse: elements of codes, rounded to the pool's dtype."""
        self.scatter_blocks(unpack(staging, pool.shape[-1]).to(pool.dtype), pool, blocks)

    def prefill_attention(
        self, chunks: Sequence[ChunkAttention], scale: float, sinks: torch.Tensor | None = None
    ) -> None:
        """Attention of chunks of several requests; writes the ``out`` of each."""
        for chunk in chunks:
            for rows, tokens, mask in chunk.pieces():
                piece = chunk.q[rows], chunk.k[:, tokens], chunk.v[:, tokens], mask
                chunk.out[rows].copy_(self._attend_chunk(*piece, scale, sinks))

    def _attend_chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        # KV heads are the batch and the heads of a group are the heads, so K and V broadcast by a stride of zero. Not
        # every kernel behind this call supports grouped heads; torch would fall back to materialised scores.
        rows, heads, head_dim = q.shape
        num_kv_heads, context = k.shape[:2]
        rows_at_once = max(QUERY_BLOCK, MASK_ELEMENTS_AT_ONCE // context)
        if mask is not None and rows > rows_at_once:
            pieces = zip(q.split(rows_at_once), mask.split(rows_at_once), strict=True)
            return torch.cat([self._attend_chunk(piece, k, v, own, scale, sinks) for piece, own in pieces])
        group = heads // num_kv_heads
        if mask is not None and q.is_cuda and rows % QUERY_BLOCK == 1:
            q, mask = (torch.cat((tensor, tensor[-1:])) for tensor in (q, mask))
        out = attend(
            q.view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3),
            k[:, None].expand(num_kv_heads, group, context, head_dim),
            v[:, None].expand(num_kv_heads, group, context, head_dim),
            mask,
            scale,
            None if sinks is None else sinks.view(num_kv_heads, group, 1),
        )
        return out.permute(2, 0, 1, 3)[:rows].reshape(rows, heads, head_dim)

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
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Store each request's new k and v at position ``seq_lens - 1`` and attend to its whole context, or to its last
        ``window`` tokens, the new one included.

        One row per request; ``block_tables`` int32 ``[rows, max_blocks]``, ``seq_lens`` int32 ``[rows]``;
        writes ``out [rows, num_heads, head_dim]``. Blocks that a window does not reach are not read, nor their ids.
        """
        num_kv_heads, block_size, head_dim = kv_layer.shape[1], kv_layer.shape[3], kv_layer.shape[4]
        last = seq_lens.long() - 1
        new_blocks = block_tables.gather(1, (last // block_size)[:, None])[:, 0].long()
        self.store_kv(k, v, kv_layer, new_blocks, last % block_size)

        rows, width = block_tables.shape
        positions = torch.arange(width * block_size, device=q.device)
        visible = positions < seq_lens[:, None]
        if window is not None:
            visible &= positions >= seq_lens[:, None] - window
            block_tables = block_tables.where(visible.view(rows, width, block_size).any(-1), 0)
        gathered = kv_layer.index_select(0, block_tables.flatten())
        gathered = gathered.view(rows, width, num_kv_heads, 2, block_size, head_dim).permute(3, 0, 2, 1, 4, 5)
        gathered = gathered.reshape(2, rows, num_kv_heads, width * block_size, head_dim)
        # Slots beyond the context may hold NaN, and a masked score does not cancel NaN * 0.
        keys, values = gathered.masked_fill_(~visible[None, :, None, :, None], 0.0)
        # The heads of a group are rows of one head, since all of them attend to the same tokens.
        attended = attend(
            q.view(rows, num_kv_heads, -1, head_dim),
            keys,
            values,
            visible[:, None, None],
            scale,
            None if sinks is None else sinks.view(num_kv_heads, -1),
        )
        out.copy_(attended.reshape(out.shape))


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of ``q [batch, heads, rows, head_dim]`` to ``k`` and ``v [batch, heads, tokens, head_dim]``: where
    ``mask`` is true, without one causal. ``sinks`` broadcast to ``[batch, heads, rows]``."""
    is_causal = mask is None
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale)
    # torch's public function keeps the sums of exponentials to itself. A sink makes them larger, and nothing else.
    if mask is not None:
        tokens = k.shape[2]
        aligned = q.new_zeros((*mask.shape[:-1], -(-tokens // MASK_ALIGNMENT) * MASK_ALIGNMENT))[..., :tokens]
        mask = aligned.masked_fill_(~mask, -torch.inf).expand(*q.shape[:3], tokens)
    if q.is_cuda:
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        out, log_sums, *_ = efficient(q, k, v, mask, True, is_causal=is_causal, scale=scale)
        log_sums = log_sums[..., : q.shape[2]]  # padded to whole blocks of rows
    else:
        on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, log_sums = on_cpu(q, k, v, is_causal=is_causal, attn_mask=mask, scale=scale)
    return (out * torch.sigmoid(log_sums - sinks)[..., None]).to(out.dtype)


def multiply(
    x: torch.Tensor, transposed: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """``x transposed + bias``, in ``out`` if that is given."""
    return torch.mm(x, transposed, out=out) if bias is None else torch.addmm(bias, x, transposed, out=out)
