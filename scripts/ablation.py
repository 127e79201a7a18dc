"""Shows the effect of each strategy: the same requests with strategies forced, disabled, or run synchronously.

python scripts/ablation.py [--backend simulated] [--help]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console
from rich.table import Table

from apex.cli.options import parse_options
from apex.cli.output import stdout_console
from evaluation.plots.ablation import draw_ablation
from evaluation.plots.notes import known_notes, length_notes, neo_notes
from evaluation.plots.style import FigureText, show_figure
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import model_folder
from evaluation.results.provenance import model_identity
from evaluation.results.rows import distinct, grouped, is_simulated
from evaluation.results.tables import Columns, rows_table, write_tables
from evaluation.run import Run, RunPoint, identity
from evaluation.studies.ablation import (
    RATE,
    ROWS,
    TO_BASELINE,
    TO_UNCHANGED,
    Options,
    attention_text,
    machine_of,
    meanings,
    measured_bound,
    measured_points,
    run_measured,
    run_simulated,
    simulated_bound,
    simulated_points,
    with_ratios,
)
from evaluation.study import Study

ONCE = " Measured once: confirm differences with --repeats 3."


def columns_of(summary: Sequence[FlatRecord]) -> Columns:
    """The table's columns. Simulated rows have latencies in place of what concerns a real machine alone, and the GPU's
    own time: a GPU batch that waits for CPU attention counts as busy."""
    predicted = is_simulated(summary[0])
    return (
        ("row", "row", "s"),
        ("SIMULATED\ntok/s" if predicted else "tok/s", RATE, ".1f"),
        ("over\nswiftllm", TO_BASELINE, ".2f"),
        ("over its\nsystem", TO_UNCHANGED, ".2f"),
        *(
            (("s/token", "per_token_latency_s_mean", ".3f"), ("TTFT\np99 (s)", "ttft_s_p99", ".1f"))
            if predicted
            else ()
        ),
        ("GPU\nbusy", "gpu_busy_fraction", ".0%")
        if predicted
        else ("GPU batch\nbusy", "gpu_batch_busy_fraction", ".0%"),
        ("CPU\nbusy", "cpu_busy_fraction", ".0%"),
        *(() if predicted else (("preempted", "preemptions", ".0f"), ("pred/actual", "predicted_over_actual", ".2f"))),
        ("strategy mix", "strategy_mix", "s"),
    )


def results_table(summary: Sequence[FlatRecord]) -> Table:
    """A line for each row of one machine."""
    result = rows_table(summary, columns_of(summary))
    result.columns[0].no_wrap = True
    return result


def heading(here: Sequence[FlatRecord], gpu_requests: int | None = None) -> str:
    """Model, machine and workload of a table."""
    first = here[0]
    outputs = first["output_len"] if first.get("output_len_mean") is None else first["output_len_mean"]
    sizes = f"{first['num_requests']} requests of {first['input_len']:.0f} in / {outputs:.0f} out"
    if is_simulated(first):
        title = ", ".join(filter(None, (first["setting_title"], first.get("reading"))))
        return (
            f"SIMULATED: {title} ({first['dtype']}), {sizes}, {first['num_gpu_blocks']} GPU blocks of 16 tokens, "
            f"{first['cpu_kv_gb']:g} GB on the host"
        )
    fit = "" if gpu_requests is None else f", {gpu_requests} of them fit the GPU tier"
    return f"{first['model']} ({first['dtype']}), {sizes}{fit}"


def figure_text(summary: Sequence[FlatRecord]) -> FigureText:
    simulated_rows = is_simulated(summary[0])
    kind = f"SIMULATED for {' and '.join(distinct(summary, 'gpu'))}" if simulated_rows else "MEASURED on this machine"
    lines = [heading(here) for here in grouped(summary, "case").values()]
    notes = [*length_notes(summary), *neo_notes(summary), *known_notes(summary)] if simulated_rows else []
    if simulated_rows:
        machines = grouped(summary, "case").values()
        notes += [f"{machine_of(here[0])}: {attention_text(here)}" for here in machines]
    title = f"What each part of APEX and NEO contributes \u2014 {kind}"
    return FigureText(title, "\n".join(lines), "\n".join(dict.fromkeys(notes)))


def show(run: Run, console: Console, gpu_requests: int | None = None, once: str = "") -> None:
    """Print a table for each machine; write figure, CSV and LaTeX into the run's folder."""
    bound_text = simulated_bound if is_simulated(run.summary[0]) else measured_bound
    for here in grouped(run.summary, "case").values():
        console.print(f"\n{heading(here, gpu_requests)}", soft_wrap=True)
        console.print(results_table(here))
        for record in here:
            if record["failed"]:
                console.print(f"{record['row']}: {record['failed']:g} requests failed, see records/ in the results")
        console.print(f"\n{bound_text(here)}", soft_wrap=True)
    console.print(f"\n{meanings(distinct(run.summary, 'row'))}.{once}\n", soft_wrap=True)
    show_figure(draw_ablation(run.summary, figure_text(run.summary)), run.folder, console)
    words = [{**record, "words": ROWS[record["row"]].words, "machine": machine_of(record)} for record in run.summary]
    columns = (("machine", "machine", "s"), ("row", "row", "s"), ("what it is", "words", "s"), *columns_of(words)[1:])
    write_tables(words, columns, run.folder, "ablation", f"{figure_text(run.summary).title}.")


def main(options: Options, run_point: RunPoint | None = None, console: Console | None = None) -> int:
    """Run and show the rows. Returns the exit status: 0 when every row is finished."""
    console = console or stdout_console()
    make_points, run_row = (
        (simulated_points, run_simulated) if options.is_simulated else (measured_points, run_measured)
    )
    try:
        options.check()
        points = make_points(options)
    except ValueError as error:
        print(f"ablation: {error}", file=sys.stderr)
        return 2
    model = None if options.is_simulated else model_identity(model_folder(options.model))
    settings = {"model": model, "points": identity(points)}
    once = ONCE if options.repeats == 1 and not options.is_simulated else ""
    fit = None if options.is_simulated else options.gpu_requests
    experiment = Study(
        "ablation",
        lambda run, console: show(run, console, fit, once),
        derive=with_ratios,
        run_point=run_point or run_row,
        describe=lambda points: settings,
    )
    return experiment.run(points, options.results_dir, options.jobs, console=console).print_outcome(console)


if __name__ == "__main__":
    sys.exit(main(parse_options(Options, prog="scripts/ablation.py")))
