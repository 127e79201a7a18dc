"""The machines of a plane, and the points of the claims map on them."""

from __future__ import annotations

import pytest

from apex.simulator.paper_settings import load_setting
from evaluation.experiments.claims_map.points import Machine, make_map_points, mappable, plane
from evaluation.experiments.options import experiment_settings
from evaluation.experiments.papers.options import FigureOptions
from evaluation.experiments.papers.points import figure_grid, simulated_points
from evaluation.experiments.places import setting_of
from evaluation.experiments.simulated_point import describe_simulated_points
from evaluation.results.claims import load_claims

PANEL = {"setting": "apex-t4", "workload": "osc", "num_requests": 9, "output_len": [50]}
SETTINGS = {"cpu_attention_gb_s": [25], "gpu_pools": [1, 2], "panels": [{"figure": "fig5", **PANEL}]}


def test_a_plane_holds_the_setting_itself_and_only_pools_that_can_be() -> None:
    setting = load_setting("apex-a10")  # 1,650 blocks of at most 3,785; the longest request needs 1,280
    machines = plane(setting, [25, 180, 250], [0.5, 0.8, 2, 3])
    assert sorted({machine.gpu_blocks for machine in machines}) == [1320, 1650, 3300, 3785]
    assert [machine.cpu_gb_s for machine in machines[:3]] == [25.0, setting.cpu_attention_gb_s("neo"), 250.0]
    assert Machine.of(setting) in machines and len(machines) == 4 * 3


def test_kernels_keep_their_relative_speed() -> None:
    setting = load_setting("apex-a10")
    place = {"setting": "apex-a10", "reference_cpu_gb_s": 25.0, "num_gpu_blocks": 3300}
    neo, apex, vllm = (setting_of({**place, "system": system}) for system in ("neo", "apex", "vllm"))
    assert neo.cpu_attention_gb_s("neo") == pytest.approx(25.0)
    times = setting.cpu_attention_gb_s("apex") / setting.cpu_attention_gb_s("neo")
    assert apex.cpu_attention_gb_s("apex") == pytest.approx(25.0 * times) and times > 1.1
    assert vllm.num_gpu_blocks == 3300


def test_gpu_only_systems_run_once_for_each_pool() -> None:
    points = make_map_points(SETTINGS, load_claims())
    assert len(points) == len({point.key for point in points})
    systems = [point.task.system for point in points]
    assert {system: systems.count(system) for system in systems} == {"apex": 6, "neo": 6, "vllm": 3}
    assert {point.task.num_gpu_blocks for point in points} == {54, 108, 300}


def test_the_own_machine_gives_the_points_of_the_figure() -> None:
    def described(points: list) -> list:
        return sorted(({**entry, "key": ""} for entry in describe_simulated_points(points)), key=str)

    section = {"system": ["vllm", "neo", "apex"], "baseline": "neo", "panels": [{"panel": "a", **PANEL}]}
    own = Machine.of(load_setting("apex-t4"))
    points = make_map_points(SETTINGS, load_claims(), seed=3)
    here = [
        point
        for point in points
        if point.task.num_gpu_blocks == own.gpu_blocks
        and point.task.values["reference_cpu_gb_s"] in (None, own.cpu_gb_s)
    ]
    assert described(here) == described(simulated_points(figure_grid(section, FigureOptions(seed=3))))


def test_every_mappable_claim_has_points() -> None:
    claims = load_claims()
    points = make_map_points(experiment_settings("claims-map"), claims, quick=True)
    have = {(point.task.values["figure"], point.task.values["setting"]) for point in points}
    assert max(point.task.lengths.spec.num_requests for point in points) == 300
    assert {(claim.figure, claim.setting) for claim in claims if mappable(claim)} == have


def test_settings_are_chosen_by_name() -> None:
    assert make_map_points(SETTINGS, load_claims(), names=["apex-t4"])
    with pytest.raises(ValueError, match="no panel in setting apex-a100; there are apex-t4"):
        make_map_points(SETTINGS, load_claims(), names=["apex-a100"])
