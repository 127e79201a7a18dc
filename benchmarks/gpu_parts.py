"""The parts of the GPU benchmark: single operations, and whole GPU batches."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import pacpu
from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.device import FIRST_PAUSE_S, NvidiaDriver, open_device
from swiftllm.ops.interface import StateChunk, StateRows
from swiftllm.ops.library import LibraryLinear, LibraryProducts, installed_version
from swiftllm.ops.matrices import Experts, ExpertWeights, QuantisedMatrix, Router
from swiftllm.runtime.cpu_tuning import read_limit, use_fastest_attention
from swiftllm.runtime.execution_context import select_ops
from swiftllm.runtime.torch_backend import TorchBackend

ROUNDS = 9
PRODUCT_ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048)
EXPERT_ROWS = (1, 4, 16, 32, 64, 128)
ATTENTION_SHAPES = ((1, 1024), (16, 1024), (64, 256), (64, 1024), (64, 4096))  # requests, tokens of context
STATES = (16, 48, 128)  # key heads, value heads and their size of Qwen3.5-27B
STATE_ROWS = (("decodes", 1), ("chunk", 512), ("decodes", 16), ("decodes", 64), ("chunk", 2048))
GIB = 1 << 30


@dataclass(frozen=True)
class Timer:
    """Measures seconds of work on a device."""

    device: torch.device

    @property
    def on_gpu(self) -> bool:
        return self.device.type != "cpu"

    def synchronize(self) -> None:
        if self.on_gpu:
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


def host_seconds(timer: Timer, work: Callable[[], None]) -> float:
    """CPU time (seconds) of the launching thread in some work, without waiting for the GPU."""
    timer.synchronize()
    start_s = time.thread_time()
    work()
    return time.thread_time() - start_s


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
    if timer.on_gpu:
        pinned = torch.empty(num_bytes // 4, dtype=torch.uint8, pin_memory=True)
        part = source[: len(pinned)]
        figures["to_device"] = len(pinned) / timer.median(lambda: part.copy_(pinned, non_blocking=True))
        figures["to_host"] = len(pinned) / timer.median(lambda: pinned.copy_(part, non_blocking=True))
    return {name: rate / 1e9 for name, rate in figures.items()}


def both_ways(timer: Timer, num_bytes: int) -> dict[str, float]:
    """GB/s of copies from and to pinned memory at the same time, each way, on streams of their own."""
    hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    ends = [torch.empty(num_bytes, dtype=torch.uint8, device=timer.device) for _ in range(2)]
    streams = [torch.cuda.Stream(timer.device) for _ in range(2)]
    pairs = (ends[0], hosts[0]), (hosts[1], ends[1])

    def copy() -> None:
        for stream, (target, source) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    return {"each_gb_s": num_bytes / timer.median(copy) / 1e9, "bytes": num_bytes}


def pinned_allocation(sizes: Sequence[int]) -> list[dict[str, float]]:
    """Time to allocate pinned memory of sizes in bytes that torch's allocator does not have at hand."""
    kept, rows = [], []
    for size in sizes:
        start_s = time.perf_counter()
        kept.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        ms = (time.perf_counter() - start_s) * 1e3
        rows.append({"MB": size / 1e6, "ms": ms, "ms_per_MB": ms / size * 1e6})
    return rows


def polling(timer: Timer) -> dict[str, float]:
    """How long it takes to look at an event that has passed, and to sleep as shortly as the engine's host does."""
    stream = open_device(timer.device.type).compute
    event = stream.mark()
    timer.synchronize()
    figures = {"query_us": timer.median(event.done, calls=100) * 1e6}
    return figures | {"sleep_us": timer.median(partial(time.sleep, FIRST_PAUSE_S), calls=100) * 1e6}


def versions(device: torch.device) -> dict[str, Any]:
    """Of torch, its CUDA and the driver, with the device's compute capability and memory."""
    found = {"torch": torch.__version__, "CUDA": torch.version.cuda, "driver": NvidiaDriver().version()}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        found |= {"capability": f"{about.major}.{about.minor}", "GiB": round(about.total_memory / GIB, 2)}
        found["multiprocessors"] = about.multi_processor_count
    return found


@torch.inference_mode()
def product(timer: Timer, dtype: torch.dtype, size: int) -> dict[str, Any]:
    """A product of two square matrices."""
    left, right = (torch.randn(size, size, device=timer.device).to(dtype) for _ in range(2))
    seconds = timer.median(lambda: torch.mm(left, right))
    return {"size": size, "ms": seconds * 1e3, "tflops": 2 * size**3 / seconds / 1e12}


