"""A predicted machine whose GPU does not hold all weights: the placement, the blocks that remain, and times.

The budget is searched by :mod:`apex.placement.budget`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from apex.perf.model import Curve, PerfModel, ProfileTable, Surface, total_s
from apex.placement.budget import Estimate, Load, Rates, best_budget, estimate_budget
from apex.placement.costs import BoundaryCost, CopyEffect
from apex.placement.formulas import beside_copies_s
from apex.placement.search import Choice
from apex.simulator.calibrated_profile import ITEMSIZES, crossing_bytes_per_row, host_read_gb_s
from apex.simulator.cpu_path import Interconnect
from apex.simulator.hardware import Host, LayerShape
from apex.simulator.predicted_machine import GPU_MEMORY_SHARE, HOST_MEMORY_SHARE, PredictedMachine
from apex.simulator.quantised_weights import packed_bytes, with_quantised_weights_on_cpu
from apex.simulator.weight_path import CHUNK_BYTES, PlacedWeights
from swiftllm.model.placement import Place, Placement

HOST_SHARE_WITH_WEIGHTS = 0.9  # of host memory for the CPU tier and weights


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

    @property
    def engine_options(self) -> dict[str, Any]:
        """Arguments of :func:`apex.simulator.build.build_simulated` beside the table."""
        return {"interconnect": self.interconnect, "weights": self.weights, "scheduler_table": self.believed}

    def num_blocks(self, num_gpu: int | None, num_cpu: int | None) -> tuple[int, int]:
        """KV blocks of the GPU and the CPU tier: the given numbers, else what the memory allows.

        Raises:
            ValueError: a tier exceeds its memory.
        """
        most = {"num_gpu_blocks": self.num_gpu_blocks, "num_cpu_blocks": self.num_cpu_blocks}
        for name, given in zip(most, (num_gpu, num_cpu), strict=True):
            if given is not None and given > most[name]:
                raise ValueError(f"{name}={given} exceeds the memory beside the weights, which holds {most[name]}")
        return tuple(
            default if given is None else given
            for default, given in zip(most.values(), (num_gpu, num_cpu), strict=True)
        )


class WeightPlacer:
    """Places the weights of a machine's model; a :class:`apex.placement.budget.Machine`.

    ``block_size`` is that of KV blocks, in tokens.
    """

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
        self.kv_bytes_per_token = machine.model.kv_bytes_per_token(self._itemsize)
        self._block_bytes = self.kv_bytes_per_token * block_size
        shape, first, layers = self._shape, machine.table.first_share, machine.model.num_layers
        scheme = machine.model.quantisation
        layer_bytes = shape.gemm_weights * self._itemsize if scheme is None else packed_bytes(shape, scheme)
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
        cpu_gb_s = float(machine.table.identity["cpu_attention_gb_s"])
        self.rates = Rates(self.interconnect.bytes_per_s, cpu_gb_s * 1e9, self.interconnect.dram_bytes_per_s)
        self._hidden_bytes = (shape.qkv_size + shape.hidden_size) * self._itemsize
        plain = cpu_linear_curve(machine.host, shape, self._itemsize)
        self._cpu_linear = plain if scheme is None else with_quantised_weights_on_cpu(plain, machine.host)
        self._usable_bytes = machine.gpu["memory_gb"] * 1e9 * GPU_MEMORY_SHARE
        self._model = PerfModel(machine.table, layers)

    def place(self, memory_gib: float | Literal["auto"], load: Load) -> PlacedMachine:
        """The machine with as many GiB of GPU memory for weights; auto: as many as give the highest predicted rate.

        Raises:
            ValueError: nothing fits; the message says what would.
        """
        if memory_gib == "auto":
            return self._placed(best_budget(self, load))
        return self._placed(estimate_budget(self, memory_gib * 2**30, load))

    def costs(self, rows: float) -> list[BoundaryCost]:
        """Of the boundaries from -1 on, for an iteration of ``rows``."""
        link = self.interconnect
        gpu_s, cpu_s = self._model.linear_s(max(1, round(rows))), self._cpu_linear(rows)
        crossing_s = 2 * link.transfer_s(round(rows * self._hidden_bytes))
        whole = max(self.boundary_bytes)
        return [
            BoundaryCost(size, gpu_s * size / whole, cpu_s * size / whole, size / link.bytes_per_s, crossing_s)
            for size in self.boundary_bytes
        ]

    @property
    def copy_effect(self) -> CopyEffect:
        """What streaming does to CPU boundaries."""
        return CopyEffect(self.interconnect.dram_share, CHUNK_BYTES / self.interconnect.bytes_per_s / 2)

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
            self.machine.table,
            cpu_attention=_mapped(self.machine.table.cpu_attention, lambda s, n: max(0.0, s - crossing_s[n])),
        )

    def believed(self, placement: Placement) -> ProfileTable:
        """What schedulers predict from: layers wait for the stream, and the stream slows CPU attention down."""
        table, layers = self.machine.table, self.machine.model.num_layers
        streamed_bytes = placement.bytes_at(Place.STREAMED, self.boundary_bytes)

        def seconds(rows: float) -> float:
            costs = zip(placement.places, self.costs(rows), strict=True)
            each_s = (cost.cpu_s + cost.crossing_s if place is Place.CPU else cost.gpu_s for place, cost in costs)
            compute_s = total_s(each_s)
            return compute_s / layers

        stream_s, dram_share = streamed_bytes / self.interconnect.bytes_per_s / layers, self.interconnect.dram_share
        return replace(
            table,
            linear=Curve(table.linear.sizes, tuple(seconds(rows) for rows in table.linear.sizes)),
            cpu_attention=_mapped(table.cpu_attention, lambda s, _: beside_copies_s(s, stream_s, dram_share)),
            stream_s=stream_s,
            streamed_layers=streamed_bytes / max(self.boundary_bytes),
        )

    def other_s(self, on_gpu: float, context: float, requests: float) -> float:
        """GPU time of an iteration beside its boundaries; see :class:`apex.placement.budget.Machine`."""
        attention_s = self._model.gpu_attention_s(max(1, round(on_gpu)), round(on_gpu * context))
        return self.machine.model.num_layers * attention_s + self._model.outside_layers_s(max(1, round(requests)))

    def gpu_kv_bytes(self, weight_bytes: float) -> float:
        """GPU memory for KV cache beside so many bytes of weights.

        Raises:
            ValueError: there is none.
        """
        if weight_bytes > self._usable_bytes:
            raise ValueError(
                f"{weight_bytes / 2**30:.2f} GiB of weights exceed the {self._usable_bytes / 2**30:.2f} GiB of "
                f"{self.machine.gpu.name} that may be used: take less, or auto"
            )
        return self._usable_bytes - weight_bytes

    def cpu_kv_bytes(self, off_gpu_bytes: float) -> float:
        """Host memory for KV cache beside the weights that the host holds.

        Raises:
            ValueError: it does not hold them.
        """
        machine = self.machine
        host_bytes = machine.host["memory_gb"] * 1e9 * machine.cpu_hosts
        tier_bytes = min(host_bytes * HOST_MEMORY_SHARE, host_bytes * HOST_SHARE_WITH_WEIGHTS - max(0.0, off_gpu_bytes))
        if tier_bytes < 0:
            raise ValueError(
                f"{machine.model_name} leaves {off_gpu_bytes / 2**30:.1f} GiB of weights to {machine.host.name}, which "
                f"has {host_bytes / 2**30:.1f} GiB: take a larger --host, a larger --gpu or 4-bit weights"
            )
        return tier_bytes

    def _placed(self, estimate: Estimate) -> PlacedMachine:
        choice = estimate.choice()
        placement = choice.placement
        taken_bytes = placement.gpu_bytes(self.boundary_bytes)
        resident_bytes = placement.bytes_at(Place.RESIDENT, self.boundary_bytes)
        tier_bytes = self.cpu_kv_bytes(sum(self.boundary_bytes) - resident_bytes)
        return PlacedMachine(
            choice,
            int(max(0.0, self._usable_bytes - self.other_bytes - taken_bytes) / self._block_bytes),
            int(tier_bytes / self._block_bytes),
            self.without_transfers(),
            self.believed(placement),
            self.interconnect,
            self.with_placement(placement),
            estimate.tokens_per_s,
        )


def cpu_linear_curve(host: Host, shape: LayerShape, itemsize: int) -> Curve:
    """Seconds over rows in which a host's cores compute a layer's weights: reading them, then multiplying.

    Weights have ``itemsize`` bytes an element.
    """
    read_s = shape.gemm_weights * itemsize / (host_read_gb_s(host) * 1e9 * host["cpu_linear_read_fraction"])
    row_s = 2 * shape.gemm_weights / (host["cores"] * host["cpu_linear_gflops_per_core"] * 1e9)
    return Curve((1, 4096), (read_s + row_s, read_s + 4096 * row_s))


def _mapped(surface: Surface, change: Callable[[float, float], float]) -> Surface:
    """``surface`` with ``change(seconds, first)`` in place of its seconds."""
    curves = (
        replace(curve, seconds=tuple(change(s, first) for s in curve.seconds))
        for first, curve in zip(surface.firsts, surface.curves, strict=True)
    )
    return Surface(surface.firsts, tuple(curves))
