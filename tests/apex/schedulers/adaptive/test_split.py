"""Who goes along in pipelining, and which of them run alone."""

from __future__ import annotations

import numpy as np
import pytest

from apex.perf.model import GpuBatchLoad, PerfModel
from apex.schedulers.adaptive import OperationTimes, best_split, candidate_splits
from tests.reference.linear_profile import LAYERS, flat_ends_table, linear_s

GPU_TOKEN_S, DECODES, CONTEXT = 1e-7, 8, 1000
GPU_BATCH_ATTENTION_S = 1e-5 + DECODES * CONTEXT * GPU_TOKEN_S


def split(cpu_tokens: list[int], cpu_token_s: float, decode_context: int = DECODES * CONTEXT) -> tuple[int, int]:
    model = PerfModel(flat_ends_table(GPU_TOKEN_S, cpu_token_s), LAYERS)
    load = GpuBatchLoad(DECODES, DECODES, DECODES, decode_context, chunks=())
    tokens = np.array(cpu_tokens, np.int64)
    return best_split(OperationTimes(model), model, load, tokens, (0, 0), token_s=2e-7)


@pytest.mark.parametrize("seed", range(3))
def test_all_join_while_their_attention_hides_behind_the_gpu_batches(seed: int) -> None:
    """A stage alone would read the weights again, for requests that the GPU batch takes along for nothing."""
    tokens = np.random.default_rng(seed).integers(100, 900, 12).tolist()
    hidden = 0.9 * (GPU_BATCH_ATTENTION_S - 2e-5) / sum(tokens)
    assert split(tokens, hidden) == (0, 12)


def test_half_step_where_only_the_linear_time_hides_them() -> None:
    """The attention of a half takes as long as a stage, that of the GPU batch next to nothing."""
    tokens = [500] * 40
    assert split(tokens, 0.95 * (linear_s(DECODES) - 2e-5) / sum(tokens[20:]), decode_context=DECODES) == (20, 20)


def test_nobody_goes_along_where_the_gpu_batch_would_wait_too_long() -> None:
    assert split([500], 1e-4) == (0, 0)


def test_every_split_is_within_the_members() -> None:
    for number in range(40):
        members, alone = candidate_splits(number, least_members=1, flat_tokens=16)
        assert (alone <= members).all() and (members <= number).all() and (members >= min(number, 1)).all()
        assert {(number, 0), (number, number)} <= set(zip(members.tolist(), alone.tolist(), strict=True))
