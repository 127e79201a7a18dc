"""The cells of the map: their machines, their lengths, and systems that need no CPU."""

from __future__ import annotations

from collections import Counter

import pytest

from apex.simulator.calibrated_profile import host_read_gb_s
from apex.simulator.hardware import load_host
from evaluation.experiments.adaptive.bandwidth_map import make_map_points, with_read_gb_s
from evaluation.experiments.adaptive.cases import Selection, make_case_points
from evaluation.experiments.options import experiment_settings

SETTINGS = experiment_settings("adaptive")
SMALL = {**SETTINGS, "map": {**SETTINGS["map"], "num_requests": {25: 4, 300: 4}, "host_read_gb_s": [12, 120]}}


def test_every_cell_has_every_system_once() -> None:
    points = make_map_points(SMALL, Selection())
    assert len({point.key for point in points}) == len(points)
    # GPU-only systems have a point for each length; the others one for each length, bandwidth and kernel.
    assert Counter(point.task.system for point in points) == {"swiftllm": 2, "neo": 8, "apex": 8, "adaptive": 8}
    assert {p.task.values["host_read_gb_s"] for p in points if p.task.system == "swiftllm"} == {None}
    assert {p.task.values["kernel"] for p in make_map_points(SMALL, Selection(kernel="ispc"))} == {None, "ispc"}


def test_a_host_with_other_memory_changes_what_its_cores_read_and_nothing_else() -> None:
    host = load_host("dual-xeon-6342")
    other = with_read_gb_s(host, 100.0)
    assert host_read_gb_s(other) == pytest.approx(100.0) and host_read_gb_s(host) == pytest.approx(0.8 * 409.6)
    assert {name for name in host.figures if other[name] != host[name]} == {"peak_bandwidth_gb_s"}


def test_a_kernel_reads_what_its_arithmetic_leaves() -> None:
    """Seconds per GB: reading, and the arithmetic, measured on a core alone, which reads 17 GB/s."""
    host = load_host("dual-xeon-6342")
    rates = {
        (p.task.values["kernel"], p.task.system): p.task.values["cpu_bandwidth_gb_s"]
        for p in make_map_points(SMALL, Selection())
        if p.task.values["host_read_gb_s"] == 120
    }
    for (kernel, system), rate in rates.items():
        own = {"neo": "ispc", "apex": "llamafile", "adaptive": "llamafile"}[system]
        fraction = host[f"{own if kernel == 'own' else kernel}_avx512_gqa"]
        assert rate == pytest.approx(1 / (1 / 120 + (1 / fraction - 1) / 17 / 48))
    assert rates["own", "neo"] < rates["own", "adaptive"] == rates["own", "apex"] < rates["native", "neo"] < 120


def test_the_cells_are_no_cases() -> None:
    """Their seed and their lengths are others, so that nothing was chosen to fit them."""
    column = {**SETTINGS, "map": {**SETTINGS["map"], "host_read_gb_s": [12]}}
    points, cases = make_map_points(column, Selection(quick=True)), make_case_points(SETTINGS, Selection(quick=True))
    assert {p.task.lengths.spec.seed for p in points}.isdisjoint(p.task.lengths.spec.seed for p in cases)
    machines = {(p.task.values["setting"], p.task.lengths.spec.name, p.task.lengths.spec.output_len) for p in cases}
    assert machines.isdisjoint(
        (p.task.values["setting"], p.task.lengths.spec.name, p.task.lengths.spec.output_len) for p in points
    )
    assert len({p.task.lengths.spec.output_len for p in points}) == 7


def test_the_bound_is_that_of_the_cell_s_cpu() -> None:
    bounds = {
        (p.task.values["kernel"], p.task.values["host_read_gb_s"]): p.task.values["bound_tokens_per_s"]
        for p in make_map_points(SMALL, Selection())
        if p.task.values["case"] == "out300"
    }
    assert bounds.pop((None, None)) is None
    assert bounds["own", 12] <= bounds["native", 12] < bounds["own", 120] < bounds["native", 120]


def test_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="leave out --cases"):
        make_map_points(SMALL, Selection(cases=["t4-osc-50"]))
