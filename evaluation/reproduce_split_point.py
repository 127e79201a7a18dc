"""Predicts the experiments of Park and Egger: split search, generations of three models, beside their claims.

python evaluation/reproduce_split_point.py [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

if __name__ == "__main__" and not __package__:  # run as a file
    import here


from rich.console import Console

from apex.cli.output import stdout_console
from apex.cli.parser import parse_options
from evaluation.experiments.placements.show import draw_search
from evaluation.options import File, ResultsDir, experiment_settings
from evaluation.plots.style import show_figure
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.folder import FlatRecord, ResultFolder
from evaluation.results.frame import grouped
from evaluation.results.paths import RESULTS_DIR
from evaluation.results.tables import rows_table
from evaluation.run import one_line_errors
from evaluation.studies.split_point import SYSTEMS, generation_rows, measured_operations, search_rows

NAME = "split-point"
REASONS = (
    "Where ours differs:",
    "Fig. 14a, 14b: the times of Fig. 6a allow no 30%. They would if Scores took 40 ms on the CPU in place of 78; "
    "Fig. 10a says that CPU work takes about half without copies. Two split points allow 42% with the same times.",
    "Fig. 14c, 14d: the paper has no times of a batch of 100. Ours are those of 50, attention and KV cache twice.",
    "Fig. 15: copies into pinned memory are all that sets FlexGen apart, at an assumed rate.",
    "Fig. 16: the paper's text does not say how large the batches are. With 16 bits the gain is smaller here. With "
    "compression it is larger: decompression takes a fixed 5 ms an operation, and the GPU's part takes long.",
)


@dataclass(frozen=True)
class Options:
    """Park and Egger's split of a model between CPU and GPU, all weights in host memory. SIMULATED (predicted times, no
    GPU needed).

    Models, workloads and figures come from configs/experiments/split-point.yaml, the claims from configs/claims.yaml.
    Results, figure and provenance go to results/split-point/<run>/.
    """

    config: File = None
    """Experiment file to use instead of configs/experiments/split-point.yaml."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to split-point/<run>/ in this folder."""


@one_line_errors
def main(options: Options) -> int:
    """Returns the exit status: 0, or 2 for invalid options."""
    settings, console = experiment_settings(NAME, options.config), stdout_console()
    searches, generations = search_rows(settings), generation_rows(settings)
    console.print("[bold]SIMULATED[/]: latency of a layer of OPT-30B, from the paper's own times", soft_wrap=True)
    print_searches(searches, console)
    console.print("[bold]SIMULATED[/]: latency of a generation in seconds, and the layer's part on the GPU")
    print_generations(generations, console)
    print_claims(load_claims("split-search"), searches, console, with_assumptions=False)
    print_claims(load_claims(NAME), generations, console, with_assumptions=False)
    for line in REASONS:
        console.print(line, highlight=False, soft_wrap=True)
    folder = ResultFolder(NAME, {"experiment": NAME, "settings": settings}, options.results_dir)
    folder.record_invocation()
    folder.save_summary([*searches, *generations])
    panels = {entry["title"]: measured_operations(settings, name) for name, entry in settings["measured"].items()}
    show_figure(draw_search(panels, settings["split_pieces"]), folder.path, console)
    console.print(f"summary and provenance: {folder.path}", highlight=False, soft_wrap=True)
    return 0


SEARCHES = (
    ("workload", "workload", "s"), ("split", "system", "s"), ("on the GPU", "on_gpu", "s"), ("CPU ms", "cpu_s", ".1f"),
    ("H2D ms", "host_to_device_s", ".1f"), ("decompr. ms", "decompress_s", ".1f"),
    ("latency ms", "layer_latency_s", ".1f"),
)  # fmt: skip
GENERATIONS = (
    ("model", "model", "s"), ("workload", "workload", "s"), ("out", "output_len", "d"),
    *((system, system, ",.0f") for system in SYSTEMS), ("/ GPU only", "ratio", ".2f"), ("on the GPU", "on_gpu", "s"),
)  # fmt: skip


def print_searches(rows: Sequence[FlatRecord], console: Console) -> None:
    in_ms = [row | {field: 1e3 * row[field] for _, field, form in SEARCHES if form == ".1f"} for row in rows]
    console.print(rows_table(in_ms, SEARCHES))


def print_generations(rows: Sequence[FlatRecord], console: Console) -> None:
    """One line for each model, workload and output length."""
    lines = []
    for here in grouped(rows, "setting", "workload", "output_len").values():
        latencies = {row["system"]: row["request_latency_s"] for row in here}
        (split,) = (row for row in here if row["system"] == "cpu-gpu")
        model, ratio = split["setting"].removeprefix("park-egger-"), latencies["cpu-gpu"] / latencies["gpu-only"]
        lines.append({**split, **latencies, "model": model, "ratio": ratio})
    console.print(rows_table(lines, GENERATIONS))


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
