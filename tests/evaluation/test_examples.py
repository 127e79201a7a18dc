"""The example of a figure of one's own, as docs/reproduce/artifact.md shows it."""

from __future__ import annotations

import json
from pathlib import Path

from evaluation.examples import host_bandwidth

MOST_LINES = 40


def test_a_figure_is_one_short_file_and_an_experiment_file(tmp_path: Path) -> None:
    assert len(Path(host_bandwidth.__file__).read_text().splitlines()) <= MOST_LINES
    assert host_bandwidth.main(host_bandwidth.Options(quick=True, jobs=1, results_dir=tmp_path)) == 0
    folder = tmp_path / "host-bandwidth/latest"
    rows = json.loads((folder / "summary.json").read_text())
    found = {(row["system"], row["host_read_gb_s"]): row for row in rows}
    assert found.keys() == {
        ("swiftllm", None),
        *((system, gb_s) for system in ("neo", "adaptive") for gb_s in (30, 120)),
    }
    assert found["swiftllm", None]["ratio"] == 1.0
    for system in ("neo", "adaptive"):
        slow, fast = (found[system, gb_s] for gb_s in (30, 120))
        assert slow["cpu_bandwidth_gb_s"] < fast["cpu_bandwidth_gb_s"] and slow["ratio"] < fast["ratio"]
    assert (folder / "figure.png").stat().st_size > 20_000
