"""All operations in plain torch, on any device. Faster implementations are tested against these."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from swiftllm.ops.interface import ChunkAttention, CrossingParts, MakesLinears
from swiftllm.ops.quantised_matrix import QuantisedMatrix

# Rows in a block of torch's memory-efficient kernel, or half of them. If K and V are broadcast and the last block is a
# single row, the kernel treats heads as rows. Up to torch 2.12 it then reads the mask beyond its end for all heads but
# the first (pytorch #191937). So such a row is duplicated.
QUERY_BLOCK = 32
MASK_ELEMENTS_AT_ONCE = 1 << 26  # torch turns a mask into numbers of q's dtype, and pads it: up to 256 MiB in 16 bits


class ReferenceOps:
    """See :class:`swiftllm.ops.interface.Ops` for the contracts."""

    takes_empty_rows = False
    by_library: str | None = None
    num_threads = 1  # of pacpu's operations in host memory

    @property
    def in_place(self) -> MakesLinears:
        return self

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
        transposed = weight.t()
        if bias is None:
            return lambda x, out=None: torch.mm(x, transposed, out=out)
        return lambda x, out=None: torch.addmm(bias, x, transposed, out=out)

    def make_quantised_linear(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Callable[..., torch.Tensor]:
        """The matrix stays packed: each call dequantises it first."""

        def linear(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            transposed = matrix.dequantise().t()
            return torch.mm(x, transposed, out=out) if bias is None else torch.addmm(bias, x, transposed, out=out)

        return linear

    def make_crossing(self, parts: CrossingParts) -> None:
        return None

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm_(
        self, residual: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        return F.rms_norm(residual.add_(addend), weight.shape, weight, eps)

    def norm_heads_(self, x: torch.Tensor, weights: torch.Tensor, eps: float) -> None:
        torch.mul(F.rms_norm(x.float(), x.shape[-1:], None, eps), weights, out=x)

    def rotary_(self, x: torch.Tensor, rotary_rows: torch.Tensor) -> None:
        wide = x.float()
        exchanged = wide.roll(x.shape[-1] // 2, -1)
        cos, signed_sin = rotary_rows.unsqueeze(2).unbind(1)
        torch.addcmul(wide * cos, exchanged, signed_sin, out=x)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    def store_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        kv_layer[blocks, :, 0, offsets] = k
        kv_layer[blocks, :, 1, offsets] = v

    def gather_kv(self, kv_layer: torch.Tensor, blocks: torch.Tensor, context_len: int) -> torch.Tensor:
        gathered = kv_layer.index_select(0, blocks).permute(2, 1, 0, 3, 4)
        return gathered.flatten(2, 3)[:, :, :context_len]

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        torch.index_select(pool, 1, blocks, out=staging)

    def scatter_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        if pool.device.type != "cpu":
            pool.index_copy_(1, blocks, staging)
            return
        # On a CPU index_copy_ copies single elements, which takes four times as long in 16 bits.
        for place, block in enumerate(blocks.tolist()):
            pool[:, block].copy_(staging[:, place])

    def prefill_attention(self, chunks: Sequence[ChunkAttention], scale: float) -> None:
        for chunk in chunks:
            chunk.out.copy_(self._attend_chunk(chunk.q, chunk.k, chunk.v, chunk.mask, scale))

    def _attend_chunk(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        # KV heads are the batch and the heads of a group are the heads, so K and V broadcast by a stride of zero. Not
        # every kernel behind this call supports grouped heads; torch would fall back to materialised scores.
        rows, heads, head_dim = q.shape
        num_kv_heads, context = k.shape[:2]
        rows_at_once = max(QUERY_BLOCK, MASK_ELEMENTS_AT_ONCE // context)
        if mask is not None and rows > rows_at_once:
            pieces = zip(q.split(rows_at_once), mask.split(rows_at_once), strict=True)
            return torch.cat([self._attend_chunk(piece, k, v, own, scale) for piece, own in pieces])
        group = heads // num_kv_heads
        if mask is not None and q.is_cuda and rows % QUERY_BLOCK == 1:
            q, mask = (torch.cat((tensor, tensor[-1:])) for tensor in (q, mask))
        out = F.scaled_dot_product_attention(
            q.view(-1, num_kv_heads, group, head_dim).permute(1, 2, 0, 3),
            k[:, None].expand(num_kv_heads, group, context, head_dim),
            v[:, None].expand(num_kv_heads, group, context, head_dim),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
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
    ) -> None:
        num_kv_heads, block_size, head_dim = kv_layer.shape[1], kv_layer.shape[3], kv_layer.shape[4]
        last = seq_lens.long() - 1
        new_blocks = block_tables.gather(1, (last // block_size)[:, None])[:, 0].long()
        self.store_kv(k, v, kv_layer, new_blocks, last % block_size)

        rows, width = block_tables.shape
        gathered = kv_layer.index_select(0, block_tables.flatten())
        gathered = gathered.view(rows, width, num_kv_heads, 2, block_size, head_dim).permute(3, 0, 2, 1, 4, 5)
        gathered = gathered.reshape(2, rows, num_kv_heads, width * block_size, head_dim)
        visible = torch.arange(width * block_size, device=q.device) < seq_lens[:, None]
        # Slots beyond the context may hold NaN, and a masked score does not cancel NaN * 0.
        keys, values = gathered.masked_fill_(~visible[None, :, None, :, None], 0.0)
        # The heads of a group are rows of one head, since all of them attend to the same tokens.
        attended = F.scaled_dot_product_attention(
            q.view(rows, num_kv_heads, -1, head_dim),
            keys,
            values,
            attn_mask=visible[:, None, None],
            scale=scale,
        )
        out.copy_(attended.reshape(out.shape))
