"""Next tokens from rows of logits, many rows at once, and each row as if it were alone.

A row's probabilities become whole numbers, ``exp((logit - highest) / temperature)`` in steps of ``2**-34``, and sums of
those in float64 are exact in whatever order they are taken. So one uniform number per row and the inverse of the
cumulative distribution give the same token alone and in any batch, on any device. Tokens are ordered by probability,
equals by their ids; that order decides what top-k and top-p keep, and no two tokens share a place in it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# A vocabulary of 2**18 tokens of the highest weight sums to 2**52: float64 holds every whole number up to 2**53. What
# is 2**34 times less likely than the likeliest token is never drawn.
WEIGHT_OF_THE_LIKELIEST = 2.0**34
LEAST_EXPONENT = -40.0  # weights are zero from -34 ln 2 on
CHUNKS = (512, 256, 128, 64)  # columns of which one sum or maximum is taken before anybody looks at single ones
ID_BITS = 32  # of a place: the distance from the highest logit, then the token's id


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """The first of the highest columns of each row, a NaN counting as highest: int64 ``[rows]``.

    A CPU finds a maximum many times faster than its index, so the index is looked for where the maximum is.
    """
    rows, columns = logits.shape
    width = _chunk(columns)
    if logits.device.type != "cpu" or columns % width or not rows:
        return logits.max(-1).indices
    chunks = logits.view(rows, -1, width)
    highest = chunks.amax(-1).max(-1).indices
    return highest * width + chunks[torch.arange(rows), highest].max(-1).indices


def weigh(distance: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Weights, whole numbers in float32, of tokens whose logits lie ``distance [rows, tokens]`` (float32, overwritten)
    below the highest of their row; ``temperature [rows, 1]``."""
    # Exponentials that underflow would take a CPU ten times as long as others.
    return distance.div_(-temperature).clamp_(min=LEAST_EXPONENT).exp_().mul_(WEIGHT_OF_THE_LIKELIEST).floor_()


def invert(weights: torch.Tensor, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first token up to which a row of ``weights [rows, tokens]`` comes to more than ``uniform [rows, 1]``, float64
    in [0, 1), of its sum: int64 ``[rows, 1]``, never one of weight zero; and the sum."""
    columns = weights.shape[1]
    width = _chunk(columns)
    chunks = _padded(weights, width, 0.0).unflatten(1, (-1, width))
    of_chunk = chunks.sum(-1, dtype=torch.float64)
    cumulative = of_chunk.cumsum(-1)
    total = cumulative[:, -1:]
    target = uniform * total  # below the total, rounded or not: 1 - 2**-53 of it is nearer to the number before it
    # Rows without a distribution, of NaN, must not lead out of bounds; nobody takes what comes of them.
    chunk = torch.searchsorted(cumulative, target, right=True).clamp(max=cumulative.shape[1] - 1)
    target = target - (cumulative.gather(1, chunk) - of_chunk.gather(1, chunk))
    inside = chunks.gather(1, chunk[:, :, None].expand(-1, -1, width))[:, 0].double().cumsum(-1)
    place = chunk * width + torch.searchsorted(inside, target, right=True)
    return place.clamp(max=columns - 1), total


def draw_from_all(
    logits: torch.Tensor, highest: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Tokens ``[rows, 1]`` from ``logits [rows, vocab_size]``; all else is ``[rows, 1]``."""
    return invert(weigh(highest - logits, temperature), uniform)[0]


def draw_from_nucleus(
    logits: torch.Tensor,
    highest: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    rejected: torch.Tensor | None = None,
) -> torch.Tensor:
    """One attempt for each row: the token, or ``~token`` if it does not belong to the smallest set whose probability
    reaches ``top_p``, and another attempt with this token as ``rejected`` has to be made.

    Finding that set takes a sort; whether one token belongs to it takes a sum over those before it. So draw from all
    and see. What a token outside leaves to the next attempt is all before it, a set that still contains the nucleus:
    whichever attempt succeeds, the nucleus is drawn from in proportion.
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
    """``weights`` of the tokens before ``token [rows, 1]`` in the order of probability, zero for all others."""
    own = weights.gather(1, token)
    ids = torch.arange(weights.shape[1], dtype=torch.float32, device=weights.device)
    # In float32 instead of bool these comparisons, and selecting by them, take a third of the time on a CPU.
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
    """Tokens ``[rows, 1]`` from the ``top_k`` (at most ``most``) of their row, and of those from the nucleus."""
    distance, ids = nearest(logits, highest, most)
    weights = weigh(distance, temperature).double()
    weights = torch.where(torch.arange(most, device=weights.device) < top_k, weights, 0.0)
    cumulative = weights.cumsum(-1)
    weights = torch.where(cumulative - weights < top_p * cumulative[:, -1:], weights, 0.0)
    return ids.gather(1, invert(weights, uniform)[0])


def nearest(logits: torch.Tensor, highest: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``count`` tokens in the order of probability: their distances from the highest logit, float32, and
    ids, int64, both ``[rows, count]``.

    They lie in the first ``count`` chunks in the order of the chunks' first tokens: a token in another chunk has all
    of those before it.
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
    # The bits of a float32 that is not negative are ordered as it is; no two places are equal.
    places = (distance.view(torch.int32).long() << ID_BITS) | ids
    places = places.topk(count, largest=False).values
    return (places >> ID_BITS).int().view(torch.float32), places & ((1 << ID_BITS) - 1)


def _chunk(columns: int) -> int:
    return next((width for width in CHUNKS if columns % width == 0), CHUNKS[-1])


def _padded(rows: torch.Tensor, width: int, value: float) -> torch.Tensor:
    """``rows`` with so many more columns of ``value`` that chunks of ``width`` fill them."""
    missing = -rows.shape[1] % width
    return F.pad(rows, (0, missing), value=value) if missing else rows
