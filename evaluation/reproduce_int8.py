"""What a CPU tier in int8 brings on the papers' machines, SIMULATED.

python evaluation/reproduce_int8.py [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console

from evaluation.grid import FIELDS, Grid, concerns, simulate, simulated_point
from evaluation.options import TraceOptions, experiment_settings
from evaluation.plots.bars import Bar, BarPanel, Half, throughput_figure
from evaluation.plots.notes import figure_text
from evaluation.plots.style import show_figure, system_colour
from evaluation.plots.table import rows_table
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.run import Point, Run
from evaluation.study import Study, command

NAME, FORMAT, INT8 = "int8", "cpu_kv_dtype", "int8"
RATE = "output_tokens_per_s"
CASE = ("setting", "workload_title")


@dataclass(frozen=True)
class Options(TraceOptions):
    """Throughput of neo, apex and adaptive with the CPU tier in int8 beside the exact one. SIMULATED (predicted times,
    no GPU needed).

    Settings and workloads come from configs/experiments/int8.yaml. Results, figure and provenance go to
    results/int8/<run>/. Running the same command again continues an interrupted run.
    """

    quick: bool = False
    """Few requests."""


COLUMNS = (
    ("system", "system", "s"), ("CPU tier", FORMAT, "s"), ("tok/s", RATE, ",.0f"),
    ("int8 / exact", "over_exact", ".2f"),
    ("/ swiftllm", "over_gpu_only", ".2f"), ("CPU blocks", "num_cpu_blocks", ",d"),
    ("CPU attention GB/s", "cpu_bandwidth_gb_s", ".1f"), ("CPU busy", "cpu_busy_fraction", ".0%"),
)  # fmt: skip
NOTE = "Outlined: the CPU tier exact; filled: in int8, in the same gigabytes; numbers: int8 over exact."


def points(options: Options) -> list[Point]:
    grid = Grid.read(experiment_settings(NAME, options.config), FIELDS, "quick" if options.quick else None)
    made = []
    for place in grid.with_(trace_dir=options.trace_dir).places(concerns):
        workload = place.get("workload") or f"{place['input_len']} in, {place['output_len']} out"
        task = simulate(place, [FORMAT], workload_title=workload)
        made.append(simulated_point([place["setting"], workload, place[FORMAT] or "gpu"], task))
    return made


def with_ratios(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows with their rate over that of the exact tier, and over that of the GPU alone."""
    rate = {(*(row[name] for name in CASE), row["system"], row[FORMAT]): row[RATE] for row in rows}

    def over(row: FlatRecord, system: str, cpu_kv_dtype: str | None) -> float | None:
        base = rate.get((*(row[name] for name in CASE), system, cpu_kv_dtype))
        return row[RATE] / base if base else None

    return [
        {**row, "over_exact": over(row, row["system"], "auto"), "over_gpu_only": over(row, "swiftllm", None)}
        for row in rows
    ]


def panels(rows: Sequence[FlatRecord], systems: Sequence[str]) -> list[BarPanel]:
    made = []
    for (gpu, host), here in grouped(rows, "gpu", "host").items():
        groups = []
        for workload, of_one in grouped(here, "workload_title").items():
            bars: list[Bar | None] = []
            for system in systems:
                for row in sorted((row for row in of_one if row["system"] == system), key=lambda row: row[FORMAT]):
                    is_int8 = row[FORMAT] == INT8
                    text = f"{row['over_exact']:.2f}" if is_int8 else ""
                    bars.append(Bar(row[RATE], system_colour(system), text, bold=is_int8, is_open=not is_int8))
            groups.append((workload, bars))
        made.append(BarPanel(f"{gpu}, {host.split(' (')[0]}", "workload", groups, "output tokens/s, SIMULATED"))
    return made


def show(run: Run, console: Console) -> None:
    rows = run.summary
    console.print("[bold]SIMULATED[/]: output tokens per second, CPU attention by the native kernel in every system")
    for case, here in grouped(rows, *CASE).items():
        console.print(" ".join(case), highlight=False)
        console.print(rows_table([{**row, FORMAT: row[FORMAT] or "-"} for row in here], COLUMNS))
    systems = [system for system in dict.fromkeys(row["system"] for row in rows) if system != "swiftllm"]
    text = figure_text("A CPU tier in int8 beside an exact one", rows, run.machine)
    drawn = [row for row in rows if row[FORMAT]]
    half = Half(panels(drawn, systems), systems, replace(text, notes=f"{NOTE}\n{text.notes}"))
    show_figure(throughput_figure([half]), run.folder, console)


main = command(Options, lambda options: [Study(NAME, show, points, with_ratios)])

if __name__ == "__main__":
    sys.exit(main())
