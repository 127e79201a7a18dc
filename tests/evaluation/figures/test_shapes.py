"""The shapes of the papers' figures, on reduced runs of their simulated machines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from evaluation.experiments.options import experiment_settings
from evaluation.experiments.points import run_point
from evaluation.experiments.simulated_sweeps import Panel, Sweep, make_simulated_points, make_sweep

NEVER_BELOW = 0.97
SYSTEMS = ("swiftllm", "neo", "apex")
SLOW_CPU_GB_S = 30.0


def sweep_of(figure: str, num_requests: int) -> Sweep:
    return make_sweep(experiment_settings(figure)["simulated"], systems=SYSTEMS, num_requests=num_requests)


def rates(sweep: Sweep, panel: Panel) -> list[dict[str, float]]:
    """Output tokens/s of each system, for each point of a panel."""
    points = make_simulated_points(replace(sweep, panels=(panel,)))
    values = [run_point(point, point.label, Console(quiet=True)).values for point in points]
    assert all(value["failed"] == 0 for value in values)
    size = len(sweep.systems)
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    return [{value["system"]: value["output_tokens_per_s"] for value in group} for group in groups]


@pytest.mark.parametrize(
    ("figure", "index", "num_requests"),
    [("fig5", 0, 100), ("fig5", 1, 200), ("fig5", 2, 120), ("fig5", 3, 60), ("fig7", 0, 80)],
)
def test_offloading_never_loses_on_the_papers_workloads(figure: str, index: int, num_requests: int) -> None:
    sweep = sweep_of(figure, num_requests)
    panel = sweep.panels[index]
    if figure == "fig7":
        panel = replace(panel, output_lens=(50, 300, 1000))
    for point in rates(sweep, panel):
        for system in ("neo", "apex"):
            assert point[system] >= NEVER_BELOW * point["swiftllm"], (panel.workload, system, point)


def test_apex_gains_on_neo_with_the_output_length_when_the_cpu_is_slow() -> None:
    """An A10 with CPU attention below a tenth of its rate: APEX's own regime (its section 3.2)."""
    sweep = sweep_of("fig7", 150)
    setting = replace(sweep.panels[0].setting, cpu_bandwidth_gb_s=SLOW_CPU_GB_S)
    assert 0.1 * setting.gpu_attention_gb_s() > SLOW_CPU_GB_S
    panel = replace(sweep.panels[0], setting=setting, output_lens=(100, 300, 1000))
    gains = [point["apex"] / point["neo"] for point in rates(replace(sweep, systems=("neo", "apex")), panel)]
    assert gains[0] < gains[1] < gains[2], gains
