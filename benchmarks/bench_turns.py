"""Measures the time to the first token by turn of conversations over HTTP, beside vLLM, both with their prefix caches.

One conversation at a time, so that only prompts are measured. Servers are up all the time and take turns; each round
has a conversation of its own, the same for all. vLLM is its CPU build (scripts/install_vllm.sh --cpu), if it is there.

python benchmarks/bench_turns.py [--help]
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

import httpx
from rich.progress import track

from apex.cli.options import parse_options
from evaluation.measure.server import ServerCommand, launched_server
from evaluation.measure.vllm import READY_TIMEOUT_S, vllm_command, vllm_program
from evaluation.results.folder import ResultFolder
from evaluation.results.paths import REPO_ROOT, RESULTS_DIR, model_folder
from evaluation.results.provenance import git_state
from swiftllm.machine import cpu_model
from swiftllm.model.config import ModelConfig

DTYPE = "bfloat16"
KV_CACHE_BYTES = 1 << 30
MAX_TOKENS_A_STEP = 2048
NO_CACHE = "--no-enable-prefix-caching"


@dataclass(frozen=True)
class Options:
    """Measure how long the first token of each turn of a conversation takes, beside vLLM if it is installed."""

    systems: tuple[str, ...] = ("vllm", "apex", "adaptive")
    """Our systems to measure."""
    rounds: int = 5
    """Conversations with each server; the first warms up and does not count."""
    turns: int = 4
    """Turns of a conversation."""
    history: int = 1000
    """Tokens of the first prompt."""
    message: int = 40
    """Tokens that each later turn adds to the prompt and the answer before it."""
    answer: int = 16
    """Tokens of each answer."""
    results_dir: Path = RESULTS_DIR
    """Results go to turns/<run>/ in this folder."""


def commands(options: Options, model: Path) -> list[ServerCommand]:
    """Our servers and vLLM's, on all cores."""
    longest = options.history + options.turns * (options.message + options.answer) + 64
    sizes = ["--dtype", DTYPE, "--max-model-len", str(longest), "--max-num-batched-tokens", str(MAX_TOKENS_A_STEP)]
    blocks = str(2 * (options.rounds + 1) * longest // 16)
    ours = [sys.executable, "-m", "apex", "serve", str(model), *sizes, "--num-gpu-blocks", blocks]
    ours += ["--num-cpu-blocks", blocks, "--system"]
    environment = {"PYTHONPATH": str(REPO_ROOT)}
    found = [ServerCommand(f"APEX {system}", (*ours, system), environment) for system in options.systems]
    if (program := vllm_program("cpu")) is not None:
        command = vllm_command(
            program, model, device_type="cpu", dtype=DTYPE, max_model_len=longest, threads="auto",
            max_num_batched_tokens=MAX_TOKENS_A_STEP, kv_cache_bytes=KV_CACHE_BYTES, name="vLLM",
        )  # fmt: skip
        found.append(replace(command, arguments=tuple(part for part in command.arguments if part != NO_CACHE)))
    return found


def ask(client: httpx.Client, model: str, prompt: list[int], num_tokens: int) -> tuple[float, list[int]]:
    """Seconds to the first token of an answer, and its tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    tokens: list[int] = []
    start_s, first_s = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                new = json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or []
                if new and not tokens:
                    first_s = time.perf_counter() - start_s
                tokens += new
    if len(tokens) != num_tokens:
        raise ValueError(f"{len(tokens)} tokens in place of {num_tokens}")
    return first_s, tokens


def converse(client: httpx.Client, options: Options, vocab_size: int, seed: int) -> list[float]:
    """Seconds to the first token of each turn."""
    draw, name = random.Random(seed), client.get("/v1/models").json()["data"][0]["id"]
    prompt = [draw.randrange(100, vocab_size) for _ in range(options.history)]
    times = []
    for _ in range(options.turns):
        first_s, answer = ask(client, name, prompt, options.answer)
        times.append(first_s)
        prompt = [*prompt, *answer, *(draw.randrange(100, vocab_size) for _ in range(options.message))]
    return times


def main(options: Options) -> None:
    """Measure, print, save."""
    model = model_folder(None)
    vocab_size = ModelConfig.from_folder(model).vocab_size
    servers = commands(options, model)
    sizes = {name: value for name, value in asdict(options).items() if name != "results_dir"}
    configuration = {"benchmark": "turns", **sizes, "date": time.ctime()}
    folder = ResultFolder("turns", configuration, options.results_dir)
    folder.record_invocation()
    times: dict[str, list[list[float]]] = {command.name: [] for command in servers}
    with ExitStack() as stack:
        clients = {}
        for command in servers:
            log = folder.path / f"{command.name.replace(' ', '-')}.log"
            running = stack.enter_context(launched_server(command, log, READY_TIMEOUT_S))
            clients[command.name] = stack.enter_context(httpx.Client(base_url=running.server.url, timeout=120.0))
        for turn in track(range(options.rounds), "conversations"):
            for name, client in clients.items():
                times[name].append(converse(client, options, vocab_size, seed=turn))
    records: list[dict[str, Any]] = []
    for name, rounds in times.items():
        medians = [statistics.median(column) for column in zip(*rounds[1:], strict=True)]
        turns = {f"turn_{number}_s": value for number, value in enumerate(medians, 1)}
        records.append({"server": name, "backend": "measured: http", **turns, "turn_2_over_1": medians[1] / medians[0]})
    header = ["server", *(f"turn {number} (s)" for number in range(1, options.turns + 1)), "turn 2 / 1"]
    rows = [header, ["---"] * len(header)]
    rows += [[r["server"], *(f"{v:.3f}" for k, v in r.items() if k.startswith("turn_"))] for r in records]
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    folder.save_summary(records, table)
    print(f"{cpu_model()}, commit {git_state()['commit']}, {model.name}, medians of {options.rounds - 1} conversations")
    print(table)
    print(f"summary and provenance: {folder.path}")


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_turns.py"))
