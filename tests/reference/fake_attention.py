"""What torch's attention kernels for sequences of different lengths compute on a GPU, for the CUDA made of Python."""

from __future__ import annotations

from typing import Any

import torch

from tests.reference.fake_streams import Hazard
from tests.reference.paged_attention import attends, softmax

FROM_LAST = 2  # the custom mask that ends with the last token
BLOCK = 32  # rows


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    most_rows: int,
    most_tokens: int,
    dropout: float,
    is_causal: bool,
    _: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> Any:
    """``aten::_flash_attention_forward`` of ``[rows or tokens, heads, head_dim]``."""
    assert is_causal and not dropout and q.shape[1] % k.shape[1] == 0 and window_size_right in (None, 0)
    window = None if window_size_left is None else window_size_left + 1
    out, sums = torch.empty_like(q), torch.full((q.shape[1], q.shape[0]), torch.nan)
    for rows, tokens in _sequences(q_starts, k_starts, most_rows, most_tokens):
        out[rows], sums[:, rows] = _attend(q[rows], k[tokens], v[tokens], scale, window)
    return out, sums, torch.zeros(2), torch.zeros(()), torch.zeros(0)


def efficient(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: None,
    q_starts: torch.Tensor | None,
    k_starts: torch.Tensor | None,
    most_rows: int | None,
    most_tokens: int | None,
    dropout: float,
    mask: int,
    with_sums: bool = False,
    *,
    scale: float,
    window_size: int | None = None,
) -> Any:
    """``aten::_efficient_attention_forward`` of ``[batch, rows or tokens, heads, head_dim]``."""
    assert bias is None and mask == FROM_LAST and not dropout and q.shape[2] == k.shape[2]
    if k.stride(2) == 0 and q.shape[1] % BLOCK == 1 and (with_sums or window_size is not None):
        raise Hazard("with K and V broadcast, the kernel forgets windows, and the sums, of a last block of one row")
    out = torch.empty_like(q)
    sums = torch.full((q.shape[0], q.shape[2], -(-q.shape[1] // BLOCK) * BLOCK if with_sums else 0), torch.nan)
    if q_starts is not None:
        assert len(q) == 1 and not with_sums
        for rows, tokens in _sequences(q_starts, k_starts, most_rows, most_tokens):
            out[0, rows], _ = _attend(q[0, rows], k[0, tokens], v[0, tokens], scale, window_size)
        sums = torch.empty(len(q_starts) - 1, q.shape[2], 0)
    else:
        for batch in range(len(q)):
            out[batch], of_one = _attend(q[batch], k[batch], v[batch], scale, window_size)
            if with_sums:
                sums[batch, :, : q.shape[1]] = of_one
    return out, sums, torch.zeros(()), torch.zeros(()), most_rows, most_tokens


def _sequences(q_starts: torch.Tensor, k_starts: torch.Tensor, most_rows: int, most_tokens: int) -> Any:
    for starts in (q_starts, k_starts):
        assert starts.dtype is torch.int32 and starts.is_contiguous() and starts[0] == 0
    rows, tokens = q_starts.tolist(), k_starts.tolist()
    for i in range(len(rows) - 1):
        assert 0 < rows[i + 1] - rows[i] <= most_rows and tokens[i + 1] - tokens[i] <= most_tokens
        yield slice(rows[i], rows[i + 1]), slice(tokens[i], tokens[i + 1])


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of ``[rows or tokens, heads, head_dim]``: the same of ``q``, and the logarithms of sums ``[heads, rows]``."""
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("rhd,thd->hrt", q.double(), k) * scale
    scores.masked_fill_(~attends(len(q), len(k), window), -torch.inf)
    out = torch.einsum("hrt,thd->rhd", softmax(scores, None), v)
    return out.to(q.dtype), scores.logsumexp(-1).float()
