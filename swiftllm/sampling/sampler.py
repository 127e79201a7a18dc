"""Choice of each request's next token from its logits."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from pacpu.rows import argmax
from swiftllm.core.request import Biases, Request, SamplingParams, TokenLogprob
from swiftllm.device import Device, HostDevice, Stream
from swiftllm.ops.interface import LEAST_EXPONENT, UNIFORM_BITS, WEIGHT_OF_THE_LIKELIEST, Draw, uniform_of
from swiftllm.sampling.grammar import GrammarDeadEnd

# -- log-probabilities -------------------------------------------------------------------------------------------------
# Log-probabilities of sampled tokens and of prompts.

LOGITS_AT_ONCE = 1 << 22  # of a prompt: enough rows for an efficient GEMM, in some ten MiB
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Found:
    """Log-probabilities of ``tokens`` int64 ``[rows]`` under ``logits [rows, vocab_size]``.

    Returns their log-probabilities, float32 ``[rows]``; their ranks, int64 ``[rows]`` (1: no token is likelier); and
    ids and log-probabilities of the ``count`` most likely tokens (at most ``vocab_size``), both ``[rows, count]``.
    """
    logprobs = logits.float().log_softmax(-1)
    own, likely = logprobs.gather(1, tokens[:, None]), logprobs.topk(min(count, logprobs.shape[1]))
    return own[:, 0], 1 + (logprobs > own).sum(-1), likely.indices, likely.values


def fetch_lists(stream: Stream, *tensors: torch.Tensor) -> list[list]:
    """The tensors' values as Python lists. The host sleeps until they are copied."""
    on_host = [stream.fetch(tensor) for tensor in tensors]
    stream.mark().synchronize()
    return [tensor.tolist() for tensor in on_host]


def token_logprobs(tokens: Sequence[int], found: Sequence[list], counts: Sequence[int]) -> list[TokenLogprob]:
    """Of ``tokens``, from the lists that :func:`score_tokens` found, each with so many of the most likely tokens."""
    return [
        TokenLogprob(token, logprob, rank, tuple(zip(ids[:count], logprobs[:count], strict=True)))
        for token, count, logprob, rank, ids, logprobs in zip(tokens, counts, *found, strict=True)
    ]


class PromptRows(NamedTuple):
    """Adjacent rows of a prompt that give the log-probabilities of the tokens ``following`` theirs."""

    request: Request
    rows: slice
    following: tuple[int, ...]


