"""Models in 16 and 4 bits on cards that hold them or not, with and without the CPU tier of KV cache."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from apex.placement.budget import UniformLoad
from apex.simulator.hardware.files import load_gpu
from apex.simulator.prediction.placed_machine import WeightPlacer
from apex.simulator.prediction.predicted_machine import predict_machine
from evaluation.drivers import SimulatedHardware, SimulatedTask
from evaluation.grid import Grid, Place, lengths_of, possible_points
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import bases, frame_of, over, with_columns
from evaluation.run import Point
from swiftllm.model.stages import placement as model_placement
from swiftllm.scheduling.admission import SchedulerLimits
from swiftllm.systems import find_system

DTYPE = "float16"
CASE = ("weights", "input_len", "output_len")
FIELDS = (*CASE, "gpu", "host", "model", "run", "system", "cpu_computes", "seed")
NOTES = (
    "block_size", "max_num_batched_tokens", "max_num_seqs", "fills", "least_requests", "most_requests"
)  # fmt: skip


def weight_points(settings: Mapping[str, Any]) -> list[Point]:
    """The points of the experiment file; prints why others are not possible.

    ``placement`` of a row are the numbers of stages that are resident, streamed and on the CPU.
    """
    places = Grid.read(settings, FIELDS, notes=NOTES).places()
    make = functools.partial(_point, settings)
    return possible_points(
        places,
        make,
        lambda place: f"{load_gpu(place['gpu']).name}, {place['model']} {place['weights']}, {place['run']}",
    )


def _point(settings: Mapping[str, Any], place: Place) -> Point:
    """
    Raises:
        ValueError: the model fits neither GPU nor host.
    """
    block_size, max_num_seqs = settings["block_size"], settings["max_num_seqs"]
    placer = _placer(place["gpu"], place["host"], place["model"], place["weights"], block_size)
    machine, system = placer.machine, place["system"]
    offloads = find_system(system).needs_predictions
    at_once = UniformLoad(max_num_seqs, place["input_len"], place["output_len"])
    placed = placer.place("auto", at_once, offloads=offloads, cpu_computes=place["cpu_computes"])
    num_cpu_blocks = placed.num_cpu_blocks if offloads else 0
    held = min(max_num_seqs, (placed.num_gpu_blocks + num_cpu_blocks) * block_size / at_once.context)
    num_requests = min(settings["most_requests"], max(settings["least_requests"], round(settings["fills"] * held)))
    lengths = lengths_of({**place, "num_requests": num_requests})
    case = (machine.gpu.name, machine.host.name, machine.model_name, *(str(place[name]) for name in CASE))
    values = {
        "case": "-".join(case),
        "host": machine.host.name,
        "weights": "4 bits" if machine.model.quantisation else "16 bits",
        "run": place["run"],
        "mean_lengths": f"{place['input_len']} in, {place['output_len']} out",
        "placement": "/".join(str(placed.timed.placement.count(where)) for where in model_placement.Place),
        "predicted_tokens_per_s": placed.predicted_tokens_per_s,
    }
    hardware = SimulatedHardware(
        machine.gpu.name,
        machine.model_name,
        machine.dtype,
        placed.table,
        machine.model.num_layers,
        interconnect=placed.interconnect,
        weights=placed.weights,
    )
    limits = SchedulerLimits(settings["max_num_batched_tokens"], max_num_seqs, machine.model.max_position_embeddings)
    pools = (placed.num_gpu_blocks, num_cpu_blocks)
    believed = placed.scheduler_table
    task = SimulatedTask(system, hardware, *pools, lengths, limits, block_size, values=values, believed=believed)
    key = f"{values['case']}-{place['run']}".replace(" ", "-").translate(str.maketrans("", "", ",()"))
    return Point(key, key, key, task, concurrent=True, cost=float(lengths.total_output_tokens))


@functools.cache
def _placer(gpu: str, host: str, model: str, weights: str, block_size: int) -> WeightPlacer:
    return WeightPlacer(predict_machine(gpu, host, model, DTYPE, weights=weights), block_size)


def with_gains(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """Rows with the ratio of their throughput to that of GPU-only with the CPU idle, the first run."""
    frame = frame_of(rows)
    base = bases(frame, frame["run"] == "GPU-only", ["case"])
    return with_columns(rows, ratio_to_gpu_only=over(frame["output_tokens_per_s"], base))
