"""Measures what the largest bodies that the limits admit, and larger ones, do to everybody else.

A server is started with a real model. For each body, which one client sends, others measure meanwhile:

- the worst time of a request for one token,
- the longest that the event loop was held, as the worst time of /health,
- by how much the memory of the server's processes grew at most.

The outputs of a body must be computed, on a CPU for seconds, before a request that came later gets its turn. So
"outputs alone", the same outputs without what makes the body large, stands beside these, and an idle server at the top.

python benchmarks/bench_largest_bodies.py [--help]
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import httpx

from apex.cli.options import parse_options
from evaluation.measure.server import LaunchedServer, ServerCommand, launched_server
from evaluation.results.folder import FlatRecord, ResultFolder, flat_record, markdown_table
from evaluation.results.paths import REPO_ROOT, RESULTS_DIR, default_model

LIMIT_S = 1.0
TIMEOUT_S = 600.0
IDLE_S = 2.0
LOOK_EVERY_S = 0.01
OUTPUTS = {"prompt": ["hi", "ho", "hu"], "n": 128, "max_tokens": 2}
MESSAGE = {"role": "user", "content": "hi"}
PART = {"type": "text", "text": ""}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
COLUMNS = (
    ("body", "body", "{}"),
    ("megabytes", "MB", "{:.1f}"),
    ("status", "status", "{}"),
    ("answer_s", "answered (s)", "{:.2f}"),
    ("worst_token_s", "another's token, worst (s)", "{:.2f}"),
    ("loop_held_s", "event loop held (s)", "{:.2f}"),
    ("grown_mb", "memory grown (MB)", "{:.0f}"),
)


@dataclass(frozen=True)
class Options:
    """Measure what the largest bodies do to other clients."""

    model: Path | None = None
    """Folder of the model; by default SmolLM2-135M-Instruct from the cache."""
    max_model_len: int = 2048
    """Tokens of one request at most."""
    bodies: tuple[str, ...] = ()
    """Names of the bodies to send; by default all."""
    results_dir: Path = RESULTS_DIR
    """Results go to bench_largest_bodies/<run>/ in this folder."""

    def __post_init__(self) -> None:
        unknown = set(self.bodies) - set(bodies(self.max_model_len))
        if unknown:
            known = ", ".join(bodies(self.max_model_len))
            raise ValueError(f"bodies={', '.join(sorted(unknown))!r} must be among {known}")


def bodies(max_model_len: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Paths and bodies by name: at a limit, and in the second half beyond one."""
    bias = {str(token): 1.0 for token in range(49_000)}
    return {
        "outputs alone": (COMPLETIONS, OUTPUTS),
        "outputs with biases": (COMPLETIONS, {**OUTPUTS, "logit_bias": bias}),
        "outputs with allowed tokens": (COMPLETIONS, {**OUTPUTS, "allowed_token_ids": list(range(49_000))}),
        "outputs with bad words": (COMPLETIONS, {**OUTPUTS, "bad_words": [f"{'w' * 97}{i:03}" for i in range(200)]}),
        "many prompts": (COMPLETIONS, {"prompt": ["a"] * 1024, "max_tokens": 1}),
        "a long prompt": (COMPLETIONS, {"prompt": " a" * (max_model_len - 2), "max_tokens": 1}),
        "many messages": (CHAT, {"messages": [MESSAGE] * 10_000, "max_tokens": 1}),
        "many parts": (CHAT, {"messages": [{"role": "user", "content": [PART] * 200}] * 500, "max_tokens": 1}),
        "an unknown field": (COMPLETIONS, {"prompt": "hi", "max_tokens": 1, "x": [[]] * 1_300_000}),
        "too many prompts": (COMPLETIONS, {"prompt": ["a"] * 300_000, "max_tokens": 1}),
        "too many outputs with biases": (COMPLETIONS, {"prompt": ["a"] * 300, "n": 128, "logit_bias": bias}),
        "too many biases": (COMPLETIONS, {"prompt": "hi", "logit_bias": {str(i): 1 for i in range(380_000)}}),
        "too many stop tokens": (COMPLETIONS, {"prompt": "hi", "stop_token_ids": [5] * 1_000_000}),
        "too long a prompt": (COMPLETIONS, {"prompt": "a " * 1_900_000, "max_tokens": 1}),
        "too many messages": (CHAT, {"messages": [MESSAGE] * 100_000, "max_tokens": 1}),
        "no messages": (CHAT, {"messages": [1] * 1_000_000, "max_tokens": 1}),
    }


