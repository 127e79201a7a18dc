"""Measures the time that the HTTP server adds to a token, at 64 streams, with an engine that takes no time.

The engine is simulated. Scheduler, service, detokenizer, HTTP server and sockets are real. Clients in another process
stream at the same time. There are two metrics, both by one clock:

- Time added to each token: from the return of its step on the engine's thread until the last byte of its event is in
  the client's socket. The kernel's time stamp is used, so the client's own reading does not count. All tokens of a step
  are ready at once and queue for one event loop, so most of this time is waiting for other streams' tokens. The main
  columns count tokens of steps in which all streams are open. One column counts all tokens, also those of steps in
  which requests are still being accepted.
- Per-token latency as docs/serving/metrics.md defines it: a request's latency over its tokens. It is an average over a
  stream, and includes the wait for acceptance, the scheduler and the engine's bookkeeping.

At pace 0 (flat out) the next step begins as soon as the server keeps up. There both metrics must stay within 2 ms at
the 99th percentile. The other paces run a step every few milliseconds, as on real hardware, and show the cost of a
processor that idles between steps.

python benchmarks/bench_server_overhead.py [--help]
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import multiprocessing
import re
import selectors
import socket
import struct
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import numpy as np

from apex.cli.options import parse_options
from apex.perf.model import FREE, ProfileTable, Surface
from apex.replay.metrics import distribution_metrics, output_tokens_per_s, per_token_latency_s
from apex.replay.records import RequestRecord
from apex.simulator.build import build_simulated
from apex.workloads.requests import load_prompt_tokens
from evaluation.measure.server import connect_server
from evaluation.results.folder import FlatRecord, ResultFolder, flat_record, markdown_table
from evaluation.results.paths import RESULTS_DIR, default_model
from swiftllm.core.request import RequestOutput
from swiftllm.engine.engine import Engine
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.processes import reserved_port
from swiftllm.server.engine_process import EngineService
from swiftllm.server.run import run_server
from swiftllm.server.settings import ServerSettings
from swiftllm.systems import systems

# -- clients -----------------------------------------------------------------------------------------------------------
# The clients of bench_server_overhead.py: read all streams at once, with the arrival time of every part.

PROMPT_LEN = 16
TIMEOUT_S = 30.0
SO_TIMESTAMPNS = 35  # Linux: arrival times of received data; Python has no name for it
TIMESTAMP = struct.Struct("qq")
EVENT = re.compile(rb"data: (\{.*?\})\n\n")
LAST_EVENT = b"data: [DONE]"


@dataclass
class ClientStream:
    """A connection and the parts read from it, each with the arrival time of its last byte."""

    connection: socket.socket
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    def is_over(self) -> bool:
        return LAST_EVENT in b"".join(self.parts[-2:])

    def read(self) -> bool:
        """Read the available data. Returns False at the end of the stream."""
        part, stamps, _, _ = self.connection.recvmsg(65_536, socket.CMSG_SPACE(TIMESTAMP.size))
        seconds, nanoseconds = TIMESTAMP.unpack(stamps[0][2]) if stamps else (time.time(), 0)  # the end has no stamp
        self.parts.append(part)
        self.times_s.append(seconds + 1e-9 * nanoseconds)
        return bool(part) and not self.is_over()

    def arrivals(self) -> tuple[str, list[float]]:
        """The engine's id of the request, and the arrival time of each token."""
        ends = list(itertools.accumulate(map(len, self.parts)))
        arrived_s: list[float] = []
        name = ""
        for match in EVENT.finditer(b"".join(self.parts)):
            event = json.loads(match[1])
            if event["choices"]:
                name = f"{event['id']}-0"
                new = event["usage"]["completion_tokens"] - len(arrived_s)
                arrived_s += [self.times_s[bisect.bisect_left(ends, match.end())]] * new
        return name, arrived_s


