"""A predicted machine from the names of GPUs, a host and a model. Imports torch to read models: import it late."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from apex.perf.model import Curve, PerfModel, ProfileTable, Surface, total_s, touched_experts
from apex.placement.search import (
    Estimate,
    ExpertsCost,
    Rates,
    StageCost,
    TimedPlacement,
    UniformLoad,
    beside_copies_s,
    best_budget,
    estimate_budget,
    most_cpu_rows,
    refined_placement,
    stage_costs,
)
from apex.simulator.hardware_files import (
    Gpu,
    Host,
    LayerShape,
    known_hardware,
    known_model,
    known_models,
    load_gpu,
    load_host,
    load_link,
    load_model_config,
)
from apex.simulator.links import (
    CHUNK_BYTES,
    Interconnect,
    RemoteHosts,
    SimulatedExperts,
    SimulatedStates,
    SimulatedWeights,
)
from apex.simulator.predicted_profile import (
    BITS_PER_BYTE,
    ITEMSIZES,
    bits_per_element,
    crossing_bytes_per_row,
    expert_times,
    hardware_profile,
    host_read_gb_s,
    how_known,
    remote_hosts,
    transfer_s,
    with_quantised_weights_on_cpu,
)
from swiftllm.config import CpuKVDtype
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.kv.tensors import KVFormat, cpu_format
from swiftllm.machine import GIB, InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import Place, Placement
from swiftllm.model.quantisation import AWQ, QuantisationScheme
from swiftllm.runtime.memory import (
    CPU_TIER_SHARE,
    SIMULATED_GPU_SHARE,
    SIMULATED_HOST_SHARE,
    SNAPSHOT_SHARE,
    MemoryBudget,
    blocks_in,
    check_states,
    choose_blocks,
    embedding_bytes,
    expert_bytes,
    snapshots_beside,
    stage_bytes,
)
from swiftllm.runtime.memory import weight_bytes as bytes_of_weights

# -- all weights on the GPU --------------------------------------------------------------------------------------------

Weights = Literal["auto", "int4"]
INT4 = QuantisationScheme(AWQ, group_size=128)  # the most common one


@dataclass(frozen=True)
class PredictedMachine:
    """GPUs of a kind, a host, the model on them, and its predicted profile table.

    ``tensor_parallel``: the number of GPUs, among which every layer is divided. ``max_num_seqs``: requests that have
    states of linear attention on them.
    """

    gpu: Gpu
    host: Host
    model: ModelConfig
    model_name: str
    dtype: str
    table: ProfileTable
    tensor_parallel: int = 1
    remote_hosts: RemoteHosts | None = None
    cpu_kv_dtype: CpuKVDtype = "auto"
    max_num_seqs: int = 0

    @property
    def cpu_hosts(self) -> int:
        """Hosts that compute CPU attention, the GPUs' own among them."""
        return 1 + (self.remote_hosts.count if self.remote_hosts else 0)

    @property
    def description(self) -> str:
        gb_s = self.table.identity["cpu_attention_gb_s"]
        gpus = self.gpu.name
        if self.tensor_parallel > 1:
            gpus = f"{self.tensor_parallel}x {gpus} over {self.table.identity['link']}"
        hosts = self.host.name
        if self.remote_hosts is not None:
            hosts = f"{self.cpu_hosts} hosts of {hosts}"
            gb_s += f" GB/s on each over {self.remote_hosts.bytes_per_s * BITS_PER_BYTE / 1e9:g} Gb/s"
        else:
            gb_s += " GB/s"
        weights = "" if self.model.quantisation is None else f", {self.table.identity['weights']}"
        tier = "" if self.cpu_kv_dtype == "auto" else f" in {self.cpu_kv_dtype}"
        return f"{self.model_name} ({self.dtype}{weights}) on {gpus} and {hosts}, CPU attention{tier} at {gb_s}"

    @property
    def how_known(self) -> str:
        """What the predicted times of its GPU rest on."""
        return how_known(self.gpu, self.model)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights, packed where they are quantised."""
        if self.model.quantisation is not None:
            return bytes_of_weights(self.model, getattr(torch, self.dtype))
        return self.model.num_parameters * ITEMSIZES[self.dtype]

    def budget(self, block_size: int) -> MemoryBudget:
        """What the machine's memory holds, with KV blocks of ``block_size`` tokens.

        Raises:
            InsufficientMemory: there is no room for the states of ``max_num_seqs`` requests. Weights that do not fit do
                not count: they are elsewhere.
        """
        dtype = getattr(torch, self.dtype)
        device_bytes = self.gpu["memory_gb"] * self.tensor_parallel * 1e9 * SIMULATED_GPU_SHARE
        free_bytes = device_bytes - self.weight_bytes
        check_states(self.model, dtype, self.max_num_seqs, free_bytes if free_bytes > 0 else device_bytes)
        return MemoryBudget(
            device_bytes=device_bytes,
            host_bytes=self.host["memory_gb"] * 1e9 * self.cpu_hosts,
            weight_bytes=self.weight_bytes,
            bytes_per_block=KVFormat.exact(dtype).block_bytes(self.model, block_size),
            cpu_bytes_per_block=cpu_format(self.cpu_kv_dtype, dtype).block_bytes(self.model, block_size),
            activation_bytes=self.max_num_seqs * self.model.state_bytes(dtype.itemsize),
        )

    def in_4_bits(self, block_size: int) -> MemoryBudget | None:
        """What the memory holds with 4-bit weights; None if they are quantised already, or would not fit either."""
        if self.model.quantisation is not None or self.model.experts is not None:
            return None
        try:
            budget = replace(self, model=replace(self.model, quantisation=INT4)).budget(block_size)
        except InsufficientMemory:  # for states beside these weights
            return None
        return budget if budget.max_gpu_blocks else None

    def states(self, num_cpu_blocks: int, block_size: int, *, caches: bool) -> SimulatedStates | None:
        """Of a model with linear attention, else None. ``caches``: whether prefixes are cached, so that host memory has
        snapshots beside ``num_cpu_blocks`` blocks."""
        if self.model.linear is None:
            return None
        state_bytes = self.model.state_bytes(ITEMSIZES[self.dtype])
        gb_s, latency_s = float(self.table.identity["pcie_gb_s"]), self.gpu["transfer_latency_us"] * 1e-6
        copy_s = transfer_s(state_bytes / self.tensor_parallel, gb_s, latency_s)
        tier_bytes = num_cpu_blocks * self.budget(block_size).host_block_bytes
        return SimulatedStates(copy_s, snapshots_beside(tier_bytes, state_bytes) if caches else 0)

    def beside_snapshots(self, num_cpu_blocks: int) -> int:
        """What is left of blocks of the CPU tier where prefixes are cached: snapshots of states have a share."""
        return num_cpu_blocks if self.model.linear is None else int(num_cpu_blocks * (1 - SNAPSHOT_SHARE))

    def num_blocks(self, num_gpu: int | None, num_cpu: int | None, block_size: int) -> tuple[int, int]:
        """KV blocks of the GPU and the CPU tier: the given numbers, else what the memory allows."""
        budget = self.budget(block_size)
        most = budget.max_gpu_blocks, budget.max_cpu_blocks
        if most[0] == 0:
            others = (
                ", --weights int4 or --weights-gpu-memory auto" if self.tensor_parallel == 1 else " or --weights int4"
            )
            raise ValueError(
                f"{self.model_name} takes {budget.weight_bytes / 1e9:.1f} GB in {self.dtype} and {self.gpu.name} has "
                f"{self.gpu['memory_gb'] * self.tensor_parallel:g} GB, of which {SIMULATED_GPU_SHARE:.0%} may be used: "
                f"take a larger --gpu, more of them (--tensor-parallel), a smaller --model{others}"
            )
        return choose_blocks((num_gpu, num_cpu), most, (most[0], int(most[1] * CPU_TIER_SHARE)))


def predict_machine(
    gpu_name: str,
    host_name: str,
    model_name: str,
    dtype: str,
    *,
    tensor_parallel: int = 1,
    link_name: str | None = None,
    cpu_hosts: int = 1,
    network_gbps: float = 100.0,
    host_memory_gib: float | None = None,
    host_read_gb_s: float | None = None,
    weights: Weights = "auto",
    cpu_kv_dtype: CpuKVDtype = "auto",
    max_num_seqs: int = 0,
    **options: Any,
) -> PredictedMachine:
    """The machine of these names or paths.

    Args:
        host_memory_gib, host_read_gb_s: in place of the host's own figures, see :meth:`Host.with_given`.
        weights: auto: as the model's config.json says; int4: 4 bits in groups of 128.
        cpu_kv_dtype: the format of the CPU tier.
        max_num_seqs: requests that have states of linear attention, in models with it.
        options: of :func:`apex.simulator.predicted_profile.hardware_profile`.

    Raises:
        ValueError: a name is unknown (the message lists the known ones), or an option is invalid.
    """
    gpu = _find("gpu", gpu_name, load_gpu, known_hardware("gpu"))
    host = _find("host", host_name, load_host, known_hardware("host")).with_given(host_memory_gib, host_read_gb_s)
    model = _find("model", model_name, load_model_config, known_models())
    if weights == "int4":
        model = replace(model, quantisation=INT4)
    links = known_hardware("link")
    if tensor_parallel > 1 and link_name is None:
        raise ValueError(f"--tensor-parallel {tensor_parallel} needs --link, which joins the GPUs: {', '.join(links)}")
    link = None if link_name is None else _find("link", link_name, load_link, links)
    options |= {"dtype": dtype, "cpu_kv_dtype": cpu_kv_dtype, "tensor_parallel": tensor_parallel, "link": link}
    table = hardware_profile(gpu, host, model, **options)
    remote = remote_hosts(host, model, dtype, cpu_hosts, network_gbps)
    name = known_model(model_name) or Path(model_name).name
    return PredictedMachine(gpu, host, model, name, dtype, table, tensor_parallel, remote, cpu_kv_dtype, max_num_seqs)


def _find(what: str, name: str, load: Callable[[str], Any], names: Sequence[str]) -> Any:
    """Load by name or path; the error for an unknown name suggests the nearest known one."""
    try:
        return load(name)
    except ValueError as error:
        near = difflib.get_close_matches(name.lower(), names, n=4, cutoff=0.3) if name not in names else []
        others = f" Near are {', '.join(near[1:])}, too." if near[1:] else ""
        raise ValueError(f"--{what}: {error}" + (f". Did you mean {near[0]}?{others}" if near else "")) from None


# -- weights that do not fit the GPU -----------------------------------------------------------------------------------
# A predicted machine whose GPU does not hold all weights: the placement, the blocks that remain, and times.
#
# The budget is searched by :mod:`apex.placement.search`.

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
        """KV blocks of the GPU and the CPU tier: the given numbers, else what the memory allows."""
        most = self.num_gpu_blocks, self.num_cpu_blocks
        return choose_blocks((num_gpu, num_cpu), most, most)


class WeightPlacer:
    """Places the weights of a machine's model; a :class:`apex.placement.search.CostModel`.

    ``block_size`` is that of KV blocks, in tokens.
    """

    def __init__(self, machine: PredictedMachine, block_size: int) -> None:
        """The machine has one GPU, and DRAM that is faster than PCIe."""
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
        self._experts: SimulatedExperts | None = None
        self.most_cpu_rows = 0
        if shape.num_experts and shape.linear is None:  # experts of several layers have no place of their own
            self._experts = experts = SimulatedExperts(
                tuple(expert_bytes(model, getattr(torch, machine.dtype))),
                gpu_experts_curve(machine.gpu, shape, itemsize, scheme),
                cpu_experts_curve(machine.host, shape, itemsize, scheme),
                shape.hidden_size * itemsize,
                machine.host["hand_over_us"] * 1e-6,
            )
            copied_s = max(experts.stage_bytes) / link.bytes_per_s
            self.most_cpu_rows = most_cpu_rows(
                lambda rows: self._rest_s(experts, rows) + experts.cpu(rows),
                lambda rows: max(copied_s, self._model.linear_s(rows)),
            )

    def place(
        self, memory_gib: float | Literal["auto"], workload: UniformLoad, *, offloads: bool, cpu_computes: bool = True
    ) -> PlacedMachine:
        """The machine with as many GiB of GPU memory for weights; auto: as many as give the highest predicted rate.

        ``offloads``, ``cpu_computes``: see :func:`apex.placement.search.estimate_budget`.
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
        """See :class:`apex.placement.search.CostModel`, here and below."""
        link = self.interconnect
        gpu_s, cpu_s = self._model.linear_s(max(1, round(rows))), self._cpu_linear(rows)
        crossing_s = 2 * link.transfer_s(round(rows * self._hidden_bytes))
        sizes = self.stage_bytes
        costs = stage_costs(sizes, max(sizes), gpu_s, cpu_s, link.bytes_per_s, crossing_s)
        if (experts := self._experts) is None:
            return costs
        times = experts.cpu(rows), max(experts.stage_bytes) / link.bytes_per_s, self._rest_s(experts, rows)
        are_copied = rows > self.most_cpu_rows
        return [
            replace(cost, experts=ExpertsCost(size, *times, are_copied)) if size else cost
            for cost, size in zip(costs, experts.stage_bytes, strict=True)
        ]

    def _rest_s(self, experts: SimulatedExperts, rows: float) -> float:
        """What a layer takes beside its experts, and the way of its rows to the CPU and back."""
        rest_s = max(0.0, self._model.linear_s(max(1, round(rows))) - experts.gpu(rows))
        return rest_s + experts.hop_s + 2 * self.interconnect.transfer_s(round(rows * experts.hidden_bytes_per_row))

    def with_placement(self, placement: Placement) -> SimulatedWeights:
        """What the simulated backend needs to run a placement."""
        return SimulatedWeights(placement, self.stage_bytes, self._cpu_linear, self._hidden_bytes, self._experts)

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
            def each_s(place: Place, cost: StageCost) -> float:
                link_s, cpu_s, gpu_s = cost.parts_s(place)
                return max(link_s, gpu_s) if place is Place.EXPERTS and link_s else cpu_s + gpu_s

            return total_s(map(each_s, placement.places, self.costs(rows))) / layers

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
        if on_cpu := round(requests - on_gpu):  # as far as it is on the GPU: states of linear attention
            attention_s += self._model.hand_over_s(on_cpu)
        return self.machine.model.num_layers * attention_s + self._model.outside_layers_s(max(1, round(requests)))

    def cpu_attention_s(self, on_cpu: float, context: float) -> float:
        each_s = self._model.cpu_attention_s(max(1, round(on_cpu)), round(on_cpu * context))  # with the way there
        return self.machine.model.num_layers * each_s

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
        of_experts = () if self._experts is None else self._experts.stage_bytes
        taken_bytes = placement.gpu_bytes(self.stage_bytes, of_experts) + (self._embedding_bytes if has_room else 0)
        tier_bytes = self.cpu_kv_bytes(placement.host_bytes(self.stage_bytes, of_experts))
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
    experts = cpu_experts_curve(host, shape, itemsize, scheme)
    return Curve(CPU_ROWS, tuple(others(rows) + shape.num_ffns * experts(rows) for rows in CPU_ROWS))


