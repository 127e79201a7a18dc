"""Measures what the front end's work costs the engine: the gaps between stages, with and without many bodies.

The engine is that of bench_server_overhead.py, with stages that take a millisecond. Scheduler, service, HTTP server
and sockets are real. In each round 64 clients stream; first nothing else happens, then another process sends long
prompts at a rate. They are refused, as the queue is full, or queued as best-effort requests, for which the streams
leave no place.

The gaps are times between the ends of two stages on the engine's thread, in the same server before and after the
bodies begin. They are shown with and without the time in which the thread was ready and the kernel gave it no core
(Linux' run delay): on two cores that is long whatever takes them. For comparison, in the runs called "unrelated" a
process that has nothing to do with the server computes half the time, in place of the bodies. The memory is that of
the server's processes together; pages that they share count once (PSS).

python benchmarks/bench_stage_gaps.py [--help]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Literal

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import numpy as np

from apex.cli.options import parse_options
from benchmarks.bench_server_overhead import Options as EngineOptions
from benchmarks.bench_server_overhead import running, zero_time_engine
from benchmarks.overhead_clients import completion_request, stream_all
from evaluation.measure.http import BEST_EFFORT_PRIORITY, allow_open_files
from evaluation.results.folder import FlatRecord, ResultFolder, markdown_table
from evaluation.results.paths import RESULTS_DIR
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import ServiceLimits

NUM_LAYERS = 32
QUANTILES = (50, 99, 99.9)
SETTLE_S = 1.0
WORK_S = 2e-3
MOST_UNREAD = 32  # answers, before the next body waits for one
COLUMNS = (
    ("fate", "bodies are", "{}"),
    ("round", "round", "{}"),
    *((f"idle_gap_ms_p{q:g}", f"gap, no bodies: p{q:g} (ms)", "{:.2f}") for q in QUANTILES),
    *((f"bodies_gap_ms_p{q:g}", f"bodies: p{q:g}", "{:.2f}") for q in QUANTILES),
    ("growth_gap", "p99 grows by", "{:+.1%}"),
    ("idle_own_ms_p99", "with a core, no bodies: p99", "{:.2f}"),
    ("bodies_own_ms_p99", "bodies: p99", "{:.2f}"),
    ("growth_own", "grows by", "{:+.1%}"),
    ("sent_per_s", "bodies/s", "{:.0f}"),
    ("pss_mib", "memory (MiB)", "{:.0f}"),
)


@dataclass(frozen=True)
class Options:
    """Measure what long bodies cost the engine's steps."""

    system: str = "fastdecode"
    """System whose scheduler plans the steps; this one runs each stage by itself, as decodes on the CPU do."""
    streams: int = 64
    """Number of clients that stream at the same time."""
    rate: float = 200.0
    """Bodies a second."""
    prompt_len: int = 4000
    """Tokens of their prompts."""
    fates: tuple[Literal["refused", "queued", "unrelated"], ...] = ("refused", "queued", "unrelated")
    """What becomes of the bodies, one run for each; unrelated: there are none, and a process computes."""
    stage_ms: float = 1.0
    """Milliseconds of a stage."""
    seconds: float = 5.0
    """Seconds with bodies, and as many without them."""
    rounds: int = 3
    """Runs, interleaved, whose medians are printed."""
    results_dir: Path = RESULTS_DIR
    """Results go to bench_stage_gaps/<run>/ in this folder."""


class ThreadDelay:
    """For how long the thread that asks has been ready to run without a core."""

    def __init__(self) -> None:
        self._file: int | None = None

    def seconds(self) -> float:
        if self._file is None:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        return int(os.pread(self._file, 100, 0).split()[1]) * 1e-9


def compute_half_the_time() -> None:
    """Until the process is killed."""
    while True:
        end_s = time.perf_counter() + WORK_S
        while time.perf_counter() < end_s:
            pass
        time.sleep(WORK_S)


def build_service(options: Options, fate: str, path: Path) -> EngineService:
    """What the engine's process runs. ``path`` gets the times at which stages ended."""
    sizes = EngineOptions(options.system, options.streams, most_tokens(options))
    engine = zero_time_engine(sizes, NUM_LAYERS, max_num_seqs=options.streams)
    stage, close, ends = engine.backend.run_stage, engine.close, []
    delay = ThreadDelay()

    def timed_stage(layer: int, batches: Sequence[Any]) -> Mapping[str, int]:
        tokens = stage(layer, batches)
        time.sleep(options.stage_ms / 1e3)
        ends.append((time.perf_counter(), delay.seconds()))
        return tokens

    def close_and_save() -> None:
        close()
        path.write_text(json.dumps(ends))

    engine.backend.run_stage, engine.close = timed_stage, close_and_save
    num_places = options.streams if fate == "refused" else 1_000_000
    return EngineService(engine, ServiceLimits(num_places, num_places, drain_timeout_s=0.5))