@contextlib.contextmanager
def busy_device(timer: Timer, dtype: torch.dtype, size: int) -> Iterator[None]:
    """Products on the device, and copies across the bus both ways, for as long as this lasts."""
    stop, on_gpu = threading.Event(), timer.on_gpu
    left = torch.randn(size, size, device=timer.device).to(dtype)
    there = torch.empty(size * size, dtype=dtype, pin_memory=on_gpu)

    def work() -> None:
        streams = [torch.cuda.Stream(timer.device) for _ in range(2)] if on_gpu else []
        back, onto = torch.empty_like(there, pin_memory=on_gpu), torch.empty_like(left).view(-1)
        while not stop.is_set():
            torch.mm(left, left)
            for stream, target, source in zip(streams, (onto, back), (there, left.view(-1)), strict=False):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
            timer.synchronize()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def cpu_attention_beside(timer: Timer, config: Any, dtype: torch.dtype, threads: int, quick: bool) -> dict[str, Any]:
    """CPU attention with a core left to the thread that launches: alone, and beside a busy device and its bus."""
    threads, num_bytes = max(1, threads - 1), GIB // 8 if quick else 2 * GIB
    alone = cpu_attention(config, dtype, threads, num_bytes)
    with busy_device(timer, dtype, 256 if quick else 4096):
        beside = cpu_attention(config, dtype, threads, num_bytes)
    rates = {"alone_gb_s": alone["gb_s"], "beside_gb_s": beside["gb_s"]}
    return {"threads": threads, **rates, "beside_over_alone": beside["gb_s"] / alone["gb_s"]}


