"""The points of Figure 1 of the APEX paper: a layer's linear operations and its decode attention, one call each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch
from rich.console import Console

import pacpu
from apex.simulator.hardware.files import LayerShape, load_gpu, load_host, load_model_config
from apex.simulator.prediction.calibrated_profile import gpu_attention_s, hardware_profile
from evaluation.results.other_work import OtherWork
from evaluation.run import Point, PointResult, identity
from swiftllm.kv.pools import host_tensor
from swiftllm.machine import cpu_model, last_level_cache_bytes
from swiftllm.runtime.attention_choices import use_fastest_attention

DTYPE, ITEMSIZE = torch.float16, 2
BLOCK_SIZE = 16
HOST = "xeon-6342"
"""A profile table has a host; none of what is taken from it here depends on which."""
COLD_CACHES = 4
"""The caches of all layers together are at least so many times the last-level cache."""
MIN_TIMED_BYTES = 64 << 20
MEASURED_ATTENTION = "measured: CPU attention speed"


@dataclass(frozen=True)
class Predicted:
    """A predicted time. ``known_from`` says what it rests on."""

    operation: str
    device: str
    size: int
    seconds: float
    known_from: str


@dataclass(frozen=True)
class MeasuredAttention:
    """Decode attention of one layer of as many KV heads as heads, by a kernel of this machine."""

    kernel: str
    batch: int
    heads: int
    head_dim: int
    context: int
    rounds: int
    threads: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token."""
        return 2 * self.heads * self.head_dim * ITEMSIZE

    @property
    def num_bytes(self) -> int:
        return self.batch * self.context * self.token_bytes


def operation_points(settings: Mapping[str, Any], threads: int | None) -> list[Point]:
    """The points of an experiment file. ``threads`` replaces its number of them.

    Raises:
        ValueError: a name of it is unknown, or a kernel is not available here; the message says why.
    """
    linear, attention = settings["linear"], settings["attention"]
    config = load_model_config(linear["model"])
    table = hardware_profile(load_gpu(linear["gpu"]), load_host(HOST), config)
    tasks: list[Predicted | MeasuredAttention] = [
        Predicted("linear", load_gpu(linear["gpu"]).name, n, table.linear(n), table.identity["linear"])
        for n in linear["tokens"]
    ]
    heads, head_dim, context = (attention[name] for name in ("heads", "head_dim", "context"))
    shape = LayerShape(heads * head_dim, 0, heads, heads, head_dim)
    for name in attention["gpu"]:
        gpu = load_gpu(name)
        status = gpu.figures["decode_attention_fraction"].status
        tasks += [
            Predicted("attention", gpu.name, n, gpu_attention_s(gpu, shape, ITEMSIZE, n, context), f"{status} figures")
            for n in attention["batch"]
        ]
    sizes = heads, head_dim, context, attention["rounds"], threads or attention["threads"]
    for kernel in attention["kernel"]:
        if kernel not in pacpu.kernels("float16"):
            raise ValueError(f"no kernel {kernel!r}: {pacpu.unavailable().get(kernel, 'it does not compute float16')}")
        tasks += [MeasuredAttention(kernel, n, *sizes) for n in attention["batch"]]
    return [_point(task) for task in tasks]


def _point(task: Predicted | MeasuredAttention) -> Point:
    if isinstance(task, Predicted):
        key = f"{task.operation}-{task.device.lower()}-{task.size}"
        return Point(key, key, f"{task.operation}, {task.device}, {task.size}", task, concurrent=True)
    key = f"attention-{task.kernel}-{task.batch}"
    return Point(key, key, f"attention, {task.kernel} kernel, {task.batch}", task, cost=float(task.num_bytes))


def describe(points: Sequence[Point]) -> dict[str, Any]:
    """What decides the numbers of the points."""
    return {
        kind: identity([point for point in points if isinstance(point.task, task)])
        for kind, task in (("simulated", Predicted), ("measured", MeasuredAttention))
    }


def run_operation(point: Point, label: str, console: Console) -> PointResult:
    """Measure the operation of a point, or note what was predicted of it."""
    task = point.task
    if isinstance(task, Predicted):
        values = {"gpu": task.device, "known_from": task.known_from, "operation_us": task.seconds * 1e6}
        size = {"tokens" if task.operation == "linear" else "batch": task.size}
        return PointResult({**_common(task.device, task.operation), "backend": "simulated", **size, **values}, ())
    others, seconds = OtherWork(), measure_attention(task)
    us = statistics.median(seconds) * 1e6
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    values = {
        **_common(task.kernel, "attention"),
        **asdict(task),
        "backend": MEASURED_ATTENTION,
        "cpu": cpu_model(),
        "dtype": "float16",
        "isa": pacpu.isa(),
        "operation_us": us,
        "operation_us_low": low * 1e6,
        "operation_us_high": high * 1e6,
        "gb_s": task.num_bytes / us / 1e3,
        "others_busy_cores": others.busy_cores(),
    }
    return PointResult(values, ())


def _common(system: str, operation: str) -> dict[str, Any]:
    return {"system": system, "workload": operation}


def measure_attention(task: MeasuredAttention) -> list[float]:
    """Seconds of a call, in each round: of one thread by its time on its core, of several by the clock.

    Calls rotate over the caches of several layers, which together exceed the last-level cache.
    """
    use_fastest_attention()
    blocks_per_request = -(-task.context // BLOCK_SIZE)
    per_layer = task.batch * blocks_per_request
    layer_bytes = per_layer * BLOCK_SIZE * task.token_bytes
    num_layers = max(1, -(-COLD_CACHES * last_level_cache_bytes() // layer_bytes))
    cache = random_cache(num_layers * per_layer, task.heads, task.head_dim)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_layers * per_layer, generator=generator).int()
    tables = list(order.view(num_layers, task.batch, blocks_per_request))
    q, k, v = (torch.randn(task.batch, task.heads, task.head_dim, generator=generator).to(DTYPE) for _ in range(3))
    out, lengths = torch.empty_like(q), torch.full((task.batch,), task.context, dtype=torch.int32)
    calls = -(-MIN_TIMED_BYTES // task.num_bytes)
    clock = time.thread_time if task.threads == 1 else time.perf_counter
    seconds, layer = [], 0
    for _ in range(task.rounds + 1):  # the first one warms up
        start_s = clock()
        for _ in range(calls):
            pacpu.paged_attention(
                q, k, v, cache, tables[layer], lengths, out, task.head_dim**-0.5,
                num_threads=task.threads, kernel=task.kernel,
            )  # fmt: skip
            layer = (layer + 1) % num_layers
        seconds.append((clock() - start_s) / calls)
    return seconds[1:]


@lru_cache(1)
def random_cache(num_blocks: int, heads: int, head_dim: int) -> torch.Tensor:
    """A cache whose every page has been written, with other numbers in every block."""
    cache = host_tensor((num_blocks, heads, 2, BLOCK_SIZE, head_dim), DTYPE)
    pattern = torch.randn(999_983, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    flat = cache.view(-1)
    for at in range(0, len(flat), len(pattern)):
        flat[at : at + len(pattern)] = pattern[: len(flat) - at]
    return cache
