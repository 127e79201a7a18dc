"""Compares the GPU path with the limits of its machine. Needs only torch, numpy, Triton and pacpu.

python benchmarks/bench_gpu.py [--help]

Every figure is a ratio within one run: paged decode attention to a copy in GPU memory, a decode iteration to the time
of reading the weights, CPU attention to a streaming read of host memory. Figures are medians over rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from apex.environment import use_environment

    use_environment("numpy", "pacpu", "torch")

import torch

from benchmarks.gpu_parts import (
    GIB,
    ROUNDS,
    Timer,
    coded_products,
    cpu_attention,
    decode_attention,
    measure_wake_up,
    memory_bandwidth,
)
from evaluation.gpu.check import CASES, Case, model_folder
from swiftllm.config import EngineConfig
from swiftllm.core.plan import LaneItem
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.files import write_atomically
from swiftllm.machine import InsufficientMemory, usable_cores
from swiftllm.runtime.torch_backend import TorchBackend
from swiftllm.sampling.sampler import Sampler

ITERATION_BATCHES = (1, 8, 32, 64)
ITERATION_CONTEXT = 32  # short, so that an iteration reads little but the weights
SAMPLED_ROWS = 64
HOWS = {
    "greedy": ({},),
    "temperature": ({"temperature": 1.0},),
    "top_p=0.95": ({"temperature": 1.0, "top_p": 0.95},),
    "top_k=50": ({"temperature": 1.0, "top_k": 50},),
}
HOWS["mixed"] = tuple(how for (how,) in HOWS.values())


@torch.inference_mode()
def iterations(timer: Timer, backend: TorchBackend, read_gb_s: float, quick: bool) -> list[dict]:
    """Times of decode iterations from the embedding to sampled tokens, compared with reading all weights once.

    Layer by layer, as with CPU requests, and in one go, as without them where graphs have been captured."""
    floor_s = weight_bytes(backend) / (read_gb_s * 1e9)
    rows = []
    for batch, in_one_go in itertools.product(ITERATION_BATCHES[: 2 if quick else None], (True, False)):
        requests = decoding_requests(backend, batch)
        items = [LaneItem(request, request.num_tokens - 1, 1, Tier.GPU, False) for request in requests]
        if in_one_go and backend.whole_iteration(backend.open_lane(items)) is None:
            continue

        def iterate(items: Sequence[LaneItem] = items, in_one_go: bool = in_one_go) -> None:
            lane = backend.open_lane(items)
            if in_one_go:
                backend.whole_iteration(lane)
                return
            for layer in range(-1, backend.num_layers - 1):
                backend.boundary(layer, [lane])
                backend.gpu_attention(layer + 1, lane)
            backend.boundary(backend.num_layers - 1, [lane])

        seconds = timer.median(iterate)
        host_s = statistics.median(host_seconds(timer, iterate) for _ in range(ROUNDS))
        rows.append(
            {
                "batch": batch,
                "in_one_go": in_one_go,
                "ms": seconds * 1e3,
                "weight_floor_ms": floor_s * 1e3,
                "ratio_to_floor": seconds / floor_s,
                "host_us_per_layer": host_s / backend.num_layers * 1e6,
            }
        )
    return rows


def sampling(timer: Timer, backend: TorchBackend, columns: int) -> list[dict]:
    """Times of sampling from logits as peaked as a model's: one token in a thousand has half of the probability."""
    sampler = Sampler(device=backend.hardware)
    logits = (3.0 * torch.randn(SAMPLED_ROWS, columns)).to(backend.dtype).to(backend.device)
    rows = []
    for name, hows in HOWS.items():
        requests = [
            Request(str(row), (1,), SamplingParams(seed=row, **hows[row % len(hows)])) for row in range(SAMPLED_ROWS)
        ]
        seconds = timer.median(lambda requests=requests: sampler.sample(logits, requests))
        rows.append({"how": name, "rows": SAMPLED_ROWS, "vocab_size": columns, "ms": seconds * 1e3})
    return rows


def host_seconds(timer: Timer, iterate: Callable[[], None]) -> float:
    """CPU time (seconds) of the launching thread in an iteration, without waiting for the GPU."""
    timer.synchronize()
    start_s = time.thread_time()
    iterate()
    return time.thread_time() - start_s


