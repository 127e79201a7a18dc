"""The simulated ablation: every setting has a workload that it takes, and rows differ in their change alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from apex.simulator.paper_settings import load_setting, setting_names
from evaluation.grid import TASK
from evaluation.studies.ablation import OF_APEX, OF_NEO, ROWS, Options, run_simulated, simulated_points

OF_CPU_BATCHES = ("cpu-batches-1", "cpu-batches-4", "no-priority", "no-request-limit", "compare-overlap")
"""Rows that matter only where several CPU batches are under way, some of them while pipelining pays."""


@pytest.mark.parametrize("setting", setting_names())
def test_every_setting_has_rows_of_one_workload_that_it_takes(setting):
    points = simulated_points(Options(backend="simulated", setting=(setting,), num_requests=12))
    paper = load_setting(setting)
    assert [point.key for point in points] == list(ROWS)
    assert len({point.task.lengths.digest() for point in points}) == 1
    for point in points:
        row = ROWS[point.key]
        assert (point.task.system, point.task.strategy) == (row.system, row.strategy)
        assert point.task.synchronous == row.synchronous and point.task.whole_swaps == ("whole_swaps" in row.axes)
        assert point.task.values["num_clipped"] == 0 and len(point.task.lengths.rows) == 12
        assert point.task.num_gpu_blocks == paper.num_gpu_blocks and point.concurrent


def test_defaults_are_long_outputs_on_an_a10_in_both_readings():
    points = simulated_points(Options(backend="simulated", rows=("swiftllm",)))
    assert [point.key for point in points] == ["apex-a10-as-measured-swiftllm", "apex-a10-swiftllm"]
    lengths = points[0].task.lengths
    assert lengths.spec.num_requests == 300
    assert lengths.mean_input_tokens == pytest.approx(1000, rel=0.02)
    assert lengths.mean_output_tokens == pytest.approx(500, rel=0.02)


def test_machine_and_workload_can_be_chosen():
    chosen = {"host": "g5-4xlarge", "num_gpu_blocks": 1700, "cpu_kv_gb": 9.0, "workload": "livebench"}
    chosen |= {"setting": ("apex-a10",), "rows": ("neo", "apex"), "num_requests": 5, "request_rate": 2.0}
    neo, apex = simulated_points(Options(backend="simulated", kernel="native", **chosen))
    for point in (neo, apex):
        task = point.task
        assert task.values["host"].startswith("g5.4xlarge") and task.num_gpu_blocks == 1700
        assert task.num_cpu_blocks == 9 * 10**9 // (16 * 128 * 1024) and task.lengths.spec.request_rate == 2.0
        assert task.lengths.spec.name == "livebench" and task.values["cpu_kernel"] == "native"
    (fast,) = simulated_points(Options(backend="simulated", cpu_bandwidth=99.0, **{**chosen, "rows": ("neo",)}))
    assert fast.task.values["cpu_bandwidth_gb_s"] == 99.0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"setting": ("apex-t4",), "input_len": 800, "output_len": 100}, "apex-t4 takes at most 832 tokens a request"),
        ({"setting": ("apex-h100",)}, "no setting 'apex-h100'"),
        (
            {"num_gpu_blocks": 20},
            "the longest request takes 1.. blocks of 16 tokens, and the pool has 20: give a larger",
        ),
        ({"cpu_bandwidth": 30.0, "rows": ("ispc-kernel",)}, "no rows ispc-kernel: all systems have one kernel"),
        ({"workload": "lorem"}, "lorem"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        simulated_points(Options(backend="simulated", **options))


def outcomes(points) -> dict[str, tuple[float, int]]:
    """SIMULATED tokens/s and iterations of each row."""
    done = {point.key: run_simulated(point, point.key, Console(quiet=True)).values for point in points}
    return {name: (values["output_tokens_per_s"], values["iterations"]) for name, values in done.items()}


def without_effect(points) -> set[str]:
    """The rows whose outcome is that of their system without the change."""
    found = outcomes(points)
    return {name for name in found if ROWS[name].unchanged and found[name] == found[ROWS[name].unchanged]}


def test_each_change_of_a_system_changes_what_it_plans_or_how_long_it_takes():
    """On a workload of this test's own, in which both strategies run and blocks are swapped."""
    changed = (name for name, row in ROWS.items() if row.group in (OF_APEX, OF_NEO))
    names = ("neo", "apex", *(name for name in changed if name not in (*OF_CPU_BATCHES, "no-correction")))
    place = {"setting": ("apex-a10-as-measured",), "num_requests": 110, "num_gpu_blocks": 1300}
    assert not without_effect(
        simulated_points(Options(backend="simulated", rows=names, input_len=3000, output_len=60, **place))
    )


def crowded(rows: tuple[str, ...]) -> list:
    """Points where several CPU batches are under way while the inequality changes sides."""
    machine = {"setting": ("apex-t4-as-measured",), "num_gpu_blocks": 225, "cpu_bandwidth": 12.0}
    return simulated_points(
        Options(backend="simulated", rows=rows, num_requests=200, input_len=400, output_len=100, **machine)
    )


def test_each_change_about_cpu_batches_changes_a_run_in_which_several_are_under_way():
    assert not without_effect(crowded(("apex", *OF_CPU_BATCHES)))


def test_correction_pays_where_the_cpu_is_slower_than_its_profile():
    slow = [
        replace(point, task=TASK["actual_over_believed"](point.task, 3.0))
        for point in crowded(("apex", "no-correction"))
    ]
    found = outcomes(slow)
    assert found["apex"][0] > 1.2 * found["no-correction"][0]
