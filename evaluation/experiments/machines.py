"""Machines with several GPUs: how many replicas of the engine, and how many GPUs in each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from apex.simulator.calibrated_profile import hardware_profile
from apex.simulator.hardware import GpuLink, Host, load_gpu, load_host, load_link, load_model_config
from apex.simulator.predicted_machine import PredictedMachine
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_point import SimulatedHardware, SimulatedTask
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import bases, frame_of, over, with_columns
from evaluation.traces.catalogue import UniformTrace
from evaluation.traces.workloads import WorkloadSpec, make_lengths
from swiftllm.scheduling.admission import SchedulerLimits

BLOCK_SIZE = 16
MAX_TOKENS = 2048  # in the lane in one iteration
MAX_REQUESTS = 1024  # that hold KV cache at once
IDEAL = "swiftllm over an ideal link"
"""The row of the GPU-only system whose all-reduces take no time."""


@dataclass(frozen=True)
class Arrangement:
    """``num_gpus`` of a machine as ``replicas`` engines of ``tensor_parallel`` GPUs, each with a share of the host."""

    machine: str
    gpu: str
    num_gpus: int
    link: str
    host: str
    model: str
    dtype: str
    tensor_parallel: int

    @property
    def replicas(self) -> int:
        return self.num_gpus // self.tensor_parallel

    @property
    def key(self) -> str:
        return f"{self.num_gpus}x{self.gpu}-{self.model}-tp{self.tensor_parallel}"

    def replica(self, cpu_kernel: str, ideal_link: bool = False) -> PredictedMachine:
        """One of the replicas, predicted."""
        model, gpu = load_model_config(self.model), load_gpu(self.gpu)
        host = share_of_host(load_host(self.host), self.replicas)
        table = hardware_profile(
            gpu,
            host,
            model,
            dtype=self.dtype,
            cpu_kernel=cpu_kernel,
            block_size=BLOCK_SIZE,
            max_tokens=MAX_TOKENS,
            tensor_parallel=self.tensor_parallel,
            link=_ideal(load_link(self.link)) if ideal_link else load_link(self.link),
        )
        return PredictedMachine(gpu, host, model, self.model, self.dtype, table, self.tensor_parallel)


def _ideal(link: GpuLink) -> GpuLink:
    """A link whose all-reduces take no time."""
    values = {"all_reduce_gb_s": math.inf, "all_reduce_latency_us": 0.0}
    figures = {name: replace(link.figures[name], value=value) for name, value in values.items()}
    return GpuLink(f"{link.name}, without its time", figures)


def share_of_host(host: Host, engines: int) -> Host:
    """What each of ``engines`` engines on a host has of it: cores, memory and bandwidth in equal parts.

    PCIe is not divided, since each has GPUs, and so slots, of its own.
    """
    if engines == 1:
        return host
    divided = {
        name: replace(host.figures[name], value=host[name] / engines, origin=f"1/{engines} of the host")
        for name in ("cores", "core_share", "memory_gb")
    }
    return replace(host, name=f"1/{engines} of {host.name}", figures={**host.figures, **divided})


def make_machine_points(settings: Mapping[str, Any]) -> tuple[list[Point], list[str]]:
    """The points of the experiment file, and for each arrangement that cannot hold its model why not."""
    points, refused = [], []
    for raw in settings["machines"]:
        for tensor_parallel in raw["tensor_parallel"]:
            arrangement = Arrangement(**{**raw, "tensor_parallel": tensor_parallel})
            try:
                pools = arrangement.replica(settings["cpu_kernel"]).num_blocks(None, None, BLOCK_SIZE)
            except ValueError as error:
                refused.append(f"{arrangement.machine}, {arrangement.replicas} replicas: {error}")
                continue
            for lengths in settings["lengths"]:
                points += _points(settings, arrangement, pools, **lengths)
    return points, refused


def _points(
    settings: Mapping[str, Any], arrangement: Arrangement, pools: tuple[int, int], input_len: int, output_len: int
) -> list[Point]:
    trace = UniformTrace(input_len, output_len)
    fill = pools[0] * BLOCK_SIZE / (input_len + output_len)  # requests that fill the GPU tier
    num_requests = max(settings["least_requests"], round(settings["fills_of_gpu_tier"] * fill))
    spec = WorkloadSpec(trace.name, num_requests, output_len=output_len, arrivals="at-once", seed=settings["seed"])
    lengths = make_lengths(spec, trace)
    limits = SchedulerLimits(MAX_TOKENS, MAX_REQUESTS, load_model_config(arrangement.model).max_position_embeddings)
    runs = [(system, system, False) for system in settings["systems"]]
    if arrangement.tensor_parallel > 1:
        runs.append((IDEAL, "swiftllm", True))
    points = []
    for name, system, ideal_link in runs:
        replica = arrangement.replica(settings["cpu_kernel"], ideal_link)
        hardware = SimulatedHardware(
            replica.gpu.name, replica.model_name, replica.dtype, replica.table, replica.model.num_layers
        )
        values = {
            "case": f"{arrangement.key}-{input_len}-{output_len}",
            "machine": arrangement.machine,
            "replicas": arrangement.replicas,
            "tensor_parallel": arrangement.tensor_parallel,
            "run": name,
            "cpu_bandwidth_gb_s": float(replica.table.identity["cpu_attention_gb_s"]),
        }
        task = SimulatedTask(system, hardware, *pools, lengths, limits, BLOCK_SIZE, values=values)
        key = f"{values['case']}-{name.replace(' ', '-')}"
        label = f"{arrangement.key} {input_len}/{output_len}, {name}"
        points.append(Point(key, key, label, task, concurrent=True, cost=float(lengths.total_output_tokens)))
    return points


def with_machine_totals(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """Rows with the rate of all replicas, its ratio to GPU-only, and the share of time that all-reduces take.

    Replicas are independent, so ``machine_tokens_per_s`` is one replica's rate times their number. It is None where
    no tier holds a request.
    """
    frame = frame_of(rows)
    rate = frame["output_tokens_per_s"].astype(float)
    gpu_only, ideal = (bases(frame, frame["run"] == run, ["case"]) for run in ("swiftllm", IDEAL))
    return with_columns(
        rows,
        machine_tokens_per_s=rate * frame["replicas"],
        ratio_to_gpu_only=over(rate, gpu_only),
        all_reduce_share=1 - gpu_only.map(rate) / ideal.map(rate),
    )
