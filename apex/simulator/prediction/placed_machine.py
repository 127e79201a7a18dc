"""A predicted machine whose GPU does not hold all weights: the placement, the blocks that remain, and times.

The budget is searched by :mod:`apex.placement.budget`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from apex.perf.experts import touched_experts
from apex.perf.model import Curve, PerfModel, ProfileTable, Surface, total_s
from apex.placement.budget import Estimate, UniformLoad, best_budget, estimate_budget
from apex.placement.costs import Rates, StageCost, beside_copies_s, stage_costs
from apex.placement.search import TimedPlacement, refined_placement
from apex.simulator.hardware.files import Host, LayerShape
from apex.simulator.prediction.calibrated_profile import ITEMSIZES
from apex.simulator.prediction.host_times import crossing_bytes_per_row, host_read_gb_s
from apex.simulator.prediction.predicted_machine import PredictedMachine
from apex.simulator.prediction.quantised_weights import with_quantised_weights_on_cpu
from apex.simulator.virtual.cpu_path import Interconnect
from apex.simulator.virtual.weight_path import CHUNK_BYTES, SimulatedWeights
from swiftllm.kv.budget import CPU_TIER_SHARE, SIMULATED_HOST_SHARE, blocks_in, choose_blocks
from swiftllm.kv.layer_groups import LayerGroups
from swiftllm.machine import GIB
from swiftllm.model.config.quantisation import QuantisationScheme
from swiftllm.model.stages.placement import Place, Placement
from swiftllm.model.weights.sizes import embedding_bytes, stage_bytes

CPU_ROWS = tuple(1 << power for power in range(13))
"""At which the time of a layer with experts is predicted."""


@dataclass(frozen=True)
class PlacedMachine:
    """A machine with a placement, and all that :func:`apex.simulator.build.build_simulated` takes of it.

    ``table`` has times without PCIe transfers, ``scheduler_table`` those that schedulers predict from.
    """

    timed: TimedPlacement
    num_gpu_blocks: int
    num_cpu_blocks: int
    table: ProfileTable
    scheduler_table: ProfileTable
    interconnect: Interconnect
    weights: SimulatedWeights
    predicted_tokens_per_s: float
    weight_bytes: float
    """GPU memory for weights, by which a real engine is told to place them alike."""

    @property
    def engine_options(self) -> dict[str, Any]:
        """Arguments of :func:`apex.simulator.build.build_simulated` beside the table."""
        return {"interconnect": self.interconnect, "weights": self.weights, "scheduler_table": self.scheduler_table}

    def num_blocks(self, num_gpu: int | None, num_cpu: int | None) -> tuple[int, int]:
        """KV blocks of the GPU and the CPU tier: the given numbers, else what the memory allows.

        Raises:
            ValueError: a tier exceeds its memory.
        """
        most = self.num_gpu_blocks, self.num_cpu_blocks
        return choose_blocks((num_gpu, num_cpu), most, most)


class WeightPlacer:
    """Places the weights of a machine's model; a :class:`apex.placement.budget.CostModel`.

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
        model, identity, itemsize = machine.model, machine.table.identity, ITEMSIZES[machine.dtype]
        shape, scheme = LayerShape.from_config(model), model.quantisation
        self._budget = machine.budget(block_size)
        self.layer_groups = LayerGroups.of(model, block_size)
        self.kv_bytes_per_token = self._budget.bytes_per_block // block_size
        self.cpu_kv_bytes_per_token = self._budget.host_block_bytes // block_size
        self.stage_bytes = tuple(stage_bytes(model, getattr(torch, machine.dtype)))
        self._embedding_bytes = embedding_bytes(model, getattr(torch, machine.dtype))
        self.other_bytes = self._budget.weight_bytes - sum(self.stage_bytes) - self._embedding_bytes
        out_bytes_per_row = shape.num_heads * shape.head_dim * itemsize
        self.interconnect = Interconnect(
            float(identity["pcie_gb_s"]) * 1e9,
            shape.qkv_size * itemsize,
            out_bytes_per_row,
            machine.gpu["transfer_latency_us"] * 1e-6,
            host_read_gb_s(machine.host) * 1e9,
        )
        link = self.interconnect
        cpu_attention = float(identity["cpu_attention_gb_s"]) * 1e9
        self.rates = Rates(link.bytes_per_s, cpu_attention, link.dram_bytes_per_s, CHUNK_BYTES)
        self._hidden_bytes = (shape.qkv_size + shape.hidden_size) * itemsize
        self._crossing_bytes = crossing_bytes_per_row(shape, itemsize)
        self._cpu_linear = cpu_layer_curve(machine.host, shape, itemsize, scheme)
        self._model = PerfModel(machine.table, model.num_layers)

    def place(
        self, memory_gib: float | Literal["auto"], workload: UniformLoad, *, offloads: bool, cpu_computes: bool = True
    ) -> PlacedMachine:
        """The machine with as many GiB of GPU memory for weights; auto: as many as give the highest predicted rate.

        ``offloads``, ``cpu_computes``: see :func:`apex.placement.budget.estimate_budget`.

        Raises:
            ValueError: nothing fits; the message says what would.
        """
        if memory_gib == "auto":
            return self._placed(best_budget(self, workload, offloads=offloads, cpu_computes=cpu_computes))
        return self._placed(estimate_budget(self, memory_gib * GIB, workload, offloads, cpu_computes))

    def place_for_rate(
        self, memory_gib: float | Literal["auto"], workload: UniformLoad, tokens_per_s: float, *, offloads: bool
    ) -> PlacedMachine:
        """The machine placed for as few requests at once, of 1, 2, 4 and so on, as give so many output tokens/s.

        Where none gives them, it is placed for all of ``workload``. Fewer requests need less KV cache, so that more
        weights stay on the GPU and each token comes sooner.
        """
        requests = 1
        while requests < workload.num_requests:
            placed = self.place(memory_gib, replace(workload, num_requests=requests), offloads=offloads)
            if placed.predicted_tokens_per_s >= tokens_per_s:
                return placed
            requests *= 2
        return self.place(memory_gib, workload, offloads=offloads)

    def costs(self, rows: float) -> list[StageCost]:
        """See :class:`apex.placement.budget.CostModel`, here and below."""
        link = self.interconnect
        gpu_s, cpu_s = self._model.linear_s(max(1, round(rows))), self._cpu_linear(rows)
        crossing_s = 2 * link.transfer_s(round(rows * self._hidden_bytes))
        sizes = self.stage_bytes
        return stage_costs(sizes, max(sizes), gpu_s, cpu_s, link.bytes_per_s, crossing_s)

    def with_placement(self, placement: Placement) -> SimulatedWeights:
        """What the simulated backend needs to run a placement."""
        return SimulatedWeights(placement, self.stage_bytes, self._cpu_linear, self._hidden_bytes)

    def without_transfers(self) -> ProfileTable:
        """The machine's table with CPU attention that leaves PCIe transfers to the simulated link."""
        link, attention = self.interconnect, self.machine.table.cpu_attention

        def without(seconds: float, rows: float) -> float:
            crossing_s = 2 * link.latency_s + rows * self._crossing_bytes / link.bytes_per_s
            return max(0.0, seconds - crossing_s)

        return replace(self.machine.table, cpu_attention=_mapped(attention, without))

    def scheduler_table(self, placement: Placement) -> ProfileTable:
        """What schedulers predict from: layers wait for the stream, and the stream slows CPU attention down."""
        table, layers = self.machine.table, self.machine.model.num_layers
        streamed_bytes = placement.bytes_at(Place.STREAMED, self.stage_bytes)

        def seconds(rows: float) -> float:
            costs = zip(placement.places, self.costs(rows), strict=True)
            each_s = (cost.cpu_s + cost.crossing_s if place is Place.CPU else cost.gpu_s for place, cost in costs)
            return total_s(each_s) / layers

        stream_s, dram_share = streamed_bytes / self.interconnect.bytes_per_s / layers, self.interconnect.dram_share
        return replace(
            table,
            linear=Curve(table.linear.sizes, tuple(seconds(rows) for rows in table.linear.sizes)),
            cpu_attention=_mapped(table.cpu_attention, lambda s, _: beside_copies_s(s, stream_s, dram_share)),
            stream_s=stream_s,
            streamed_layers=streamed_bytes / max(self.stage_bytes),
        )

    def other_s(self, on_gpu: float, context: float, requests: float) -> float:
        attention_s = self._model.gpu_attention_s(max(1, round(on_gpu)), round(on_gpu * context))
        return self.machine.model.num_layers * attention_s + self._model.outside_layers_s(max(1, round(requests)))

    def gpu_kv_bytes(self, weight_bytes: float) -> float:
        if weight_bytes > self._budget.usable_bytes:
            raise ValueError(
                f"{weight_bytes / GIB:.2f} GiB of weights exceed the {self._budget.usable_bytes / GIB:.2f} GiB of "
                f"{self.machine.gpu.name} that may be used: take less, or auto"
            )
        return self._budget.usable_bytes - weight_bytes

    def cpu_kv_bytes(self, off_gpu_bytes: float) -> float:
        machine, host_bytes = self.machine, self._budget.host_bytes
        off_gpu_bytes = max(0.0, off_gpu_bytes) + self._embedding_bytes
        tier_bytes = min(host_bytes * CPU_TIER_SHARE, host_bytes * SIMULATED_HOST_SHARE - off_gpu_bytes)
        if tier_bytes < 0:
            raise ValueError(
                f"{machine.model_name} leaves {off_gpu_bytes / GIB:.1f} GiB of weights to {machine.host.name}, which "
                f"has {host_bytes / GIB:.1f} GiB: take a larger --host, a larger --gpu or 4-bit weights"
            )
        return tier_bytes

    def _placed(self, estimate: Estimate) -> PlacedMachine:
        has_room = estimate.weight_bytes >= self._budget.weight_bytes  # for an embedding beside all else
        timed = refined_placement(estimate.problem).with_embedding(0 if has_room else self._embedding_bytes)
        placement = timed.placement
        taken_bytes = placement.gpu_bytes(self.stage_bytes) + (self._embedding_bytes if has_room else 0)
        resident_bytes = placement.bytes_at(Place.RESIDENT, self.stage_bytes)
        tier_bytes = self.cpu_kv_bytes(sum(self.stage_bytes) - resident_bytes)
        return PlacedMachine(
            timed,
            blocks_in(self._budget.usable_bytes - self.other_bytes - taken_bytes, self._budget.bytes_per_block),
            blocks_in(tier_bytes, self._budget.host_block_bytes),
            self.without_transfers(),
            self.scheduler_table(placement),
            self.interconnect,
            self.with_placement(placement),
            estimate.tokens_per_s,
            estimate.weight_bytes,
        )


