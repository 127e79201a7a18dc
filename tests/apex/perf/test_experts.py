"""Times of experts: which are touched, the formula on measured rows that it was not fitted to, and what tables say."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean, median

import pytest

from apex.perf.model import ExpertTimes, PerfModel, decode_bound, flat_from_tokens, touched_experts
from apex.simulator.predicted_machine import predict_machine
from apex.source_tree import configs_folder
from evaluation.validation.experts import FITTED, LEFT_OUT, errors, fit, read_rows

MOE = ("a10", "dual-xeon-6342", "qwen3-30b-a3b", "float16")


def test_touched_experts_are_those_of_random_rows() -> None:
    assert [round(touched_experts(n, 128, 8)) for n in (1, 4, 16, 32, 64, 128)] == [8, 29, 82, 112, 126, 128]
    draw = random.Random(0)
    for rows, experts, slots in ((1, 8, 2), (5, 16, 4), (12, 6, 6)):
        drawn = [len({e for _ in range(rows) for e in draw.sample(range(experts), slots)}) for _ in range(2000)]
        assert touched_experts(rows, experts, slots) == pytest.approx(fmean(drawn), rel=0.02)
    assert flat_from_tokens(128, 8) == pytest.approx(46.4, abs=0.1) and flat_from_tokens(0, 0) == 1.0


def test_the_formula_holds_on_rows_it_was_not_fitted_to() -> None:
    path = configs_folder("groundtruth") / "rtxpro6000-qwen3-30b-a3b" / "moe.csv"
    found = errors(fit(read_rows(path, FITTED)), read_rows(path, LEFT_OUT))
    assert len(found) == 19 and median(found) <= 0.05 and max(found) <= 0.10
    times = ExpertTimes(1e-3, 1e9, 1e12)
    assert times.seconds(3, 1e6, 0, 1e6) == pytest.approx(4e-3) and times.seconds(0, 1e6, 500, 2e6) == pytest.approx(
        3e-3
    )


def test_a_layer_takes_longer_with_each_expert_that_is_touched_and_codes_take_less() -> None:
    plain, coded = (predict_machine(*MOE, weights=weights) for weights in ("auto", "int4"))
    assert 30.4e9 < plain.model.num_parameters < 30.7e9  # as the model's card says
    assert 16e9 < coded.weight_bytes < 17.5e9
    rate = coded.gpu["memory_bandwidth_gb_s"] * 1e9 * coded.gpu["weight_read_fraction"] * 0.8
    expert_bytes = 3 * 2048 * 768 * (4 + 24 / 128) / 8
    for few, many in ((1, 4), (4, 16), (16, 32)):
        more = touched_experts(many, 128, 8) - touched_experts(few, 128, 8)
        grown_s = coded.table.linear(many) - coded.table.linear(few)
        assert 0.9 * more * expert_bytes / rate < grown_s < 1.2 * more * expert_bytes / rate
    assert plain.table.linear(32) > 2.5 * coded.table.linear(32)
    knee, dense = PerfModel(coded.table, 48), PerfModel(replace(coded.table, flat_from_tokens=1.0), 48)
    assert knee.flat_linear_tokens >= 46 > dense.flat_linear_tokens
    assert float(coded.table.identity["cpu_attention_gb_s"]) < float(
        predict_machine("a10", "dual-xeon-6342", "llama-3.1-8b", "float16").table.identity["cpu_attention_gb_s"]
    )  # eight query heads on a KV head


def test_the_bound_grows_with_the_tier_of_the_cpu_and_is_that_of_the_slower_processor() -> None:
    table = predict_machine(*MOE, weights="int4", cpu_bandwidth_gb_s=90.0).table
    alone, gpu, none = decode_bound(table, 48, 700, (47_600, 0), 400)
    both, _, cpu = decode_bound(table, 48, 700, (47_600, 1e6), 400)
    assert gpu == 68 and none == 0 and cpu > 0 and both > 1.2 * alone
    model = PerfModel(table, 48)
    assert alone == pytest.approx(
        68 / (48 * (model.linear_s(68) + model.gpu_attention_s(68, 68 * 700)) + model.logits_s(68))
    )
