"""Shows the effect of each strategy: the same requests with strategies forced, disabled, or run synchronously.

python scripts/ablation.py [--backend simulated --setting apex-a10] [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console
from rich.table import Table

from apex.cli.output import ratio, stdout_console
from apex.cli.parser import parse_options
from evaluation.experiments.ablation import measured, simulated
from evaluation.experiments.ablation.options import Options
from evaluation.experiments.ablation.rows import BASELINE, MEANINGS
from evaluation.experiments.experiment import Experiment
from evaluation.experiments.identity import identity
from evaluation.experiments.runner import RunPoint
from evaluation.plots.table import rows_table
from evaluation.results.folder import FlatRecord
from evaluation.results.kinds import is_simulated
from evaluation.results.paths import model_folder
from evaluation.results.provenance import model_identity

LATENCY = "per_token_latency_s_mean"
ONCE = " Measured once: confirm differences with --repeats 3."


def results_table(summary: Sequence[FlatRecord]) -> Table:
    """A line for each row. Simulated rows have latencies in place of what concerns a real machine alone."""
    base = next((record["output_tokens_per_s"] for record in summary if record["row"] == BASELINE), None)
    predicted = is_simulated(summary[0])
    columns = (
        ("row", "row", "s"),
        ("SIMULATED\ntok/s" if predicted else "tok/s", "output_tokens_per_s", ".1f"),
        (f"/{BASELINE}", "ratio", ".2f"),
        *((("s/token", LATENCY, ".3f"), ("TTFT\np99 (s)", "ttft_s_p99", ".1f")) if predicted else ()),
        ("lane\nbusy", "lane_busy_fraction", ".0%"),
        ("CPU\nbusy", "cpu_busy_fraction", ".0%"),
        *(() if predicted else (("preempted", "preemptions", ".0f"), ("pred/actual", "predicted_over_actual", ".2f"))),
        ("strategy mix", "strategy_mix", "s"),
    )
    records = [{**record, "ratio": ratio(record["output_tokens_per_s"], base)} for record in summary]
    result = rows_table(records, columns)
    result.columns[0].no_wrap = True
    return result


def heading(first: FlatRecord, options: Options) -> str:
    """Model, machine and workload of the table."""
    sizes = f"{first['num_requests']} requests of {first['input_len']:.0f} in / {first['output_len']:.0f} out"
    if is_simulated(first):
        return (
            f"SIMULATED: {first['setting_title']} ({first['dtype']}), {sizes}, {first['num_gpu_blocks']} GPU blocks of "
            f"16 tokens"
        )
    return f"{first['model']} ({first['dtype']}), {sizes}, {options.gpu_requests} of them fit the GPU tier"


def main(options: Options, run_point: RunPoint | None = None, console: Console | None = None) -> int:
    """Run and print the table and the result folder. Returns the exit status: 0 when every row is finished."""
    console = console or stdout_console()
    kind = simulated if options.is_simulated else measured
    try:
        options.check()
        points = kind.make_points(options)
    except ValueError as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 2
    model = None if options.is_simulated else model_identity(model_folder(options.model))
    settings = {"model": model, "points": identity(points)}
    experiment = Experiment("ablation", run_point=run_point or kind.run_row, describe=lambda points: settings)
    outcome = experiment.run(points, options.results_dir, options.jobs, console=console)
    if outcome.summary:
        console.print(f"\n{heading(outcome.summary[0], options)}", soft_wrap=True)
        console.print(results_table(outcome.summary))
        for record in outcome.summary:
            if record["failed"]:
                console.print(f"{record['row']}: {record['failed']:g} requests failed, see records/ in the results")
        once = ONCE if options.repeats == 1 and not options.is_simulated else ""
        console.print(f"\n{MEANINGS}.{once}\n\n{kind.bound_text(outcome.summary)}\n")
    return outcome.print_outcome(console)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="scripts/ablation.py")))
