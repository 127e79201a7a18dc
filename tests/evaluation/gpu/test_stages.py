"""Time that is shared out among parts, with parts that hang, fail and crash."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from evaluation.gpu import stages as gpu_stages
from evaluation.gpu.report import read_parts
from evaluation.gpu.stages import MOST_LOG_BYTES, CheckProcess, Stage, chosen_stages, run_stages

HANG = "import threading\ndef hang_here(): threading.Event().wait()\nhang_here()"


def test_a_stage_whose_limit_lies_behind_the_end_waits_for_the_next_call(tmp_path: Path) -> None:
    stages = [Stage(name, limit_s, (CheckProcess(name, ("true",)),)) for name, limit_s in (("a", 9e9), ("b", 60.0))]
    all_well, left = run_stages(stages, tmp_path, time.monotonic() + 3600.0)
    assert all_well and left == stages[:1]
    assert [part[:2] for part in read_parts(tmp_path)] == [["a", "not reached"], ["b", "ok"]]


def test_a_stage_that_needs_less_than_its_limit_gets_what_is_left(tmp_path: Path) -> None:
    write = CheckProcess("a", ("sh", "-c", f"echo {{limit_s}} > {tmp_path}/told"))
    stages = [Stage("a", 9e9, (write,), 30.0), Stage("b", 9e9, (CheckProcess("b", ("true",)),), 4000.0)]
    assert run_stages(stages, tmp_path, time.monotonic() + 3600.0) == (True, stages[1:])
    assert 30 < int((tmp_path / "told").read_text()) <= 3600


def test_what_a_cut_call_did_not_reach_is_in_the_archive(tmp_path: Path) -> None:
    folder, archive = tmp_path / "run", tmp_path / "run.tar.gz"
    copy = CheckProcess("second", ("cp", str(archive), str(tmp_path / "seen.tar.gz")))  # as a cut would leave it
    stages = [Stage("first", 60.0, (CheckProcess("first", ("true",)),)), Stage("second", 60.0, (copy,))]
    assert run_stages(stages, folder, time.monotonic() + 3600.0, archive) == (True, [])
    with tarfile.open(tmp_path / "seen.tar.gz") as tar:
        summary = json.load(tar.extractfile("run/summary.json"))
    assert [part[:2] for part in summary["parts"]] == [["first", "ok"], ["second", "not reached"]]
    assert "Not reached: second." in summary["verdict"]


def test_a_later_call_adds_what_is_not_done_and_repeats_what_failed(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    stages = [
        Stage("well", 60.0, (CheckProcess("well", ("sh", "-c", f"echo x >> {tmp_path}/ran")),)),
        Stage("ill", 60.0, (CheckProcess("ill", ("test", "-e", str(flag))),)),
        Stage("later", 60.0, (CheckProcess("later", ("true",)),)),
    ]
    run_stages(chosen_stages(stages, "well,i*", tmp_path), tmp_path, time.monotonic() + 3600.0)
    assert [part[:2] for part in read_parts(tmp_path)] == [["well", "ok"], ["ill", "failed (1)"]]
    flag.touch()
    left = chosen_stages(stages, None, tmp_path)
    assert [stage.name for stage in left] == ["ill", "later"]
    assert run_stages(left, tmp_path, time.monotonic() + 3600.0) == (True, [])
    assert [part[:2] for part in read_parts(tmp_path)] == [["well", "ok"], ["ill", "ok"], ["later", "ok"]]
    assert (tmp_path / "ran").read_text() == "x\n" and not (tmp_path / "ill.log").exists()
    with pytest.raises(ValueError, match="no stage is called wel; there are well, ill, later"):
        chosen_stages(stages, "wel", tmp_path)


def test_parts_that_hang_fail_or_crash_cost_the_others_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    shell = "sh", "-c"
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    wordy = "import sys; print('x' * 3_000_000); print('the end'); sys.exit(3)"
    stages = [
        Stage("hangs", 3.0, (CheckProcess("hangs", (sys.executable, "-c", HANG)),)),
        Stage(
            "fails",
            60.0,
            (CheckProcess("fails", (sys.executable, "-c", wordy)), CheckProcess("beside", (*shell, "sleep 0.3"))),
        ),
        Stage("crashes", 60.0, (CheckProcess("crashes", (sys.executable, "-c", crash)),)),
        Stage("last", 60.0, (CheckProcess("last", (*shell, f"echo {{limit_s}} > {tmp_path}/told")),)),
    ]
    all_well, left = run_stages(stages, tmp_path, time.monotonic() + 3600.0)
    assert not all_well and not left
    parts = [part[:2] for part in read_parts(tmp_path)]
    assert sorted(parts[1:3]) == [["beside", "ok"], ["fails", "failed (3)"]]
    assert [parts[0], *parts[3:]] == [
        ["hangs", "time limit"],
        ["crashes", "failed (SIGSEGV)"],
        ["last", "ok"],
    ]
    assert int((tmp_path / "told").read_text()) > 0
    assert "in hang_here" in (tmp_path / "hangs.log").read_text(), "a part that hangs says where"
    assert (tmp_path / "fails.log").read_text().endswith("the end\n")
    assert (tmp_path / "fails.log").stat().st_size <= MOST_LOG_BYTES
    assert sorted(path.stem for path in tmp_path.glob("*.log")) == ["crashes", "fails", "hangs"]
    assert json.loads((tmp_path / "summary.json").read_text())["parts"][-1][:2] == ["last", "ok"]
    assert "| hangs | time limit |" in (tmp_path / "README.md").read_text()


def test_the_page_is_there_before_the_last_part(tmp_path: Path) -> None:
    seen = tmp_path / "seen.md"
    look = CheckProcess("looks", ("cp", str(tmp_path / "README.md"), str(seen)))
    stages = [Stage("first", 60.0, (CheckProcess("first", ("true",)),)), Stage("second", 60.0, (look,))]
    assert run_stages(stages, tmp_path, time.monotonic() + 3600.0) == (True, [])
    assert "| first | ok |" in seen.read_text()


def test_who_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    """The part's process holds a pipe open, whose end tells that it is gone."""
    code = f"""
from pathlib import Path
from evaluation.gpu.stages import CheckProcess, Stage, run_stage
part = CheckProcess("hangs", ("sh", "-c", "exec 3> {tmp_path}/fifo; sleep 0.5; echo ready >&3; exec sleep 1000"))
run_stage(Stage("hangs", 1000.0, (part,)), Path({str(tmp_path)!r}))
"""
    os.mkfifo(tmp_path / "fifo")
    process = subprocess.Popen([sys.executable, "-c", code], cwd=gpu_stages.REPO_ROOT, stderr=subprocess.PIPE)
    with (tmp_path / "fifo").open() as alive:
        assert alive.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
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
def test_all_stages_fit_the_time_and_name_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rehearse: bool
) -> None:
    monkeypatch.setattr(gpu_stages, "SANITIZER", sys.executable)
    stages = gpu_stages.all_stages(tmp_path, rehearse)
    names = [part.name for stage in stages for part in stage.parts]
    assert len(set(names)) == len(names) and names[0] == "build"
    assert rehearse or names[-1] == "compute-sanitizer"
    for word in (word for stage in stages for part in stage.parts for word in part.command):
        assert not word.endswith(".py") or (gpu_stages.REPO_ROOT / word).is_file()
    for system in ("swiftllm", "neo", "adaptive"):
        cases = [name.removeprefix("apex-") for name in names if name.startswith("apex-")]
        assert all(names.index(f"apex-{case}") < names.index(f"{system}-{case}") for case in cases), "profiles first"
    factor = gpu_stages.REHEARSAL_FACTOR if rehearse else 1.0
    limits = [stage.limit_s / factor for stage in stages]
    until = [stage.name for stage in stages].index("speeds")
    least = sum(stage.least_s for stage in stages[:until])
    assert least + gpu_stages.END_S <= 60.0 * gpu_stages.MINUTES <= 540.0, "by estimate a call comes to what is first"
    assert max(limits) + gpu_stages.END_S <= 540.0, "where a command may take ten minutes, every stage fits one"
