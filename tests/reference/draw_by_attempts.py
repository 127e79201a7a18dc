"""The draws that a GPU makes in one launch, row by row and attempt by attempt in torch."""

from __future__ import annotations

import torch

from swiftllm.ops.interface import uniform_of
from swiftllm.sampling.sampler import draw_from_nucleus


def draw_by_attempts(
    logits: torch.Tensor, chosen: torch.Tensor, likeliest: torch.Tensor, settings: torch.Tensor, tokens: torch.Tensor
) -> None:
    """Writes ``tokens``; see :meth:`swiftllm.ops.interface.Ops.make_draw`."""
    tokens.copy_(likeliest[chosen])
    for place, row in enumerate(chosen.tolist()):
        own, uniform, (temperature, top_p) = logits[row][None], settings[0, place].item(), settings[1:, place]
        highest = own[:, tokens[place], None].float()
        attempt, token = 0, None
        while highest.isfinite() and (token is None or token < 0):
            number = torch.tensor([[uniform_of(uniform, attempt)]], dtype=torch.float64)
            rejected = None if token is None else ~token
            token = draw_from_nucleus(own, highest, temperature.float(), top_p, number, rejected)
            attempt += 1
        if token is not None:
            tokens[place] = token