def most_tokens(options: Options) -> int:
    """More than a stream can get."""
    return int((2 * options.seconds + 10 * SETTLE_S) / (options.stage_ms / 1e3 * NUM_LAYERS))


def send_bodies(options: Options, fate: str, port: int, begin: Event, num_sent: Any) -> None:
    """The process of the bodies' client, until it is killed. Each body has a connection of its own."""
    if fate == "unrelated":
        begin.wait()
        compute_half_the_time()
    allow_open_files(100_000)
    priority = BEST_EFFORT_PRIORITY if fate == "queued" else 0
    data = completion_request([5] * options.prompt_len, 8, priority=priority)
    under_way: deque[socket.socket] = deque()
    begin.wait()
    start_s = time.perf_counter()
    while True:
        time.sleep(max(0.0, start_s + num_sent.value / options.rate - time.perf_counter()))
        under_way.append(socket.create_connection(("127.0.0.1", port)))
        under_way[-1].sendall(data)
        num_sent.value += 1
        if fate == "refused" and len(under_way) > MOST_UNREAD:
            with under_way.popleft() as oldest:
                if b" 429 " not in oldest.recv(1 << 16):
                    raise RuntimeError("a body was not refused")


def pss_mib(pid: int) -> float:
    """Memory of a process and of those below it, in MiB."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    own = next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return own / 1024 + sum(map(pss_mib, map(int, children)))


def measure(options: Options, fate: str) -> FlatRecord:
    """One run, with a new server."""
    context = multiprocessing.get_context("spawn")
    begin, num_sent = context.Event(), context.Value("i", 0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "stages.json")
        with running(partial(build_service, options, fate, path)) as server:
            bodies = context.Process(target=send_bodies, args=(options, fate, server.port, begin, num_sent))
            streams = (server.port, options.streams, most_tokens(options))
            reader = threading.Thread(target=stream_all, args=streams, daemon=True)
            bodies.start()
            reader.start()
            time.sleep(2 * SETTLE_S)
            idle_s = time.perf_counter(), time.perf_counter() + options.seconds
            time.sleep(options.seconds)
            begin.set()
            time.sleep(SETTLE_S)
            before, with_bodies_s = num_sent.value, (time.perf_counter(), time.perf_counter() + options.seconds)
            time.sleep(options.seconds)
            num_in_window, memory = num_sent.value - before, pss_mib(server.process.pid)
            bodies.kill()
            server.end()
        ended_s, delayed_s = np.array(json.loads(path.read_text())).T
    record = {"fate": fate, "pss_mib": memory, "sent_per_s": num_in_window / options.seconds}
    for phase, (since_s, until_s) in (("idle", idle_s), ("bodies", with_bodies_s)):
        within = (ended_s >= since_s) & (ended_s < until_s)
        gaps_ms, delays_ms = 1e3 * np.diff(ended_s[within]), 1e3 * np.diff(delayed_s[within])
        for kind, values in (("gap", gaps_ms), ("own", gaps_ms - delays_ms)):
            record |= {f"{phase}_{kind}_ms_p{q:g}": float(np.percentile(values, q)) for q in QUANTILES}
        record[f"{phase}_stages_per_s"] = len(gaps_ms) / options.seconds
    for kind in ("gap", "own"):
        record[f"growth_{kind}"] = record[f"bodies_{kind}_ms_p99"] / record[f"idle_{kind}_ms_p99"] - 1
    return record


def main(options: Options) -> int:
    """Measure, print the medians, save."""
    configuration = {name: str(value) for name, value in asdict(options).items() if name != "results_dir"}
    folder = ResultFolder("bench_stage_gaps", configuration, options.results_dir)
    folder.record_invocation()
    fixed = {"system": options.system, "backend": "measured: gaps between stages", "num_requests": options.streams}
    records: list[FlatRecord] = []
    for number in range(1, options.rounds + 1):
        for fate in options.fates:
            records.append({**fixed, "round": number, **measure(options, fate)})
            print(f"round {number} of {options.rounds}, {fate}", file=sys.stderr, flush=True)
    folder.save_summary(records, markdown_table(records, COLUMNS))
    for fate in options.fates:
        of_fate = [record for record in records if record["fate"] == fate]
        for key, title, form in COLUMNS[2:]:
            print(f"{fate}: {title:>32} {form.format(float(np.median([record[key] for record in of_fate])))}")
    print(f"summary and provenance: {folder.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="benchmarks/bench_stage_gaps.py")))
