"""Servers that are started and stopped for a measurement, as real processes with fake behaviour."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, PromptTokens, WorkloadSpec, make_workload
from evaluation.measure.http import replay_workload
from evaluation.measure.server import ServerCommand, ServerEnded, ServerNotReady, launched_server
from evaluation.measure.sessions import end_session, session_stats
from evaluation.results.paths import REPO_ROOT

FAKE = ServerCommand(
    "fake", (sys.executable, "-m", "tests.evaluation.fake_server"), {"PYTHONPATH": str(REPO_ROOT), "APEX_X": "1"}
)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_runs_where_it_is_bound_and_is_gone_afterwards(tmp_path):
    core = max(os.sched_getaffinity(0))
    command = ServerCommand(FAKE.name, FAKE.arguments, FAKE.environment, (core,))
    before = os.sched_getaffinity(0)
    with launched_server(command, tmp_path / "logs" / "fake.log", 30.0) as running:
        pid = running.process.pid
        assert os.sched_getaffinity(pid) == {core} and os.sched_getaffinity(0) == before
        assert running.server.version == "9.9" and is_running(pid)
        used_s = running.processor_s()
        lengths = Lengths(WorkloadSpec("x", 2), "X", Origin("fitted", "for tests"), (TraceRow(4, 300, 0.0),) * 2)
        records = replay_workload(running.server, make_workload(lengths, PromptTokens(100))).records
        assert all(record.completed for record in records)
        assert running.processor_s() >= used_s > 0.0 and running.resident_bytes() > 2**20
    assert not is_running(pid) and session_stats(pid) == {}


def test_what_decides_is_described(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("APEX_X", "0")
    monkeypatch.setenv("HOME_OF_NOTHING", "1")
    described = FAKE.describe()
    assert described["arguments"] == list(FAKE.arguments) and described["cores"] == sorted(os.sched_getaffinity(0))
    assert described["environment"]["OMP_NUM_THREADS"] == "1" and described["environment"]["APEX_X"] == "1"
    assert "HOME_OF_NOTHING" not in described["environment"]


def test_a_server_that_ends_at_once_is_told_with_its_log(tmp_path):
    command = ServerCommand("broken", (sys.executable, "-c", "import sys; sys.exit('no such model')"))
    with pytest.raises(ServerNotReady) as error, launched_server(command, tmp_path / "log", 60.0):
        pass
    assert "broken: it ended with status 1 before it was ready" in str(error.value)
    assert "no such model" in str(error.value) and str(tmp_path / "log") in str(error.value)


def test_a_server_that_ends_while_it_runs_is_told(tmp_path):
    with launched_server(FAKE, tmp_path / "log", 30.0) as running:
        running.check_running(within_s=0.01)
        running.process.kill()
        with pytest.raises(ServerEnded, match="fake: it ended with SIGKILL while it was measured\\nit printed nothing"):
            running.check_running(within_s=30.0)
        assert running.ended() == "it ended with SIGKILL"


def test_a_server_that_never_gets_ready_is_stopped(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    command = ServerCommand("sleeper", (sys.executable, "-c", code))
    with pytest.raises(ServerNotReady, match=r"within 0\.5 s"), launched_server(command, tmp_path / "log", 0.5):
        pass
    assert not is_running(int((tmp_path / "log").read_text()))


def test_cores_that_are_not_there_are_refused(tmp_path):
    command = ServerCommand("fake", FAKE.arguments, cores=(10_000,))
    with pytest.raises(ValueError, match=r"cores \[10000\] are not among"), launched_server(command, tmp_path / "log"):
        pass


def test_children_that_outlive_their_parent_are_ended_with_it():
    """The parent ends at SIGTERM; its child ignores it."""
    ignores = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    child = f"{ignores}; print('ready', flush=True); signal.pause()"
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout.readline() == b"ready\n"
    assert len(session_stats(process.pid)) == 2
    assert end_session(process)
    assert process.stdout.read() == b""  # the pipe closes when the last process ends
    process.stdout.close()


def test_interrupting_twice_leaves_nothing_behind(tmp_path):
    """A server that ends slowly, with a child in another process group that does not end by itself."""
    child = "import os, signal; os.setpgid(0, 0); print(os.getpid(), flush=True); signal.pause()"
    server = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, lambda *_: print('asked to end', flush=True));"
        f"subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    )
    measuring = (
        "import sys; from pathlib import Path; from evaluation.measure.server import ServerCommand, launched_server\n"
        f"with launched_server(ServerCommand('slow', (sys.executable, '-c', {server!r})), Path(sys.argv[1])): pass"
    )
    log = tmp_path / "log"
    os.mkfifo(log)
    command = [sys.executable, "-c", measuring, str(log)]
    process = subprocess.Popen(command, cwd=REPO_ROOT, stderr=subprocess.PIPE)
    with log.open("rb") as printed:
        pid = int(printed.readline())
        process.send_signal(signal.SIGINT)
        assert printed.readline() == b"asked to end\n"
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=300)[1]
        os.set_blocking(printed.fileno(), False)
        try:
            assert printed.read() == b""  # empty: all writers have ended; None would mean that one is left
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
