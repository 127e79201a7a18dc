"""Predictions from measured operators: interpolation, chunks beside decodes, unequal contexts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import pytest

from apex.perf.model import FREE, Curve, GpuBatchLoad, PerfModel, ProfileTable, Surface
from apex.perf.operator_tables import OperatorModel, OperatorTable, TimeGrid, UnequalContexts, model_of
from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import Request, SamplingParams, Tier


def decode_s(decodes: float, context: float) -> float:
    return 1e-5 + decodes * context * 1e-8


def prefill_s(new: float, cached: float) -> float:
    return 2e-5 + new * 1e-7 + cached * 1e-8


def surface(seconds: Callable[[float, float], float]) -> Surface:
    return Surface((1, 100), tuple(Curve((0, 1000), (seconds(n, 0), seconds(n, 1000))) for n in (1, 100)))


MIXED = TimeGrid.of(
    {
        (new, cached, n, context): prefill_s(new, cached) + 2 * decode_s(n, context)
        for new, cached, n, context in product((1, 100), (0, 1000), (1, 100), (0, 1000))
    }
)
TABLE = OperatorTable(
    {},
    linear=Curve((1, 2), (1e-4, 2e-4)),
    ends=Curve((1, 2), (1e-5, 2e-5)),
    swap=FREE,
    prefill_attention=surface(prefill_s),
    gpu_attention=surface(decode_s),
    cpu_attention=surface(decode_s),
    token_ends=Curve((1, 2), (3e-6, 6e-6)),
    mixed_attention=MIXED,
)


def test_a_grid_interpolates_in_each_size_and_beyond() -> None:
    plane = TimeGrid.of({(x, y): 2 * x + 3 * y for x, y in ((1, 0), (1, 10), (4, 2), (4, 3), (4, 9), (8, 0), (8, 5))})
    for x, y in ((1, 0), (2.5, 4), (4, 2.5), (8, 5), (10, 20)):
        assert plane(x, y) == pytest.approx(2 * x + 3 * y)
    bent = TimeGrid.of({(0,): 0.0, (1,): 1.0, (2,): 4.0})
    assert [bent(x) for x in (0.5, 1.5, 3)] == [0.5, 2.5, 7.0]
    with pytest.raises(ValueError, match="two values of each size"):
        TimeGrid.of({(1, 2): 1.0, (1, 3): 2.0})


def test_chunks_and_decodes_together_take_the_measured_time_of_both() -> None:
    model = model_of(TABLE, 4)
    assert isinstance(model, OperatorModel)
    assert model.gpu_batch_attention_s(10, 5000, ()) == pytest.approx(decode_s(10, 500))
    assert model.gpu_batch_attention_s(0, 0, ((50, 200),)) == pytest.approx(prefill_s(50, 200))
    together = prefill_s(50, 200) + 2 * decode_s(10, 500)
    assert model.gpu_batch_attention_s(10, 5000, ((50, 200),)) == pytest.approx(together)
    apart = model_of(replace(TABLE, mixed_attention=None), 4)
    assert apart.gpu_batch_attention_s(10, 5000, ((50, 200),)) == pytest.approx(prefill_s(50, 200) + decode_s(10, 500))


def test_several_chunks_take_their_own_times_and_slow_decodes_down_as_one() -> None:
    model = model_of(TABLE, 4)
    alone = prefill_s(20, 100) + prefill_s(30, 0)
    assert model.gpu_batch_attention_s(10, 5000, ((20, 100), (30, 0))) == pytest.approx(alone + 2 * decode_s(10, 500))


UNEQUAL = UnequalContexts({1: 0.4, 16: 0.2}, {1: 0.8, 16: 0.4})


def test_unequal_contexts_lie_between_their_mean_and_the_longest() -> None:
    model = model_of(replace(TABLE, unequal=UNEQUAL), 4)
    mean, longest = decode_s(4, 500), decode_s(4, 900)
    assert model.gpu_batch_attention_s(4, 2000, (), 900) == pytest.approx(mean + 0.3 * (longest - mean))
    assert model.gpu_batch_attention_s(4, 2000, (), 500) == pytest.approx(mean)
    chunk = prefill_s(50, 200)
    expected = chunk + 2 * (mean + 0.6 * (longest - mean))
    assert model.gpu_batch_attention_s(4, 2000, ((50, 200),), 900) == pytest.approx(expected)


def test_shares_are_interpolated_in_the_logarithm_of_the_decodes() -> None:
    shares = [UNEQUAL.share(n, beside_chunks=False) for n in (1, 4, 16, 99)]
    assert shares == pytest.approx([0.4, 0.3, 0.2, 0.2])
    assert UNEQUAL.share(4, beside_chunks=True) == pytest.approx(0.6)


def test_a_gpu_batch_knows_its_longest_context() -> None:
    requests = [Request(str(n), (1,) * n, SamplingParams(max_tokens=9)) for n in (5, 9, 7)]
    load = GpuBatchLoad.from_items([GpuBatchItem(r, r.num_tokens - 1, 1, Tier.GPU, False) for r in requests])
    assert (load.decode_context, load.longest_context) == (21, 9)


def test_all_tokens_pass_embedding_and_norm() -> None:
    model = model_of(TABLE, 4)
    plain = PerfModel(TABLE, 4)
    assert model.first_stage_s(2) == pytest.approx(plain.first_stage_s(2) + 6e-6)
    assert model.last_stage_s(1) == plain.last_stage_s(1)
    assert model.last_stage_s(1, sampled=2) == pytest.approx(0.5 * 2e-4 + 1e-5)


def test_other_tables_keep_the_plain_predictions() -> None:
    fields = {name: getattr(TABLE, name) for name in ("identity", "linear", "ends", "swap")}
    attention = {name: getattr(TABLE, name) for name in ("prefill_attention", "gpu_attention", "cpu_attention")}
    assert type(model_of(ProfileTable(**fields, **attention), 4)) is PerfModel
