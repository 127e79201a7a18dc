"""The check of a GPU machine, rehearsed on the CPU: every part runs and the report has all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def test_rehearsal_writes_a_report(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(REPO / "scripts/gpu_check.sh"), "--rehearse", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert [result for _, result, _ in summary["parts"]] == ["ok"] * 8
    assert [run["system"] for run in summary["runs"]] == ["swiftllm", "neo", "apex"]
    assert all(run["measured"]["completed"] and run["simulated"]["completed"] for run in summary["runs"])
    page = (tmp_path / "run/README.md").read_text()
    assert "A rehearsal on a CPU" in page and "weight-reading floor" in page
    assert (tmp_path / "run/end_to_end.png").stat().st_size > 5000
    assert sum(file.stat().st_size for file in (tmp_path / "run").rglob("*")) < 2 << 20, "too large to commit"
