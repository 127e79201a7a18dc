"""The machines of a plane, and the points of the claims map on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from apex.simulator.paper_settings import load_setting
from evaluation.grid import simulate
from evaluation.results.claims import load_claims
from evaluation.run import Point
from evaluation.studies.claims_map import STUDY, Options, PlaneCell, mappable, plane

PANEL = {"setting": "apex-t4", "workload": "osc", "num_requests": 9, "output_len": [50]}
SETTINGS = {"cpu_attention_gb_s": [25], "gpu_pools": [1, 2], "panels": [{"figure": "fig5", **PANEL}]}


@pytest.fixture
def map_points(tmp_path: Path) -> Callable[..., list[Point]]:
    """The points of the small map, with these options."""
    config = tmp_path / "claims-map.yaml"
    config.write_text(yaml.safe_dump(SETTINGS))
    return lambda **options: STUDY.points_of(Options(config=config, **options))


def test_a_plane_holds_the_setting_itself_and_only_pools_that_can_be() -> None:
    setting = load_setting("apex-a10")  # 1,650 blocks of at most 3,785; the longest request needs 1,280
    machines = plane(setting, [25, 180, 250], [0.5, 0.8, 2, 3])
    assert sorted({machine.gpu_blocks for machine in machines}) == [1320, 1650, 3300, 3785]
    assert [machine.cpu_gb_s for machine in machines[:3]] == [25.0, setting.cpu_attention_gb_s("neo"), 250.0]
    assert PlaneCell.of(setting) in machines and len(machines) == 4 * 3


def test_kernels_keep_their_relative_speed_and_the_own_machine_is_the_setting(map_points) -> None:
    setting = load_setting("apex-t4")
    own = PlaneCell.of(setting)
    for point in map_points():
        row, system = point.task.values, point.task.system
        own_rate = setting.cpu_attention_gb_s(system)
        if own_rate is None:
            assert row["reference_cpu_gb_s"] is None and row["cpu_bandwidth_gb_s"] is None
            continue
        times = own_rate / own.cpu_gb_s
        assert row["cpu_bandwidth_gb_s"] == pytest.approx(row["reference_cpu_gb_s"] * times)
        assert (times == 1) == (system == "neo")


def test_gpu_only_systems_run_once_for_each_pool(map_points) -> None:
    points = map_points()
    assert len(points) == len({point.key for point in points})
    systems = [point.task.system for point in points]
    assert {system: systems.count(system) for system in systems} == {"apex": 6, "neo": 6, "vllm": 3}
    assert {point.task.num_gpu_blocks for point in points} == {54, 108, 300}


def test_the_own_machine_gives_the_tasks_of_the_setting(map_points) -> None:
    own = PlaneCell.of(load_setting("apex-t4"))
    for point in map_points(set=("seed=3",)):
        row = point.task.values
        if point.task.num_gpu_blocks != own.gpu_blocks or row["reference_cpu_gb_s"] not in (None, own.cpu_gb_s):
            continue
        plain = simulate({**PANEL, "output_len": 50, "seed": 3, "system": point.task.system})
        assert replace(point.task, values={}) == replace(plain, values={})
        assert plain.values.items() <= row.items()


def test_every_mappable_claim_has_points() -> None:
    claims = load_claims()
    points = STUDY.points_of(Options(quick=True))
    rows = [point.task.values for point in points]
    have = {(row["figure"], row.get("paper_setting", row["setting"])) for row in rows}
    assert (
        len({row["variant"] for row in rows}) == 5
    )  # two readings, each with and without NEO's launches, and NEO's machines
    assert max(point.task.lengths.spec.num_requests for point in points) == 300
    assert {(claim.figure, claim.setting) for claim in claims if mappable(claim)} == have


def test_settings_are_chosen_by_name(map_points) -> None:
    assert map_points(only=("setting=apex-t4",))
    with pytest.raises(ValueError, match="no setting apex-a100; there are apex-t4"):
        map_points(only=("setting=apex-a100",))
