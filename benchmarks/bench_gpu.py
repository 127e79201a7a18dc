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
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    NEEDS = ("numpy", "pacpu", "torch")
    import here

import torch

from benchmarks.gpu_parts import (
    GIB,
    ROUNDS,
    SMALL,
    GpuBatchSizes,
    Timer,
    both_ways,
    captures,
    coded_products,
    cpu_attention,
    cpu_attention_beside,
    decode_attention,
    expert_layers,
    gpu_batch_profiles,
    gpu_batch_times,
    host_seconds,
    iterate,
    linear_attention,
    measure_wake_up,
    memory_bandwidth,
    pinned_allocation,
    polling,
    product,
    versions,
)
from evaluation.gpu.check import CASES, Case, model_folder
from evaluation.gpu.report import part_lines
from evaluation.gpu.stages import GPU_BATCH_PARTS, MACHINE_PARTS
from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.device import CudaDevice, Device, open_device
from swiftllm.files import check_writable, save_result
from swiftllm.machine import InsufficientMemory, usable_cores
from swiftllm.model.config import ModelConfig
from swiftllm.runtime.torch_backend import TorchBackend, device_name, open_torch_backend
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
PARTS = (
    *MACHINE_PARTS,
    *GPU_BATCH_PARTS,
    *("iterations", "sampling", "iterations_eager", "decode_attention"),
    *("linear_attention", "coded_products", "experts", "cpu_attention", "cpu_attention_beside"),
)
OF_A_GPU = ("both_ways", "pinned_allocation", "polling", "wake_up", "captures")
"""What a host has nothing of."""
PINNED_SIZES = (1 << 20, 4 << 20, 64 << 20, 256 << 20)
HOWS["mixed"] = tuple(how for (how,) in HOWS.values())


