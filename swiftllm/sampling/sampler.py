"""Choice of each request's next token from its logits."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence

import torch

from swiftllm.core.request import Request, TokenLogprob
from swiftllm.core.sampling_params import SamplingParams
from swiftllm.device.device import Device
from swiftllm.device.host import HostDevice
from swiftllm.ops.draw_rules import UNIFORM_BITS, uniform_of
from swiftllm.ops.interface import Draw
from swiftllm.sampling.draws import draw_from_all, draw_from_nucleus, draw_from_top_k, most_likely
from swiftllm.sampling.logprobs import fetch_lists, score_tokens, token_logprobs
from swiftllm.sampling.penalties import adjust_logits, drop_improbable

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

        ``likeliest``: int64 ``[rows]``, :func:`~swiftllm.sampling.draws.most_likely` of the logits if already computed.
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
