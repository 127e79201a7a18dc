"""Prefill attention on an NVIDIA GPU by torch's kernels for sequences of different lengths, without masks.

FlashAttention is one call for all chunks, in 16 bits from sm_80 on. Elsewhere (sm_75, float32) torch's memory-efficient
kernel is one call for all chunks where each head has its own K and V, and one for each chunk otherwise: it knows no
groups of heads, but K and V of a single sequence may be broadcast to them. Both kernels align a causal mask with the
last token, as a chunk is the end of its context.
"""

from __future__ import annotations

import torch

from swiftllm.ops.interface import ChunkLens, with_sinks

FLASH_CAPABILITY, FLASH_MOST_HEAD_DIM = 80, 256
CAUSAL_FROM_LAST = 2  # custom_mask_type of the memory-efficient kernel
# Rows in a block of that kernel, or half of them. If K and V are broadcast and the last block has a single row, it
# treats heads as rows, and then forgets the window and writes the sums of exponentials elsewhere.
QUERY_BLOCK = 32


def takes_flash(q: torch.Tensor, capability: int) -> bool:
    """Whether FlashAttention computes attention of ``q [rows, num_heads, head_dim]``."""
    return capability >= FLASH_CAPABILITY and q.dtype.itemsize == 2 and q.shape[2] <= FLASH_MOST_HEAD_DIM


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: ChunkLens,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """See :meth:`swiftllm.ops.interface.Ops.prefill_attention`."""
    starts = lens.row_starts, lens.token_starts, max(lens.rows), max(lens.tokens)
    reach = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    attended, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k.transpose(0, 1), v.transpose(0, 1), *starts, 0.0, True, False, scale=scale, **reach
    )
    out.copy_(attended if sinks is None else with_sinks(attended, log_sums.t(), sinks))


def efficient_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: ChunkLens,
    out: torch.Tensor,
    scale: float,
    window: int | None,
    sinks: torch.Tensor | None,
) -> None:
    """The same by the memory-efficient kernel."""
    how = {"scale": scale, "window_size": window}
    attend = torch.ops.aten._efficient_attention_forward
    if k.shape[0] == q.shape[1] and sinks is None:
        starts = lens.row_starts, lens.token_starts, max(lens.rows), max(lens.tokens)
        sequences = (x[None] for x in (q, k.transpose(0, 1), v.transpose(0, 1)))
        out.copy_(attend(*sequences, None, *starts, 0.0, CAUSAL_FROM_LAST, **how)[0][0])
        return
    kv_heads, group = k.shape[0], q.shape[1] // k.shape[0]
    for rows, tokens in lens.slices():
        extra, queries = int((rows.stop - rows.start) % QUERY_BLOCK == 1), q[rows]
        if extra:
            queries = torch.cat((queries[:1], queries))  # in front, where it moves no other row
        # [kv heads, rows or tokens, heads of a group, head_dim]
        queries = queries.unflatten(1, (kv_heads, group)).transpose(0, 1)
        context = (x[:, tokens, None].expand(-1, -1, group, -1) for x in (k, v))
        attended, log_sums, *_ = attend(
            queries, *context, None, None, None, None, None, 0.0, CAUSAL_FROM_LAST, sinks is not None, **how
        )
        if sinks is not None:  # sums are [kv heads, heads of a group, rows padded to whole blocks]
            sums = log_sums[..., : attended.shape[1]].transpose(1, 2)
            attended = with_sinks(attended, sums, sinks.view(kv_heads, 1, group))
        out[rows].copy_(attended[:, extra:].transpose(0, 1).flatten(1, 2))
