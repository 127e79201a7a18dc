"""Simulated points of the papers' settings: overrides reach the profile, sweeps have every combination once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from apex.simulator.paper_settings import load_setting
from apex.workloads.catalogue import Origin, TraceRow, UniformTrace
from apex.workloads.requests import Lengths, WorkloadSpec, make_lengths
from evaluation.experiments.paper_settings import clip_lengths, simulated_hardware, simulated_task
from evaluation.experiments.papers.options import FigureOptions
from evaluation.experiments.papers.points import figure_grid, simulated_points
from evaluation.experiments.papers.sensitivity import parse_sensitivity
from evaluation.experiments.simulated_point import build_engine


def lengths(*rows):
    return Lengths(WorkloadSpec("osc", len(rows)), "OSC", Origin("fitted", ""), tuple(TraceRow(*row) for row in rows))


def test_what_the_engine_would_refuse_is_clipped_and_counted():
    clipped, count = clip_lengths(lengths((10, 20), (10, 90), (300, 5)), 100)
    assert [(row.input_tokens, row.output_tokens) for row in clipped.rows] == [(10, 20), (10, 90), (99, 1)]
    assert count == 1
    task = simulated_task(load_setting("apex-t4"), "neo", lengths((400, 500)))
    assert task.values["num_clipped"] == 1 and task.lengths.rows[0].output_tokens == 432


def test_overrides_reach_the_profile():
    setting = load_setting("apex-a10")
    slow = replace(setting, cpu_bandwidth_gb_s=10.0)
    fast, slowed = (simulated_hardware(s, "neo").table for s in (setting, slow))
    assert slowed.cpu_attention(64, 64_000) > 5 * fast.cpu_attention(64, 64_000)
    assert slowed.gpu_attention == fast.gpu_attention
    assert setting.cpu_attention_gb_s("swiftllm") is None and slow.cpu_attention_gb_s("swiftllm") is None
    assert slow.cpu_attention_gb_s("apex") == 10.0
    assert setting.cpu_attention_gb_s("apex") != setting.cpu_attention_gb_s("neo")  # llamafile and ISPC
    weaker = replace(setting, host="g5-4xlarge").with_figures("a smaller host", cpu_kv_gb=30)
    assert weaker.cpu_attention_gb_s("neo") < setting.cpu_attention_gb_s("neo")
    assert weaker.num_cpu_blocks == setting.num_cpu_blocks // 4
    assert weaker.figures["cpu_kv_gb"].origin == "a smaller host"


def test_neos_launches_lengthen_its_attention_tasks_and_its_rows_say_whether_they_do():
    setting = load_setting("apex-a10-as-measured")
    charged = replace(setting, charges_launches=True)
    for system, us in (("neo", 300.0), ("fastdecode", 300.0), ("apex", None), ("vllm", None)):
        without, with_them = (simulated_task(s, system, lengths((10, 20))) for s in (setting, charged))
        assert without.values.get("attention_launch_us") == (None if us is None else 0.0)
        assert with_them.values.get("attention_launch_us") == us
        hand_over_s = with_them.hardware.table.hand_over(64)
        assert hand_over_s - without.hardware.table.hand_over(64) == pytest.approx((us or 0.0) * 1e-6)


def test_rows_of_a_reading_name_it_and_the_machine_that_claims_are_about():
    values = simulated_task(load_setting("apex-t4-as-measured"), "neo", lengths((10, 20))).values
    assert (values["paper_setting"], values["reading"], values["cpu_kernel"]) == ("apex-t4", "as APEX measured", "ispc")
    assert values["cpu_bandwidth_gb_s"] == pytest.approx(0.02805 * 272)
    assert "reading" not in simulated_task(load_setting("neo-t4"), "neo", lengths((10, 20))).values


def test_several_gpus_and_hosts_reach_the_machine_and_the_row():
    setting = load_setting("omniserve-llama-2-70b")
    assert setting.tensor_parallel == 4 and setting.remote_hosts is None
    task = simulated_task(setting, "vllm", lengths((10, 20)))
    assert task.hardware.table.identity["tensor_parallel"] == "4"
    assert task.values["tensor_parallel"] == 4 and task.values["link"] == "pcie-4" and "cpu_hosts" not in task.values
    several = simulated_task(replace(setting, cpu_hosts=5, network_gbps=10.0), "neo", lengths((10, 20)))
    assert several.num_cpu_blocks == 5 * setting.num_cpu_blocks == 5 * task.num_cpu_blocks
    assert several.hardware.remote_hosts.count == 4 and several.hardware.remote_hosts.bytes_per_s == 1.25e9
    assert several.values["cpu_hosts"] == 5 and several.values["network_gbps"] == 10.0
    assert "remote_hosts" in build_engine(several).describe() and build_engine(task).describe()["remote_hosts"] is None
    assert not {"tensor_parallel", "cpu_hosts"} & set(
        simulated_task(load_setting("apex-a10"), "neo", lengths((1, 2))).values
    )


def test_synthetic_lengths_are_those_asked_for():
    made = make_lengths(WorkloadSpec("x", 2000, output_len=300, seed=3), UniformTrace(1000, 300))
    inputs, outputs = ([getattr(row, name) for row in made.rows] for name in ("input_tokens", "output_tokens"))
    assert 899 <= min(inputs) < 910 and 1090 < max(inputs) <= 1101
    assert made.mean_output_tokens == pytest.approx(300, rel=0.002) and max(outputs) <= 334
    assert made.mean_input_tokens == pytest.approx(1000, rel=0.01)
    with pytest.raises(ValueError, match="request rate"):
        make_lengths(WorkloadSpec("x", 5, arrivals="trace"), UniformTrace(1000, 300))


def test_a_sweep_has_every_combination_once():
    panels = [
        {"panel": "a", "setting": "apex-t4", "workload": "osc", "num_requests": 4, "request_rate": [1, 2]},
        {"panel": "b", "setting": "apex-a10", "input_len": 100, "num_requests": 4, "output_len": [10, 20, 30]},
    ]
    settings = {"system": ["swiftllm", "apex"], "baseline": "swiftllm", "panels": panels}
    points = simulated_points(figure_grid(settings, FigureOptions()))
    assert len({point.key for point in points}) == len(points) == 2 * 2 + 3 * 2
    assert all(point.concurrent for point in points)
    assert [point.cost for point in points[4::2]] == sorted(point.cost for point in points[4::2])
    only = simulated_points(figure_grid(settings, FigureOptions(gpu="a10", systems=("swiftllm",), num_requests=7)))
    assert len(only) == 3 and {len(point.task.lengths.rows) for point in only} == {7}


def test_sensitivity_is_spaced_evenly_on_a_logarithmic_axis():
    assumption, values = parse_sensitivity("cpu_bandwidth=20..300")
    assert assumption.field == "cpu_bandwidth_gb_s"
    assert values[0] == 20 and values[-1] == 300 and len(values) == 8
    assert all(1.35 < high / low < 1.6 for low, high in itertools.pairwise(values))


def test_sensitivity_keeps_the_ends_and_stays_between_them():
    values = parse_sensitivity("gpu_blocks=1645..1705")[1]
    assert values[0] == 1645 and values[-1] == 1705 and list(values) == sorted(set(values))
