"""Which CPU decodes go along in pipelining, and which of them run alone: the split with most tokens for the GPU batch's
time."""

from __future__ import annotations

import numpy as np

from apex.perf.gpu_batch_load import GpuBatchLoad
from apex.perf.model import PerfModel
from apex.schedulers.adaptive.rates import pipelining_layer_s
from apex.schedulers.adaptive.times import OperationTimes

MEMBER_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.3, 0.2, 0.12, 0.06, 0.0)
ALONE_SHARES = (1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.25, 0.0)
LEAST_TIME_SHARE = 0.02
"""Of an iteration at least this share is charged to its decodes, however much of it the prompts pay."""


def best_split(
    times: OperationTimes,
    model: PerfModel,
    load: GpuBatchLoad,
    ready_tokens: np.ndarray,
    partial: tuple[int, int],
    *,
    token_s: float,
    least_members: int = 0,
) -> tuple[int, int]:
    """How many of the first ready CPU decodes join, and how many run alone.

    The split maximises the decodes over the time that the prompts do not pay. Prompts pay for the linear work of their
    tokens in a large batch, and for their attention.

    Args:
        ready_tokens: context of each ready CPU decode, in the order in which they are taken; int64 [number].
        partial: requests under way, which run alone too, and the sum of their context in tokens.
        token_s: linear time of a token in a large batch, in seconds of one layer (b).
        least_members: take at least so many.

    Returns:
        The number that run alone, which come first, and the number that join, which come after them.
    """
    num_partial, partial_context = partial
    sums = np.concatenate(([0], np.cumsum(ready_tokens)))
    members, alone = candidate_splits(len(ready_tokens), least_members, model.flat_linear_tokens)
    joining = members - alone
    num_alone = alone + num_partial
    alone_context = sums[alone] + partial_context
    joined_context = sums[members] - sums[alone]
    prefill_s = load.prefill_attention_s(model)
    gpu_batch_attention_s = model.gpu_attention_s(load.decodes, load.decode_context) + prefill_s
    joined_load = joining, joined_context / np.maximum(joining, 1)
    alone_load = num_alone, alone_context / np.maximum(num_alone, 1)
    layer_s = pipelining_layer_s(times, load.tokens, gpu_batch_attention_s, joined_load, alone_load)
    total_s = times.num_layers * layer_s + times.outside_layers_s(load.requests + joining)
    total_s = total_s + times.outside_layers_s(num_alone)
    paid_s = times.num_layers * (token_s * (load.tokens - load.decodes) + prefill_s)
    rates = (load.decodes + num_partial + members) / np.maximum(total_s - paid_s, LEAST_TIME_SHARE * total_s)
    best = int(rates.argmax())
    return int(alone[best]), int(joining[best])


def candidate_splits(num_ready: int, least_members: int, flat_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of members and, of these, of those that run alone, to be compared; int64 [candidates] each."""
    members = np.ceil(num_ready * np.array(MEMBER_SHARES)).astype(int)
    members = np.unique(np.maximum(members, min(least_members, num_ready)))
    shares = np.round(members[:, None] * np.array(ALONE_SHARES)).astype(int)
    at_flat_end = np.minimum(members, flat_tokens)[:, None]
    alone = np.concatenate([shares, at_flat_end], axis=1)
    return np.repeat(members, alone.shape[1]), alone.ravel()