def cpu_layer_curve(host: Host, shape: LayerShape, itemsize: int, scheme: QuantisationScheme | None) -> Curve:
    """Seconds over rows in which a host's cores compute a layer, with the experts that so many rows touch."""

    def quantised(linear: Curve) -> Curve:
        return linear if scheme is None else with_quantised_weights_on_cpu(linear, host)

    others = cpu_linear_curve(host, shape.gemm_weights, itemsize)
    others = others if scheme is not None and scheme.experts_only else quantised(others)
    if not shape.num_experts:
        return others
    expert = quantised(cpu_linear_curve(host, shape.ffn_weights, itemsize))

    def seconds(rows: int) -> float:
        touched = touched_experts(rows, shape.num_experts, shape.per_token)
        return others(rows) + touched * expert(rows * shape.per_token / touched)

    return Curve(CPU_ROWS, tuple(seconds(rows) for rows in CPU_ROWS))


def cpu_linear_curve(host: Host, weights: int, itemsize: int) -> Curve:
    """Seconds over rows in which a host's cores multiply with so many weights: reading them, then multiplying.

    Weights have ``itemsize`` bytes an element.
    """
    read_s = weights * itemsize / (host_read_gb_s(host) * 1e9 * host["cpu_linear_read_fraction"])
    row_s = 2 * weights / (host["cores"] * host["cpu_linear_gflops_per_core"] * 1e9)
    return Curve((1, 4096), (read_s + row_s, read_s + 4096 * row_s))


def _mapped(surface: Surface, change: Callable[[float, float], float]) -> Surface:
    """``surface`` with ``change(seconds, first)`` in place of its seconds."""
    curves = (
        replace(curve, seconds=tuple(change(s, first) for s in curve.seconds))
        for first, curve in zip(surface.firsts, surface.curves, strict=True)
    )
    return Surface(surface.firsts, tuple(curves))