def measure_wake_up(timer: Timer) -> dict[str, float]:
    """The extra time until the engine's host, which sleeps, notices an event, compared with one that spins. Pacing must
    hide it."""
    words = torch.zeros(GIB // 16, dtype=torch.int32, device=timer.device)
    stream = open_device(timer.device.type).compute

    def sleep() -> None:
        words.add_(1)
        stream.mark().synchronize()

    def spin() -> None:
        words.add_(1)
        torch.cuda.current_stream().synchronize()

    asleep, spinning = timer.median(sleep), timer.median(spin)
    return {"us": (asleep - spinning) * 1e6}


@torch.inference_mode()  # as in the backend: torch makes tensors at its first capture and fills them at each one
def decode_attention(timer: Timer, config: Any, dtype: torch.dtype, copy_gb_s: float, quick: bool) -> list[dict]:
    """Paged decode attention over 1 GiB of K and V (larger than any GPU cache) in shuffled blocks of 16."""
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
        if hardware.can_capture:  # as in the engine, so that launches of short calls are not measured
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
def linear_attention(timer: Timer, dtype: torch.dtype, copy_gb_s: float, quick: bool) -> list[dict]:
    """The rule of a layer over states of 1 GiB: decodes, which read and write a state each, and a chunk of a prompt."""
    ops, device, (key_heads, heads, size) = select_ops(timer.device, dtype), timer.device, STATES
    hardware, graphs, rows = open_device(device.type), [], []
    state_bytes = heads * size * size * 4
    slots = max(64, (GIB if device.type == "cuda" else GIB // 4) // state_bytes)
    states = torch.zeros(slots, heads, size, size, device=device)
    for kind, count in STATE_ROWS[: 2 if quick else None]:
        q, k, v = (
            torch.randn(count, number, size, device=device).to(dtype) for number in (key_heads, key_heads, heads)
        )
        decay, beta = -torch.rand(count, heads, device=device), torch.rand(count, heads, device=device)
        if kind == "chunk":
            of_rows = [StateRows.of([StateChunk(0, count, is_first=False)], [], lambda tensor: tensor.to(device))]
        else:
            parts = torch.randperm(slots, device=device)[: slots // count * count].split(count)
            of_rows = [StateRows((), part) for part in parts]

        def run(new: tuple = (q, k, v, decay, beta), of_rows: list = of_rows) -> None:
            for rows in of_rows:
                ops.delta_rule(*new, states, rows)

        run()
        if hardware.can_capture:  # as in the engine
            graphs.append(hardware.capture(run))
            run = graphs[-1].replay
        seconds = timer.median(run) / len(of_rows)
        gb_s = 2 * count * state_bytes / seconds / 1e9 if kind == "decodes" else None
        fraction = None if gb_s is None else gb_s / copy_gb_s
        us = seconds * 1e6
        rows.append({"of": kind, "rows": count, "us": us, "us_a_row": us / count, "gb_s": gb_s, "over_copy": fraction})
    return rows


@torch.inference_mode()
def coded_products(timer: Timer, config: Any, dtype: torch.dtype, quick: bool) -> list[dict]:
    """Products with a layer's largest matrix in 4 bits: from its codes, and with it written out; and in 16 bits.

    Where codes stop being faster is what ``TritonOps.most_quantised_rows`` should be. The optional library is measured
    where it is installed.
    """
    ops, device = select_ops(timer.device, dtype).in_place, timer.device
    out, inputs = 2 * config.intermediate_size, config.hidden_size
    matrix = QuantisedMatrix.from_codes(
        torch.randint(16, (inputs, out), dtype=torch.uint8, device=device),
        torch.full((1, out), 0.01, dtype=dtype, device=device).expand(-(-inputs // 128), out).contiguous(),
        torch.full((-(-inputs // 128), out), 8, dtype=torch.uint8, device=device),
        min(inputs, 128),
        dtype,
    )
    full = matrix.dequantise()
    linear, rows = ops.make_quantised_linear(matrix, None), []
    by_library = None
    if device.type == "cuda" and dtype.itemsize == 2 and installed_version() is not None:
        by_library = LibraryLinear(matrix, None)
    for count in PRODUCT_ROWS[: 2 if quick else None]:
        x = torch.randn(count, inputs, device=device).to(dtype)
        row = {"rows": count, "full_us": timer.median(lambda x=x: torch.mm(x, full.t()), calls=4) * 1e6}
        limits = {"codes_us": count}
        if device.type == "cuda":
            limits["written_out_us"] = 0
        for name, most in limits.items():
            ops.most_quantised_rows = most
            row[name] = timer.median(lambda x=x: linear(x), calls=4) * 1e6
        if by_library is not None:
            row["library_us"] = timer.median(lambda x=x: by_library(x), calls=4) * 1e6
        rows.append(row)
    return rows


@torch.inference_mode()
def expert_layers(timer: Timer, dtype: torch.dtype, copy_gb_s: float, quick: bool) -> list[dict]:
    """A layer of 4-bit experts, of the sizes of Qwen3-30B-A3B: its time by that of reading the codes and scales of the
    chosen experts at the rate of a copy. Rows choose at random, as equal ones would choose equal experts. The optional
    library is measured where it is installed and right."""
    experts, slots, hidden, ffn = (8, 2, 64, 32) if quick else (128, 8, 2048, 768)
    ops, device, group = select_ops(timer.device, dtype).in_place, timer.device, 32 if quick else 128
    stacks = []
    for out, inputs in ((experts * 2 * ffn, hidden), (experts * hidden, ffn)):
        new = partial(torch.empty, device=device)
        stacks.append(QuantisedMatrix.allocate(new, out, inputs, inputs // group, group, dtype, dtype))
        stacks[-1].codes.random_(-(1 << 31), (1 << 31) - 1)
        stacks[-1].scales.fill_(0.01)
        stacks[-1].zeros.fill_(8)
    weights = ExpertWeights(torch.randn(experts, hidden, device=device), *stacks, slots, normalises=True)
    layers, router, rows, graphs = {"us": ops.make_experts(weights)}, Router(weights), [], []
    if device.type == "cuda" and dtype.itemsize == 2 and installed_version() is not None:
        times = cycle((2.0, 1.0))  # of own products and of the library's, in turn: it is used wherever it is right
        library = LibraryProducts(lambda work, device: next(times))
        experts_by_library = select_ops(device, dtype, library=library).make_experts(weights)
        if library.description is not None:
            layers["library_us"] = experts_by_library
    hardware, expert_bytes = open_device(device.type), sum(stack.nbytes for stack in stacks) / experts
    for count in EXPERT_ROWS[: 2 if quick else None]:
        batches = [torch.randn(count, hidden, device=device).to(dtype) for _ in range(8)]
        touched = sum(len(router(x, None)[0].unique()) for x in batches)

        row = {"rows": count, "experts": touched / len(batches)}
        for name, layer in layers.items():

            def compute(batches: list = batches, layer: Experts = layer) -> None:
                for x in batches:
                    layer(x)

            compute()
            if hardware.can_capture:  # as in the engine
                graphs.append(hardware.capture(compute))
                compute = graphs[-1].replay
            row[name] = timer.median(compute, calls=4) / len(batches) * 1e6
        copied_us = touched / len(batches) * expert_bytes / copy_gb_s / 1e3
        rows.append(row | {"over_copy": row["us"] / copied_us})
    return rows


def cpu_attention(config: Any, dtype: torch.dtype, threads: int, num_bytes: int) -> dict[str, Any]:
    """The default kernel of pacpu over caches in host memory, compared with the limit of streaming reads."""
    use_fastest_attention()
    kv_heads, dim, batch, block_size, context = config.num_kv_heads, config.head_dim, 32, 16, 1024
    blocks = batch * context // block_size
    layer_bytes = blocks * kv_heads * 2 * block_size * dim * dtype.itemsize
    layers = torch.empty((max(2, num_bytes // layer_bytes), blocks, kv_heads, 2, block_size, dim), dtype=dtype)
    noise = torch.randn(1 << 20).to(dtype)
    for part in layers.view(-1).split(len(noise)):  # drawing billions of random numbers would take too long
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
        reads.append(read_limit(threads, layers, passes=3) / 1e9)
    fractions = [rate / read for rate, read in zip(rates, reads, strict=True)]
    return {
        "kernel": pacpu.default_kernel(dtype),
        "isa": pacpu.isa(),
        "threads": threads,
        "gb_s": statistics.median(rates),
        "read_gb_s": statistics.median(reads),
        "fraction_of_read": statistics.median(fractions),
    }


# -- whole GPU batches ------------------------------------------------------------------------------------------------

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
