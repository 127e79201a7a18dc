"""Choosing the next token of each request from its logits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import torch

from swiftllm.request import Request, SamplingParams


class Sampler:
    """Keeps one random generator per request that samples.

    A request's draws depend on its own seed and on how many tokens it has drawn, never on what else is in the batch.
    """

    def __init__(self, seed: int = 0) -> None:
        """``seed`` feeds the generators of requests that bring none of their own, together with the request's id."""
        self._seed = seed
        self._generators: dict[str, torch.Generator] = {}

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, requests: Sequence[Request]) -> list[int]:
        """One token per row: ``logits [rows, vocab_size]`` of any float dtype, row i belongs to ``requests[i]``."""
        wide = logits.float()
        tokens = wide.argmax(-1)
        for row, request in enumerate(requests):
            if not request.sampling.is_greedy:
                # The draw lies in (0, 1]: zero would select a token of probability zero.
                draw = 1.0 - torch.rand((), generator=self._generator(request))
                tokens[row] = _draw_token(wide[row], request.sampling, draw.to(wide.device))
        return tokens.tolist()

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop the generators of requests that are over."""
        for request_id in request_ids:
            self._generators.pop(request_id, None)

    def _generator(self, request: Request) -> torch.Generator:
        generator = self._generators.get(request.request_id)
        if generator is None:
            seed = request.sampling.seed
            if seed is None:
                digest = hashlib.blake2b(f"{self._seed}:{request.request_id}".encode(), digest_size=8).digest()
                seed = int.from_bytes(digest, "little", signed=True)
            generator = torch.Generator().manual_seed(seed)
            self._generators[request.request_id] = generator
        return generator


def _draw_token(logits: torch.Tensor, sampling: SamplingParams, draw: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution of one row ``[vocab_size]`` at ``draw``, after top-k and top-p."""
    highest = logits.max()
    if not highest.isfinite():  # an overflow or NaN upstream: there is no distribution to draw from
        return logits.argmax()
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
    return index if token_ids is None else token_ids[index]
