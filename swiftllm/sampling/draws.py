"""Draws of tokens from rows of logits, many rows at once. The result of a row does not depend on the other rows.

A row's probabilities become integer weights: ``exp((logit - highest) / temperature)`` in steps of ``2**-34``. Sums of
these in float64 are exact in any order. So inverting the cumulative distribution at one uniform number per row gives
the same token in any batch, on any device. Tokens are ordered by probability, equals by their ids. That strict order
decides which tokens top-k and top-p keep.

``swiftllm/ops/triton/draws.py`` draws from all tokens and from the nucleus in one kernel a row, by the same steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pacpu.rows import argmax
from swiftllm.ops.draw_rules import LEAST_EXPONENT, WEIGHT_OF_THE_LIKELIEST

CHUNKS = (512, 256, 128, 64)  # columns reduced to one sum or maximum before single columns are searched
ID_BITS = 32  # low bits of a place hold the token's id, high bits the distance from the highest logit


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """The first column with the maximum of each row, where NaN counts as the highest value: int64 ``[rows]``."""
    if logits.device.type != "cpu":
        return logits.max(-1).indices
    found = torch.empty(logits.shape[0], dtype=torch.int64)
    argmax(logits if logits.stride(0) else logits.contiguous(), found)  # pacpu takes no broadcast rows
    return found


def weigh(distance: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Integer weights in float32 of tokens ``distance [rows, tokens]`` (float32, overwritten) below their row's highest
    logit; ``temperature [rows, 1]``."""
    # The clamp avoids exponentials that underflow: a CPU takes ten times as long for them.
    return distance.div_(-temperature).clamp_(min=LEAST_EXPONENT).exp_().mul_(WEIGHT_OF_THE_LIKELIEST).floor_()


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Invert the cumulative distribution of ``weights [rows, tokens]`` at ``uniform [rows, 1]``, float64 in [0, 1).

    Returns the first token whose cumulative weight exceeds ``uniform`` times the sum, int64 ``[rows, 1]``, never one of
    weight zero; and the sum, float64 ``[rows, 1]``.
    """
    columns = weights.shape[1]
    width = _chunk(columns)
    chunks = _padded(weights, width, 0.0).unflatten(1, (-1, width))
    of_chunk = chunks.sum(-1, dtype=torch.float64)
    cumulative = of_chunk.cumsum(-1)
    total = cumulative[:, -1:]
    target = uniform * total  # stays below the total after rounding: (1 - 2**-53) of it is nearer to the float before
    # The clamp keeps rows of NaN, which have no distribution, in bounds. Their result is discarded.
    chunk = torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)
    target = target - (cumulative.gather(1, chunk) - of_chunk.gather(1, chunk))
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, width))[:, 0].double().cumsum(-1)
    place = chunk * width + torch.searchsorted(inside, target, right=True)
    return place.clamp(max=columns - 1), total


def draw_from_all(
    logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Tokens ``[rows, 1]`` drawn from ``logits [rows, vocab_size]``; all other arguments are ``[rows, 1]``."""
    return invert(weigh(highest - logits, temperature), uniform)[0]


def draw_from_nucleus(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    rejected: torch.Tensor | None = None,
) -> torch.Tensor:
    """One attempt per row to draw from the nucleus, the smallest set of tokens whose probability reaches ``top_p``.

    Returns the token if it is in the nucleus, else ``~token``: the next attempt must pass this token as ``rejected``.

    Finding the nucleus takes a sort, but testing one token takes only a sum over the tokens before it. So a token is
    drawn from all and tested. After a rejection only the tokens before it remain. They still contain the nucleus, so
    each attempt draws from it in proportion.
    """
    weights = weigh(highest - logits, temperature)
    if rejected is None:
        token, total = invert(weights, uniform)
    else:
        token, _ = invert(_before(weights, rejected), uniform)
        total = weights.sum(-1, keepdim=True, dtype=torch.float64)
    belongs = _before(weights, token).sum(-1, keepdim=True, dtype=torch.float64) < top_p * total
    return torch.where(belongs, token, ~token)


def _before(weights: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """``weights`` with zeros except for tokens before ``token [rows, 1]`` in the order of probability."""
    own = weights.gather(1, token)
    ids = torch.arange(weights.shape[1], dtype=torch.float32, device=weights.device)
    # On a CPU, comparing and selecting takes a third of the time in float32 instead of bool.
    heavier, equal, earlier = torch.empty((3, *weights.shape), dtype=torch.float32, device=weights.device)
    torch.gt(weights, own, out=heavier)
    torch.eq(weights, own, out=equal)
    torch.lt(ids, token.float(), out=earlier)
    return heavier.add_(equal.mul_(earlier)).mul_(weights)


def draw_from_top_k(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """Tokens ``[rows, 1]`` drawn from the nucleus of the ``top_k`` (at most ``most``) likeliest tokens of each row."""
    distance, ids = nearest(logits, highest, most)
    weights = weigh(distance, temperature).double()
    weights = torch.where(torch.arange(most, device=weights.device) < top_k, weights, 0.0)
    cumulative = weights.cumsum(-1)
    weights = torch.where(cumulative - weights < top_p * cumulative[:, -1:], weights, 0.0)
    return ids.gather(1, invert(weights, uniform)[0])


def nearest(logits: torch.Tensor, highest: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``count`` tokens in the order of probability: their distances from the highest logit, float32, and
    ids, int64, both ``[rows, count]``.

    Chunks are ordered by their likeliest token, and only the first ``count`` chunks are searched. A token in another
    chunk has at least ``count`` tokens before it.
    """
    columns, width, device = logits.shape[1], CHUNKS[-1], logits.device
    if columns <= 2 * count * width:
        return _first(highest - logits, torch.arange(columns, device=device), count)
    chunks = _padded(logits, width, -torch.inf).unflatten(1, (-1, width))
    _, chosen = _first(highest - chunks.amax(-1), torch.arange(chunks.shape[1], device=device), count)
    near = chunks.gather(1, chosen[:, :, None].expand(-1, -1, width))
    ids = chosen[:, :, None] * width + torch.arange(width, device=device)
    return _first(highest - near.flatten(1), ids.flatten(1), count)


def _first(distance: torch.Tensor, ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    # The bits of non-negative floats are ordered as the floats are. The id makes each place unique.
    places = (distance.view(torch.int32).long() << ID_BITS) | ids
    places = places.topk(count, largest=False).values
    return (places >> ID_BITS).int().view(torch.float32), places & ((1 << ID_BITS) - 1)


def _chunk(columns: int) -> int:
    return next((width for width in CHUNKS if columns % width == 0), CHUNKS[-1])


def _padded(rows: torch.Tensor, width: int, value: float) -> torch.Tensor:
    """``rows`` with columns of ``value`` appended up to a multiple of ``width``."""
    missing = -rows.shape[1] % width
    return F.pad(rows, (0, missing), value=value) if missing else rows
