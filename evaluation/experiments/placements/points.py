"""Points of models in 16 and 4 bits on cards that hold them or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from apex.placement.budget import Workload
from apex.simulator.placed_machine import PlacedMachine, WeightPlacer
from apex.simulator.predicted_machine import PredictedMachine, predict_machine
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_point import SimulatedHardware, SimulatedTask
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import bases, frame_of, over, with_columns
from evaluation.traces.catalogue import UniformTrace
from evaluation.traces.workloads import WorkloadSpec, make_lengths
from swiftllm.model.placement import Place
from swiftllm.scheduling.admission import SchedulerLimits
from swiftllm.systems import find_system

DTYPE = "float16"


def make_weight_points(settings: Mapping[str, Any]) -> tuple[list[Point], list[str]]:
    """The points of the experiment file, and why others are not possible.

    ``placement`` of a row are the numbers of boundaries that are resident, streamed and on the CPU.
    """
    points, refused = [], []
    for raw in settings["machines"]:
        for model in raw["models"]:
            for weights in raw["weights"]:
                machine = predict_machine(raw["gpu"], raw["host"], model, DTYPE, weights=weights)
                placer = WeightPlacer(machine, settings["block_size"])
                for lengths in settings["lengths"]:
                    for run in settings["runs"]:
                        try:
                            points.append(_point(settings, placer, weights, run, **lengths))
                        except ValueError as error:
                            refused.append(f"{machine.gpu.name}, {model} {weights}, {run['run']}: {error}")
    return points, refused


def _point(
    settings: Mapping[str, Any],
    placer: WeightPlacer,
    weights: str,
    run: Mapping[str, Any],
    *,
    input_len: int,
    output_len: int,
) -> Point:
    """
    Raises:
        ValueError: the model fits neither GPU nor host.
    """
    machine, system = placer.machine, run["system"]
    offloads = find_system(system).needs_predictions
    at_once = Workload(settings["max_num_seqs"], input_len, output_len)
    placed = placer.place("auto", at_once, offloads=offloads, cpu_computes=run["cpu_computes"])
    num_cpu_blocks = placed.num_cpu_blocks if offloads else 0
    trace = UniformTrace(input_len, output_len)
    num_requests = _num_requests(settings, at_once, placed.num_gpu_blocks + num_cpu_blocks)
    spec = WorkloadSpec(trace.name, num_requests, output_len=output_len, arrivals="at-once", seed=settings["seed"])
    lengths = make_lengths(spec, trace)
    values = {
        "case": f"{machine.gpu.name}-{machine.host.name}-{machine.model_name}-{weights}-{input_len}-{output_len}",
        "host": machine.host.name,
        "weights": "4 bits" if machine.model.quantisation else "16 bits",
        "run": run["run"],
        "mean_lengths": f"{input_len} in, {output_len} out",
        "placement": "/".join(str(placed.timed.placement.count(place)) for place in Place),
        "predicted_tokens_per_s": placed.predicted_tokens_per_s,
    }
    limits = SchedulerLimits(
        settings["max_num_batched_tokens"], settings["max_num_seqs"], machine.model.max_position_embeddings
    )
    task = SimulatedTask(
        system,
        _hardware(machine, placed),
        placed.num_gpu_blocks,
        num_cpu_blocks,
        lengths,
        limits,
        settings["block_size"],
        values=values,
        believed=placed.scheduler_table,
    )
    key = f"{values['case']}-{run['run']}".replace(" ", "-").replace(",", "").replace("(", "").replace(")", "")
    return Point(key, key, key, task, concurrent=True, cost=float(lengths.total_output_tokens))


def _hardware(machine: PredictedMachine, placed: PlacedMachine) -> SimulatedHardware:
    return SimulatedHardware(
        machine.gpu.name,
        machine.model_name,
        machine.dtype,
        placed.table,
        machine.model.num_layers,
        interconnect=placed.interconnect,
        weights=placed.weights,
    )


def _num_requests(settings: Mapping[str, Any], at_once: Workload, num_blocks: int) -> int:
    held = min(at_once.num_requests, num_blocks * settings["block_size"] / at_once.context)
    return min(settings["most_requests"], max(settings["least_requests"], round(settings["fills"] * held)))


def with_gains(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """Rows with the ratio of their throughput to that of GPU-only with the CPU idle, the first run."""
    frame = frame_of(rows)
    base = bases(frame, frame["run"] == "GPU-only", ["case"])
    return with_columns(rows, ratio_to_gpu_only=over(frame["output_tokens_per_s"], base))
