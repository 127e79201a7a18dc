"""The points of the experiment file: what is swept, what a system is told, and a machine slower than believed."""

from __future__ import annotations

import pytest

from evaluation.options import experiment_settings
from evaluation.run import Point
from evaluation.studies.omniserve import Options, parts
from swiftllm.core.request import ServiceClass

SETTINGS = experiment_settings("omniserve")


def make(section: str, *systems: str) -> list[Point]:
    only = (f"system={','.join(systems)}",) if systems else ()
    options = Options(set=("duration_s=2",), only=only)
    return parts(options)[section.removeprefix("fig")].points_of(options)


@pytest.mark.parametrize("section", SETTINGS["figures"])
def test_every_section_has_points_with_keys_of_their_own(section: str) -> None:
    points = make(section)
    assert len({point.key for point in points}) == len(points) > 0
    here = SETTINGS["figures"][section]
    assert here["quick"]["duration_s"] < here["duration_s"]
    for point in points:
        task = point.task
        assert task.duration_s == 2.0
        assert task.strategy.ttft_slo_s == task.values["ttft_slo_s"]
        assert task.strategy.tpot_slo_s == task.values["tpot_slo_s"]
        assert task.strategy.disable_admission_control is not task.values["admission_control"]
        assert max(row.arrival_s for row in task.lengths.rows) < 2.0


def test_systems_without_classes_are_told_of_one() -> None:
    tasks = {point.task.system: point.task for point in make("fig12")}
    assert {name for name, task in tasks.items() if task.one_class} == {"neo"}
    classes = {row.service_class for row in tasks["neo"].lengths.rows}
    assert classes == set(ServiceClass)


def test_a_slower_machine_has_its_own_table_and_the_scheduler_the_old_one() -> None:
    points = {point.key: point.task for point in make("a10")}
    right = points["a-apex-a10-dailymails-backlog-rate1-tpot0.2-hosts1-omniserve"]
    slower = points["slower-apex-a10-dailymails-backlog-rate1-tpot0.2-hosts1-slower1.15-omniserve"]
    assert right.believed is None and slower.believed == right.hardware.table
    for name in ("linear", "ends"):
        believed, actual = getattr(slower.believed, name), getattr(slower.hardware.table, name)
        assert actual.seconds == pytest.approx([1.15 * value for value in believed.seconds])


def test_hosts_add_memory_and_a_pool_can_be_replaced() -> None:
    hosts = {point.task.values["cpu_hosts"]: point.task for point in make("fig18")}
    assert hosts[5].num_cpu_blocks == 5 * hosts[1].num_cpu_blocks
    assert hosts[1].hardware.remote_hosts is None and hosts[5].hardware.remote_hosts.count == 4
    pools = {point.task.num_gpu_blocks for point in make("a10")}
    assert pools == {1650, 3785}


def test_short_outputs_run_on_machines_faster_and_slower_than_believed() -> None:
    tasks = [point.task for point in make("a10-limits")]
    short = [task for task in tasks if (task.values["best_effort"] or "").endswith("-short-backlog")]
    assert {task.values["slower"] for task in short} == {0.88, 1.0, 1.18}
    rests = [[row for row in task.lengths.rows if row.service_class is ServiceClass.BEST_EFFORT] for task in short]
    assert all(sum(row.output_tokens for row in rows) / len(rows) == pytest.approx(50, rel=0.02) for rows in rests)


def test_unknown_systems_are_refused_and_known_ones_selected() -> None:
    with pytest.raises(ValueError, match="nothing"):
        make("fig12", "nothing")
    points = make("fig12", "sarathi")
    assert {point.task.system for point in points} == {"sarathi"}
