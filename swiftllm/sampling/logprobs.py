"""Log-probabilities of tokens, and those of a whole prompt."""

from __future__ import annotations

import torch

from swiftllm.core.request import TokenLogprob
from swiftllm.device.device import Device, Stream
from swiftllm.model.llama import LlamaModel
from swiftllm.runtime.batch import Lane

LOGITS_AT_ONCE = 1 << 22  # of a prompt: enough rows for a matrix product, and no more than some ten MiB
Found = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def score_tokens(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> Found:
    """Log-probabilities float32 ``[rows]`` and ranks int64 ``[rows]`` (1: no token is likelier) of ``tokens`` int64
    ``[rows]`` under ``logits [rows, vocab_size]``; ids and log-probabilities of the ``count`` most likely tokens (fewer
    if there are not so many), both ``[rows, count]``."""
    logprobs = logits.float().log_softmax(-1)
    own, likely = logprobs.gather(1, tokens[:, None]), logprobs.topk(min(count, logprobs.shape[1]))
    return own[:, 0], 1 + (logprobs > own).sum(-1), likely.indices, likely.values


def fetch_lists(stream: Stream, *tensors: torch.Tensor) -> list[list]:
    """What the tensors hold; the host sleeps until it is there."""
    on_host = [stream.fetch(tensor) for tensor in tensors]
    stream.mark().synchronize()
    return [tensor.tolist() for tensor in on_host]


class PromptScorer:
    """Finds the log-probabilities of prompts, a piece at a time: never all logits of a prompt at once."""

    def __init__(self, model: LlamaModel, device: Device) -> None:
        self._model = model
        self._stream = device.compute
        self._rows_at_once = max(1, LOGITS_AT_ONCE // model.config.vocab_size)

    def score_prompts(self, lane: Lane) -> None:
        """Add what the lane, which stands before the last boundary, tells of its requests' prompts to them."""
        for request, rows, following in lane.prompts:
            count = request.sampling.prompt_logprobs
            tokens = self._stream.send(torch.tensor(following, dtype=torch.int64))
            scores = []
            for piece in self._pieces(rows):
                tokens_of_piece = tokens[piece.start - rows.start : piece.stop - rows.start]
                scores.append(score_tokens(self._logits(lane, piece), tokens_of_piece, count))
            found = fetch_lists(self._stream, *(torch.cat(parts) for parts in zip(*scores, strict=True)))
            for token, logprob, rank, top_tokens, top_logprobs in zip(following, *found, strict=True):
                top = tuple(zip(top_tokens, top_logprobs, strict=True))
                request.prompt_logprobs.append(TokenLogprob(token, logprob, rank, top))

    def _pieces(self, rows: slice) -> list[slice]:
        starts = range(rows.start, rows.stop, self._rows_at_once)
        return [slice(start, min(start + self._rows_at_once, rows.stop)) for start in starts]

    def _logits(self, lane: Lane, rows: slice) -> torch.Tensor:
        return self._model.leave(lane.attention_out[rows], lane.residual[rows].clone())  # the lane has yet to leave
