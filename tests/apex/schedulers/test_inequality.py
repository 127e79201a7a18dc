"""The papers' formulas and the performance model, against numbers worked out by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from apex.perf.model import Curve, PerfModel, ProfileMismatch, ProfileTable, Surface
from apex.schedulers.formulas import (
    Inequality,
    mixed_cpu_window_s,
    offload_bound_tokens_per_s,
    pipelined_layer_s,
    pipelining_pays,
)
from tests.reference.fake_engine import flat_table


def test_pipelined_layer() -> None:
    # max(3, 5) + max(1 + 2, 2) = 8: the CPU shows in the first half and hides in the second.
    assert pipelined_layer_s(3, 1, 2, 2, 5) == 8


def test_inequality_5_and_6_agree() -> None:
    """Inequality (6) is (5) solved for N_G / N_C: both decide alike wherever neither is a near-tie."""
    rng = random.Random(1)
    seen = set()
    for _ in range(2000):
        linear_s, attention_s = rng.uniform(0.1, 3), rng.uniform(0.1, 3)
        cpu_rate = rng.uniform(1, 50)
        gpu_rate = cpu_rate * rng.uniform(0.5, 20)
        limit = 2 * linear_s / attention_s + 3 + attention_s / linear_s
        if abs(gpu_rate / cpu_rate - limit) < 1e-6:
            continue
        holds = pipelining_pays(gpu_rate, cpu_rate, linear_s, attention_s).holds
        assert holds == (gpu_rate / cpu_rate < limit)
        seen.add(holds)
    assert seen == {True, False}


def test_ratio_of_the_paper() -> None:
    """With T_gatt = T_glinear the CPU needs a sixth of the GPU's rate; between 0.5 and 1.5 never below 1/7.5."""
    for attention_s, ratio in ((1.0, 6.0), (0.5, 7.5), (1.5, 2 / 1.5 + 4.5)):
        assert pipelining_pays(0.999 * ratio, 1.0, 1.0, attention_s).holds
        assert not pipelining_pays(1.001 * ratio, 1.0, 1.0, attention_s).holds


def test_mixed_window_is_longer() -> None:
    window_s = mixed_cpu_window_s(5, 1, 2)
    assert window_s == 8
    assert pipelining_pays(10, 1, 1, 1, window_s).left > pipelining_pays(10, 1, 1, 1).left


def test_empty_gpu_batch_pays() -> None:
    assert pipelining_pays(0, 5, 0, 0).holds


def test_empty_gpu_batch_is_worth_what_the_cpu_does_alone() -> None:
    assert pipelining_pays(0, 0.5, 0, 0) == Inequality(left=0.5, right=0.0)


def test_bound() -> None:
    # 50 GB/s over 1250 tokens of 128 KiB: 305 tokens/s on top of what the GPU does.
    assert offload_bound_tokens_per_s(100, 50e9, 131072, 1250) == pytest.approx(405.2, abs=0.1)


def test_curve_interpolates_extrapolates_and_never_falls() -> None:
    curve = Curve((1, 2, 4), (1.0, 3.0, 2.0))
    assert [curve(x) for x in (1, 1.5, 2, 3, 4, 8)] == [1, 1.75, 2.5, 2.5, 2.5, 2.5]
    assert Curve((1, 2, 3, 4), (4.0, 1.0, 1.0, 7.0)).seconds == (2.0, 2.0, 2.0, 7.0)
    assert Curve((0, 10), (0.0, 5.0))(20) == 10
    with pytest.raises(ValueError, match="ascending"):
        Curve((2, 1), (0.0, 1.0))


def test_a_curve_needs_two_sizes_and_is_never_negative() -> None:
    with pytest.raises(ValueError, match="at least two"):
        Curve((1,), (1.0,))
    assert Curve((2, 4), (0.0, 2.0))(1) == 0
    below = Surface((2, 4), (Curve((0, 10), (0.0, 0.0)), Curve((0, 10), (0.0, 30.0))))
    assert below(1, 5) == 0


def test_surface() -> None:
    surface = Surface((1, 3), (Curve((0, 10), (0.0, 10.0)), Curve((0, 10), (0.0, 30.0))))
    assert surface(1, 5) == 5
    assert surface(2, 5) == 10
    assert surface(5, 10) == 50


