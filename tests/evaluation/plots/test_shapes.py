"""The shapes of the papers' figures, on reduced runs of their simulated machines."""

from __future__ import annotations

import pytest
from rich.console import Console

from apex.simulator.paper_settings import load_setting
from evaluation.drivers import run_point
from evaluation.grid import Grid, simulate
from evaluation.options import experiment_settings
from evaluation.run import Point
from evaluation.studies.papers import FigureOptions, figure_grid, simulated_points

NEVER_BELOW = 0.97
SLOW_CPU_GB_S = 30.0


def rates(grid: Grid) -> list[dict[str, float]]:
    """Output tokens/s of each system, for each point of the only panel of a grid."""
    points = simulated_points(grid)
    values = [run_point(point, point.label, Console(quiet=True)).values for point in points]
    assert all(value["failed"] == 0 for value in values)
    places = {value["output_len"]: {} for value in values}
    for value in values:
        places[value["output_len"]][value["system"]] = value["output_tokens_per_s"]
    return list(places.values())


def panel_of(figure: str, index: int, num_requests: int, systems: tuple[str, ...]) -> Grid:
    """One of a figure's panels with today's kernels."""
    section = {**experiment_settings(figure)["simulated"], "baseline": systems[0]}
    panels = figure_grid(section, FigureOptions(systems=systems, num_requests=num_requests)).panels
    today = [panel for panel in panels if load_setting(panel["setting"]).like is None]
    return Grid((today[index],))


@pytest.mark.parametrize(
    ("figure", "index", "num_requests"),
    [("fig5", 0, 100), ("fig5", 1, 200), ("fig5", 2, 120), ("fig5", 3, 60), ("fig7", 0, 80)],
)
def test_offloading_never_loses_on_the_papers_workloads(figure: str, index: int, num_requests: int) -> None:
    grid = panel_of(figure, index, num_requests, ("swiftllm", "neo", "apex"))
    if figure == "fig7":
        grid = grid.with_(output_len=[50, 300, 1000])
    for point in rates(grid):
        for system in ("neo", "apex"):
            assert point[system] >= NEVER_BELOW * point["swiftllm"], (grid.panels, system, point)


def test_as_apex_measured_algorithm_1_overlaps_on_the_a10_and_pipelines_on_the_t4() -> None:
    """CPU attention below a tenth of the GPU's rarely meets inequality (6) (APEX section 3.2)."""
    mixes = {}
    for name, lengths in (("apex-a10", {"workload": "livebench"}), ("apex-t4", {"workload": "osc", "output_len": 200})):
        for setting in (f"{name}-as-measured", name):
            place = {"setting": setting, "system": "apex", "num_requests": 120, **lengths}
            task = simulate(place)
            result = run_point(Point(setting, setting, setting, task), setting, Console(quiet=True))
            mixes[setting] = result.details["engine_stats"]["strategy_iterations"]
    assert mixes["apex-a10-as-measured"].get("asynchronous-overlap", 0) > 0
    for other in ("apex-a10", "apex-t4", "apex-t4-as-measured"):
        assert not mixes[other].get("asynchronous-overlap") and mixes[other]["asymmetric-pipelining"] > 0


@pytest.mark.thorough
def test_apex_gains_on_neo_with_the_output_length_when_the_cpu_is_slow() -> None:
    """An A10 with CPU attention below a tenth of its rate: APEX's own regime (its section 3.2)."""
    assert 0.1 * load_setting("apex-a10").gpu_attention_gb_s() > SLOW_CPU_GB_S
    grid = panel_of("fig7", 0, 100, ("neo", "apex"))
    grid = grid.with_(cpu_bandwidth_gb_s=SLOW_CPU_GB_S, output_len=[100, 300, 1000])
    gains = [point["apex"] / point["neo"] for point in rates(grid)]
    assert len(gains) == 3 and gains[0] < gains[1] < gains[2], gains
