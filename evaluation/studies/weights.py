"""Models in 16 and 4 bits on cards that hold them or not, with and without the CPU tier of KV cache."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from matplotlib.figure import Figure

from apex.placement.search import UniformLoad
from apex.simulator.hardware_files import load_gpu
from apex.simulator.predicted_machine import WeightPlacer, predict_machine
from evaluation.drivers import SimulatedHardware, SimulatedTask
from evaluation.grid import Place, lengths_of
from evaluation.options import StudyOptions
from evaluation.plots.charts import Bar, BarPanel, draw_bars
from evaluation.plots.notes import known_notes
from evaluation.plots.style import FigureText, legend, sheet, system_colour
from evaluation.results.folder import FlatRecord
from evaluation.results.rows import distinct, grouped
from evaluation.run import Point
from evaluation.study import RATE, Ratio, Rows, Study, Table, command
from swiftllm.model import placement as model_placement
from swiftllm.scheduling.validation import SchedulerLimits
from swiftllm.systems import find_system

DTYPE = "float16"
CASE = ("weights", "input_len", "output_len")
LIMITS = ("block_size", "max_num_batched_tokens", "max_num_seqs")
FIELDS = (
    *CASE, *LIMITS, "gpu", "host", "model", "run", "system", "cpu_computes", "seed", "fills", "least_requests",
    "most_requests",
)  # fmt: skip


@dataclass(frozen=True)
class Options(StudyOptions):
    """Models in 16 and 4 bits on cards that hold them or not, with and without the CPU tier of KV cache. SIMULATED
    (predicted times, no GPU needed).

    Machines, models and lengths come from configs/experiments/weights.yaml. Results, figure and provenance go to
    results/weights/<run>/. Running the same command again continues an interrupted run.
    """


def point(place: Place) -> Point:
    """The point of a place. ``placement`` of its row: the numbers of stages that are resident, streamed, on the
    CPU, and if there are any, with their experts in host memory.

    Raises:
        ValueError: the model fits neither GPU nor host.
    """
    block_size, max_num_batched_tokens, max_num_seqs = (place[name] for name in LIMITS)
    placer = _placer(place["gpu"], place["host"], place["model"], place["weights"], block_size)
    machine, system = placer.machine, place["system"]
    offloads = find_system(system).needs_predictions
    at_once = UniformLoad(max_num_seqs, place["input_len"], place["output_len"])
    placed = placer.place("auto", at_once, offloads=offloads, cpu_computes=place["cpu_computes"])
    num_cpu_blocks = placed.num_cpu_blocks if offloads else 0
    held = min(max_num_seqs, (placed.num_gpu_blocks + num_cpu_blocks) * block_size / at_once.context)
    num_requests = min(place["most_requests"], max(place["least_requests"], round(place["fills"] * held)))
    lengths = lengths_of({**place, "num_requests": num_requests})
    case = (machine.gpu.name, machine.host.name, machine.model_name, *(str(place[name]) for name in CASE))
    where = model_placement.Place
    counts = [placed.timed.placement.count(at) for at in (where.RESIDENT, where.STREAMED, where.CPU)]
    counts += [count] if (count := placed.timed.placement.count(where.EXPERTS)) else []
    values = {
        "case": "-".join(case),
        "host": machine.host.name,
        "weights": "4 bits" if machine.model.quantisation else "16 bits",
        "run": place["run"],
        "mean_lengths": f"{place['input_len']} in, {place['output_len']} out",
        "placement": "/".join(map(str, counts)),
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
    limits = SchedulerLimits(max_num_batched_tokens, max_num_seqs, machine.model.max_position_embeddings)
    pools = (placed.num_gpu_blocks, num_cpu_blocks)
    believed = placed.scheduler_table
    task = SimulatedTask(system, hardware, *pools, lengths, limits, block_size, values=values, believed=believed)
    key = f"{values['case']}-{place['run']}".replace(" ", "-").translate(str.maketrans("", "", ",()"))
    return Point(key, key, key, task, concurrent=True, cost=float(lengths.total_output_tokens))


@functools.cache
def _placer(gpu: str, host: str, model: str, weights: str, block_size: int) -> WeightPlacer:
    return WeightPlacer(predict_machine(gpu, host, model, DTYPE, weights=weights), block_size)


# -- tables and figure ------------------------------------------------------------------------------------------------

PANEL_WIDTH = 2.9
IDLE_CPU = "#C9C9C9"
WEIGHTS_TEXT = FigureText(
    "What 4-bit weights and the CPU tier of KV cache bring",
    "Output tokens per second, all requests at once. SIMULATED: predicted times, nothing measured. Axes differ.",
    "GPU-only has no KV cache in host memory. Weights that do not fit are streamed over PCIe, or computed by the CPU "
    "where the bar's name allows it and that is predicted to be faster. 4-bit products are as fast as assumed "
    "(configs/hardware/assumptions.yaml), on a T4 those of its optional library.",
)


def draw_weights(rows: Rows) -> Figure:
    """A column of panels for each machine and model, a row for each pair of lengths; bars are the runs."""
    machines, runs = grouped(rows, "gpu", "host", "model"), distinct(rows, "run")
    lengths, systems = distinct(rows, "mean_lengths"), {row["run"]: row["system"] for row in rows}
    # Two runs have one system: the one that uses more of the machine is darker.
    colours = [IDLE_CPU if run == "GPU-only" else system_colour(systems[run]) for run in runs]
    width = max(7.0, PANEL_WIDTH * len(machines) + 1.0)
    text = replace(WEIGHTS_TEXT, notes="\n".join([WEIGHTS_TEXT.notes, *known_notes(rows)]))
    figure, axes = sheet(text, len(lengths), len(machines), width=width, height=1.9, left=0.6, right=0.3, below=0.7)
    legend(figure, runs, colours)
    for line, wanted in zip(axes, lengths, strict=True):
        for ax, ((gpu, host, model), here) in zip(line, machines.items(), strict=True):
            groups = []
            there = (row for row in here if row["mean_lengths"] == wanted)
            for weights, of_weights in grouped(there, "weights").items():
                rates = {row["run"]: row["output_tokens_per_s"] for row in of_weights}
                bars = [
                    Bar(rate, colour, f"{rate:.0f}") if (rate := rates.get(run)) is not None else Bar(0.0, "none")
                    for run, colour in zip(runs, colours, strict=True)
                ]
                groups.append((weights, bars))
            draw_bars(ax, BarPanel(f"{gpu}, {model}", f"requests of {wanted}\n{host}", groups), size=6.3)
            ax.set_xlim(-0.5, max(1.5, len(groups) - 0.5))
        line[0].set_ylabel("tokens/s")
    return figure


def lines(rows: Rows) -> list[FlatRecord]:
    return [{**row, "mean_lengths": row["mean_lengths"].replace(" in, ", "/").replace(" out", "")} for row in rows]


STUDY = Study(
    "weights",
    fields=FIELDS,
    point=point,
    refused=lambda place: f"{load_gpu(place['gpu']).name}, {place['model']} {place['weights']}, {place['run']}",
    ratios={"ratio_to_gpu_only": Ratio(lambda row: row["run"] == "GPU-only", ["case"])},
    tables=[
        Table(
            (
                ("GPU", "gpu", "s"), ("host", "host", "s"), ("model", "model", "s"), ("weights", "weights", "s"),
                ("in/out", "mean_lengths", "s"), ("run", "run", "s"), ("tok/s", RATE, ",.1f"),
                ("/ GPU-only", "ratio_to_gpu_only", ".2f"), ("GPU busy", "gpu_busy_fraction", ".0%"),
                ("placed", "placement", "s"),
            ),
            "[bold]SIMULATED[/]: output tokens per second; 4-bit products are as fast as assumed\n"
            "placed: stages that are resident / streamed / on the CPU",
            lines=lines,
        )
    ],
    figure=lambda run: draw_weights(run.summary),
)  # fmt: skip
main = command(Options, {"weights": STUDY})
