"""Attention, slowly and in float64: the judge of every kernel."""

import torch

from swiftllm.ops.interface import ChunkLens, Ops


def store_new_tokens(
    k: torch.Tensor,
    v: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Write each request's new K and V at position `seq_lens[i] - 1` of its context, in place.

    Args:
        k, v: `[batch, num_kv_heads, head_dim]`.
        kv_cache: `[num_blocks, num_kv_heads, 2, block_size, head_dim]`.
        block_tables: int `[batch, max_blocks_per_seq]`.
        seq_lens: int `[batch]`, including the new token.
    """
    block_size = kv_cache.shape[3]
    for request, seq_len in enumerate(seq_lens.tolist()):
        index, slot = divmod(seq_len - 1, block_size)
        block = block_tables[request, index]
        kv_cache[block, :, 0, slot] = k[request]
        kv_cache[block, :, 1, slot] = v[request]


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token per request over its cached context, new token included.

    Args:
        q: `[batch, num_heads, head_dim]`.
        kv_cache: `[num_blocks, num_kv_heads, 2, block_size, head_dim]`; query head h uses KV head
            `h // (num_heads // num_kv_heads)`.
        block_tables, seq_lens: as for `store_new_tokens`.
        scale: factor on the scores.
        window: how many tokens are attended to, the last ones; None: all.
        sinks: `[num_heads]`, each the score of one more token, whose value is zero.

    Returns:
        float64 `[batch, num_heads, head_dim]`.
    """
    _, num_heads, head_dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[1], kv_cache.shape[3]
    out = torch.empty(q.shape, dtype=torch.float64)
    for request, seq_len in enumerate(seq_lens.tolist()):
        begin = 0 if window is None else max(0, seq_len - window)
        first = begin // block_size
        blocks = block_tables[request, first : -(-seq_len // block_size)].long()
        # [blocks, heads, 2, slots, dim] -> [2, heads, tokens, dim]
        context = kv_cache[blocks].double().permute(2, 1, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
        context = context[:, :, begin - first * block_size : seq_len - first * block_size]
        keys, values = context.repeat_interleave(num_heads // num_kv_heads, dim=1)
        scores = torch.einsum("hd,htd->ht", q[request].double(), keys) * scale
        out[request] = torch.einsum("ht,htd->hd", softmax(scores, sinks), values)
    return out


def softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Of ``[num_heads, ..., tokens]`` over the tokens, and over a head's sink, whose weight is left out."""
    if sinks is None:
        return torch.softmax(scores, dim=-1)
    own = sinks.to(scores).view(-1, *[1] * (scores.ndim - 1)).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, own], dim=-1), dim=-1)[..., :-1]


def attend_chunk(
    ops: Ops,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """``prefill_attention`` of a single chunk, into poisoned memory."""
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    lens = ChunkLens.of([len(q)], [k.shape[1]], lambda starts: starts.to(q.device))
    ops.prefill_attention(q, k, v, lens, out, scale, window, sinks)
    return out


def chunk_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the last tokens of a context.

    Args:
        q: `[rows, num_heads, head_dim]`; row i stands at position `context - rows + i`.
        k, v: `[num_kv_heads, context, head_dim]`.
        scale, window, sinks: as for `paged_attention`.

    Returns:
        float64 `[rows, num_heads, head_dim]`.
    """
    rows, num_heads, _ = q.shape
    num_kv_heads, context, _ = k.shape
    keys, values = (x.double().repeat_interleave(num_heads // num_kv_heads, dim=0) for x in (k, v))
    scores = torch.einsum("rhd,htd->hrt", q.double(), keys) * scale
    scores.masked_fill_(~attends(rows, context, window).to(q.device), -torch.inf)
    return torch.einsum("hrt,htd->rhd", softmax(scores, sinks), values)


def attends(rows: int, context: int, window: int | None = None) -> torch.Tensor:
    """Bool ``[rows, context]``: whether a row, the last ones of a context, attends to a token."""
    age = torch.arange(context - rows, context)[:, None] - torch.arange(context)
    return (age >= 0) & (age < (context if window is None else window))
