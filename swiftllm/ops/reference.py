"""All operations in plain torch, on any device: right first, and what faster ones are tested against."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F


class ReferenceOps:
    """See :class:`swiftllm.ops.Ops` for the contracts."""

    takes_empty_rows = False

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        return partial(F.linear, weight=weight, bias=bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x.add_(residual)
        return F.rms_norm(total, weight.shape, weight, eps), total

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
        pool.index_copy_(1, blocks, staging)

    def prefill_attention(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k[None],
            v[None],
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[0],
        )
        return out[0].transpose(0, 1)

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
        # Slots beyond the context may hold anything, NaN too, and a masked score does not undo NaN * 0.
        keys, values = gathered.masked_fill_(~visible[None, :, None, :, None], 0.0)
        attended = F.scaled_dot_product_attention(
            q[:, :, None],
            keys,
            values,
            attn_mask=visible[:, None, None],
            scale=scale,
            enable_gqa=q.shape[1] != num_kv_heads,
        )
        out.copy_(attended[:, :, 0])