def completion_request(prompt: list[int], output_len: int, **fields: object) -> bytes:
    """A request for a stream of so many tokens. ``fields`` go into its body, too."""
    body = {
        "prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, **fields,
    }  # fmt: skip
    data = json.dumps(body).encode()
    kind = "Content-Type: application/json"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def stream_all(port: int, num_streams: int, output_len: int) -> list[ClientStream]:
    """Send all requests and read until all streams end. Nothing else runs meanwhile.

    Raises:
        RuntimeError: nothing has arrived for TIMEOUT_S.
    """
    data = completion_request([5] * PROMPT_LEN, output_len)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        streams = []
        for _ in range(num_streams):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            streams.append(ClientStream(connection))
            selector.register(connection, selectors.EVENT_READ, streams[-1])
        for stream in streams:
            stream.sent_s = time.time()
            stream.connection.sendall(data)
        left = num_streams
        while left:
            ready = selector.select(TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"{left} of {num_streams} streams got nothing for {TIMEOUT_S:g} s")
            for key, _ in ready:
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    left -= 1
    return streams


# -- the benchmark -----------------------------------------------------------------------------------------------------


LIMIT_MS = 2.0
NUM_LAYERS = 4
VOCAB_SIZE = 49_152
BLOCK_SIZE = 16
COLUMNS = (
    ("pace", "pace", "{}"),
    ("round", "round", "{}"),
    ("added_ms_p50", "added to a token: p50 (ms)", "{:.2f}"),
    ("added_ms_p90", "p90", "{:.2f}"),
    ("added_ms_p99", "p99", "{:.2f}"),
    ("added_ms_max", "max", "{:.2f}"),
    ("added_ms_p99_of_all", "p99 of all tokens", "{:.2f}"),
    ("per_token_ms_p50", "per-token latency: p50 (ms)", "{:.2f}"),
    ("per_token_ms_p99", "p99", "{:.2f}"),
    ("output_tokens_per_s", "tokens/s", "{:.0f}"),
)


@dataclass(frozen=True)
class Options:
    """Measure the time that the server adds to a token."""

    system: str = "apex"
    """System whose scheduler plans the steps."""
    streams: int = 64
    """Number of clients that stream at the same time."""
    output_len: int = 256
    """Output tokens of each client."""
    pace_ms: tuple[float, ...] = (0.0, 5.0, 20.0)
    """Milliseconds between the ends of two steps, one run for each; 0 is flat out."""
    rounds: int = 3
    """Runs at each pace, interleaved. Medians over the runs are printed and compared with the limit."""
    model: Path | None = None
    """Folder whose tokenizer detokenizes; by default SmolLM2-135M-Instruct from the cache."""
    results_dir: Path = RESULTS_DIR
    """Results go to bench_server_overhead/<run>/ in this folder."""

    def __post_init__(self) -> None:
        if self.system not in systems():
            raise ValueError(f"system={self.system!r} must be one of {', '.join(systems())}")
        if self.rounds < 1:
            raise ValueError(f"rounds={self.rounds!r} must be at least 1")


class TooFewTokens(ValueError):
    """The streams were too short to be open at the same time; the message says what to do."""


class TimedEngine:
    """Wraps an engine: keeps a pace where a device would be waited for, and records when tokens returned from steps.

    The times are in the file ``path`` when the engine has been closed.
    """

    def __init__(self, engine: Engine, pace_s: float, path: Path) -> None:
        self.ready: dict[str, list[float]] = defaultdict(list)
        self._close, self._path = engine.close, path
        self._step, self._stage = engine.step, engine.backend.run_stage
        self._last_layer = engine.backend.num_layers - 1
        self._pace_s = pace_s
        self._next_s = 0.0
        engine.step, engine.backend.run_stage, engine.close = self.step, self.run_stage, self.close

    def run_stage(self, layer: int, batches: Sequence[Any]) -> Mapping[str, int]:
        tokens = self._stage(layer, batches)
        if self._pace_s and layer == self._last_layer:
            time.sleep(max(0.0, self._next_s - time.perf_counter()))
            self._next_s = time.perf_counter() + self._pace_s
        return tokens

    def step(self) -> list[RequestOutput]:
        outputs = self._step()
        now_s = time.time()
        for output in outputs:
            if output.new_token_ids:
                self.ready[output.request_id].append(now_s)
        return outputs

    def close(self) -> None:
        self._close()
        self._path.write_text(json.dumps(self.ready))


