"""Predicts real runs and shows them: `evaluation/validate.py --run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from evaluation.groundtruth.judge import Judged, judge, ladder, link_of, recorded_errors, worse_than_recorded
from evaluation.groundtruth.report import draw_run, print_comparison, print_terms
from evaluation.plots.style import save_figure
from evaluation.results.folder import ResultFolder


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