def test_model_flags_extrapolation_and_knows_the_flat_part() -> None:
    table = flat_table()
    model = PerfModel(table, num_layers=2)
    model.linear_s(1000)
    assert model.extrapolated == set()
    model.linear_s(5000)
    assert model.extrapolated == {"linear"}
    assert model.linear_s(0) == model.cpu_attention_s(0, 0) == 0
    steps = Curve((1, 64, 128, 256), (1.0, 1.1, 1.2, 2.0))
    stepped = PerfModel(ProfileTable(**{**vars(table), "linear": steps}), 2)
    assert stepped.flat_linear_tokens == 128


@pytest.mark.parametrize(
    ("requests", "context", "flagged"),
    [(1, 0, False), (2, 1000, False), (3, 500, True), (2, 1001, True), (3, 1001, True)],
)
def test_what_lies_outside_the_table_in_either_size_is_flagged(requests: int, context: int, flagged: bool) -> None:
    model = PerfModel(flat_table(), num_layers=2)
    model.gpu_attention_s(requests, requests * context)
    assert model.extrapolated == ({"gpu_attention"} if flagged else set())


def test_one_long_request_is_in_the_table_where_two_of_them_would_not_fit_the_tier() -> None:
    fewer_contexts = Surface((1, 2), (Curve((0, 1000), (0.0, 1e-3)), Curve((0, 500), (0.0, 1e-3))))
    model = PerfModel(ProfileTable(**{**vars(flat_table()), "gpu_attention": fewer_contexts}), num_layers=2)
    model.gpu_attention_s(1, 1000)
    assert not model.extrapolated


@pytest.mark.parametrize(("tokens", "flagged"), [(1, False), (1001, False), (1002, True)])
def test_the_ends_of_a_curve_belong_to_it(tokens: int, flagged: bool) -> None:
    model = PerfModel(flat_table(), num_layers=2)
    model.linear_s(tokens)
    assert model.extrapolated == ({"linear"} if flagged else set())


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no profile table"), ("{}", "has another format"), ('{"version": 1}', "has another format")],
)
def test_what_is_no_table_of_this_version_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ProfileMismatch, match=message):
        ProfileTable.load(tmp_path / "t.json", {})


def test_table_round_trip_and_refusal(tmp_path: Path) -> None:
    table = ProfileTable(**{**vars(flat_table()), "identity": {"cpu": "a", "dtype": "float32"}})
    (tmp_path / "t.json").write_text(table.as_json())
    assert ProfileTable.load(tmp_path / "t.json", {"cpu": "a", "dtype": "float32"}) == table
    with pytest.raises(ProfileMismatch, match="cpu: table 'a', here 'b'"):
        ProfileTable.load(tmp_path / "t.json", {"cpu": "b", "dtype": "float32"})
    with pytest.raises(ProfileMismatch, match=r"no profile table in .*none.json .*run `apex profile` first"):
        ProfileTable.load(tmp_path / "none.json", {})


def test_chunks_of_a_gpu_batch_share_what_it_pays_once() -> None:
    table = ProfileTable(**{**vars(flat_table()), "prefill_shared_s": 4e-7})
    model = PerfModel(table, 2)
    assert model.prefill_attention_s([(1, 0)]) == pytest.approx(1e-6)
    assert model.prefill_attention_s([(1, 0)] * 3) == pytest.approx(3e-6 - 2 * 4e-7)
    assert model.prefill_attention_s([]) == 0


def test_streamed_weights_leave_the_gpu_only_rate_to_the_link() -> None:
    """A layer takes 10 s either way. So the CPU's tokens come on top of the GPU's, as long as both passes fit."""
    assert pipelining_pays(10, 1, 1, 1, stream_s=10) == Inequality((10 + 10) / 10, 10 / 10)
    assert pipelining_pays(1000, 1, 1, 1, stream_s=10).holds and not pipelining_pays(1000, 1, 1, 1).holds
    assert pipelining_pays(10, 1, 1, 1, stream_s=1.5) == pipelining_pays(10, 1, 1, 1)


def test_the_flat_part_ends_where_a_stage_takes_longer_than_its_weights() -> None:
    table = replace(flat_table(), linear=Curve((1, 100, 200, 300, 400), (1.0, 1.2, 2.0, 3.0, 4.0)))
    knees = {s: PerfModel(replace(table, stream_s=s), 4).flat_linear_tokens for s in (0.0, 1.1, 2.0, 2.5)}
    assert knees == {0.0: 100, 1.1: 100, 2.0: 200, 2.5: 300}
