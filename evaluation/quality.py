"""What a format of the CPU tier changes in a model's predictions and answers, measured on this machine.

python evaluation/quality.py [--help]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from rich.console import Console

from evaluation.options import File, Folder, RunOptions, experiment_settings
from evaluation.plots.lines import LinePanel, Series, line_figure
from evaluation.plots.style import FigureText, show_figure, system_colour
from evaluation.results.folder import FlatRecord
from evaluation.results.tables import rows_table
from evaluation.run import Point, Run
from evaluation.studies.quality import AnswerTask, ScoreTask, describe, points_of, run_answers, run_scores
from evaluation.study import Study, command

NAME, ANSWERS = "quality", "quality-answers"


@dataclass(frozen=True)
class Options(RunOptions):
    """Perplexity, KL divergence and greedy answers with the CPU tier in eight bits beside the exact one, all decodes on
    the CPU.

    Formats and sizes come from configs/experiments/quality.yaml. Results, figure and provenance go to
    results/quality/<run>/ and results/quality-answers/<run>/. Running the same command again continues an interrupted
    run. With the default model on two cores it takes about 20 minutes.
    """

    model: Folder = None
    """Hugging Face folder of the model; by default the one of `make setup`."""
    text: File = None
    """Text to predict, UTF-8; by default the English one of Python's own help."""


SCORES = (
    ("format", "system", "s"), ("tokens", "tokens", ",d"), ("perplexity", "perplexity", ".3f"),
    ("exact", "perplexity_exact", ".3f"), ("/ exact", "perplexity_over_exact", ".4f"),
    ("KL divergence", "kl_divergence", ".5f"), ("equal top token", "equal_top", ".2%"),
    ("worst head's error", "worst_head_error", ".1%"),
)  # fmt: skip
COMPARED = (
    ("format", "system", "s"), ("outputs", "outputs", "d"), ("equal", "equal_outputs", ".0%"),
    ("first difference", "first_difference", ".0f"), ("needles", "needles", "d"),
    ("found", "needles_found", "d"), ("exact", "needles_found_exact", "d"),
)  # fmt: skip
COLOURS = dict(
    zip(("exact-rotated", "int8", "int8-rotated"), map(system_colour, ("swiftllm", "neo", "apex")), strict=True)
)
NOTES = (
    "Every token is a decode that attends to a tier in the format; the exact tier is predicted beside it. Rotated: Q, "
    "K and V times a Hadamard matrix. exact-rotated shows what rounding to the model's dtype alone changes."
)


def by_number(row: FlatRecord, prefix: str) -> list[tuple[float, float]]:
    """The values of the fields that begin so, by the number at their end."""
    return sorted((int(name.removeprefix(prefix)), value) for name, value in row.items() if name.startswith(prefix))


def show_scores(run: Run, console: Console) -> None:
    rows = [
        {**row, "worst_head_error": max(error for _, error in by_number(row, "worst_head_error_layer_"))}
        for row in run.summary
    ]
    first = rows[0]
    console.print(f"MEASURED: {first['model']} in {first['dtype']} on {first['text']}, all decodes on the CPU tier")
    console.print(rows_table(rows, SCORES))

    def panel(title: str, x_label: str, y_label: str, prefix: str, times: int, **options: bool) -> LinePanel:
        lines = [
            Series(row["system"], COLOURS[row["system"]], [(x, times * y) for x, y in by_number(row, prefix)])
            for row in rows
        ]
        return LinePanel(title, x_label, y_label, lines, **options)

    panels = [
        panel(
            "What is predicted",
            "context (tokens, at most)",
            "KL from exact (0.001 nats)",
            "kl_up_to_",
            1000,
            log_x=True,
        ),
        panel("What attention computes", "layer", "worst head's error (%)", "worst_head_error_layer_", 100),
    ]
    subtitle = f"{first['model']} in {first['dtype']}, {first['tokens']:,} tokens of {first['text']}, measured"
    text = FigureText("A CPU tier in eight bits beside an exact one", subtitle, NOTES)
    show_figure(line_figure(panels, text), run.folder, console)


def show_answers(run: Run, console: Console) -> None:
    console.print("MEASURED: greedy answers of an engine whose CPU tier has the format, and of one with the exact tier")
    console.print("first difference: mean position in the output; needles: a key at several depths of a long context")
    console.print(rows_table(run.summary, COMPARED))


def experiments(options: Options) -> list[Study]:
    def points(name: str, task: type[ScoreTask | AnswerTask], field: str, options: Options) -> list[Point]:
        section = experiment_settings(NAME, options.config)[name]
        return points_of(task, field, section, options.model, options.text)

    scores, answers = (
        partial(points, "scores", ScoreTask, "format"),
        partial(points, "answers", AnswerTask, "cpu_kv_dtype"),
    )
    return [
        Study(NAME, show_scores, scores, run_point=run_scores, describe=describe),
        Study(ANSWERS, show_answers, answers, run_point=run_answers, describe=describe),
    ]


main = command(Options, experiments)

if __name__ == "__main__":
    sys.exit(main())
