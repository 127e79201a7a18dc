"""What prefix caches bring by where they keep blocks, SIMULATED, and what they save on this machine, measured.

python evaluation/reproduce_prefix.py [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console

from evaluation.experiments.prefix.measured import describe, measured_points, run_sharing_point
from evaluation.experiments.prefix.simulated import run_prefix_point, simulated_points, with_ratios
from evaluation.options import Folder, TraceOptions, experiment_settings
from evaluation.plots.lines import LinePanel, Series, line_figure
from evaluation.plots.notes import figure_text
from evaluation.plots.style import show_figure, system_colour
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.tables import rows_table
from evaluation.run import Point, Run
from evaluation.study import Study, command

NAME, MEASURED = "prefix", "prefix-measured"


@dataclass(frozen=True)
class Options(TraceOptions):
    """Throughput and time to first token with prefix caches off, on the GPU only, with host memory as a store from
    which blocks are copied back, and over both tiers, attended where they lie. SIMULATED (predicted times, no GPU
    needed).

    Workloads, systems and sizes of the GPU pool come from configs/experiments/prefix.yaml. Results, figure and
    provenance go to results/prefix/<run>/. Running the same command again continues an interrupted run.
    """

    backend: Literal["simulated", "torch"] = "simulated"
    """torch: measure on this machine with a small model what a cache saves in the second turn of a conversation, and
    where 64 requests share 1,000 of 1,100 tokens."""
    quick: bool = False
    """Few requests on one size of the GPU pool (simulated)."""
    model: Folder = None
    """Folder of the model (torch); by default the one of `make setup`."""


COLUMNS = (
    ("pool", "pool", "g"), ("system, cache", "variant", "s"),
    ("tok/s", "output_tokens_per_s", ",.0f"), ("/ off", "over_off", ".2f"), ("/ gpu", "over_gpu_only", ".2f"),
    ("TTFT mean", "ttft_s_mean", ".2f"), ("p50", "ttft_s_p50", ".2f"), ("p99", "ttft_s_p99", ".2f"),
    *((f"turn {turn}", f"ttft_s_turn_{turn}", ".2f") for turn in range(1, 5)),
    ("found GPU", "found_on_gpu", ".0%"), ("CPU", "found_on_cpu", ".0%"),
)  # fmt: skip
MEASURED_COLUMNS = (
    ("system", "system", "s"), ("turn 1 (s)", "ttft_s_turn_1", ".3f"), ("turn 2 (s)", "ttft_s_turn_2", ".3f"),
    ("turn 2 / 1", "turn_2_over_1", ".2f"), ("found tokens", "found_tokens", ".0f"),
    ("computed tokens", "computed_tokens", "d"), ("/ fewest", "computed_over_fewest", ".3f"),
    ("no hits on / off", "no_hits_on_over_off", ".3f"),
)  # fmt: skip
LINES_NOTE = (
    "off: no cache. gpu: in GPU memory only. store: swiftllm, which copies what host memory has back before it "
    "uses it. Others: a cache over both tiers, attended where it lies."
)
DRAWN = {("vllm", "gpu"), ("swiftllm", "store"), ("apex", "tiers"), ("adaptive", "tiers")}


def print_prefix(rows: Sequence[FlatRecord], console: Console) -> None:
    """A table for each machine and workload; times to first token in seconds."""
    console.print("[bold]SIMULATED[/]: output tokens per second, and seconds to the first token (TTFT)")
    console.print("pool: of the GPU over the working set; / off: over the same system's without a cache")
    console.print("/ gpu: over vllm's with a cache on the GPU; found: prompt tokens in either tier's cache")
    for (machine, workload), here in grouped(rows, "setting_title", "workload_title").items():
        first = here[0]
        origin = f"{first['num_requests']} requests, {first['working_set_blocks']} blocks in all"
        console.print(f"{machine}, {workload} ({first['trace_origin']}; {origin})", highlight=False, soft_wrap=True)
        shown = [
            column
            for column in COLUMNS
            if column[1] == "variant" or any(row.get(column[1]) is not None for row in here)
        ]
        named = [{**row, "variant": f"{row['system']}, {row['cache']}"} for row in here]
        console.print(rows_table(sorted(named, key=lambda row: row["pool"]), shown))


def panels(rows: Sequence[FlatRecord], field: str, words: str, **options: bool) -> list[LinePanel]:
    made = []
    for (gpu, workload), here in grouped(rows, "gpu", "workload_title").items():
        lines = [
            Series(
                system if cache == "tiers" else f"{system} {cache}" if cache != "store" else cache,
                system_colour(system),
                [(row["pool"], row[field]) for row in of_one],
                dashed=cache == "off",
            )
            for (system, cache), of_one in grouped(here, "system", "cache").items()
            if (system, cache) in DRAWN or (cache == "off" and system != "apex")
        ]
        x_label = "GPU pool over the working set"
        made.append(LinePanel(f"{gpu}, {workload}", x_label, f"{words}, SIMULATED", lines, log_x=True, **options))
    return made


def show(run: Run, console: Console) -> None:
    rows = run.summary
    print_prefix(rows, console)
    drawn = [
        *panels(rows, "output_tokens_per_s", "output tokens/s"),
        *panels(rows, "ttft_s_mean", "mean s to first token", log_y=True),
    ]
    text = figure_text("Prefix caches by where they keep blocks", rows, run.machine)
    text = replace(text, notes=f"{LINES_NOTE}\n{text.notes}")
    show_figure(line_figure(drawn, text, columns=len(drawn) // 2), run.folder, console)


def show_measured(run: Run, console: Console) -> None:
    console.print("MEASURED: seconds to the first token in two turns; prompt tokens computed for the sharers")
    console.print(rows_table(run.summary, MEASURED_COLUMNS))


def experiments(options: Options) -> list[Study]:
    def points(options: Options) -> list[Point]:
        section = experiment_settings(NAME, options.config)["simulated"]
        return simulated_points(section, options.quick, options.trace_dir)

    def measured(options: Options) -> list[Point]:
        return measured_points(experiment_settings(NAME, options.config)["torch"], options.model)

    return [
        Study(NAME, show, points, with_ratios, run_prefix_point),
        Study(MEASURED, show_measured, measured, run_point=run_sharing_point, describe=describe),
    ]


main = command(Options, experiments, lambda options: [NAME if options.backend == "simulated" else MEASURED])

if __name__ == "__main__":
    sys.exit(main())