def cpu_experts_curve(host: Host, shape: LayerShape, itemsize: int, scheme: QuantisationScheme | None) -> Curve:
    """Seconds over rows in which a host's cores compute the experts of a layer that so many rows touch.

    In 4 bits: max(bytes / D, bytes / (cores c(rows))). The figures ``cpu_int4_gain_<rows>`` give c, the rate of one
    core with memory for itself; all cores share D.
    """
    weights = shape.ffn_weights
    expert = cpu_linear_curve(host, weights, itemsize)
    if scheme is not None:
        read_fraction = host["cpu_linear_read_fraction"]
        read_s = weights * itemsize / (host["core_read_gb_s"] * 1e9 * read_fraction)
        row_s = 2 * weights / (host["cpu_linear_gflops_per_core"] * 1e9)
        of_one_core = with_quantised_weights_on_cpu(Curve((1, 4096), (read_s + row_s, read_s + 4096 * row_s)), host)
        code_bytes = weights * bits_per_element(scheme, shape.hidden_size) / 8
        shared_s, of_all_cores = code_bytes / (host_read_gb_s(host) * 1e9 * read_fraction), host["cores"]
        sizes = of_one_core.sizes
        expert = Curve(sizes, tuple(max(shared_s, of_one_core(rows) / of_all_cores) for rows in sizes))

    def seconds(rows: int) -> float:
        touched = touched_experts(rows, shape.num_experts, shape.per_token)
        return touched * expert(rows * shape.per_token / touched)

    return Curve(CPU_ROWS, tuple(seconds(rows) for rows in CPU_ROWS))


def gpu_experts_curve(gpu: Gpu, shape: LayerShape, itemsize: int, scheme: QuantisationScheme | None) -> Curve:
    """The same of a GPU, as :func:`~apex.simulator.predicted_profile.with_experts` adds it to a layer."""
    times, bits = expert_times(gpu, scheme), BITS_PER_BYTE * itemsize
    bits = bits if scheme is None else bits_per_element(scheme, shape.hidden_size)

    def seconds(rows: int) -> float:
        touched = touched_experts(rows, shape.num_experts, shape.per_token)
        return times.seconds(touched, shape.ffn_weights * bits / 8, rows * shape.per_token, shape.ffn_weights)

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
