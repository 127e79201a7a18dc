"""Log-probabilities of tokens, and those of a whole prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from swiftllm.core.request import Request, TokenLogprob
from swiftllm.device.device import Device, Stream

LOGITS_AT_ONCE = 1 << 22  # of a prompt: enough rows for a matrix product, and no more than some ten MiB
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def score(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Found:
    """Log-probabilities float32 ``[rows]`` and ranks int64 ``[rows]`` (1: no token is likelier) of ``tokens`` int64
    ``[rows]`` under ``logits [rows, vocab_size]``; ids and log-probabilities of the ``count`` most likely tokens (fewer
    if there are not so many), both ``[rows, count]``."""
    logprobs = logits.float().log_softmax(-1)
    own, likely = logprobs.gather(1, tokens[:, None]), logprobs.topk(min(count, logprobs.shape[1]))
    return own[:, 0], 1 + (logprobs > own).sum(-1), likely.indices, likely.values


def fetch(stream: Stream, *tensors: torch.Tensor) -> list[list]:
    """What the tensors hold; the host sleeps until it is there."""
    on_host = [stream.fetch(tensor) for tensor in tensors]
    stream.mark().synchronize()
    return [tensor.tolist() for tensor in on_host]


class PromptRows(NamedTuple):
    """Adjacent rows of a prompt that give the log-probabilities of the tokens ``following`` theirs."""

    request: Request
    rows: slice
    following: tuple[int, ...]


class PromptScorer:
    """Finds the log-probabilities of prompts, a piece at a time: never all logits of a prompt at once."""

    def __init__(self, vocab_size: int, device: Device) -> None:
        self._stream = device.compute
        self._rows_at_once = max(1, LOGITS_AT_ONCE // vocab_size)

    def score_prompts(self, prompts: Sequence[PromptRows], logits: Callable[[slice], torch.Tensor]) -> None:
        """Append to the requests' ``prompt_logprobs`` what these rows give. ``logits`` computes those of some rows,
        ``[rows, vocab_size]``."""
        for request, rows, following in prompts:
            count = request.sampling.prompt_logprobs
            tokens = self._stream.send(torch.tensor(following, dtype=torch.int64))
            pieces = [
                score(logits(piece), tokens[piece.start - rows.start : piece.stop - rows.start], count)
                for piece in self._pieces(rows)
            ]
            found = fetch(self._stream, *(torch.cat(parts) for parts in zip(*pieces, strict=True)))
            for token, logprob, rank, top_tokens, top_logprobs in zip(following, *found, strict=True):
                top = tuple(zip(top_tokens, top_logprobs, strict=True))
                request.prompt_logprobs.append(TokenLogprob(token, logprob, rank, top))

    def _pieces(self, rows: slice) -> list[slice]:
        starts = range(rows.start, rows.stop, self._rows_at_once)
        return [slice(start, min(start + self._rows_at_once, rows.stop)) for start in starts]