def zero_time_engine(options: Options, num_layers: int = NUM_LAYERS, max_num_seqs: int = 256) -> Engine:
    """An engine whose operations take no time, with GPU blocks for all streams. Its output is real text."""
    blocks = options.streams * (2 + (PROMPT_LEN + options.output_len) // BLOCK_SIZE)
    free = Surface((1, 2), (FREE, FREE))
    table = ProfileTable({}, linear=FREE, ends=FREE, swap=FREE, prefill_attention=free, gpu_attention=free,
                         cpu_attention=free)  # fmt: skip
    sizes = {"num_gpu_blocks": blocks, "num_cpu_blocks": blocks, "block_size": BLOCK_SIZE, "vocab_size": VOCAB_SIZE,
             "max_num_seqs": max_num_seqs}  # fmt: skip
    engine = build_simulated(options.system, table, num_layers, **sizes)
    model = options.model or default_model()
    engine.tokenizer = Tokenizer.from_folder(model)
    stage, text = engine.backend.run_stage, itertools.cycle(load_prompt_tokens(model).text_ids or (1,))

    def with_real_tokens(layer: int, batches: Sequence[Any]) -> Mapping[str, int]:
        return {request_id: next(text) for request_id in stage(layer, batches)}

    engine.backend.run_stage = with_real_tokens  # the simulation's placeholders have no text
    return engine


def build_service(options: Options, pace_s: float, path: Path) -> EngineService:
    """What the engine's process runs. ``path`` gets the times at which each request's tokens were ready."""
    service = EngineService(zero_time_engine(options))
    TimedEngine(service.engine, pace_s, path)
    return service


def serve(build: Callable[[], EngineService], port: int) -> None:
    """The server's process: serve until SIGTERM."""
    run_server(build, ServerSettings(port=port, served_model_name="simulated"))


@dataclass
class RunningServer:
    port: int
    process: multiprocessing.process.BaseProcess

    def end(self) -> None:
        """Let it end as after SIGTERM."""
        self.process.terminate()
        self.process.join()


@contextmanager
def running(build: Callable[[], EngineService]) -> Iterator[RunningServer]:
    """A server with this engine."""
    with reserved_port() as port:
        process = multiprocessing.get_context("spawn").Process(target=serve, args=(build, port))
        process.start()
        try:
            connect_server("simulated", f"http://127.0.0.1:{port}", 60.0)
            yield RunningServer(port, process)
        finally:
            process.kill()
            process.join()


def measure(options: Options, pace_ms: float) -> dict[str, Any]:
    """One run.

    Raises:
        RuntimeError: some token has not arrived.
        TooFewTokens: no token came while all streams were open.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ready.json")
        with running(partial(build_service, options, pace_ms / 1e3, path)) as server:
            stream_all(server.port, options.streams, options.output_len)  # first calls pay for lazy initialisation
            streams = stream_all(server.port, options.streams, options.output_len)
            server.end()
        return summarise(options, pace_ms, streams, json.loads(path.read_text()))


def summarise(
    options: Options, pace_ms: float, streams: Sequence[ClientStream], ready: Mapping[str, Sequence[float]]
) -> FlatRecord:
    """The figures of a run. ``ready`` has the times at which tokens were ready, by the engine's id of the request.

    Raises:
        RuntimeError: some token has not arrived.
        TooFewTokens: no token came while all streams were open.
    """
    ready_s, arrived_s = np.empty((2, options.streams, options.output_len))
    for number, stream in enumerate(streams):
        name, times_s = stream.arrivals()
        if len(times_s) != options.output_len:
            answer = b"".join(stream.parts)[-300:]
            raise RuntimeError(
                f"{len(times_s)} of {options.output_len} tokens have arrived; the answer ends {answer!r}"
            )
        ready_s[number], arrived_s[number] = ready[name], times_s
    added_ms = 1e3 * (arrived_s - ready_s)
    all_are_open = (ready_s >= ready_s[:, 0].max()) & (ready_s <= ready_s[:, -1].min())
    if not all_are_open.any():
        raise TooFewTokens(
            f"no token came while all {options.streams} streams were open: the first ended before the last began; "
            f"use more tokens than --output-len {options.output_len}, or fewer --streams"
        )
    records = [
        RequestRecord(str(number), stream.sent_s, PROMPT_LEN, options.output_len, tuple(arrived_s[number].tolist()))
        for number, stream in enumerate(streams)
    ]
    latency_s = distribution_metrics("per_token_s", [per_token_latency_s(record) for record in records])
    p50, p90, p99 = np.percentile(added_ms[all_are_open], (50, 90, 99))
    return flat_record(
        {
            "system": options.system, "backend": "measured: server overhead", "num_requests": options.streams,
            "pace_ms": pace_ms, "pace": pace_name(pace_ms),
            "output_len": options.output_len, "output_tokens_per_s": output_tokens_per_s(records),
            "added_ms_p50": float(p50), "added_ms_p90": float(p90), "added_ms_p99": float(p99),
            "added_ms_max": float(added_ms[all_are_open].max()),
            "added_ms_p99_of_all": float(np.percentile(added_ms, 99)),
            "fraction_all_open": float(all_are_open.mean()),
            "per_token_ms_p50": 1e3 * latency_s["per_token_s_p50"],
            "per_token_ms_p99": 1e3 * latency_s["per_token_s_p99"],
        }
    )  # fmt: skip


def main(options: Options) -> int:
    """Measure at every pace, print, save.

    Returns the exit status: 1 if the limit is exceeded flat out, 2 for invalid options.
    """
    configuration = {name: str(value) for name, value in asdict(options).items() if name != "results_dir"}
    folder = ResultFolder("bench_server_overhead", configuration, options.results_dir)
    folder.record_invocation()
    print(f"{options.streams} streams of {options.output_len} tokens, {options.system}, zero-time engine; milliseconds")
    records = []
    for number in range(options.rounds):
        for pace_ms in options.pace_ms:
            try:
                records.append(measure(options, pace_ms) | {"round": number})
            except TooFewTokens as error:
                print(f"bench_server_overhead: {error}", file=sys.stderr)
                return 2
            print(f"round {number + 1} of {options.rounds}, {pace_name(pace_ms)}", file=sys.stderr, flush=True)
    folder.save_summary(records, markdown_table(records, COLUMNS))
    medians = {pace_ms: median_of([r for r in records if r["pace_ms"] == pace_ms]) for pace_ms in options.pace_ms}
    print("                   added to a token, all streams open   of all   per-token latency")
    print("       pace         p50     p90     p99     max     p99         p50     p99   tokens/s")
    for pace_ms, record in medians.items():
        added = [record[f"added_ms_{name}"] for name in ("p50", "p90", "p99", "max", "p99_of_all")]
        latency = [record[f"per_token_ms_{name}"] for name in ("p50", "p99")]
        row = "{:12.2f}{:8.2f}{:8.2f}{:8.2f}{:8.2f}{:12.2f}{:8.2f}".format(*added, *latency)
        print(f"{pace_name(pace_ms):>11}{row}{record['output_tokens_per_s']:11.0f}")
    print(f"summary and provenance: {folder.path}")
    is_kept = True
    for what, key in (("added to a token", "added_ms_p99"), ("per-token latency", "per_token_ms_p99")):
        for record in (medians[pace_ms] for pace_ms in options.pace_ms if not pace_ms):
            is_kept &= record[key] <= LIMIT_MS
            verdict = "within" if record[key] <= LIMIT_MS else "above"
            print(f"{what}, flat out: p99 {record[key]:.2f} ms, {verdict} the limit of {LIMIT_MS:g} ms")
    return 0 if is_kept else 1


def pace_name(pace_ms: float) -> str:
    return f"{pace_ms:g} ms" if pace_ms else "flat out"


def median_of(records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The median over rounds of each number, at one pace."""
    keys = [key for key, value in records[0].items() if isinstance(value, (int, float))]
    return {key: float(np.median([record[key] for record in records])) for key in keys}


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="benchmarks/bench_server_overhead.py")))
