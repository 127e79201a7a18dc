"""A predicted machine whose GPU does not hold all weights: the placement, the blocks that remain, and times.

The load to choose for is that of requests of one size, half-way through their outputs, while others prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from apex.perf.model import Curve, PerfModel, ProfileTable, Surface
from apex.placement.formulas import batch_s, cpu_read_bytes_per_s
from apex.placement.placement import BoundaryCost, Place, Placement
from apex.placement.search import Choice, choose_placement
from apex.simulator.calibrated_profile import ITEMSIZES, crossing_bytes_per_row, host_read_gb_s
from apex.simulator.cpu_path import Interconnect
from apex.simulator.hardware import Host, LayerShape
from apex.simulator.predicted_machine import GPU_MEMORY_SHARE, HOST_MEMORY_SHARE, PredictedMachine
from apex.simulator.weight_path import CHUNK_BYTES, PlacedWeights

HOST_SHARE_WITH_WEIGHTS = 0.9  # of host memory for the CPU tier and weights
CPU_SHARES = tuple(i / 4 for i in range(5))  # of the CPU tier, of which the best is taken for an estimate


@dataclass(frozen=True)
class Load:
    """Requests of one size: prompt and output tokens, and how many of them may hold KV cache at once."""

    input_len: int
    output_len: int
    max_num_seqs: int
    offloads: bool
    """Whether the system has a CPU tier of KV cache."""

    @property
    def context(self) -> float:
        """Tokens of KV cache of a request half-way through its output."""
        return self.input_len + self.output_len / 2

    def rows(self, requests: float) -> float:
        """Rows of an iteration in which each request decodes, and so many prompts prefill as requests end."""
        return requests * (1 + self.input_len / self.output_len)


@dataclass(frozen=True)
class PlacedMachine:
    """A machine with a placement; ``table`` has times without PCIe transfers, ``believed`` those for schedulers."""

    choice: Choice
    num_gpu_blocks: int
    num_cpu_blocks: int
    table: ProfileTable
    believed: ProfileTable
    interconnect: Interconnect
    weights: PlacedWeights
    predicted_tokens_per_s: float


class WeightPlacer:
    """Places the weights of a machine's model. ``block_size`` is that of KV blocks, in tokens."""

    def __init__(self, machine: PredictedMachine, block_size: int) -> None:
        """
        Raises:
            ValueError: there are several GPUs, or the machine's DRAM is no faster than PCIe.
        """
        if machine.tensor_parallel > 1:
            raise ValueError("weights are streamed to one GPU: leave out --weights-gpu-memory or --tensor-parallel")
        self.machine = machine
        self._shape = LayerShape.from_config(machine.model)
        self._itemsize = ITEMSIZES[machine.dtype]
        self._block_bytes = machine.model.kv_bytes_per_token(self._itemsize) * block_size
        self._block_size = block_size
        shape, first, layers = self._shape, machine.table.first_share, machine.model.num_layers
        layer_bytes = shape.gemm_weights * self._itemsize
        self.boundary_bytes = (first * layer_bytes, *[layer_bytes] * (layers - 1), (1 - first) * layer_bytes)
        self.other_bytes = machine.weight_bytes - layers * layer_bytes
        """Embedding, head and norms, which stay on the GPU."""
        self.interconnect = Interconnect(
            float(machine.table.identity["pcie_gb_s"]) * 1e9,
            shape.qkv_size * self._itemsize,
            shape.num_heads * shape.head_dim * self._itemsize,
            machine.gpu["transfer_latency_us"] * 1e-6,
            host_read_gb_s(machine.host) * 1e9,
        )
        self._hidden_bytes = (shape.qkv_size + shape.hidden_size) * self._itemsize
        self._cpu_linear = cpu_linear_curve(machine.host, shape, self._itemsize)
        self._model = PerfModel(machine.table, layers)

    def place(self, memory_gib: float | Literal["auto"], load: Load) -> PlacedMachine:
        """The machine with as many GiB of GPU memory for weights; auto: as many as give the highest predicted rate.

        Raises:
            ValueError: nothing fits; the message says what would.
        """
        usable_bytes = self.machine.gpu["memory_gb"] * 1e9 * GPU_MEMORY_SHARE
        if memory_gib == "auto":
            return max(self._candidates(usable_bytes, load), key=lambda placed: placed.predicted_tokens_per_s)
        return self._placed(usable_bytes, memory_gib * 2**30, load)

    def costs(self, rows: float) -> list[BoundaryCost]:
        """Of the boundaries from -1 on, for an iteration of ``rows``; the CPU computes while copies run."""
        link = self.interconnect
        cpu_share = cpu_read_bytes_per_s(1.0, link.bytes_per_s, link.dram_bytes_per_s)
        gpu_s, cpu_s = self._model.linear_s(max(1, round(rows))), self._cpu_linear(rows) / cpu_share
        crossing_s = 2 * link.transfer_s(round(rows * self._hidden_bytes))
        crossing_s += CHUNK_BYTES / link.bytes_per_s / 2  # the result waits for half a chunk of weights
        whole = max(self.boundary_bytes)
        return [
            BoundaryCost(size, gpu_s * size / whole, cpu_s * size / whole + crossing_s, size / link.bytes_per_s)
            for size in self.boundary_bytes
        ]

    def with_placement(self, placement: Placement) -> PlacedWeights:
        """What the simulated backend needs to run a placement."""
        return PlacedWeights(placement, self.boundary_bytes, self._cpu_linear, self._hidden_bytes)

    def without_transfers(self) -> ProfileTable:
        """The machine's table with CPU attention that leaves PCIe transfers to the simulated link."""
        link, row_bytes = self.interconnect, crossing_bytes_per_row(self._shape, self._itemsize)
        crossing_s = {
            n: 2 * link.latency_s + n * row_bytes / link.bytes_per_s for n in self.machine.table.cpu_attention.firsts
        }
        return replace(
            self.machine.table, cpu_attention=_plus(self.machine.table.cpu_attention, lambda n: -crossing_s[n])
        )

    def believed(self, placement: Placement) -> ProfileTable:
        """What schedulers predict from: boundaries wait for the stream, and the stream slows CPU attention down."""
        table, layers = self.machine.table, self.machine.model.num_layers
        streamed_bytes = placement.bytes_at(Place.STREAMED, self.boundary_bytes)
        stream_s = streamed_bytes / self.interconnect.bytes_per_s / layers

        def seconds(rows: float) -> float:
            costs = zip(placement.places, self.costs(rows), strict=True)
            compute_s = sum(cost.cpu_s if place is Place.CPU else cost.gpu_s for place, cost in costs)
            return max(compute_s / layers, stream_s)

        linear = Curve(table.linear.sizes, tuple(seconds(rows) for rows in table.linear.sizes))
        lost_s = streamed_bytes / self.interconnect.dram_bytes_per_s / layers
        return replace(table, linear=linear, cpu_attention=_plus(table.cpu_attention, lambda _: lost_s))

    def _candidates(self, usable_bytes: float, load: Load) -> Iterator[PlacedMachine]:
        """All numbers of boundaries' worth of GPU memory for weights, from none on."""
        found, refused = False, None
        for number in range(len(self.boundary_bytes) + 1):
            try:
                placed = self._placed(usable_bytes, self.other_bytes + number * max(self.boundary_bytes), load)
            except ValueError as error:
                refused = refused or error
                continue
            found = True
            yield placed
        if not found:
            raise refused

    def _placed(self, usable_bytes: float, weight_bytes: float, load: Load) -> PlacedMachine:
        """
        Raises:
            ValueError: the weights fit neither GPU nor host, or leave no KV block.
        """
        machine = self.machine
        if weight_bytes > usable_bytes:
            raise ValueError(
                f"{weight_bytes / 2**30:.2f} GiB of weights exceed the {usable_bytes / 2**30:.2f} GiB of "
                f"{machine.gpu.name} that may be used: take less, or auto"
            )
        for_boundaries = weight_bytes - self.other_bytes
        gpu_requests = max(0.0, usable_bytes - weight_bytes) / self._block_bytes * self._block_size / load.context
        best: tuple[float, Choice] | None = None
        host_bytes = machine.host["memory_gb"] * 1e9 * machine.cpu_hosts
        off_gpu = max(0.0, sum(self.boundary_bytes) - max(0.0, for_boundaries))
        cpu_bytes = min(host_bytes * HOST_MEMORY_SHARE, host_bytes * HOST_SHARE_WITH_WEIGHTS - off_gpu)
        if cpu_bytes < 0:
            raise ValueError(
                f"{machine.model_name} leaves {off_gpu / 2**30:.1f} GiB of weights to {machine.host.name}, which has "
                f"{host_bytes / 2**30:.1f} GiB: take a larger --host, a larger --gpu or 4-bit weights"
            )
        cpu_requests = cpu_bytes / self._block_bytes * self._block_size / load.context
        shares = CPU_SHARES if load.offloads else CPU_SHARES[:1]
        for share in shares:
            on_gpu = min(gpu_requests, load.max_num_seqs)
            on_cpu = min(share * cpu_requests, load.max_num_seqs - on_gpu)
            if on_gpu + on_cpu < 1:
                continue
            choice, iteration_s = self._estimate(for_boundaries, on_gpu, on_cpu, load)
            if best is None or (on_gpu + on_cpu) / iteration_s > best[0]:
                best = (on_gpu + on_cpu) / iteration_s, choice
        if best is None:
            raise ValueError(
                f"{weight_bytes / 2**30:.2f} GiB of weights leave no request of {load.context:g} tokens on "
                f"{machine.gpu.name}: take a smaller --weights-gpu-memory, or auto"
            )
        rate, choice = best
        taken = self.other_bytes + choice.placement.gpu_bytes(self.boundary_bytes)
        gpu_blocks = int(max(0.0, usable_bytes - taken) / self._block_bytes)
        return PlacedMachine(
            choice,
            gpu_blocks,
            int(cpu_bytes / self._block_bytes),
            self.without_transfers(),
            self.believed(choice.placement),
            self.interconnect,
            self.with_placement(choice.placement),
            rate,
        )

    def _estimate(self, gpu_bytes: float, on_gpu: float, on_cpu: float, load: Load) -> tuple[Choice, float]:
        """The placement for these requests and the seconds of an iteration with it."""
        layers, link = self.machine.model.num_layers, self.interconnect
        attention_s = layers * self._model.gpu_attention_s(max(1, round(on_gpu)), round(on_gpu * load.context))
        other_s = attention_s + self._model.ends_s(max(1, round(on_gpu + on_cpu)))
        choice = choose_placement(self.costs(load.rows(on_gpu + on_cpu)), gpu_bytes, other_s)
        streamed = choice.placement.bytes_at(Place.STREAMED, self.boundary_bytes)
        kv_bytes = on_cpu * load.context * layers * self._shape.kv_elements * self._itemsize
        cpu_gb_s = float(self.machine.table.identity["cpu_attention_gb_s"])
        seconds = batch_s(
            streamed, kv_bytes, choice.iteration_s, link.bytes_per_s, cpu_gb_s * 1e9, link.dram_bytes_per_s
        )
        return choice, seconds


def cpu_linear_curve(host: Host, shape: LayerShape, itemsize: int) -> Curve:
    """Seconds over rows in which a host's cores compute a layer's weights: reading them, then multiplying.

    Weights are read in ``itemsize`` bytes an element: quantised ones are dequantised when they are loaded.
    """
    read_s = shape.gemm_weights * itemsize / (host_read_gb_s(host) * 1e9 * host["cpu_linear_read_fraction"])
    row_s = 2 * shape.gemm_weights / (host["cores"] * host["cpu_linear_gflops_per_core"] * 1e9)
    return Curve((1, 4096), (read_s + row_s, read_s + 4096 * row_s))


def _plus(surface: Surface, extra_s: Callable[[float], float]) -> Surface:
    """``surface`` with ``extra_s(first)`` seconds more, never below 0."""
    curves = (
        replace(curve, seconds=tuple(max(0.0, s + extra_s(first)) for s in curve.seconds))
        for first, curve in zip(surface.firsts, surface.curves, strict=True)
    )
    return Surface(surface.firsts, tuple(curves))
