"""Machines with several GPUs: how many replicas of the engine, and how many GPUs in each."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from apex.cli.output import number
from apex.simulator.hardware_files import GpuLink, Host, load_gpu, load_host, load_link, load_model_config
from apex.simulator.predicted_machine import PredictedMachine
from apex.simulator.predicted_profile import hardware_profile
from evaluation.drivers import WITH_BOUND, SimulatedHardware, SimulatedTask
from evaluation.grid import Place, lengths_of
from evaluation.options import StudyOptions
from evaluation.results.folder import FlatRecord
from evaluation.results.rows import bases, frame_of, grouped, over, with_columns
from evaluation.run import Point
from evaluation.study import RATE, Rows, Study, Table, command
from swiftllm.scheduling.validation import SchedulerLimits


@dataclass(frozen=True)
class Options(StudyOptions):
    """Which machine with several GPUs for which model, and how: replicas of the engine or tensor parallelism, and what
    CPU attention adds. SIMULATED (predicted times, no GPU needed).

    Machines, models and lengths come from configs/experiments/machines.yaml. Results and provenance go to
    results/machines/<run>/. Running the same command again continues an interrupted run. With --set with_bound=true
    rows also say what part of the bound they reach (docs/simulator.md), which takes half a minute a row.
    """


BLOCK_SIZE = 16
MAX_TOKENS = 2048  # in the GPU batch in one iteration
MAX_REQUESTS = 1024  # that hold KV cache at once
IDEAL = "swiftllm over an ideal link"
"""The run of the GPU-only system whose all-reduces take no time."""
MACHINE = ("gpu", "host", "model", "dtype", "link", "tensor_parallel")
FIELDS = (
    *MACHINE, "machine", "num_gpus", "input_len", "output_len", "run", "system", "seed", "fills_of_gpu_tier",
    "least_requests", "cpu_kernel", WITH_BOUND,
)  # fmt: skip


def point(place: Place) -> Point:
    """
    Raises:
        ValueError: the GPUs of a replica do not hold the model.
    """
    replicas, run, machine = replicas_of(place), place["run"], [place[field] for field in MACHINE]
    pools = replica(*machine, replicas, place["cpu_kernel"]).num_blocks(None, None, BLOCK_SIZE)
    here = replica(*machine, replicas, place["cpu_kernel"], ideal_link=run == IDEAL)
    fill = pools[0] * BLOCK_SIZE / (place["input_len"] + place["output_len"])  # requests that fill the GPU tier
    num_requests = max(place["least_requests"], round(place["fills_of_gpu_tier"] * fill))
    lengths = lengths_of({**place, "num_requests": num_requests})
    limits = SchedulerLimits(MAX_TOKENS, MAX_REQUESTS, here.model.max_position_embeddings)
    arrangement = f"{place['num_gpus']}x{place['gpu']}-{place['model']}-tp{place['tensor_parallel']}"
    case = f"{arrangement}-{place['input_len']}-{place['output_len']}"
    values = {
        "case": case,
        "machine": place["machine"],
        "replicas": replicas,
        "tensor_parallel": place["tensor_parallel"],
        "run": run,
        **({WITH_BOUND: True} if place.get(WITH_BOUND) else {}),
        "cpu_bandwidth_gb_s": float(here.table.identity["cpu_attention_gb_s"]),
    }
    hardware = SimulatedHardware(here.gpu.name, here.model_name, here.dtype, here.table, here.model.num_layers)
    task = SimulatedTask(place["system"], hardware, *pools, lengths, limits, BLOCK_SIZE, values=values)
    key = f"{case}-{run.replace(' ', '-')}"
    label = f"{arrangement} {place['input_len']}/{place['output_len']}, {run}"
    return Point(key, key, label, task, concurrent=True, cost=float(lengths.total_output_tokens))


def replicas_of(place: Place) -> int:
    return place["num_gpus"] // place["tensor_parallel"]


@functools.cache
def replica(
    gpu: str,
    host: str,
    model: str,
    dtype: str,
    link: str,
    tensor_parallel: int,
    replicas: int,
    cpu_kernel: str,
    ideal_link: bool = False,
) -> PredictedMachine:
    """One of equal replicas, each with ``tensor_parallel`` GPUs and its share of the host, predicted."""
    config, card, share = load_model_config(model), load_gpu(gpu), share_of_host(load_host(host), replicas)
    table = hardware_profile(
        card,
        share,
        config,
        dtype=dtype,
        cpu_kernel=cpu_kernel,
        block_size=BLOCK_SIZE,
        max_tokens=MAX_TOKENS,
        tensor_parallel=tensor_parallel,
        link=_ideal(load_link(link)) if ideal_link else load_link(link),
    )
    return PredictedMachine(card, share, config, model, dtype, table, tensor_parallel)


def _ideal(link: GpuLink) -> GpuLink:
    """A link whose all-reduces take no time."""
    values = {"all_reduce_gb_s": math.inf, "all_reduce_latency_us": 0.0}  # of buffers of every size
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


def with_machine_totals(rows: Rows) -> list[FlatRecord]:
    """Rows with the rate of all replicas, its ratio to GPU-only, and the share of time that all-reduces take.

    Replicas are independent, so ``machine_tokens_per_s`` is one replica's rate times their number. It is None where
    no tier holds a request.
    """
    frame = frame_of(rows)
    rate = frame[RATE].astype(float)
    gpu_only, ideal = (bases(frame, frame["run"] == run, ["case"]) for run in ("swiftllm", IDEAL))
    return with_columns(
        rows,
        machine_tokens_per_s=rate * frame["replicas"],
        ratio_to_gpu_only=over(rate, gpu_only),
        all_reduce_share=1 - gpu_only.map(rate) / ideal.map(rate),
    )


def lines(rows: Rows) -> list[FlatRecord]:
    """The runs on real links, with the rate of the best of each machine, model and prompt in bold."""
    best = {
        where: max(row["machine_tokens_per_s"] or 0.0 for row in here)
        for where, here in grouped(rows, "machine", "model", "input_len").items()
    }

    def line(row: FlatRecord) -> FlatRecord:
        rate = number(row["machine_tokens_per_s"], ",.0f")
        is_best = row["machine_tokens_per_s"] == best[row["machine"], row["model"], row["input_len"]]
        return {
            **row,
            "lengths": f"{row['input_len']:.0f}/{row['output_len_mean']:.0f}",
            "arrangement": f"{row['replicas']} x {row['tensor_parallel']} GPU",
            "rate": f"[bold]{rate}[/]" if is_best else rate,
        }

    return [line(row) for row in rows if row["run"] != IDEAL]


STUDY = Study(
    "machines",
    fields=FIELDS,
    is_place=lambda place: place["run"] != IDEAL or place["tensor_parallel"] > 1,
    point=point,
    refused=lambda place: f"{place['machine']}, {replicas_of(place)} replicas",
    derive=with_machine_totals,
    tables=[
        Table(
            (
                ("machine", "machine", "s"), ("model", "model", "s"), ("in/out", "lengths", "s"),
                ("replicas", "arrangement", "s"), ("system", "system", "s"), ("tok/s", "rate", ""),
                ("/ GPU only", "ratio_to_gpu_only", ".2f"), ("all-reduce", "all_reduce_share", ".0%"),
                ("CPU busy", "cpu_busy_fraction", ".0%"), ("of the bound", "of_the_bound", ".2f"),
                ("binds", "binds", "s"),
            ),
            "[bold]SIMULATED[/]: output tokens per second of the whole machine; the best of each is bold",
            lines=lines,
        )
    ],
)  # fmt: skip
main = command(Options, {"machines": STUDY})