@torch.inference_mode()
def iterations(timer: Timer, backend: TorchBackend, read_gb_s: float, quick: bool) -> list[dict]:
    """Times of decode iterations from the embedding to sampled tokens, compared with reading all weights once.

    Layer by layer, as with CPU requests, and in one go, as without them where graphs have been captured."""
    floor_s = weight_bytes(backend) / (read_gb_s * 1e9)
    rows = []
    for batch, in_one_go in itertools.product(ITERATION_BATCHES[: 2 if quick else None], (True, False)):
        requests = decoding_requests(backend, batch)
        items = [GpuBatchItem(request, request.num_tokens - 1, 1, Tier.GPU, False) for request in requests]
        if in_one_go and backend.run_full_graph(backend.open_gpu_batch(items)) is None:
            continue

        def work(items: Sequence[GpuBatchItem] = items, in_one_go: bool = in_one_go) -> None:
            iterate(backend, items, in_one_go)

        seconds = timer.median(work)
        host_s = statistics.median(host_seconds(timer, work) for _ in range(ROUNDS))
        rows.append(
            {
                "batch": batch,
                "in_one_go": in_one_go,
                "graphs": backend.graphs is not None,
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
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="these alone; default all that --output lacks")
    parser.add_argument("--output", type=Path, help="add the figures to this JSON file")
    options = parser.parse_args(arguments)
    known = json.loads(options.output.read_text()) if options.output and options.output.exists() else {}
    names = options.parts or [name for name in PARTS if name not in known]
    case = CASES["rehearsal" if options.rehearse else "llama-3.1-8b"]
    figures = known
    if options.output:
        check_writable(options.output.parent)
    for figures in measure(case, options.rehearse, names, known):
        if options.output:
            save_result(options.output, json.dumps(figures, indent=1) + "\n")
    return 1 if set(figures.get("failed", ())) & set(names) else 0


def measure(
    case: Case, small: bool, names: Sequence[str] = PARTS, known: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """Yields all figures so far after each part of ``names``. Parts that fail are named in ``failed``; the others still
    run. ``known`` are figures of an earlier call."""
    device, dtype = torch.device(case.device), getattr(torch, case.dtype)
    sizes = SMALL if small else GpuBatchSizes()
    timer, cores = Timer(device), usable_cores()
    with model_folder(case) as folder:
        config = ModelConfig.from_folder(folder)
    figures: dict[str, Any] = {
        "device": device_name(device),
        "model": case.model or "rehearsal",
        "num_layers": config.num_layers,
        "dtype": case.dtype,
        "warnings": [],
        **(known or {}),
    }
    figures["failed"] = [name for name in figures.get("failed", ()) if name not in names]
    backends: list[TorchBackend] = []

    def memory() -> dict[str, float]:
        if "memory" not in figures:
            figures["memory"] = memory_bandwidth(timer, GIB // 16 if small else GIB)
        return figures["memory"]

    def backend(graphs: bool = True) -> TorchBackend:
        """The one that is open, or another in its place: a card may hold one alone."""
        if backends and (graphs or not backends[0].hardware.can_capture):
            return backends[0]
        while backends:
            backends.pop().close()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            opened = open_backend(case) if graphs else open_backend(case, eager_device(device))
        backends.append(opened)
        for warning in warned:
            print(f"warning: {warning.message}", flush=True)
            figures["warnings"].append(str(warning.message))
        figures["num_layers"] = opened.model_config.num_layers
        if opened.graphs is not None:
            took = {"seconds": opened.graphs.seconds, "bytes": opened.graphs.num_bytes}
            figures["captured"] = {"graphs": len(opened.graphs), **took}
        return opened

    def iterations_of(graphs: bool) -> list[dict]:
        read_gb_s = max(memory()["read"], memory()["copy"])
        return iterations(timer, backend(graphs), read_gb_s, small)

    work: dict[str, Callable[[], Any]] = {
        "versions": lambda: versions(device),
        "both_ways": lambda: both_ways(timer, GIB // 4),
        "pinned_allocation": lambda: pinned_allocation(PINNED_SIZES),
        "polling": lambda: polling(timer),
        "wake_up": lambda: measure_wake_up(timer),
        "captures": lambda: captures(backend()),
        "gpu_batch_profiles": lambda: gpu_batch_profiles(timer, backend(), sizes),
        "gpu_batch_times": lambda: gpu_batch_times(timer, backend(), sizes),
        "memory": memory,
        "gemm": lambda: product(timer, dtype, 256 if small else 8192),
        "iterations": lambda: iterations_of(True),
        "sampling": lambda: sampling(timer, backend(), config.vocab_size),
        "iterations_eager": lambda: iterations_of(False),
        "decode_attention": lambda: decode_attention(timer, config, dtype, memory()["copy"], small),
        "linear_attention": lambda: linear_attention(timer, dtype, memory()["copy"], small),
        "coded_products": lambda: coded_products(timer, config, dtype, small),
        "experts": lambda: expert_layers(timer, dtype, memory()["copy"], small),
        "cpu_attention": lambda: cpu_attention(config, dtype, cores, GIB // 8 if small else 2 * GIB),
        "cpu_attention_beside": lambda: cpu_attention_beside(timer, config, dtype, cores, small),
    }
    try:
        for name in names:
            figures.pop(name, None)
            try:
                needs_gpu = name in OF_A_GPU and device.type != "cuda"
                figures[name] = None if needs_gpu else work[name]()
            except Exception:
                figures["failed"].append(name)
                traceback.print_exc()
            else:
                if needs_gpu:
                    figures["needs_gpu"] = sorted({*figures.get("needs_gpu", ()), name})
                print("\n".join(part_lines(name, {"needs": "a GPU"} if needs_gpu else figures[name])), flush=True)
            yield figures
    finally:
        while backends:
            backends.pop().close()


def eager_device(device: torch.device) -> Device:
    """A device that launches every kernel on its own."""
    return CudaDevice(can_capture=False) if device.type == "cuda" else open_device(device.type)


def open_backend(case: Case, hardware: Device | None = None) -> TorchBackend:
    """A backend with the model of a case, or with half, a quarter, ... of its layers if the GPU cannot hold all. Fewer
    layers suffice, since the figures are ratios and times per layer."""
    with model_folder(case) as model, TemporaryDirectory() as folder:
        raw = json.loads((model / "config.json").read_text())
        while True:
            (Path(folder) / "config.json").write_text(json.dumps(raw))
            try:
                return open_torch_backend(
                    EngineConfig(
                        folder,
                        case.device,
                        case.dtype,
                        "dummy",
                        num_gpu_blocks=512,
                        num_cpu_blocks=64,
                        max_model_len=case.max_model_len,
                        gpu_batch_threads=1,
                    ),
                    **({} if hardware is None else {"hardware": hardware}),
                )
            except InsufficientMemory as error:
                if raw["num_hidden_layers"] == 1:
                    raise
                print(f"trying half of the layers: {error}", flush=True)
            raw["num_hidden_layers"] //= 2


if __name__ == "__main__":
    sys.exit(main())
