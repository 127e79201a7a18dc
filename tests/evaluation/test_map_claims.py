"""The script that maps the papers' claims, on a small plane."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from evaluation import map_claims

PLANE = {
    "cpu_attention_gb_s": [25],
    "gpu_pools": [1],
    "panels": [{"figure": "fig5", "setting": "apex-t4", "workload": "osc", "num_requests": 12, "output_len": [50]}],
}


def run(folder: Path) -> Path:
    config = folder / "plane.yaml"
    folder.mkdir()
    config.write_text(yaml.safe_dump(PLANE))
    assert map_claims.main(map_claims.Options(jobs=1, config=config, results_dir=folder)) == 0
    (summary,) = (folder / "claims-map").glob("[0-9a-f]*/summary.json")
    return summary.parent


def test_the_same_seed_gives_the_same_rows_figure_and_table(tmp_path, capsys) -> None:
    first = run(tmp_path / "a")
    printed = capsys.readouterr().out
    assert "SIMULATED" in printed and "apex/vllm" in printed and "Not mapped" in printed
    again = run(tmp_path / "b")
    rows = json.loads((first / "summary.json").read_text())
    assert len(rows) == 2 * (2 * 2 + 1) and {row["backend"] for row in rows} == {"simulated"}  # vllm once a pool
    for name in ("summary.json", "claims.md", "figure.png"):
        assert (first / name).read_bytes() == (again / name).read_bytes()
    table = (first / "claims.md").read_text()
    assert "APEX 5.2: T4, osc" in table and "of 4 |" in table and "states no number" in table
    (first / "figure.png").unlink()
    assert map_claims.main(map_claims.Options(from_folder=first)) == 0
    assert (first / "figure.png").is_file()


def test_an_unknown_setting_ends_with_those_there_are(tmp_path, capsys) -> None:
    assert map_claims.main(map_claims.Options(only=("setting=t5",), results_dir=tmp_path)) == 2
    assert "no setting t5; there are apex-t4" in capsys.readouterr().out
