"""Prints and draws real runs beside their predictions: what `apex validate --run` shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from apex.cli.output import table
from evaluation.groundtruth.judge import (
    Judged,
    Outcome,
    errors,
    judge,
    ladder,
    link_of,
    recorded_errors,
    worse_than_recorded,
)
from evaluation.groundtruth.runs import RealRun
from evaluation.plots.style import FigureText, save_figure, sheet, tidy_axes
from evaluation.results.folder import ResultFolder

UNITS = {"tokens_per_s": (1.0, "output tokens/s", ".0f"), "ttft": (1.0, "s", ".2f"), "tpot": (1e3, "ms", ".1f")}
LADDER = ("tokens_per_s", "ttft_mean_s", "ttft_p99_s", "tpot_mean_s")
WIDTH, HEIGHT = 7.2, 2.0  # inches, of the figure and of each of its axes
MEASURED, PREDICTED = "#222222", "#C0392B"


def print_comparison(run: RealRun, measured: Outcome, predicted: Outcome, console: Console) -> None:
    real, simulated, off = measured.metrics(), predicted.metrics(), errors(measured, predicted)
    rows = []
    for name in real:
        factor, unit, form = UNITS[name if name in UNITS else name[:4]]
        label = unit if name in UNITS else f"{name[:4].upper()} {name.split('_')[1]}, {unit}"
        values = (format(values[name] * factor, form) for values in (real, simulated))
        rows.append((label, *values, f"{off[name]:+.1%}"))
    for name in ("running", "waiting"):
        means = (f"{getattr(outcome, name).mean():.1f}" for outcome in (measured, predicted))
        rows.append((f"{name} requests, mean", *means, f"{off[f'{name}_requests']:.1f} off"))
    console.print(f"{run.name}: {run.model} in vLLM, measured and SIMULATED", highlight=False)
    console.print(table(("metric", "measured", "SIMULATED", "error"), rows, left=("metric",)))


def print_terms(rows: Sequence[tuple[str, Mapping[str, float]]], console: Console) -> None:
    titles = ("term", "tokens/s", "TTFT mean", "TTFT p99", "TPOT mean", "running", "waiting")
    shown = [
        (
            term,
            *(f"{100 * off[name]:+.1f}" for name in LADDER),
            *(f"{off[name]:.1f}" for name in ("running_requests", "waiting_requests")),
        )
        for term, off in rows
    ]
    console.print("Errors in % (running and waiting: in requests), terms added in order", highlight=False)
    console.print(table(titles, shown, left=("term",)))


def draw_run(run: RealRun, measured: Outcome, predicted: Outcome) -> Figure:
    """Running and waiting requests over time, and the distributions of TTFT and TPOT."""
    times_s = [sample.time_s for sample in run.load]
    text = FigureText(
        f"SIMULATED against a real run: {run.name}",
        f"{run.model}, vLLM; {len(run.requests)} requests",
        "Black: measured. Red: SIMULATED from operator times of the card.",
    )
    figure, axes = sheet(text, 2, 2, width=WIDTH, height=HEIGHT)
    for outcome, colour in ((measured, MEASURED), (predicted, PREDICTED)):
        for axis, name in zip(axes.flat[:2], ("running", "waiting"), strict=True):
            axis.plot(times_s, getattr(outcome, name), color=colour, linewidth=1.0)
            axis.set(xlabel="s", ylabel=f"{name} requests")
        spans_s = (outcome.last_token_s - outcome.first_token_s) / np.maximum(outcome.output_lens - 1, 1)
        share = np.linspace(0, 1, len(spans_s))
        axes.flat[2].plot(np.sort(outcome.first_token_s - outcome.queued_s), share, color=colour, linewidth=1.0)
        axes.flat[3].plot(np.sort(spans_s) * 1e3, share, color=colour, linewidth=1.0)
    axes.flat[2].set(xlabel="time to first token, s", ylabel="share of requests")
    axes.flat[3].set(xlabel="time per output token, ms", ylabel="share of requests")
    for axis in axes.flat:
        tidy_axes(axis)
    return figure


# -- the command -------------------------------------------------------------------------------------------------------


def show_runs(runs: Sequence[str], model: Path | None, results_dir: Path, console: Console, *, with_terms: bool) -> int:
    """Print and draw each run beside its prediction. ``with_terms`` adds the errors term by term.

    Returns:
        The exit status: 1 where an error exceeds the recorded one by more than a point.

    Raises:
        ValueError: a run is unknown, a file of it is missing or malformed, or its model is unknown.
    """
    judged = [judge(run, model) for run in runs]
    folder = ResultFolder("real-runs", {"runs": [result.run.name for result in judged]}, results_dir)
    folder.record_invocation()
    for result in judged:
        print_comparison(result.run, result.measured, result.predicted, console)
        for line in remarks(result):
            console.print(line, highlight=False, soft_wrap=True)
        if with_terms:
            print_terms(list(ladder(result)), console)
        save_figure(draw_run(result.run, result.measured, result.predicted), folder.path, result.run.name)
    rows = [{"run": result.run.name, **result.errors} for result in judged]
    folder.save_summary(rows, "\n".join(f"- {row}" for row in rows))
    console.print(f"written to {folder.path}", highlight=False, soft_wrap=True)
    known = recorded_errors()
    worse = [line for result in judged if result.run.name in known for line in worse_than_recorded(result)]
    for line in worse:
        console.print(f"[red]worse than recorded[/]: {line}", soft_wrap=True)
    return 1 if worse else 0


def remarks(judged: Judged) -> list[str]:
    """What the prediction of a run leaves out, or takes for granted."""
    run, lines = judged.run, ["the prompts of the run are not known: no request finds the prefix of another one"]
    if run.num_gpu_blocks is None:
        lines.append("the run did not record its KV blocks: there are enough for all requests")
    if run.tensor_parallel > 1:
        link = link_of(run)
        if link is None:
            lines.append(
                "the tables have no communication between the GPUs of a layer, and what joins them is not known: it is "
                'left out (meta.json may name a "link")'
            )
        else:
            lines.append(f"communication between the GPUs is by the figures of {link.name} in configs/hardware")
    if run.data_parallel > 1:
        lines.append("the ranks take requests in turn and are equally loaded; their link is assumed")
    return lines