def decoding_requests(backend: TorchBackend, batch: int) -> list[Request]:
    """Requests that are ready to decode, in a zeroed pool."""
    blocks_each = -(-(ITERATION_CONTEXT + 1) // backend.block_size)
    backend.kv_pools.tensors[Tier.GPU].zero_()
    tables, requests = {}, []
    for index in range(batch):
        request = Request(f"bench-{index}", tuple(range(1, ITERATION_CONTEXT + 1)), SamplingParams(max_tokens=64))
        request.append_token(1, 0.0)
        request.tier = Tier.GPU
        tables[request.request_id] = list(range(index * blocks_each, (index + 1) * blocks_each))
        requests.append(request)
    backend.block_tables = tables
    return requests


def weight_bytes(backend: TorchBackend) -> int:
    """Bytes of weights that an iteration reads: all but an embedding that is not also the output matrix."""
    config = backend.model_config
    untied = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (config.num_parameters - untied) * backend.dtype.itemsize


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="run a tiny model on the CPU, to test the script")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    for figures in measure(CASES["rehearsal" if options.rehearse else "llama-3.1-8b"], options.rehearse):
        if options.output:
            write_atomically(options.output, json.dumps(figures, indent=1) + "\n")
    return 1 if figures["failed"] else 0


def measure(case: Case, small: bool) -> Iterator[dict[str, Any]]:
    """Yields all figures so far after each part. Parts that fail are named in ``failed``; the others still run."""
    device, dtype = torch.device(case.device), getattr(torch, case.dtype)
    timer = Timer(device)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        backend = open_backend(case)
    config, graphs = backend.model_config, backend.graphs
    figures = {
        "device": backend.device_name,
        "model": case.model or "rehearsal",
        "num_layers": config.num_layers,
        "dtype": case.dtype,
        "warnings": [str(warning.message) for warning in warned],
        "failed": [],
    }
    for warning in figures["warnings"]:
        print(f"warning: {warning}", flush=True)
    if graphs is not None:
        figures["captured"] = {"graphs": len(graphs), "seconds": graphs.seconds, "bytes": graphs.num_bytes}
    memory: dict[str, float] = {}
    parts: dict[str, Callable[[], Any]] = {
        "memory": lambda: memory.update(memory_bandwidth(timer, GIB // 16 if small else GIB)) or memory,
        "iterations": lambda: iterations(timer, backend, max(memory["read"], memory["copy"]), small),
        "sampling": lambda: sampling(timer, backend, config.vocab_size),
        "decode_attention": lambda: decode_attention(timer, config, dtype, memory["copy"], small),
        "coded_products": lambda: coded_products(timer, config, dtype, small),
        "cpu_attention": lambda: cpu_attention(config, dtype, usable_cores(), GIB // 8 if small else 2 * GIB),
    }
    if device.type == "cuda":
        parts["wake_up"] = lambda: measure_wake_up(timer)
    for name, part in parts.items():
        try:
            figures[name] = part()
        except Exception:
            figures["failed"].append(name)
            traceback.print_exc()
        else:
            show(name.replace("_", " "), figures[name])
        yield figures
    backend.close()


def open_backend(case: Case) -> TorchBackend:
    """A backend with the model of a case, or with half, a quarter, ... of its layers if the GPU cannot hold all. Fewer
    layers suffice, since the figures are ratios and times per layer."""
    with model_folder(case) as model, TemporaryDirectory() as folder:
        raw = json.loads((model / "config.json").read_text())
        while True:
            (Path(folder) / "config.json").write_text(json.dumps(raw))
            try:
                return TorchBackend(
                    EngineConfig(
                        folder,
                        case.device,
                        case.dtype,
                        "dummy",
                        num_gpu_blocks=512,
                        num_cpu_blocks=4,
                        max_model_len=case.max_model_len,
                        lane_threads=1,
                    )
                )
            except InsufficientMemory as error:
                if raw["num_hidden_layers"] == 1:
                    raise
                print(f"trying half of the layers: {error}", flush=True)
            raw["num_hidden_layers"] //= 2


def show(title: str, figures: dict | list[dict]) -> None:
    print(f"{title}:")
    for row in figures if isinstance(figures, list) else [figures]:
        cells = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        print("  " + ", ".join(cells), flush=True)


if __name__ == "__main__":
    sys.exit(main())
