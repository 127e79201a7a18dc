"""Servers that are measured in turn: all of them stay up, and those that are not asked must leave the cores alone."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from apex.workloads.requests import Lengths, PromptTokens
from evaluation.experiments.http_point import HttpTask, run_http_point
from evaluation.experiments.runner import Point, PointResult
from evaluation.measure.server import LaunchedServer, Server, ServerCommand, launched_server
from evaluation.measure.vllm import ENVIRONMENT, READY_TIMEOUT_S

IDLE_SHARE_THAT_DISTURBS = 0.05  # cores
QUIET_CHECK_S, MOST_QUIET_CHECKS = 1.0, 20
BENCH_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class RoundTask:
    """The measurement of one server in one round."""

    command: ServerCommand
    round: int
    lengths: Lengths
    model: Path
    prompt_tokens: PromptTokens


def cores_text(cores: int) -> str:
    return f"{cores} core{'s' if cores > 1 else ''}"


def key_of(command: ServerCommand) -> str:
    return f"{command.name}-{len(command.cores)}core"


def label_of(command: ServerCommand) -> str:
    return f"{command.name} on {cores_text(len(command.cores))}"


class RunningServers(contextlib.ExitStack):
    """Servers, started when first needed and stopped at the end."""

    def __init__(self, logs: Path, console: Console) -> None:
        super().__init__()
        self.logs = logs
        self.console = console
        self.by_key: dict[str, LaunchedServer] = {}

    def get_server(self, command: ServerCommand) -> LaunchedServer:
        """The ready server of a command, started unless it is running."""
        if key_of(command) not in self.by_key:
            log = self.logs / f"{key_of(command)}.log"
            launched = launched_server(command, log, READY_TIMEOUT_S, self.console, label_of(command))
            self.by_key[key_of(command)] = self.enter_context(launched)
        return self.by_key[key_of(command)]

    def run_point(self, point: Point, label: str, console: Console) -> PointResult:
        """Measure one server in one round."""
        measured: RoundTask = point.task
        command, running = measured.command, self.get_server(measured.command)
        others = [server for server in self.by_key.values() if server is not running]
        _await_quiet(others)
        prompts = measured.prompt_tokens
        task = HttpTask(running.server, measured.model, measured.lengths, {}, prompt_tokens=prompts, launched=running)
        start, own, idle = time.monotonic(), running.processor_s(), _processor_s(others)
        result = run_http_point(replace(point, task=task), label, console)
        seconds = time.monotonic() - start
        values = {
            **result.values,
            "system": command.name,
            "server": f"version {running.server.version}",
            "panel": cores_text(len(command.cores)),
            "cores": len(command.cores),
            "round": measured.round,
            "server_cores_busy": (running.processor_s() - own) / seconds,
            "idle_servers_cores_busy": (_processor_s(others) - idle) / seconds,
            "resident_gib": running.resident_bytes() / 2**30,
        }
        if values["idle_servers_cores_busy"] > IDLE_SHARE_THAT_DISTURBS:
            text = f"the idle servers used {values['idle_servers_cores_busy']:.2f} cores meanwhile"
            console.print(f"warning: {text}", style="yellow", highlight=False)
        return PointResult(values, result.records, {**result.details, "command": command.describe()})


def _processor_s(servers: Sequence[LaunchedServer]) -> float:
    return sum(server.processor_s() for server in servers)


def _await_quiet(servers: Sequence[LaunchedServer]) -> None:
    """Wait until idle servers leave the cores alone, some seconds at most: vLLM's go on after their last request."""
    for _ in range(MOST_QUIET_CHECKS):
        before = _processor_s(servers)
        time.sleep(QUIET_CHECK_S)
        if _processor_s(servers) - before < IDLE_SHARE_THAT_DISTURBS * QUIET_CHECK_S:
            return


class BenchFailed(RuntimeError):
    """vLLM's client produced no result; the message holds the end of its output."""


def bench_serve(
    vllm: Path, server: Server, model: Path, num_requests: int, input_len: int, output_len: int, result: Path
) -> dict[str, Any]:
    """Send random prompts by `vllm bench serve`, an independent client, all at once, and wait for all answers.

    Returns:
        The client's figures, with the numbers of ``completed`` and ``failed`` requests among them, as in ``result``.

    Raises:
        BenchFailed: the client ended with an error or took too long.
    """
    command = [
        str(vllm), "bench", "serve", "--backend", "openai", "--base-url", server.url, "--endpoint", "/v1/completions",
        "--model", server.model, "--tokenizer", str(model), "--dataset-name", "random",
        "--num-prompts", str(num_requests), "--random-input-len", str(input_len),
        "--random-output-len", str(output_len), "--ignore-eos", "--disable-tqdm", "--save-result",
        "--result-dir", str(result.parent), "--result-filename", result.name,
    ]  # fmt: skip
    result.parent.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            command, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=BENCH_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise BenchFailed(f"vllm bench serve took longer than {BENCH_TIMEOUT_S:g} s") from None
    if done.returncode != 0 or not result.is_file():
        end = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise BenchFailed(f"vllm bench serve ended with status {done.returncode}:\n{end}")
    return json.loads(result.read_text())
