"""Parts of bench_gpu.py: iterations of several kinds of GPU batch, their times, and where these go, kernel by
kernel."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts import ROUNDS, Timer, host_seconds
from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.runtime.torch_backend import TorchBackend

LONGEST = 25  # kernels of a table
PROFILED = 3  # iterations of a profile
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")


@dataclass(frozen=True)
class GpuBatchSizes:
    """Requests and tokens of the GPU batches. The blocks of all of one GPU batch must fit the backend's GPU tier."""

    decodes: int = 64
    decoded_context: int = 32
    chunk: int = 512
    hits: int = 16
    hit_tokens: int = 896
    """Of a cached prefix: whole blocks. Two more tokens of each prompt are computed."""
    swapped_tokens: int = 800


SMALL = GpuBatchSizes(decodes=4, chunk=24, hits=3, hit_tokens=64, swapped_tokens=48)
"""Of a rehearsal."""
HIT_COMPUTED = 2


class GpuBatches:
    """Iterations over blocks that hold zeros: their times depend on how many tokens there are, not on which."""

    def __init__(self, backend: TorchBackend, sizes: GpuBatchSizes) -> None:
        self._backend, self._sizes = backend, sizes
        for pool in backend.kv_pools.tensors.values():
            pool.zero_()
        self.kinds: dict[str, Callable[[], None]] = {
            "decodes": self._decodes,
            "decodes and a chunk": self._mixed,
            f"{sizes.hits} prefix hits": self._hits,
            "a chunk after tokens in the CPU tier": self._later_chunk,
            "decodes and a swap to the host": lambda: self._swap(Tier.GPU),
            "decodes and a swap to the GPU": lambda: self._swap(Tier.CPU),
        }

    def _decodes(self) -> None:
        self._iterate([self._decode(index) for index in range(self._sizes.decodes)])

    def _mixed(self) -> None:
        decodes = [self._decode(index) for index in range(self._sizes.decodes)]
        self._iterate([self._chunk("chunk", 0, self._sizes.chunk, self._beyond(self._sizes.chunk)), *decodes])

    def _hits(self) -> None:
        """Prompts that share all of their beginning, as after a common system prompt."""
        cached, size = self._sizes.hit_tokens, self._backend.block_size
        shared = list(range(cached // size))
        self._iterate(
            [
                self._chunk(f"hit-{index}", cached, HIT_COMPUTED, [*shared, len(shared) + index])
                for index in range(self._sizes.hits)
            ]
        )

    def _later_chunk(self) -> None:
        before, rows = self._sizes.swapped_tokens // 2, self._sizes.swapped_tokens // 2
        blocks = list(range(-(-(before + rows) // self._backend.block_size)))
        self._iterate([self._chunk("later", before, rows, blocks, Tier.CPU)])

    def _swap(self, source: Tier) -> None:
        count = -(-self._sizes.swapped_tokens // self._backend.block_size)
        of_tier = {Tier.GPU: self._beyond(self._sizes.swapped_tokens), Tier.CPU: list(range(count))}
        target = Tier.CPU if source is Tier.GPU else Tier.GPU
        self._backend.swap([Swap(None, source, tuple(of_tier[source]), tuple(of_tier[target]))])
        self._decodes()
        self._backend.await_swaps()

    def _beyond(self, tokens: int) -> list[int]:
        """GPU blocks behind those of the decodes."""
        first = self._sizes.decodes * self._decoded_blocks
        return list(range(first, first - (-tokens // self._backend.block_size)))

    @property
    def _decoded_blocks(self) -> int:
        return -(-(self._sizes.decoded_context + 1) // self._backend.block_size)

    def _decode(self, index: int) -> GpuBatchItem:
        blocks = range(index * self._decoded_blocks, (index + 1) * self._decoded_blocks)
        request = self._request(f"decode-{index}", self._sizes.decoded_context, list(blocks), Tier.GPU)
        request.append_token(1, 0.0)
        return GpuBatchItem(request, request.num_tokens - 1, 1, Tier.GPU, is_prefill=False)

    def _chunk(self, name: str, start: int, rows: int, blocks: list[int], tier: Tier = Tier.GPU) -> GpuBatchItem:
        return GpuBatchItem(self._request(name, start + rows, blocks, tier), start, rows, tier, is_prefill=True)

    def _request(self, name: str, tokens: int, blocks: list[int], tier: Tier) -> Request:
        request = Request(name, tuple(1 + place % 100 for place in range(tokens)), SamplingParams(max_tokens=64))
        request.tier = tier
        self._backend.block_tables = {**self._backend.block_tables, name: blocks}
        return request

    def _iterate(self, items: Sequence[GpuBatchItem]) -> None:
        iterate(self._backend, items)


def iterate(backend: TorchBackend, items: Sequence[GpuBatchItem], in_one_go: bool = True) -> None:
    """An iteration of a GPU batch without CPU batches, in one go where that is possible and allowed."""
    gpu_batch = backend.open_gpu_batch(items)
    if in_one_go and backend.run_full_graph(gpu_batch) is not None:
        return
    for layer in range(-1, backend.num_layers - 1):
        backend.run_stage(layer, [gpu_batch])
        backend.gpu_attention(layer + 1, gpu_batch)
    backend.run_stage(backend.num_layers - 1, [gpu_batch])


@torch.inference_mode()
def gpu_batch_times(timer: Timer, backend: TorchBackend, sizes: GpuBatchSizes) -> list[dict[str, Any]]:
    """Time of an iteration, and the launching thread's CPU time in it, for each kind of GPU batch."""
    rows = []
    for name, work in GpuBatches(backend, sizes).kinds.items():
        seconds = timer.median(work)
        host_s = statistics.median(host_seconds(timer, work) for _ in range(ROUNDS))
        rows.append({"gpu_batch": name, "ms": seconds * 1e3, "host_ms": host_s * 1e3})
    return rows


@torch.inference_mode()
def gpu_batch_profiles(timer: Timer, backend: TorchBackend, sizes: GpuBatchSizes) -> list[dict[str, Any]]:
    """A table of kernels for each kind of GPU batch, of :data:`PROFILED` iterations; see :func:`kernel_table`."""
    on_gpu = timer.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    tables = []
    for name, work in GpuBatches(backend, sizes).kinds.items():
        work()  # compiles what it needs
        timer.synchronize()
        with profile(activities=activities) as profiler:
            for _ in range(PROFILED):
                work()
            timer.synchronize()
        tables.append({"gpu_batch": name, "iterations": PROFILED, **kernel_table(profiler.events(), on_gpu)})
    return tables


def kernel_table(events: Iterable[Any], on_gpu: bool) -> dict[str, Any]:
    """The kernels (on a CPU: torch's operations) that took longest, summed up by name, longest first, with the launches
    and, on a GPU, the time between its first and last kernel in which none ran, on any stream."""
    events = [event for event in events if not event.is_user_annotation and not event.name.startswith("ProfilerStep")]
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spent: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in events:
        if event.device_type == kind:
            spans.append((event.time_range.start, event.time_range.end))
            spent[event.name].append(spans[-1][1] - spans[-1][0] if on_gpu else event.self_cpu_time_total)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:LONGEST]
    table = {
        "kernels": [{"name": name, "calls": len(times), "us": sum(times)} for name, times in longest],
        "launches": None,
        "span_us": None,
        "idle_us": None,
    }
    if on_gpu and spans:
        launches = (e.device_type == DeviceType.CPU and e.name.startswith(LAUNCHES) for e in events)
        span = max(end for _, end in spans) - min(start for start, _ in spans)
        table |= {"launches": sum(launches), "span_us": span, "idle_us": span - covered(spans)}
    return table


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of what intervals cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def captures(backend: TorchBackend) -> list[dict[str, Any]]:
    """What the graphs of each number of rows took, in the order of capturing."""
    return [
        {"rows": bucket.rows, "graphs": bucket.graphs, "seconds": bucket.seconds, "MiB": bucket.num_bytes / 2**20}
        for bucket in backend.graphs.captured
    ]
