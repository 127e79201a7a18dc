"""Time that is shared out among parts, with parts that hang, fail and crash."""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from evaluation.gpu import stages as gpu_stages
from evaluation.gpu.stages import Part, Stage, run_stages, share

HANG = "import threading\ndef hang_here(): threading.Event().wait()\nhang_here()"


def limits(total_s: float, seconds: list[float], hanging: set[int]) -> list[float]:
    """What each stage may take where those of ``hanging`` take all of it and the others no time."""
    left_s, granted = total_s, []
    for place in range(len(seconds)):
        granted.append(share(left_s, seconds[place:]))
        left_s -= granted[-1] if place in hanging else 0.0
    return granted


def test_whatever_hangs_nobody_gets_less_than_a_fair_share() -> None:
    total_s, seconds = 500.0, [120.0, 95.0, 50.0, 75.0, 15.0]
    for count in range(len(seconds) + 1):
        for hanging in itertools.combinations(range(len(seconds)), count):
            granted = limits(total_s, seconds, set(hanging))
            for limit_s, wanted_s in zip(granted, seconds, strict=True):
                assert limit_s >= 0.999 * total_s * wanted_s / sum(seconds), (hanging, granted)
            assert sum(granted[place] for place in hanging) <= 1.001 * total_s
    after_none, after_one = (limits(total_s, seconds, hanging)[-1] for hanging in (set(), {0}))
    assert after_one < after_none, "what one leaves goes to the others"
    assert share(-3.0, seconds) == 0.0


def test_parts_that_hang_fail_or_crash_cost_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    shell = "sh", "-c"
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    wordy = "import sys; print('x' * 3_000_000); print('the end'); sys.exit(3)"
    stages = [
        Stage(3.0, (Part("hangs", (sys.executable, "-c", HANG)), Part("beside", (*shell, "echo unseen")))),
        Stage(3.0, (Part("fails", (sys.executable, "-c", wordy)),)),
        Stage(3.0, (Part("crashes", (sys.executable, "-c", crash)),)),
        Stage(9.0, (Part("last", (*shell, f"echo {{limit_s}} > {tmp_path}/told")),)),
    ]
    assert not run_stages(stages, tmp_path, time.monotonic() + 18.0)
    parts = [line.split("\t")[:2] for line in (tmp_path / "parts.txt").read_text().splitlines()]
    assert parts == [
        ["beside", "ok"],
        ["hangs", "time limit"],
        ["fails", "failed (3)"],
        ["crashes", "failed (SIGSEGV)"],
        ["last", "ok"],
    ]
    assert int((tmp_path / "told").read_text()) > 0
    assert "in hang_here" in (tmp_path / "hangs.log").read_text(), "a part that hangs says where"
    assert (tmp_path / "fails.log").read_text().endswith("the end\n")
    assert (tmp_path / "fails.log").stat().st_size <= gpu_stages.MOST_LOG_BYTES
    assert sorted(path.stem for path in tmp_path.glob("*.log")) == ["crashes", "fails", "hangs"]
    assert json.loads((tmp_path / "summary.json").read_text())["parts"][-1][:2] == ["last", "ok"]
    assert "| hangs | time limit |" in (tmp_path / "README.md").read_text()


def test_the_page_is_there_before_the_last_part(tmp_path: Path) -> None:
    seen = tmp_path / "seen.md"
    look = Part("looks", ("cp", str(tmp_path / "README.md"), str(seen)))
    assert run_stages([Stage(1.0, (Part("first", ("true",)),)), Stage(1.0, (look,))], tmp_path, time.monotonic() + 60.0)
    assert "| first | ok |" in seen.read_text()


def test_who_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    """The part's process holds a pipe open, whose end tells that it is gone."""
    code = f"""
from pathlib import Path
from evaluation.gpu.stages import Part, Stage, run_stage
part = Part("hangs", ("sh", "-c", "exec 3> {tmp_path}/fifo; sleep 0.5; echo ready >&3; exec sleep 1000"))
run_stage(Stage(1.0, (part,)), Path({str(tmp_path)!r}), limit_s=1000.0)
"""
    os.mkfifo(tmp_path / "fifo")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=gpu_stages.REPO_ROOT, stderr=subprocess.PIPE)
    with (tmp_path / "fifo").open() as alive:
        assert alive.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert errors.endswith(b"KeyboardInterrupt\n")
        assert select.select([alive], [], [], 30.0)[0] and alive.read() == ""


def test_what_is_missing_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert gpu_stages.lacking() is None
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "g++-of-my-own")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_stages.lacking() == "there is no gcc: install it, or set CC"
    monkeypatch.setattr(gpu_stages.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert f"there is no {tmp_path}/Python.h: install python3." in gpu_stages.lacking()


@pytest.mark.parametrize("rehearse", [True, False])
def test_all_stages_fit_the_time_and_name_what_is_there(tmp_path: Path, rehearse: bool) -> None:
    stages = gpu_stages.all_stages(tmp_path, tmp_path, rehearse)
    names = [part.name for stage in stages for part in stage.parts]
    assert len(set(names)) == len(names) and names[0] == "build" and names[-1] == "report"
    for word in (word for stage in stages for part in stage.parts for word in part.command):
        assert not word.endswith(".py") or (gpu_stages.REPO_ROOT / word).is_file()
    for system in ("swiftllm", "neo"):
        cases = [name.removeprefix("apex-") for name in names if name.startswith("apex-")]
        assert all(names.index(f"apex-{case}") < names.index(f"{system}-{case}") for case in cases), "profiles first"
