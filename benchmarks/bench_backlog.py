"""Measures how long latency-sensitive requests wait while thousands of best-effort bodies arrive at once.

The engine is simulated and takes the time that it predicts. Scheduler, service, HTTP server and sockets are real. Two
clients with plain sockets have a process each, so that neither delays the other. One sends latency-sensitive requests
at a rate and times their first tokens. The other sends all best-effort bodies as fast as it can, and reads nothing.

Three phases are told apart by the arrival of a latency-sensitive request: alone, while bodies arrive (until all are
queued), and behind the full queue. Linux only: the times of threads come from /proc.

python benchmarks/bench_backlog.py [--help]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import re
import socket
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import httpx
import numpy as np

from apex.cli.options import parse_options
from apex.perf.model import Curve, ProfileTable, Surface
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from evaluation.measure.http import BEST_EFFORT_PRIORITY, allow_open_files
from evaluation.measure.server import connect_server
from evaluation.results.folder import FlatRecord, ResultFolder, markdown_table
from evaluation.results.paths import RESULTS_DIR, default_model
from swiftllm.engine.engine import Engine
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.processes import reserved_port
from swiftllm.server.engine_process import EngineService
from swiftllm.server.run import run_server
from swiftllm.server.settings import ServerSettings

NUM_LAYERS = 4
VOCAB_SIZE = 49_152
TTFT_SLO_S, TPOT_SLO_S = 2.0, 0.1
TIMEOUT_S = 60.0
LOOK_EVERY_S = 0.25
URGENT_PROMPT_LEN = 32
BODY_MAX_TOKENS = 4000  # none ends while others are still being queued
QUEUED = re.compile(r'^apex:num_requests_(?:waiting|running)\{.*service_class="best-effort".*\} (\S+)', re.MULTILINE)
WORD = " the"  # one token
PHASES = ("alone", "arriving", "queued")
COLUMNS = (
    ("round", "round", "{}"),
    *((f"{phase}_ttft_s_{q}", f"{phase}: first token, {q} (s)", "{:.3f}") for phase in PHASES for q in ("p50", "p99")),
    ("refused", "refused", "{}"),
    ("until_queued_s", "until all are queued (s)", "{:.2f}"),
    ("loop_ms_per_body", "event loop, ms of CPU a body", "{:.3f}"),
)


@dataclass(frozen=True)
class Options:
    """Measure what a burst of best-effort bodies costs latency-sensitive requests."""

    system: str = "omniserve"
    """System whose scheduler plans the steps."""
    bodies: int = 5000
    """Best-effort requests that arrive at once."""
    prompt_len: int = 250
    """Tokens of their prompts."""
    prompt: Literal["tokens", "text"] = "tokens"
    """Whether their prompts are sent as token ids or as text, which the server tokenizes."""
    rate: float = 5.0
    """Latency-sensitive requests per second."""
    step_ms: float = 10.0
    """Milliseconds of a step of the engine without prompts; a prompt's 100 tokens take as long again."""
    alone_s: float = 5.0
    """Seconds of the first phase."""
    queued_s: float = 5.0
    """Seconds of the last phase."""
    rounds: int = 3
    """Runs, whose medians are printed."""
    results_dir: Path = RESULTS_DIR
    """Results go to bench_backlog/<run>/ in this folder."""


# -- the server -------------------------------------------------------------------------------------------------------


def timed_engine(options: Options) -> Engine:
    """An engine that sleeps for the time that a step takes by its table, and whose clock is the machine's."""
    layer_s = options.step_ms / 1e3 / NUM_LAYERS
    free = Surface((1, 2), (Curve((0, 1), (0.0, 0.0)),) * 2)
    table = ProfileTable(
        {}, linear=Curve((1, 101), (layer_s, 2 * layer_s)), ends=Curve((1, 2), (0.0, 0.0)),
        swap=Curve((1, 2), (0.0, 0.0)), prefill_attention=free, gpu_attention=free, cpu_attention=free,
    )  # fmt: skip
    tokenizer = Tokenizer.from_folder(default_model())
    engine = build_simulated(
        options.system, table, NUM_LAYERS, num_gpu_blocks=400, num_cpu_blocks=4000, vocab_size=VOCAB_SIZE,
        strategy=StrategyConfig(ttft_slo_s=TTFT_SLO_S, tpot_slo_s=TPOT_SLO_S),
    )  # fmt: skip
    engine.tokenizer = tokenizer
    backend, step, start_s = engine.backend, engine.step, time.perf_counter()
    engine.state.now = backend.now = lambda: time.perf_counter() - start_s

    def timed_step() -> Any:
        before_s, began_s = backend.clock_s, time.perf_counter()
        outputs = step()
        time.sleep(max(0.0, backend.clock_s - before_s - (time.perf_counter() - began_s)))
        return outputs

    engine.step = timed_step
    return engine


def build_service(options: Options) -> EngineService:
    """What the engine's process runs."""
    return EngineService(timed_engine(options))


def serve(options: Options, port: int) -> None:
    """The server's process."""
    run_server(partial(build_service, options), ServerSettings(port=port, served_model_name="simulated"))


def loop_s(pid: int) -> float:
    """Seconds of CPU that the process' first thread, which runs the event loop, has used."""
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


# -- the clients ------------------------------------------------------------------------------------------------------


