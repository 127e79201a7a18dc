"""Engines in processes of their own: who shares one, what a death costs, and that none is left."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from evaluation.drivers import TorchTask
from evaluation.measure import live_systems
from evaluation.measure.live_systems import EngineHere, EngineInChild, LiveSystems
from evaluation.measure.processes import still_alive
from evaluation.results.paths import REPO_ROOT
from evaluation.run import Point, PointResult, by_session
from evaluation.study import Study
from swiftllm.config import EngineConfig
from tests.evaluation.papers_machines import FEW, live_point, simulated_profile
from tests.reference.tiny_model import make_tiny_llama

QUIET = Console(file=io.StringIO())
WAIT_S = 20.0


class BrokenTask:
    program = None


def broken_point(session: str) -> Point:
    """Fails in its process before torch is loaded, and does not end the process."""
    return Point("broken", "broken", "broken", BrokenTask(), session=session)


class HangingTask:
    """An engine that hangs as one whose GPU does: in native code that keeps Python's lock, with all signals blocked.

    It has started a process, whose id it writes to ``told``.
    """

    program = None

    def __init__(self, told: Path) -> None:
        self.told = told

    @property
    def engine(self) -> EngineConfig:
        started = subprocess.Popen(["sleep", "1000"])
        self.told.write_text(str(started.pid))
        still_alive(limit_s=0.5)
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        ctypes.PyDLL(None).pause()
        raise AssertionError("it came back")


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + WAIT_S
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def test_a_session_has_one_process_and_the_next_another(tmp_path, monkeypatch):
    monkeypatch.setattr(EngineInChild, "run_point", lambda self, *_: self.child.call(os.getpid, limit_s=WAIT_S))
    with LiveSystems(tmp_path, QUIET) as live:
        seen = [live.run_point(broken_point(session), "", QUIET) for session in ("a", "a", "b")]
        assert seen[0] == seen[1] != seen[2] == live.held.child.pid
        assert not is_running(seen[0]), "two engines would share the card's memory"
        live.stop()
        assert not is_running(seen[2])
        live.stop()  # without a process


def test_an_error_in_a_point_ends_its_process(tmp_path):
    with LiveSystems(tmp_path, QUIET) as live:
        with pytest.raises(AttributeError):
            live.run_point(broken_point("a"), "", QUIET)
        assert live.held is None, "what is left of an engine may hold the card's memory"


def test_a_process_that_dies_or_hangs_is_a_failed_point_and_the_next_runs_in_a_fresh_one(tmp_path):
    """Real engines of one session. One point finds its process killed, the next hangs and is killed."""
    config = EngineConfig(
        str(make_tiny_llama(tmp_path / "model")),
        "cpu",
        "float32",
        num_gpu_blocks=20,
        num_cpu_blocks=20,
        max_model_len=64,
        max_num_batched_tokens=64,
    )
    made = [live_point("swiftllm", config, key, ("s", "swiftllm")) for key in ("first", "second", "killed", "last")]
    told = tmp_path / "told"
    made.insert(3, replace(made[2], key="hangs", group="hangs", label="hangs", task=HangingTask(told)))
    used: dict[str, int] = {}
    console = Console(file=io.StringIO(), width=300)
    with LiveSystems(tmp_path / "logs", console) as live:

        def run(point, label, console):
            if point.key == "killed":
                os.kill(used["second"], signal.SIGKILL)
            result = live.run_point(point, label, console)
            used[point.key] = live.held.child.pid
            return result

        outcome = Study("x", run_point=run, describe=lambda points: {}).run(made, tmp_path, console=console)
    assert outcome.failed == ["killed", "hangs"]
    assert [(row["backend"], row["completed"], row["failed"]) for row in outcome.summary] == [("torch-cpu", 2, 0)] * 3
    assert used["first"] == used["second"] != used["last"]
    assert "the engine's process died (SIGKILL)" in (outcome.folder / "errors" / "killed.txt").read_text()
    assert "the engine's process hung" in (outcome.folder / "errors" / "hangs.txt").read_text()
    assert not any(map(is_running, used.values())), "a process outlived the run"
    assert wait_until_gone(int(told.read_text())), "what the hung engine had started outlived it"
    shown = " ".join(console.file.getvalue().split())
    assert "FAILED: the engine's process died" in shown and "--jobs" not in shown
    assert "no sign of life for 0.5 s and was killed; the others go on" in shown


def test_an_interrupt_ends_the_process(tmp_path):
    seen: list[int] = []

    def interrupt(live: LiveSystems) -> None:
        while live.held is None:
            time.sleep(0.01)
        seen.append(live.held.child.pid)
        _thread.interrupt_main()

    config = EngineConfig(str(tmp_path / "a folder that the engine never gets to look for"))
    with LiveSystems(tmp_path, QUIET) as live:
        threading.Thread(target=interrupt, args=(live,), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            live.run_point(live_point("swiftllm", config), "", QUIET)
        assert live.held is None and not is_running(seen[0])


def test_a_killed_harness_takes_its_engine_along():
    code = (
        "import io, os, time\n"
        "from rich.console import Console\n"
        "from evaluation.measure.live_systems import EngineInChild\n"
        "from evaluation.run import Point\n"
        "engine = EngineInChild()\n"
        "try: engine.run_point(Point('x', 'x', 'x', 'no task', session='a'), '', Console(file=io.StringIO()))\n"
        "except AttributeError: print(engine.child.pid, flush=True)\n"
        "time.sleep(600)"
    )
    harness = subprocess.Popen([sys.executable, "-c", code], cwd=REPO_ROOT, stdout=subprocess.PIPE, text=True)
    try:
        engine = int(harness.stdout.readline())
        assert is_running(engine)
    finally:
        harness.kill()
        harness.wait()
        harness.stdout.close()
    try:
        assert wait_until_gone(engine)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGKILL)


def test_points_of_a_session_come_together_and_others_keep_their_order():
    order = [("a1", "a"), ("b1", "b"), ("c", "c"), ("a2", "a"), ("b2", "b"), ("d", "d")]
    points = [Point(key, key, key, None, session=session) for key, session in order]
    assert [point.key for point in by_session(points)] == ["a1", "a2", "b1", "b2", "c", "d"]
    alone = [Point(str(number), "", "", None) for number in range(5)]
    assert by_session(alone) == alone


def test_profiles_are_measured_once_for_each_engine(tmp_path, monkeypatch):
    from apex.simulator.paper_settings import load_setting

    asked = []

    def profile_of(config):
        asked.append(config)
        return replace(simulated_profile(load_setting("apex-t4"))(config), start_s=3.0)

    monkeypatch.setattr(live_systems, "profile_of", profile_of)
    small, large = (EngineConfig("m", num_gpu_blocks=blocks) for blocks in (54, 80))
    with LiveSystems(tmp_path, QUIET, EngineHere) as live:
        first = live.profile(small)
        assert live.profile(small) is first and live.profile(large).start_s == 3.0
    assert asked == [small, large]


def test_a_server_serves_its_session_and_never_beside_an_engine(tmp_path, monkeypatch):
    """The card holds one system: what lives is stopped before another one starts."""
    happened = []

    @contextlib.contextmanager
    def launched(command, log, ready_timeout_s, console):
        happened.append(f"start {log.stem}")
        yield log.stem
        happened.append(f"stop {log.stem}")

    class Engine:
        def run_point(self, point, label, console):
            happened.append(f"engine {point.key}")
            return PointResult({}, [])

        def profile(self, config):
            happened.append("profile")
            return None

        def stop(self):
            happened.append("engine stopped")

    def run_launched(point, running, label, console):
        happened.append(f"{point.key} on {running}")
        if point.key == "fails":
            raise RuntimeError("no luck")
        return PointResult({}, [])

    monkeypatch.setattr("evaluation.measure.server.launched_server", launched)
    monkeypatch.setattr(live_systems, "run_launched_point", run_launched)
    monkeypatch.setattr(live_systems, "server_command", lambda task: None)
    config = EngineConfig("m")

    def served(key: str, session: str) -> Point:
        return Point(key, key, key, TorchTask("vllm", config, FEW, {}, 9.0, Path("vllm")), session=(session, "vllm"))

    with LiveSystems(tmp_path, QUIET, Engine) as live:
        for point in (served("1", "a"), served("2", "a"), served("3", "b")):
            live.run_point(point, "", QUIET)
        live.run_point(live_point("neo", config), "", QUIET)
        with pytest.raises(RuntimeError):
            live.run_point(served("fails", "b"), "", QUIET)
        live.run_point(served("4", "b"), "", QUIET)
        live.profile(config)
    assert happened == [
        "start a-vllm", "1 on a-vllm", "2 on a-vllm", "stop a-vllm", "start b-vllm", "3 on b-vllm", "stop b-vllm",
        "engine neo", "engine stopped", "start b-vllm", "fails on b-vllm", "stop b-vllm", "start b-vllm",
        "4 on b-vllm", "stop b-vllm", "profile", "engine stopped",
    ]  # fmt: skip


def test_a_plan_rests_on_the_first_start_of_an_engine(tmp_path, monkeypatch):
    """Starts take another time whenever they are measured, and then an interrupted run would not be found again."""
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    config = EngineConfig(
        str(make_tiny_llama(tmp_path / "tiny")), "cpu", "float32", num_gpu_blocks=16, num_cpu_blocks=64,
        max_num_batched_tokens=32, max_model_len=64, gpu_batch_threads=1, cpu_threads=1,
    )  # fmt: skip
    machine, again = live_systems.profile_of(config), live_systems.profile_of(config)
    assert machine.table == again.table and machine.start_s == again.start_s > 0.0
    (stored,) = (tmp_path / "cache" / "profiles").glob("*.start")
    stored.write_text("7.5\n")
    assert live_systems.profile_of(config).start_s == 7.5
