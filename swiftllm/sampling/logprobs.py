"""Log-probabilities of sampled tokens and of prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from swiftllm.core.request import Request, TokenLogprob
from swiftllm.device.device import Device, Stream

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
