"""What an evaluator on AWS may expect of Figure 5: ratios, minutes and dollars for each instance, SIMULATED."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console

from apex.simulator.hardware_files import Figure, load_gpu, load_host
from apex.simulator.paper_settings import BLOCK_SIZE
from evaluation.grid import FIELDS, Grid, Place, setting_of, simulate, simulated_point
from evaluation.options import RunOptions, experiment_settings
from evaluation.plots.notes import neo_notes, trace_note
from evaluation.results.claims import AGREES, ratios_by_point
from evaluation.results.folder import FlatRecord, markdown_lines
from evaluation.results.rows import grouped
from evaluation.results.tables import rows_table
from evaluation.run import Point, Run
from evaluation.study import Study, command
from swiftllm.config import EngineConfig
from swiftllm.files import write_atomically
from swiftllm.machine import GIB
from swiftllm.runtime.memory_estimate import estimate_memory

NAME = "aws"
PAIRS = (("apex", "vllm"), ("apex", "neo"), ("neo", "vllm"), ("adaptive", "vllm"))
HOURS = 8
"""Of `make artifact`, whose hours are chosen."""
COLUMNS = (
    ("instance", "instance", "s"), ("workload", "workload", "s"), ("out", "output_len_mean", ".0f"),
    ("host GB", "cpu_kv_gb", ".0f"), *((f"{ours}/{theirs}", f"{ours}/{theirs}", ".2f") for ours, theirs in PAIRS),
    ("apex tok/s", "apex", ".0f"), ("min", "minutes", ".0f"), (f"USD for {HOURS} h", "usd", ".2f"),
)  # fmt: skip


@dataclass(frozen=True)
class Options(RunOptions):
    """What an evaluator on AWS may expect of Figure 5 on g4dn and g5 instances, SIMULATED (predicted times, no GPU
    needed): ratios, minutes and dollars for each instance.

    Instances, workloads and prices come from configs/experiments/aws.yaml. Results go to results/aws/<run>/, with the
    table of docs/reproduce/aws.md in expected.md.
    """


def points(options: Options) -> list[Point]:
    settings = experiment_settings(NAME, options.config)
    free_share = Figure(**settings["free_share"]).value
    grid = Grid.read(settings, FIELDS, notes=("free_share", "usd_per_hour"))
    return [_point(place, free_share) for place in grid.places()]


def _point(place: Place, free_share: float) -> Point:
    place = {**place, "cpu_kv_gb": tier_gb(place, free_share)}
    names = (place["host"], place["workload"], *([f"out{place['output_len']:g}"] if place.get("output_len") else []))
    return simulated_point(names, simulate(place, ("host",), instance=place["host"]))


def tier_gb(place: Place, free_share: float) -> float:
    """GB of KV cache on the host: the paper's, or what the instance's free memory leaves beside the engine."""
    paper = setting_of({**place, "host": None})
    model, host_gib = paper.model_config, load_host(place["host"])["memory_gb"]  # AWS states GiB
    config = EngineConfig("model", "cuda", block_size=BLOCK_SIZE, **vars(paper.limits))
    sizes = {
        "device_bytes": int(load_gpu(paper.gpu)["memory_gb"] * 1e9),
        "host_bytes": int(free_share * host_gib * GIB),
    }
    fit = estimate_memory(config, model, getattr(torch, paper.dtype), **sizes)
    return min(paper["cpu_kv_gb"], fit.max_cpu_blocks * fit.bytes_per_block / 1e9)


def expectations(rows: Sequence[FlatRecord], usd_per_hour: dict[str, Any]) -> list[FlatRecord]:
    """A line for each instance and point: ratios, the minutes of its systems together, dollars of ``HOURS``."""
    lines = []
    for (instance, workload, _), here in grouped(rows, "instance", "workload", "output_len").items():
        ratios = {
            f"{ours}/{theirs}": ratios_by_point(here, "output_tokens_per_s", ours, theirs) for ours, theirs in PAIRS
        }
        by_system = {row["system"]: row for row in here}
        lines.append(
            {
                "instance": instance,
                "workload": workload,
                "output_len_mean": here[0]["output_len_mean"],
                "cpu_kv_gb": here[0]["cpu_kv_gb"],
                **{name: next(iter(values.values()), None) for name, values in ratios.items()},
                "apex": by_system["apex"]["output_tokens_per_s"] if "apex" in by_system else None,
                "minutes": sum(row["wall_s"] for row in here) / 60,
                "usd": Figure(**usd_per_hour[instance]).value * HOURS,
            }
        )
    return lines


def appendix(lines: Sequence[FlatRecord]) -> str:
    """The table of docs/reproduce/aws.md."""
    heads = [
        "instance",
        "workload, output",
        *(f"`{ours}` over `{theirs}`" for ours, theirs in PAIRS),
        f"USD, {HOURS} h",
    ]
    cells = [
        [
            line["instance"].replace("-", ".", 1),
            f"{line['workload']}, {line['output_len_mean']:.0f}",
            *(f"{line[f'{ours}/{theirs}']:.2f}" for ours, theirs in PAIRS),
            f"{line['usd']:.2f}",
        ]
        for line in lines
    ]
    return "\n".join(markdown_lines(heads, cells)) + "\n"


def show(usd_per_hour: dict[str, Any], run: Run, console: Console) -> None:
    lines = expectations(run.summary, usd_per_hour)
    console.print(f"[bold]SIMULATED[/]: expected of Figure 5 on AWS, within {AGREES:.0%}; min: of all systems together")
    console.print(rows_table(lines, COLUMNS))
    for note in (*neo_notes(run.summary), trace_note(run.summary)):
        console.print(note, highlight=False, soft_wrap=True)
    write_atomically(run.folder / "expected.md", appendix(lines))


def parts(options: Options) -> dict[str, Study]:
    settings = experiment_settings(NAME, options.config)
    return {NAME: Study(NAME, partial(show, settings["usd_per_hour"]), points)}


main = command(Options, parts)