def message(**fields: Any) -> bytes:
    body = {"temperature": 0.0, "ignore_eos": True, "stream": True, **fields}
    data = json.dumps(body).encode()
    kind = "Content-Type: application/json"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def send_bodies(options: Options, port: int, begin: Event, end: Event) -> None:
    """The best-effort client's process: send all bodies, and keep the connections until the end."""
    allow_open_files(options.bodies + 100)
    prompt = WORD * options.prompt_len if options.prompt == "text" else [5] * options.prompt_len
    data = message(prompt=prompt, max_tokens=BODY_MAX_TOKENS, priority=BEST_EFFORT_PRIORITY)
    begin.wait()
    connections = []
    for _ in range(options.bodies):
        connections.append(socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S))
        connections[-1].sendall(data)
    end.wait()


@dataclass
class Timed:
    """A latency-sensitive request: when it arrived, seconds to its first token, and whether it was refused."""

    arrival_s: float
    ttft_s: float
    refused: bool


async def first_token(port: int, data: bytes, arrival_s: float) -> Timed:
    """Send a request and read its answer. The answer's first event has the first token."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        head = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " in head.partition(b"\r\n")[0]:
            await reader.readuntil(b"data: ")
        timed = Timed(arrival_s, time.perf_counter() - arrival_s, b" 429 " in head.partition(b"\r\n")[0])
        await reader.readuntil(b"0\r\n\r\n") if not timed.refused else None
        return timed
    finally:
        writer.close()


async def num_queued(url: str) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, trust_env=False) as client:
        return round(sum(map(float, QUEUED.findall((await client.get("/metrics")).text))))


async def watch(options: Options, port: int, pid: int, begin: Event) -> dict[str, Any]:
    """Send latency-sensitive requests through all phases. Returns the figures of the run.

    Raises:
        TimeoutError: not all bodies were queued in time.
    """
    url = f"http://127.0.0.1:{port}"
    data = message(prompt=[5] * URGENT_PROMPT_LEN, max_tokens=8)
    await first_token(port, data, time.perf_counter())  # first calls pay for lazy initialisation
    start_s = time.perf_counter()
    tasks: list[asyncio.Task[Timed]] = []

    async def send() -> None:
        for number in itertools.count():
            arrival_s = start_s + number / options.rate
            await asyncio.sleep(arrival_s - time.perf_counter())
            tasks.append(asyncio.create_task(first_token(port, data, arrival_s)))

    sender = asyncio.create_task(send())
    await asyncio.sleep(options.alone_s)
    before_s, begin_s = loop_s(pid), time.perf_counter()
    begin.set()
    async with asyncio.timeout(TIMEOUT_S):
        while await num_queued(url) < options.bodies:
            await asyncio.sleep(LOOK_EVERY_S)
    queued_s, used_s = time.perf_counter(), loop_s(pid) - before_s
    await asyncio.sleep(options.queued_s)
    sender.cancel()
    timed = await asyncio.gather(*tasks)
    found: dict[str, Any] = {
        "refused": sum(each.refused for each in timed),
        "until_queued_s": queued_s - begin_s,
        "loop_ms_per_body": 1e3 * used_s / options.bodies,
    }
    for phase, since_s, until_s in zip(PHASES, (0.0, begin_s, queued_s), (begin_s, queued_s, np.inf), strict=True):
        times_s = [each.ttft_s for each in timed if since_s <= each.arrival_s < until_s and not each.refused]
        for quantile in (50, 99):
            found[f"{phase}_ttft_s_p{quantile}"] = float(np.percentile(times_s, quantile)) if times_s else None
    return found


def measure(options: Options) -> dict[str, Any]:
    """One run, with a new server.

    Raises:
        TimeoutError: not all bodies were queued in time.
    """
    with reserved_port() as port:
        return measure_on(port, options)


def measure_on(port: int, options: Options) -> dict[str, Any]:
    """The same, with the server's port."""
    context = multiprocessing.get_context("spawn")
    begin, end = context.Event(), context.Event()
    server = context.Process(target=serve, args=(options, port))
    bodies = context.Process(target=send_bodies, args=(options, port, begin, end), daemon=True)
    server.start()
    bodies.start()
    try:
        connect_server("simulated", f"http://127.0.0.1:{port}", 60.0)
        return asyncio.run(watch(options, port, server.pid, begin))
    finally:
        end.set()
        for process in (bodies, server):
            process.kill()
            process.join()


def main(options: Options) -> int:
    """Measure, print the medians, save."""
    configuration = {name: str(value) for name, value in asdict(options).items() if name != "results_dir"}
    folder = ResultFolder("bench_backlog", configuration, options.results_dir)
    folder.record_invocation()
    records: list[FlatRecord] = []
    for number in range(1, options.rounds + 1):
        fixed = {"system": options.system, "backend": "measured: best-effort bodies", "num_requests": options.bodies}
        records.append({**fixed, "round": number, **measure(options)})
        print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
    folder.save_summary(records, markdown_table(records, COLUMNS))
    for key, title, form in COLUMNS[1:]:
        values = [record[key] for record in records if record[key] is not None]
        print(f"{title:>36}: {form.format(float(np.median(values))) if values else 'none'}")
    print(f"summary and provenance: {folder.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="benchmarks/bench_backlog.py")))
