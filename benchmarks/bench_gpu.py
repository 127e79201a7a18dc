"""How near the GPU path comes to the limits of the machine it runs on. Needs torch, numpy, Triton and pacpu alone.

python benchmarks/bench_gpu.py [--help]

Every figure is a ratio within one run: paged decode attention to a copy in GPU memory, a decode iteration to the time
that reading the weights takes, CPU attention to a streaming read of host memory. Medians of rounds count.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

import pacpu
from evaluation.gpu_check import CASES, Case, model_folder
from evaluation.provenance import usable_cores
from swiftllm.config import EngineConfig
from swiftllm.device import open_device
from swiftllm.memory import InsufficientMemory
from swiftllm.ops import select_ops
from swiftllm.plan import LaneItem
from swiftllm.request import Request, SamplingParams, Tier
from swiftllm.sampling import Sampler
from swiftllm.torch_backend import TorchBackend

ROUNDS = 9
ATTENTION_SHAPES = ((1, 1024), (16, 1024), (64, 256), (64, 1024), (64, 4096))  # requests, tokens of context
ITERATION_BATCHES = (1, 8, 32, 64)
ITERATION_CONTEXT = 32  # short: the weights are what an iteration reads
SAMPLED_ROWS = 64
HOWS = {
    "greedy": ({},),
    "temperature": ({"temperature": 1.0},),
    "top_p=0.95": ({"temperature": 1.0, "top_p": 0.95},),
    "top_k=50": ({"temperature": 1.0, "top_k": 50},),
}
HOWS["mixed"] = tuple(how for (how,) in HOWS.values())
GIB = 1 << 30


@dataclass(frozen=True)
class Timer:
    """Seconds of work on a device."""

    device: torch.device

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def seconds(self, work: Callable[[], None], calls: int = 1) -> float:
        self.synchronize()
        start_s = time.perf_counter()
        for _ in range(calls):
            work()
        self.synchronize()
        return (time.perf_counter() - start_s) / calls

    def median(self, work: Callable[[], None], calls: int = 1) -> float:
        work()  # the first call compiles and fills caches
        return statistics.median(self.seconds(work, calls) for _ in range(ROUNDS))


def memory_bandwidth(timer: Timer, num_bytes: int) -> dict[str, float]:
    """GB/s inside the device's memory (bytes read and written) and across the bus from and to pinned memory."""
    device = timer.device
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    words = source.view(torch.int32)
    figures = {
        "copy": 2 * num_bytes / timer.median(lambda: target.copy_(source), calls=4),
        "read": num_bytes / timer.median(lambda: words.max(), calls=4),
    }
    if device.type == "cuda":
        pinned = torch.empty(num_bytes // 4, dtype=torch.uint8, pin_memory=True)
        part = source[: len(pinned)]
        figures["to_device"] = len(pinned) / timer.median(lambda: part.copy_(pinned, non_blocking=True))
        figures["to_host"] = len(pinned) / timer.median(lambda: pinned.copy_(part, non_blocking=True))
    return {name: rate / 1e9 for name, rate in figures.items()}


def wake_up(timer: Timer) -> dict[str, float]:
    """How much later a host that sleeps hears of an event than one that spins: what pacing has to hide."""
    words = torch.zeros(GIB // 16, dtype=torch.int32, device=timer.device)

    def wait(blocking: bool) -> None:
        words.add_(1)
        event = torch.cuda.Event(blocking=blocking)
        event.record()
        event.synchronize()

    asleep, spinning = (timer.median(partial(wait, blocking)) for blocking in (True, False))
    return {"us": (asleep - spinning) * 1e6}


@torch.inference_mode()  # as the backend captures: torch makes tensors for its first capture and fills them at each
def decode_attention(timer: Timer, config: Any, dtype: torch.dtype, copy_gb_s: float, quick: bool) -> list[dict]:
    """Paged decode attention over a GiB of K and V, which no cache of the GPU holds, in shuffled blocks of 16."""
    ops, device, block_size = select_ops(timer.device, dtype), timer.device, 16
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
    hardware, graphs, rows = open_device(device.type), [], []
    for batch, context in ATTENTION_SHAPES[: 2 if quick else None]:
        blocks = -(-context // block_size)
        num_blocks = batch * blocks
        block_bytes = kv_heads * 2 * block_size * dim * dtype.itemsize
        copies = max(1, (GIB if device.type == "cuda" else GIB // 64) // (num_blocks * block_bytes))
        shape = (num_blocks, kv_heads, 2, block_size, dim)
        layers = [torch.randn(shape, dtype=dtype, device=device) for _ in range(copies)]
        tables = torch.randperm(num_blocks, device=device).to(torch.int32).view(batch, blocks)
        lens = torch.full((batch,), context, dtype=torch.int32, device=device)
        q = torch.randn(batch, heads, dim, device=device).to(dtype)
        k, v = (torch.randn(batch, kv_heads, dim, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(q)

        def attend(layers: list = layers, arguments: tuple = (tables, lens, out, dim**-0.5), new=(q, k, v)) -> None:
            for layer in layers:
                ops.decode_attention(*new, layer, *arguments)

        attend()
        if hardware.can_capture:  # as in the engine: short calls are measured, not their launches
            graphs.append(hardware.capture(attend))
            attend = graphs[-1].replay
        seconds = timer.median(attend, calls=4) / copies
        gb_s = batch * context * kv_heads * 2 * dim * dtype.itemsize / seconds / 1e9
        rows.append(
            {
                "batch": batch,
                "context": context,
                "us": seconds * 1e6,
                "gb_s": gb_s,
                "fraction_of_copy": gb_s / copy_gb_s,
            }
        )
    return rows


@torch.inference_mode()
def iterations(timer: Timer, backend: TorchBackend, read_gb_s: float, quick: bool) -> list[dict]:
    """Decode iterations from the embedding to sampled tokens, beside the time to read all weights once: layer by layer,
    as where CPU requests may board, and in one go, as where there are none and the graphs for it have been captured."""
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
    """Tokens from logits as peaked as a model's: half of the probability lies on one token in a thousand."""
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
    """CPU time of the launching thread in an iteration: waiting for the GPU is none of it."""
    timer.synchronize()
    start_s = time.thread_time()
    iterate()
    return time.thread_time() - start_s


def decoding_requests(backend: TorchBackend, batch: int) -> list[Request]:
    """Requests that stand before a decode; their blocks hold whatever the pool holds, zeroed."""
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
    """What an iteration reads: everything but an embedding that is not the output matrix too."""
    config = backend.model_config
    untied = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return (config.num_parameters - untied) * backend.dtype.itemsize


def cpu_attention(config: Any, dtype: torch.dtype, threads: int, num_bytes: int) -> dict[str, Any]:
    """The default kernel of pacpu over caches in host memory, beside streaming reads of the same memory."""
    kv_heads, dim, batch, block_size, context = config.num_kv_heads, config.head_dim, 32, 16, 1024
    blocks = batch * context // block_size
    layer_bytes = blocks * kv_heads * 2 * block_size * dim * dtype.itemsize
    layers = torch.empty((max(2, num_bytes // layer_bytes), blocks, kv_heads, 2, block_size, dim), dtype=dtype)
    noise = torch.randn(1 << 20).to(dtype)
    for part in layers.view(-1).split(len(noise)):  # billions of random numbers would take longer than all else
        part.copy_(noise[: len(part)])
    tables = torch.randperm(blocks).to(torch.int32).view(batch, -1)
    lens = torch.full((batch,), context, dtype=torch.int32)
    q = torch.randn(batch, config.num_heads, dim).to(dtype)
    k, v = (torch.randn(batch, kv_heads, dim).to(dtype) for _ in range(2))
    out = torch.empty_like(q)
    rates, reads = [], []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        for layer in layers:
            pacpu.paged_attention(q, k, v, layer, tables, lens, out, dim**-0.5, num_threads=threads)
        rates.append(len(layers) * layer_bytes / (time.perf_counter() - start_s) / 1e9)
        reads.append(pacpu.read_bandwidth(layers, num_threads=threads) / 1e9)
    fractions = [rate / read for rate, read in zip(rates, reads, strict=True)]
    return {
        "kernel": pacpu.default_kernel(dtype),
        "isa": pacpu.isa(),
        "threads": threads,
        "gb_s": statistics.median(rates),
        "read_gb_s": statistics.median(reads),
        "fraction_of_read": statistics.median(fractions),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="a tiny model on the CPU: shows that the script works")
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    options = parser.parse_args(arguments)
    for figures in measure(CASES["rehearsal" if options.rehearse else "llama-3.1-8b"], options.rehearse):
        if options.output:
            options.output.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if figures["failed"] else 0


def measure(case: Case, small: bool) -> Iterator[dict[str, Any]]:
    """The figures there are after each part; one that fails is named in ``failed``, and the others go on."""
    device, dtype = torch.device(case.device), getattr(torch, case.dtype)
    timer = Timer(device)
    backend = open_backend(case)
    config, graphs = backend.model_config, backend.graphs
    figures = {
        "device": backend.device_name,
        "model": case.model or "rehearsal",
        "num_layers": config.num_layers,
        "dtype": case.dtype,
        "failed": [],
    }
    if graphs is not None:
        figures["captured"] = {"graphs": len(graphs), "seconds": graphs.seconds, "bytes": graphs.num_bytes}
    memory: dict[str, float] = {}
    parts: dict[str, Callable[[], Any]] = {
        "memory": lambda: memory.update(memory_bandwidth(timer, GIB // 16 if small else GIB)) or memory,
        "iterations": lambda: iterations(timer, backend, max(memory["read"], memory["copy"]), small),
        "sampling": lambda: sampling(timer, backend, config.vocab_size),
        "decode_attention": lambda: decode_attention(timer, config, dtype, memory["copy"], small),
        "cpu_attention": lambda: cpu_attention(config, dtype, usable_cores(), GIB // 8 if small else 2 * GIB),
    }
    if device.type == "cuda":
        parts["wake_up"] = lambda: wake_up(timer)
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
    """The model of a case, or the first half, quarter, ... of its layers where the GPU cannot hold them all: what is
    measured are ratios and times per layer."""
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
                print(f"half of the layers: {error}", flush=True)
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