class PromptScorer:
    """Computes log-probabilities of prompts piece by piece, so that a prompt's logits are never all in memory."""

    def __init__(self, vocab_size: int, device: Device) -> None:
        self._stream = device.compute
        self._rows_at_once = max(1, LOGITS_AT_ONCE // vocab_size)

    def score_prompts(self, prompts: Sequence[PromptRows], logits: Callable[[slice], torch.Tensor]) -> None:
        """Append to the requests' ``prompt_logprobs`` what these rows give. ``logits`` computes those of some rows,
        ``[rows, vocab_size]``."""
        for request, rows, following in prompts:
            count = request.sampling.prompt_logprobs or 0
            tokens = self._stream.send(torch.tensor(following, dtype=torch.int64))
            pieces = [
                score_tokens(logits(piece), tokens[piece.start - rows.start : piece.stop - rows.start], count)
                for piece in self.pieces(rows)
            ]
            found = fetch_lists(self._stream, *(torch.cat(parts) for parts in zip(*pieces, strict=True)))
            request.prompt_logprobs += token_logprobs(following, found, [count] * len(following))

    def pieces(self, rows: slice) -> list[slice]:
        """The rows in the pieces whose logits are computed at once."""
        starts = range(rows.start, rows.stop, self._rows_at_once)
        return [slice(start, min(start + self._rows_at_once, rows.stop)) for start in starts]


# -- draws -------------------------------------------------------------------------------------------------------------
# Draws of tokens from rows of logits, many rows at once. The result of a row does not depend on the other rows.
#
# A row's probabilities become integer weights: ``exp((logit - highest) / temperature)`` in steps of ``2**-34``. Sums of
# these in float64 are exact in any order. So inverting the cumulative distribution at one uniform number per row gives
# the same token in any batch, on any device. Tokens are ordered by probability, equals by their ids. That strict order
# decides which tokens top-k and top-p keep.
#
# ``swiftllm/ops/triton/rows.py`` draws from all tokens and from the nucleus in one kernel a row, by the same steps.

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


# -- changes to logits -------------------------------------------------------------------------------------------------
# Changes to logits before a token is chosen: biases, penalties, bans and ``min_p``, many rows at once.
#
# The order is vLLM's: biases; penalties for repetition, frequency and presence; temperature; ``min_p``; then ``top_k``
# and ``top_p`` of the remaining tokens. Tokens that must not be chosen are excluded after the penalties. Each row
# changes independently, and only if its request asks for it.

FAR_BELOW = 3e38  # near the float32 maximum: no chance at any temperature
NO_BIAS = Biases()
NO_PAIRS = array("q"), array("f")
Pairs = tuple[array, array]
"""Token ids, and one number for each."""


def adjust_logits(logits: torch.Tensor, requests: Sequence[Request], compute: Stream) -> None:
    """Apply the biases, penalties and bans of the requests to ``logits`` float32 ``[rows, vocab_size]`` in place.
    ``compute`` is the stream of the logits."""
    settings = [request.sampling for request in requests]
    if any(how.logit_bias for how in settings):
        _add_biases(logits, [how.logit_bias for how in settings], compute)
    if any(how.has_penalties for how in settings):
        _penalise(logits, requests, compute)
    if any(how.restricts_tokens for how in settings):
        _restrict(logits, requests, compute)


def _add_biases(logits: torch.Tensor, biases: list[Biases], compute: Stream) -> None:
    """Add the biases of each row. Rows that share theirs, as all outputs of one body do, get them as one line of the
    table: pairs for each row, of a bias for all the vocabulary, would take gigabytes."""
    for rows in _rows_by_owner(biases, NO_BIAS):
        if len(rows) > 1:
            ids, numbers = (compute.send(torch.from_numpy(np.asarray(of_all))) for of_all in biases[rows[0]].arrays)
            _add_line(logits, rows, torch.zeros_like(logits[0]).index_copy_(0, ids, numbers), compute)
            for row in rows:
                biases[row] = NO_BIAS
    if any(biases):
        ids, numbers = zip(*(of_row.arrays for of_row in biases), strict=True)
        _, places = _places(ids, logits.shape[1], compute)
        flat = logits.view(-1)
        flat.index_copy_(0, places, flat.index_select(0, places) + _joined(numbers, compute))


def _rows_by_owner(values: Sequence[object], nothing: object) -> list[list[int]]:
    """The rows that share one object, for each object but ``nothing`` and what equals it."""
    rows: dict[int, list[int]] = {}
    for row, value in enumerate(values):
        if value != nothing:
            rows.setdefault(id(value), []).append(row)
    return list(rows.values())


def _add_line(logits: torch.Tensor, rows: Sequence[int], line: torch.Tensor, compute: Stream) -> None:
    """Add the same number for each token to all of these rows."""
    logits.index_add_(0, compute.send(torch.tensor(rows)), line.expand(len(rows), -1))


def _penalise(logits: torch.Tensor, requests: Sequence[Request], compute: Stream) -> None:
    pairs = [_counted(request) if request.sampling.has_penalties else NO_PAIRS for request in requests]
    ids, numbers = zip(*pairs, strict=True)
    rows, places = _places(ids, logits.shape[1], compute)
    counts = _joined(numbers, compute)
    penalties = [
        (how.repetition_penalty, how.frequency_penalty, how.presence_penalty)
        for how in (request.sampling for request in requests)
    ]
    columns = compute.send(torch.tensor(penalties, dtype=torch.float32).T.contiguous())
    repetition, frequency, presence = columns.index_select(1, rows)
    flat = logits.view(-1)
    values = flat.index_select(0, places)
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat.index_copy_(0, places, values - frequency * counts - presence * (counts > 0))


def _counted(request: Request) -> Pairs:
    known = request.count_tokens()
    return known.ids, known.counts


def _restrict(logits: torch.Tensor, requests: Sequence[Request], compute: Stream) -> None:
    """Exclude, in place, the tokens that are not allowed, or forbidden now."""
    flat, columns = logits.view(-1), logits.shape[1]
    allowed = [request.sampling.allowed_token_ids for request in requests]
    for rows in _rows_by_owner(allowed, None):
        ids = compute.send(torch.tensor(allowed[rows[0]]))
        _add_line(logits, rows, torch.full_like(logits[0], -math.inf).index_fill_(0, ids, 0.0), compute)
    forbidden = [request.forbidden_tokens() for request in requests]
    ruled = [row for row, request in enumerate(requests) if request.sampling.grammar is not None]
    if ruled:
        bits = np.stack([np.frombuffer(_bits(requests[row]), dtype=np.uint8) for row in ruled])
        excluded = np.unpackbits(~bits, axis=1, count=columns, bitorder="little")
        for of_row, row in zip(excluded, ruled, strict=True):
            if forbidden[row] and np.delete(of_row, forbidden[row]).all():
                forbidden[row] = []
        index = compute.send(torch.tensor(ruled))
        rows = logits if len(ruled) == len(requests) else logits.index_select(0, index)
        # On a CPU a mask of bytes takes a tenth of the time of a bool mask, and half that of a float32 mask.
        rows.add_(compute.send(torch.from_numpy(excluded)), alpha=-FAR_BELOW)
        if rows is not logits:
            logits.index_copy_(0, index, rows)
    _, places = _places(forbidden, columns, compute)
    flat.index_fill_(0, places, -math.inf)


def _bits(request: Request) -> bytes:
    try:
        return request.tokens_by_grammar()
    except GrammarDeadEnd as error:
        error.request_id = request.request_id
        raise


def _places(ids: Sequence[Sequence[int]], columns: int, compute: Stream) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of all rows as rows and flat indices of the logits, int64, on the device."""
    flat = np.concatenate([np.asarray(of_row, dtype=np.int64) for of_row in ids])
    rows = np.repeat(np.arange(len(ids)), [len(of_row) for of_row in ids])
    where = compute.send(torch.from_numpy(np.stack([rows, rows * columns + flat])))
    return where[0], where[1]


def _joined(numbers: Sequence[array], compute: Stream) -> torch.Tensor:
    """The numbers of all rows, on the device."""
    return compute.send(torch.from_numpy(np.concatenate([np.asarray(of_row) for of_row in numbers])))


def drop_improbable(
    logits: torch.Tensor, likeliest: torch.Tensor, requests: Sequence[Request], compute: Stream
) -> None:
    """Exclude, in place, the tokens less probable than ``min_p`` times the likeliest, ``likeliest [rows, 1]``.

    These have ``exp(-distance / temperature) < min_p``, where ``distance`` is to the highest logit.
    """
    settings = [request.sampling for request in requests]
    if any(how.min_p for how in settings):
        reach = [-how.temperature * math.log(how.min_p) if how.min_p else math.inf for how in settings]
        lowest = logits.gather(1, likeliest) - compute.send(torch.tensor(reach, dtype=torch.float32))[:, None]
        # On a CPU a float32 mask takes a quarter of the time of a bool mask.
        logits.add_(torch.lt(logits, lowest, out=torch.empty_like(logits)), alpha=-FAR_BELOW)


# -- the sampler -------------------------------------------------------------------------------------------------------

BYTES_PER_LOGIT = 24  # at the peak of a draw, about
# Logits processed at once. On a CPU: a few MiB, which stay in its caches and are reused by
# malloc. On a GPU: enough to keep it busy.
CPU_LOGITS, GPU_LOGITS = 1 << 19, 1 << 22
LEAST_TOP_K = 64  # smaller values are processed together with this one
GREEDY = 1  # count of likeliest tokens that stands for greedy decoding, without a draw
AT_ONCE = -1  # stands for a draw from all or from the nucleus in one call
MAX_TEMPERATURE = 1e30  # the distribution is flat long before, and float32 does not overflow


class LogitsNotFinite(RuntimeError):
    """The model's logits have no maximum, or an infinite one: no token follows from them. ``request_id`` names the
    request."""

    def __init__(self, request_id: str, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        wider = "bfloat16 or float32" if dtype is torch.float16 else "float32"
        advice = "look at the weights" if dtype is torch.float32 else f"give --dtype {wider}, or look at the weights"
        super().__init__(f"the model's logits are not finite in {name} (request {request_id}): {advice}")
        self.request_id = request_id


class Sampler:
    """Samples tokens. A draw depends on the request's seed and the token's position, never on the batch.

    So the sampler keeps no state between iterations, and a token that is computed again is drawn again the same.
    """

    def __init__(self, seed: int = 0, device: Device | None = None, draw: Draw | None = None) -> None:
        """``seed``, together with the request's id, seeds requests without a seed of their own.
        ``device`` holds the logits; default: the host. ``draw`` draws from all tokens and from the nucleus, on that
        device; without it torch does, attempt by attempt."""
        self._seed = seed
        self._device = device or HostDevice()
        self._draw = draw
        self._logits_at_once = CPU_LOGITS if self._device.torch_device.type == "cpu" else GPU_LOGITS
        self._logprobs: dict[str, TokenLogprob] = {}

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, requests: Sequence[Request], likeliest: torch.Tensor | None = None
    ) -> list[int]:
        """One token per row of ``logits [rows, vocab_size]``, of any float dtype; row i belongs to ``requests[i]``.

        Raises LogitsNotFinite.

        ``likeliest``: int64 ``[rows]``, :func:`~swiftllm.sampling.sampler.most_likely` of the logits if already
        computed.
        """
        if likeliest is None:
            likeliest = most_likely(logits)
        chosen = [row for row, request in enumerate(requests) if not request.sampling.takes_likeliest]
        highest = logits.gather(1, likeliest[:, None])[:, 0].float()
        if chosen:
            tokens, found = self._choose(logits, requests, chosen, likeliest, highest)
        else:
            tokens, found = fetch_lists(self._device.compute, likeliest, highest)
        if not all(map(math.isfinite, found)):
            row = next(row for row, value in enumerate(found) if not math.isfinite(value))
            raise LogitsNotFinite(requests[row].request_id, logits.dtype)
        scored = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        for rows in self._blocks(scored, logits.shape[1]):
            self._score(self._select(logits, rows), [requests[row] for row in rows], [tokens[row] for row in rows])
        return tokens

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        """Log-probabilities of the tokens sampled since the last call, by id of the requests that ask for them."""
        taken, self._logprobs = self._logprobs, {}
        return taken

    def _choose(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        chosen: list[int],
        likeliest: torch.Tensor,
        highest: torch.Tensor,
    ) -> tuple[list[int], list[float]]:
        """Tokens and highest logits of all rows. Rows in ``chosen`` are drawn together, in as many attempts as
        needed."""
        tokens, found, attempt = likeliest.clone(), [0] * len(requests), 0
        maxima: list[float] = []
        while chosen:
            by_way: dict[tuple[int | None, bool], list[int]] = {}
            for row in chosen:
                by_way.setdefault(_way(requests[row].sampling, logits.shape[1], self._draw is not None), []).append(row)
            for (count, is_adjusted), rows in by_way.items():
                # What draws at once reads the logits where they are, and takes no memory.
                is_whole = count == AT_ONCE and not is_adjusted
                for block in [rows] if is_whole else self._blocks(rows, logits.shape[1]):
                    index, where = self._upload(block), [requests[row] for row in block]
                    if is_whole:
                        own, likely = logits, likeliest
                    elif is_adjusted:
                        own, likely = self._adjust(logits.index_select(0, index).float(), where)
                    else:
                        own, likely = self._select(logits, block), likeliest.index_select(0, index)
                    if count == AT_ONCE:
                        assert self._draw is not None  # else there is no such way
                        places = index if is_whole else torch.arange(len(block), device=index.device)
                        new = self._draw(own, places, likely, self._settings(where, attempt)[:3])
                    else:
                        rejected = self._upload([~found[row] for row in block])[:, None] if attempt else None
                        new = self._attempt(own, likely[:, None], where, count, attempt, rejected)[:, 0]
                    tokens.index_copy_(0, index, new)
            found, maxima = fetch_lists(self._device.compute, tokens, highest)
            chosen = [row for row in chosen if found[row] < 0]
            attempt += 1
        return found, maxima

    def _adjust(self, logits: torch.Tensor, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply biases, penalties and ``min_p`` to float32 ``logits`` in place. Returns these and the likeliest tokens
        ``[rows]``."""
        adjust_logits(logits, requests, self._device.compute)
        likeliest = most_likely(logits)
        drop_improbable(logits, likeliest[:, None], requests, self._device.compute)
        return logits, likeliest

    def _attempt(
        self,
        logits: torch.Tensor,
        likeliest: torch.Tensor,
        requests: Sequence[Request],
        count: int | None,
        attempt: int,
        rejected: torch.Tensor | None,
    ) -> torch.Tensor:
        """Tokens ``[rows, 1]`` of requests with the same ``count``; a negative one is a rejected attempt."""
        if count == GREEDY:
            return likeliest
        uniform, temperature, top_p, top_k = self._settings(requests, attempt)[:, :, None]
        highest = logits.gather(1, likeliest).float()
        common = logits, highest, temperature.float()
        if count is None:
            token = draw_from_all(*common, uniform)
        elif count == 0:
            token = draw_from_nucleus(*common, top_p, uniform, rejected)
        else:
            token = draw_from_top_k(*common, top_k, top_p, uniform, count)
        # After an overflow or NaN in the model there is no distribution to draw from.
        return torch.where(highest.isfinite(), token, likeliest)

    def _settings(self, requests: Sequence[Request], attempt: int) -> torch.Tensor:
        """float64 ``[4, rows]`` on the device: uniform number of the attempt, temperature, top_p and top_k."""
        settings = [
            (self._uniform(request, attempt), min(how.temperature, MAX_TEMPERATURE), how.top_p, how.top_k)
            for request, how in ((request, request.sampling) for request in requests)
        ]
        return self._device.compute.send(torch.tensor(settings, dtype=torch.float64).T.contiguous())

    def _uniform(self, request: Request, attempt: int) -> float:
        """A uniform number in [0, 1) for one attempt at a request's next token."""
        seed = request.sampling.seed
        stream = f"{self._seed}:{request.request_id}" if seed is None else seed
        digest = hashlib.blake2b(f"{stream}/{request.output_len}/0".encode(), digest_size=8).digest()
        return uniform_of((int.from_bytes(digest, "little") >> (64 - UNIFORM_BITS)) / 2**UNIFORM_BITS, attempt)

    def _score(self, logits: torch.Tensor, requests: Sequence[Request], tokens: list[int]) -> None:
        counts = [request.sampling.logprobs or 0 for request in requests]
        found = fetch_lists(self._device.compute, *score_tokens(logits, self._upload(tokens), max(counts)))
        scored = zip(requests, token_logprobs(tokens, found, counts), strict=True)
        self._logprobs |= {request.request_id: logprob for request, logprob in scored}

    def _blocks(self, rows: list[int], columns: int) -> Iterator[list[int]]:
        count = max(1, self._logits_at_once // columns)
        return (rows[start : start + count] for start in range(0, len(rows), count))

    def _select(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return logits if len(rows) == len(logits) else logits.index_select(0, self._upload(rows))

    def _upload(self, numbers: list[int]) -> torch.Tensor:
        return self._device.compute.send(torch.tensor(numbers, dtype=torch.int64))


def _way(sampling: SamplingParams, vocab_size: int, has_draw: bool) -> tuple[int | None, bool]:
    """How a row is drawn; rows with equal results are processed together.

    Returns how many of the likeliest tokens a draw considers (0: the nucleus, None: all, AT_ONCE: either), and whether
    the model's logits are changed first. Counts are rounded up to few values, so that many rows share one.
    """
    if sampling.is_greedy:
        count = GREEDY
    elif 0 < sampling.top_k < vocab_size:
        count = min(max(LEAST_TOP_K, 1 << (sampling.top_k - 1).bit_length()), vocab_size)
    elif has_draw:
        count = AT_ONCE
    else:
        count = 0 if sampling.top_p < 1.0 else None
    return count, sampling.adjusts_logits
