"""One measured point: sends a workload to a server that is already running."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from apex.replay.metrics import DEFAULT_TARGETS, Targets, compute_metrics
from apex.replay.records import ReplayRequest, RequestRecord
from apex.workloads.requests import Lengths, PromptTokens, Workload, load_prompt_tokens, make_workload
from evaluation.experiments.runner import Point, PointResult
from evaluation.experiments.torch_point import ENGINE_FIELDS, warm_up, workload_values
from evaluation.results.progress import TokenProgress

if TYPE_CHECKING:
    from evaluation.measure.server import LaunchedServer, Server

FRESH_TOKENS = 2
WIDE_REQUESTS = 34
WIDE_PROMPT_TOKENS = 4
WIDE_OUTPUT_TOKENS = 12
END_GRACE_S = 10.0  # a server that fails answers with errors, or not at all, for some seconds before it ends


def wide_warm_up(workload: Workload) -> Workload:
    """The longest prompt of a workload, and a batch of short requests that shrinks step by step.

    GPU servers compile attention kernels when they meet a new kind of batch: a prompt, decodes, one request, a multiple
    of 16 requests. The batch takes all of them. Its requests fit one block of 16 tokens each, so small pools hold it.
    """
    longest = max(workload.requests, key=lambda request: len(request.prompt_token_ids))
    requests = [replace(longest, request_id="warm-up-longest", arrival_s=0.0, output_len=1)]
    for index, request in zip(range(WIDE_REQUESTS), itertools.cycle(workload.requests), strict=False):
        prompt, output_len = request.prompt_token_ids[:WIDE_PROMPT_TOKENS], 1 + index % WIDE_OUTPUT_TOKENS
        requests.append(ReplayRequest(f"warm-up-{index}", 0.0, prompt, output_len, request.service_class))
    return replace(workload, requests=tuple(requests))


@dataclass(frozen=True)
class HttpTask:
    """What an HTTP point runs. ``model`` is the folder whose tokenizer makes the prompts; ``values`` are summary
    fields that are known beforehand (swept variables), or better known than from the server."""

    server: Server
    model: Path
    lengths: Lengths
    values: Mapping[str, Any]
    stall_timeout_s: float = 120.0
    request_timeout_s: float = 1800.0
    duration_s: float | None = None
    """Seconds after which the measurement is broken off; None runs until all requests have ended."""
    ready_timeout_s: float = 60.0
    targets: Targets = DEFAULT_TARGETS
    prompt_tokens: PromptTokens | None = None
    """Tokens of the prompts; by default a text in the model's tokens."""
    launched: LaunchedServer | None = None
    """The server's process if this program started it: if it ends, the point fails at once and says why."""
    warm_up: Callable[[Workload], Workload] = warm_up
    """Makes the requests sent before the measurement; :func:`wide_warm_up` suits servers that compile kernels late."""


class NothingServed(RuntimeError):
    """No request was completed; the message gives a reason."""


def run_http_point(point: Point, label: str, console: Console) -> PointResult:
    """Check that the server still runs, warm it up, and send the workload.

    Raises:
        ServerNotReady: the server is not ready, or is another one than when the run began.
        ServerEnded: the launched server ended while requests were running.
        NothingServed: no request was completed; the point is not saved and runs again with the next command.
    """
    from evaluation.measure.http import replay_workload  # only points that really run need the HTTP client
    from evaluation.measure.server import connect_server, still_running

    task: HttpTask = point.task
    ended = task.launched.ended if task.launched else still_running
    server = connect_server(task.server.name, task.server.url, task.ready_timeout_s, expected=task.server, ended=ended)
    prompt_tokens = task.prompt_tokens or load_prompt_tokens(task.model)
    workload = make_workload(task.lengths, prompt_tokens)
    limits = {"stall_timeout_s": task.stall_timeout_s, "request_timeout_s": task.request_timeout_s, "ended": ended}
    warmed = replay_workload(server, with_fresh_prompts(task.warm_up(workload), prompt_tokens.vocab_size), **limits)
    check_served(task, warmed.records)
    with TokenProgress(label, task.lengths.total_output_tokens, console) as progress:
        limits["duration_s"] = task.duration_s
        result = replay_workload(server, with_fresh_prompts(workload, prompt_tokens.vocab_size), progress, **limits)
    check_served(task, result.records)
    values = {
        "system": server.name,
        "backend": "http",
        "gpu": None,  # what the server runs on is unknown here
        "model": Path(server.model).name,
        "server": server.url if server.version is None else f"{server.url} (version {server.version})",
        **dict.fromkeys(ENGINE_FIELDS),
        "max_model_len": server.max_model_len,
        **workload_values(task.lengths, prompt_tokens),
        **task.values,
        **compute_metrics(result.records, result.wall_s, targets=task.targets, window_s=task.duration_s),
        **result.stats,
    }
    return PointResult(values, result.records, {"server": asdict(server)})


def with_fresh_prompts(workload: Workload, vocab_size: int) -> Workload:
    """The workload with the first tokens of each prompt drawn anew, without a seed.

    A server may cache the KV of earlier prompts (vLLM does by default), and the points of a figure share prompts.
    A prompt that begins differently has no cached prefix, so every point starts with a cold cache.
    """
    rng = np.random.default_rng()

    def fresh(prompt: tuple[int, ...]) -> tuple[int, ...]:
        count = min(FRESH_TOKENS, len(prompt))
        return (*rng.integers(0, vocab_size, count).tolist(), *prompt[count:])

    requests = (replace(request, prompt_token_ids=fresh(request.prompt_token_ids)) for request in workload.requests)
    return replace(workload, requests=tuple(requests))


def check_served(task: HttpTask, records: tuple[RequestRecord, ...]) -> None:
    """Raise if the server ended, or completed nothing. Some failed requests are a result; a server's end is none.

    In a run of fixed duration a token is enough, since all requests may be unfinished at its end.
    """
    if task.launched and task.duration_s is None and not all(record.completed for record in records):
        task.launched.check_running(within_s=END_GRACE_S)
    if not any(record.completed or (task.duration_s is not None and record.token_times_s) for record in records):
        server = task.server
        raise NothingServed(
            f"{server.name} at {server.url} completed none of {len(records)} requests; the first: {records[0].failure}"
        )
