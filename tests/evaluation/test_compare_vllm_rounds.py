"""What a row says of a server in its round: its own cores, its memory, and what the idle ones took meanwhile."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from evaluation import compare_vllm, drivers
from evaluation.compare_vllm import RoundTask, RunningServers, key_of
from evaluation.measure.server import ServerCommand
from evaluation.run import Point, PointResult


class Launched:
    """A server that has used ``used_s`` of processor time, and takes ``cores`` while it is measured or idle."""

    def __init__(self, used_s: float, cores: float) -> None:
        self.server = SimpleNamespace(version="1.2")
        self.used_s, self.cores = used_s, cores

    def processor_s(self) -> float:
        return self.used_s

    def resident_bytes(self) -> int:
        return 3 << 30


@pytest.mark.parametrize("idle_cores", [0.0, 0.25])
def test_cores_are_those_of_this_round_and_of_each_server(idle_cores: float, monkeypatch, capsys) -> None:
    clock = SimpleNamespace(now_s=100.0)
    commands = [ServerCommand(name, ("serve",), cores=(0, 1)) for name in ("asked", "idle")]
    asked, idle = Launched(50.0, 1.5), Launched(70.0, idle_cores)

    def run_http_point(point: Point, label: str, console: Console) -> PointResult:
        assert point.task.server is asked.server and point.task.launched is asked
        clock.now_s += 20.0
        for server in (asked, idle):
            server.used_s += 20.0 * server.cores
        return PointResult({"output_tokens_per_s": 9.0}, [])

    monkeypatch.setattr(drivers, "run_http_point", run_http_point)
    for module in (compare_vllm, drivers):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s, sleep=lambda seconds: None))
    servers = RunningServers(Path("logs"), Console())
    servers.by_key = {key_of(command): server for command, server in zip(commands, (asked, idle), strict=True)}
    task = RoundTask(commands[0], 2, lengths=None, model=Path("model"), prompt_tokens=None)
    result = servers.run_point(Point("p", "p", "p", task), "p", Console())
    values = result.values
    assert values["server_cores_busy"] == pytest.approx(1.5)
    assert values["idle_servers_cores_busy"] == pytest.approx(idle_cores)
    assert (values["system"], values["panel"], values["cores"], values["round"]) == ("asked", "2 cores", 2, 2)
    assert values["resident_gib"] == 3 and values["output_tokens_per_s"] == 9.0
    assert ("the idle servers used 0.25 cores meanwhile" in capsys.readouterr().out) == bool(idle_cores)
