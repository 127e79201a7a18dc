"""What is expected on AWS: every instance has a price and a tier that leaves it room, and the table is the page's."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex.simulator.hardware_files import load_host
from evaluation.options import experiment_settings
from evaluation.studies.aws import HOURS, Options, appendix, expectations, points

PRICES = experiment_settings("aws")["usd_per_hour"]
PAGE = Path(__file__).parents[2] / "docs/reproduce/aws.md"


@pytest.fixture(scope="module")
def tasks():
    return [point.task for point in points(Options())]


def test_every_instance_has_a_price_and_a_tier_that_leaves_it_room(tasks) -> None:
    assert {task.values["instance"] for task in tasks} == set(PRICES)
    for task in tasks:
        there = load_host(task.values["instance"])["memory_gb"] * 2**30 / 1e9
        assert 0 < task.values["cpu_kv_gb"] <= there - 4.0, task.values["instance"]
        assert task.system == "vllm" or task.hardware.table.identity["cpu_kernel"] == "native"


def row(system: str, rate: float) -> dict:
    return {
        "instance": "g5-xlarge", "workload": "livebench", "output_len": None, "output_len_mean": 534.0, "setting": "x",
        "system": system, "output_tokens_per_s": rate, "cpu_kv_gb": 12.0, "wall_s": 120.0,
    }  # fmt: skip


def test_ratios_minutes_and_dollars() -> None:
    rates = {"vllm": 10.0, "neo": 20.0, "apex": 30.0, "adaptive": 40.0}
    (line,) = expectations([row(*item) for item in rates.items()], PRICES)
    assert (line["apex/vllm"], line["apex/neo"], line["neo/vllm"], line["adaptive/vllm"]) == (3.0, 1.5, 2.0, 4.0)
    assert line["minutes"] == 8.0 and line["usd"] == pytest.approx(HOURS * 1.006)
    assert appendix([line]).splitlines()[2] == "| g5.xlarge | livebench, 534 | 3.00 | 1.50 | 2.00 | 4.00 | 8.05 |"


def test_the_page_has_a_line_for_each_instance_and_workload(tasks) -> None:
    page = PAGE.read_text()
    for task in tasks:
        assert f"| {task.values['instance'].replace('-', '.', 1)} | {task.lengths.spec.name}, " in page
