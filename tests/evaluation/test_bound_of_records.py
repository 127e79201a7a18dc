"""Recorded simulated runs are below the bound of their machine and requests."""

from __future__ import annotations

import pytest

from evaluation.drivers import bound_of
from evaluation.results.folder import read_json
from tests.golden.test_records import RECORDS, points_of_record

ALL = {
    record: [
        index
        for index, row in enumerate(rows)
        if row["system"] in ("neo", "apex", "adaptive") and row["request_rate"] is None
    ]
    for record in ("adaptive", "machines", "fig5", "fig7")
    if (rows := [row for row in read_json(RECORDS / record / "summary.json") if row["backend"] == "simulated"])
}
"""By record the rows of systems that decode on the CPU, when all requests are there at once."""


@pytest.mark.parametrize(("record", "index"), [(record, index) for record, rows in ALL.items() for index in rows])
def test_a_recorded_run_is_below_the_bound(record: str, index: int) -> None:
    rows = [row for row in read_json(RECORDS / record / "summary.json") if row["backend"] == "simulated"]
    row, point = rows[index], points_of_record(record, None)[index]
    limit = bound_of(point.task).tokens_per_s
    assert row["system"] == point.task.system
    assert row["output_tokens_per_s"] <= limit
    assert row["output_tokens_per_s"] > 0.2 * limit
