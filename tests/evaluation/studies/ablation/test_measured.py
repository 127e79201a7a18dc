"""The measured ablation: its points, and the bound on made-up figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evaluation.studies.ablation import Options, measured_bound, measured_points
from tests.reference.tiny_model import make_tiny_llama

RATES = {"swiftllm": 40.0, "apex": 100.0}
PROFILED = {"cpu_bytes_per_s": 8e9, "kv_bytes_per_token": 25_000.0, "gpu_batch_limit_tokens_per_s": 300.0}


@pytest.fixture
def options(tmp_path) -> Options:
    model = make_tiny_llama(tmp_path / "tiny")
    return Options(
        model=model, rows=("swiftllm", "apex"), num_requests=6, input_len=20, output_len=13, gpu_requests=2,
        dtype="float32",
    )  # fmt: skip


def record(row: str, **values) -> dict:
    base = {"row": row, "system": row, "backend": "torch-cpu", "gpu": None, "num_requests": 64, "input_len": 96.0,
            "output_len": 64.0, "output_tokens_per_s": RATES[row], "gpu_batch_busy_fraction": 0.97,
        "cpu_busy_fraction": 0.1,
            "preemptions": 0, "predicted_over_actual": None, "failed": 0, "strategy_mix": "-"}  # fmt: skip
    return base | values


def test_points_cap_the_gpu_tier_and_leave_room_for_all_on_the_cpu(options):
    points = measured_points(options)
    assert [point.key for point in points] == ["swiftllm", "apex"]
    engine = points[0].task.task.engine
    assert engine.num_gpu_blocks == 2 * 3 and engine.num_cpu_blocks >= 6 * 3


def test_repeats_take_turns_at_going_first(options):
    keys = [point.key for point in measured_points(replace(options, repeats=2))]
    assert keys == ["swiftllm-0", "apex-0", "apex-1", "swiftllm-1"]


def test_bound_is_the_formula_and_names_the_gpu_batch_as_its_limit():
    text = measured_bound([record("swiftllm"), record("apex", **PROFILED)])
    assert "= 2540 tokens/s" in text  # 40 + 8e9 / (25000 * 128)
    assert "apex, 100.0 tokens/s, 4% of it" in text
    assert "at most 300 tokens/s with up to 64 requests" in text and "busy 97% of the time, its CPU worker 10%" in text


def test_bound_says_nothing_of_the_gpu_batch_where_it_is_not_the_limit():
    text = measured_bound([record("swiftllm"), record("apex", **PROFILED | {"gpu_batch_limit_tokens_per_s": 1e6})])
    assert "linear layers" not in text


def test_no_bound_without_both_kinds_of_row():
    assert measured_bound([record("apex", **PROFILED)]).startswith("No bound")
    assert measured_bound([record("swiftllm")]).startswith("No bound")