def post(client: httpx.Client, path: str, content: bytes) -> tuple[int, float]:
    """Status and seconds of a request."""
    start_s = time.perf_counter()
    answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
    return answer.status_code, time.perf_counter() - start_s


@contextmanager
def repeated(look: Callable[[], float], pause_s: float) -> Iterator[list[float]]:
    """What ``look`` returns, again and again until the end of the block, in a thread."""
    found: list[float] = []
    is_over = threading.Event()

    def run() -> None:
        while True:
            found.append(look())
            if is_over.wait(pause_s):
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield found
    finally:
        is_over.set()
        thread.join()


def measure(server: LaunchedServer, send: Callable[[httpx.Client], tuple[int, float]]) -> dict[str, float]:
    """What others see while a client sends."""
    one_token = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    options = {"base_url": server.server.url, "timeout": TIMEOUT_S, "trust_env": False}
    with httpx.Client(**options) as sender, httpx.Client(**options) as other, httpx.Client(**options) as third:

        def health_s() -> float:
            start_s = time.perf_counter()
            third.get("/health")
            return time.perf_counter() - start_s

        before = server.resident_bytes()
        token_s = repeated(lambda: post(other, COMPLETIONS, one_token)[1], 10 * LOOK_EVERY_S)
        with token_s as tokens_s, repeated(health_s, LOOK_EVERY_S) as healths_s:  # noqa: SIM117  old Pythons read this
            with repeated(server.resident_bytes, LOOK_EVERY_S) as sizes:
                time.sleep(0.3)
                status, answer_s = send(sender)
    grown_mb = (max(sizes) - before) / 1e6
    seen = {"worst_token_s": max(tokens_s), "loop_held_s": max(healths_s), "grown_mb": grown_mb}
    return {"status": status, "answer_s": answer_s, **seen}


def idle(_: httpx.Client) -> tuple[int, float]:
    time.sleep(IDLE_S)
    return 0, 0.0


def main(options: Options) -> int:
    """Send every body, print, save.

    Returns the exit status: 1 if a limit of a second is exceeded, see :func:`is_kept`.
    """
    configuration = {name: str(value) for name, value in asdict(options).items() if name != "results_dir"}
    folder = ResultFolder("bench_largest_bodies", configuration, options.results_dir)
    folder.record_invocation()
    chosen = {n: b for n, b in bodies(options.max_model_len).items() if n in options.bodies or not options.bodies}
    model = str(options.model or default_model())
    limits = ("--max-model-len", str(options.max_model_len), "--num-gpu-blocks", "2048", "--num-cpu-blocks", "2048")
    command = ServerCommand(
        "apex", (sys.executable, "-m", "apex", "serve", model, *limits), {"PYTHONPATH": str(REPO_ROOT)}
    )
    records: list[FlatRecord] = []
    with tempfile.TemporaryDirectory() as logs, launched_server(command, Path(logs, "server.log")) as server:
        for _ in range(2):  # first calls pay for lazy initialisation
            measure(server, lambda client: post(client, COMPLETIONS, json.dumps(OUTPUTS).encode()))
        records.append(record_of("nothing", 0, measure(server, idle)))
        for name, (path, body) in chosen.items():
            content = json.dumps(body, separators=(",", ":")).encode()
            seen = measure(server, lambda client, path=path, content=content: post(client, path, content))
            records.append(record_of(name, len(content), seen))
            print(COLUMNS[0][2].format(name), seen, file=sys.stderr, flush=True)
            server.check_running()
    table = markdown_table(records, COLUMNS)
    folder.save_summary(records, table)
    print(table)
    print(f"summary and provenance: {folder.path}")
    return 0 if is_kept(records) else 1


def record_of(name: str, num_bytes: int, seen: dict[str, float]) -> FlatRecord:
    return flat_record({"backend": "measured: largest bodies", "body": name, "megabytes": num_bytes / 1e6, **seen})


def is_kept(records: list[FlatRecord]) -> bool:
    """Whether no body held the event loop, or delayed another client's token, for longer than the limit. The time that
    its outputs take to be computed does not count."""
    computing_s = max((r["worst_token_s"] for r in records if r["body"] == "outputs alone"), default=0.0)
    for record in records:
        is_refused, has_outputs = record["status"] >= 400, record["body"].startswith("outputs with")
        most_s = LIMIT_S + computing_s if has_outputs else LIMIT_S
        is_late = (is_refused or has_outputs) and record["worst_token_s"] > most_s
        if is_late or record["loop_held_s"] > LIMIT_S:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="benchmarks/bench_largest_bodies.py")))
