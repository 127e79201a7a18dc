"""Measures what a CPU tier of int8 gains end to end, where CPU attention is most of the work.

The model has many KV heads, a small hidden size and dummy weights. An engine with an exact tier and one with int8 serve
the same requests in turn; figures are medians over the rounds.

python benchmarks/bench_kv_format.py [--help]
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console
from rich.table import Table

from apex.build import build_system
from apex.cli.options import SystemName, parse_options
from swiftllm.config import DtypeName, EngineConfig, check_at_least
from swiftllm.core.request import SamplingParams
from swiftllm.engine.engine import Engine
from swiftllm.machine import cpu_model, usable_cores

FORMATS = ("auto", "int8")
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Options:
    """Measure the throughput of a system with a CPU tier of int8, beside an exact one."""

    system: SystemName = "fastdecode"
    """What serves."""
    dtype: DtypeName = "auto"
    """Weights, activations and the exact tier."""
    num_requests: int = 8
    """Requests, all there from the start."""
    input_len: int = 1000
    """Prompt tokens of each."""
    output_len: int = 256
    """Output tokens of each."""
    num_layers: int = 4
    """Layers of the model."""
    hidden_size: int = 256
    """Its hidden size."""
    num_heads: int = 32
    """Its query heads, of 128 dims."""
    num_kv_heads: int = 32
    """Its KV heads."""
    rounds: int = 4
    """Rounds of both formats, over which medians are taken."""

    def __post_init__(self) -> None:
        check_at_least(1, self, "num_requests", "input_len", "output_len", "num_layers", "rounds")


def write_model(folder: Path, options: Options) -> None:
    sizes = {
        "hidden_size": options.hidden_size,
        "intermediate_size": 2 * options.hidden_size,
        "num_hidden_layers": options.num_layers,
        "num_attention_heads": options.num_heads,
        "num_key_value_heads": options.num_kv_heads,
        "head_dim": 128,
        "vocab_size": 1024,
        "max_position_embeddings": options.input_len + options.output_len,
        "rms_norm_eps": 1e-5,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}), encoding="utf-8")


def open_engine(folder: Path, options: Options, cpu_kv_dtype: str) -> Engine:
    blocks = -(-(options.input_len + options.output_len) // BLOCK_SIZE) * options.num_requests
    config = EngineConfig(
        str(folder),
        device="cpu",
        dtype=options.dtype,
        load_format="dummy",
        num_gpu_blocks=blocks // options.num_requests,
        num_cpu_blocks=blocks,
        cpu_kv_dtype=cpu_kv_dtype,
        enable_prefix_caching=False,
        gpu_batch_threads=1,
        cpu_threads=1,
    )
    return build_system(options.system, config)


def serve(engine: Engine, options: Options, seed: int) -> tuple[float, float, float]:
    """Output tokens a second of all the run and of its decodes alone, and the CPU worker's busy share in these."""
    rng, sampling = random.Random(seed), SamplingParams(max_tokens=options.output_len, ignore_eos=True)
    requests = []
    for number in range(options.num_requests):
        prompt = [rng.randrange(3, 1024) for _ in range(options.input_len)]
        requests.append(engine.add(engine.make_request(f"{seed}-{number}", prompt, sampling)))
    start_s = time.perf_counter()
    while not all(request.output_len for request in requests):
        engine.step()
    busy_s, done = engine.stats().cpu_busy_s, sum(request.output_len for request in requests)
    decodes_s = time.perf_counter()
    while engine.has_unfinished():
        engine.step()
    end_s = time.perf_counter()
    total = options.num_requests * options.output_len
    busy = (engine.stats().cpu_busy_s - busy_s) / (end_s - decodes_s)
    return total / (end_s - start_s), (total - done) / (end_s - decodes_s), busy


def main(options: Options) -> None:
    """Measure and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), options)
        engines = {name: open_engine(Path(folder), options, name) for name in FORMATS}
        try:
            found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in FORMATS}
            for seed in range(options.rounds + 1):  # the first one warms up
                for name, engine in engines.items():
                    found[name].append(serve(engine, options, seed))
            backend = engines["int8"].backend
            print(f"{cpu_model()}, {usable_cores()} cores; {options}; {backend.dtype_name}, 1 + 1 threads")
            print(f"bytes of a block: {backend.kv_bytes_per_block:,} exact, {backend.cpu_kv_bytes_per_block:,} int8")
        finally:
            for engine in engines.values():
                engine.close()
    table = Table("CPU tier", "tokens/s", "range", "of decodes", "CPU worker busy", "gain", "of decodes")
    medians = {
        name: [statistics.median(column) for column in zip(*rows[1:], strict=True)] for name, rows in found.items()
    }
    for name, (tokens, decodes, busy) in medians.items():
        whole = [row[0] for row in found[name][1:]]
        gains = f"{tokens / medians['auto'][0]:.2f}", f"{decodes / medians['auto'][1]:.2f}"
        about = f"{min(whole):.1f} to {max(whole):.1f}"
        table.add_row(name, f"{tokens:.1f}", about, f"{decodes:.1f}", f"{busy:.0%}", *gains)
    Console().print(table)


if __name__ == "__main__":
    main(parse_options(Options, prog="benchmarks/bench_kv_format.py"))
