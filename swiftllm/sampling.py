"""Choosing the next token of each request from its logits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from swiftllm.request import Request, SamplingParams, TokenLogprob

CHUNK = 512  # columns, for most_likely


class Sampler:
    """Draws depend on a request's own seed and the token's position, never on what else is in the batch.

    So nothing is kept between iterations, and a token that has to be drawn again comes out the same.
    """

    def __init__(self, seed: int = 0) -> None:
        """``seed`` stands in for that of requests that bring none of their own, together with the request's id."""
        self._seed = seed
        self._logprobs: dict[str, TokenLogprob] = {}

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """One token per row: ``logits [rows, vocab_size]`` of any float dtype, row i belongs to ``requests[i]``."""
        tokens: list[int] = most_likely(logits).tolist()
        for row, request in enumerate(requests):
            if not request.sampling.is_greedy:
                tokens[row] = _draw_token(logits[row].float(), request.sampling, self._draw(request))
        scored = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        if scored:
            self._score(logits[scored], [requests[row] for row in scored], [tokens[row] for row in scored])
        return tokens

    def take_logprobs(self) -> Mapping[str, TokenLogprob]:
        """Of the tokens sampled since the last call, for the requests that ask for them."""
        taken, self._logprobs = self._logprobs, {}
        return taken

    def _score(self, logits: torch.Tensor, requests: Sequence[Request], tokens: Sequence[int]) -> None:
        logprobs = logits.float().log_softmax(-1)
        chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
        most = min(max(request.sampling.logprobs for request in requests), logprobs.shape[1])
        likely = logprobs.topk(most)
        rows = zip(requests, tokens, chosen, likely.indices.tolist(), likely.values.tolist(), strict=True)
        for request, token, logprob, top_tokens, top_logprobs in rows:
            count = request.sampling.logprobs
            top = tuple(zip(top_tokens[:count], top_logprobs[:count], strict=True))
            self._logprobs[request.request_id] = TokenLogprob(token, logprob, top)

    def _draw(self, request: Request) -> float:
        """A number in (0, 1] for the next token of a request: zero would select a token of probability zero."""
        seed = request.sampling.seed
        stream = f"{self._seed}:{request.request_id}" if seed is None else seed
        digest = hashlib.blake2b(f"{stream}/{request.output_len}".encode(), digest_size=8).digest()
        return ((int.from_bytes(digest, "little") >> 11) + 1) / 2**53


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """The first of the highest columns of each row, a NaN counting as highest: int64 ``[rows]``.

    A CPU finds a maximum many times faster than its index, so the index is looked for where the maximum is.
    """
    rows, columns = logits.shape
    if logits.device.type != "cpu" or columns % CHUNK or not rows:
        return logits.max(-1).indices
    chunks = logits.view(rows, -1, CHUNK)
    highest = chunks.amax(-1).max(-1).indices
    return highest * CHUNK + chunks[torch.arange(rows), highest].max(-1).indices


def _draw_token(logits: torch.Tensor, sampling: SamplingParams, draw: float) -> int:
    """Invert the cumulative distribution of one row ``[vocab_size]`` at ``draw``, after top-k and top-p."""
    highest = logits.max()
    if not highest.isfinite():  # an overflow or NaN upstream: there is no distribution to draw from
        return int(logits.argmax())
    # Subtracting the maximum first keeps tiny temperatures from overflowing.
    scaled = (logits - highest) / sampling.temperature
    token_ids = None
    if 0 < sampling.top_k < len(scaled):
        scaled, token_ids = scaled.topk(sampling.top_k)
    # Sums over a vocabulary in float32 would lose the tail.
    probabilities = scaled.double().softmax(-1)
    if sampling.top_p < 1.0:
        # Tokens below this bound come to less than 1 - top_p together: the nucleus is complete without them, and
        # only the few others need sorting.
        likely = (probabilities >= (1.0 - sampling.top_p) / len(probabilities)).nonzero()[:, 0]
        probabilities, order = probabilities[likely].sort(descending=True)
        likely = likely[order]
        token_ids = likely if token_ids is None else token_ids[likely]
        before = probabilities.cumsum(-1) - probabilities
        probabilities = probabilities * (before < sampling.top_p)
    cumulative = probabilities.cumsum(-1)
    index = torch.searchsorted(cumulative, draw * cumulative[-1])
    return int(index if token_ids is None else token_ids[index])
