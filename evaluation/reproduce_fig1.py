"""Draws Figure 1 of the APEX paper: linear operations over tokens, attention on GPU and CPU over the batch.

python evaluation/reproduce_fig1.py [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console

from evaluation.experiments.operations import describe, operation_points, run_operation
from evaluation.options import RunOptions, check_counts, experiment_settings
from evaluation.plots.lines import LinePanel, Series, line_figure
from evaluation.plots.style import FAINT, INK, FigureText, show_figure, system_colour
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.kinds import distinct, is_simulated
from evaluation.results.tables import rows_table
from evaluation.run import Point, Run
from evaluation.study import Study, command

NAME = "fig1"
KERNEL_COLOURS = dict(
    zip(("native", "llamafile", "ispc"), map(system_colour, ("adaptive", "apex", "neo")), strict=True)
)
GPU_COLOURS = (FAINT, "#A5A5A5")
STATED_COLOUR = INK


@dataclass(frozen=True)
class Options(RunOptions):
    """Figure 1 of the APEX paper: (a) a layer's linear operations of Llama-3.1-8B on an A10 over the tokens, (b) a
    layer's attention on a GPU and on a CPU over the batch.

    The GPUs' times are SIMULATED (predicted, no GPU needed), the CPU's are measured on this machine in about half a
    minute, on one core. What the paper states in numbers is drawn as marks. Sizes come from
    configs/experiments/fig1.yaml. Results, figure and provenance go to results/fig1/<run>/.
    """

    threads: int | None = None
    """Threads of CPU attention; by default one, measured by the time that it has its core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, ("threads",))


LINEAR = (("tokens", "tokens", "d"), ("us, SIMULATED", "operation_us", ",.0f"), ("/ 1 token", "over_first", ".2f"))
ATTENTION = (
    ("who", "system", "s"), ("kind", "kind", "s"), ("batch", "batch", "d"), ("us", "operation_us", ",.0f"),
    ("GB/s", "gb_s", ".0f"), ("others", "others_busy_cores", ".2f"),
)  # fmt: skip


def points(options: Options) -> list[Point]:
    return operation_points(experiment_settings(NAME, options.config), options.threads)


def kv_bytes(attention: Mapping[str, Any], batch: int) -> int:
    """Bytes of K and V in 16 bits that a call of attention reads."""
    return batch * attention["context"] * 2 * attention["heads"] * attention["head_dim"] * 2


def stated_words(settings: Mapping[str, Any]) -> str:
    """What the paper states, with the rates that it implies."""
    attention, parts, rates = settings["attention"], [], []
    for mark in settings["stated"]:
        rates.append(kv_bytes(attention, mark["batch"]) / mark["us"] / 1e3)
        parts.append(f"{mark['us']:,} us on {mark['what']} ({rates[-1]:.0f} GB/s)")
    batch = settings["stated"][0]["batch"]
    return (
        f"the paper states, at batch {batch}, {' and '.join(parts)} for {kv_bytes(attention, batch) / 1e6:.1f} MB: "
        f"{min(rates) / max(rates):.1%}"
    )


def show(settings: Mapping[str, Any], run: Run, console: Console) -> None:
    linear, attention = ([row for row in run.summary if row["workload"] == name] for name in ("linear", "attention"))
    words = stated_words(settings)
    if linear:
        first = linear[0]["operation_us"]
        console.print(
            f"[bold]SIMULATED[/]: linear operations of a layer on {linear[0]['gpu']}, {linear[0]['known_from']}"
        )
        console.print(rows_table([{**row, "over_first": row["operation_us"] / first} for row in linear], LINEAR))
    console.print("Attention of a layer; others: cores that other work on this machine kept busy", highlight=False)
    console.print(rows_table([with_rate(settings, row) for row in attention], ATTENTION))
    console.print(words[0].upper() + words[1:], highlight=False, soft_wrap=True)
    show_figure(
        line_figure(panels(settings, linear, attention), text_of(words, linear, attention)), run.folder, console
    )


def with_rate(settings: Mapping[str, Any], row: FlatRecord) -> FlatRecord:
    kind = "SIMULATED" if is_simulated(row) else "measured"
    return {**row, "kind": kind, "gb_s": kv_bytes(settings["attention"], row["batch"]) / row["operation_us"] / 1e3}


def panels(
    settings: Mapping[str, Any], linear: Sequence[FlatRecord], attention: Sequence[FlatRecord]
) -> list[LinePanel]:
    lines, gpus = [], iter(GPU_COLOURS)
    for (system,), rows in grouped(attention, lambda row: (row["system"],)).items():
        simulated = is_simulated(rows[0])
        colour = next(gpus, FAINT) if simulated else KERNEL_COLOURS.get(system) or system_colour(system)
        name = f"{system}, sim." if simulated else f"CPU, {system}"
        lines.append(Series(name, colour, [(row["batch"], row["operation_us"]) for row in rows], dashed=simulated))
    for mark in settings["stated"]:
        lines.append(Series(f"paper: {mark['what']}", STATED_COLOUR, [(mark["batch"], mark["us"])], width=4.0))
    over_tokens = [(row["tokens"], row["operation_us"] / 1e3) for row in linear]
    a10 = Series("", system_colour("apex"), over_tokens)
    names = f"{settings['linear']['model']}, {settings['linear']['gpu'].upper()}"
    return [
        LinePanel(f"(a) Linear operations of a layer, {names}", "tokens", "ms, SIMULATED", [a10], log_x=True),
        LinePanel("(b) Decode attention of a layer", "requests in a batch", "us", lines, log_x=True, log_y=True),
    ]


def text_of(words: str, linear: Sequence[FlatRecord], attention: Sequence[FlatRecord]) -> FigureText:
    measured = [row for row in attention if not is_simulated(row)]
    threads = " and ".join(f"{count:g} thread{'s' * (count > 1)}" for count in distinct(measured, "threads"))
    on = f"CPU: MEASURED on {' and '.join(distinct(measured, 'cpu'))}, {threads}" if measured else "CPU: not measured"
    size = measured[0] if measured else None
    shape = "" if size is None else f"{size['heads']} heads of {size['head_dim']}, {size['context']:,} tokens each. "
    first = linear[0] if linear else None
    table = "" if first is None else f"(a) {first['gpu']}: {first['known_from']}. "
    rests_on = distinct(attention, "known_from")
    known = f"(b) GPUs by the simulator's formula, {rests_on[0]}; " if rests_on else "(b) "
    return FigureText(
        "Why attention on the CPU can help, and how slow it is \u2014 SIMULATED and MEASURED",
        f"GPUs: SIMULATED. {on}\n(b) {shape}Marks: what the paper states.",
        f"{table}{known}CPU: time of the thread on its core for one thread, else by the clock. In (b) {words}. It does "
        "not show its CPU's latencies at batch 64 and 128.",
    )


def experiments(options: Options) -> list[Study]:
    settings = experiment_settings(NAME, options.config)
    return [Study(NAME, partial(show, settings), points, run_point=run_operation, describe=describe)]


main = command(Options, experiments)

if __name__ == "__main__":
    sys.exit(main())
