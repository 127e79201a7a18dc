"""The points of ``evaluation/quality.py``: one for each format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from evaluation.experiments.quality.answers import AnswerTask, answer_both
from evaluation.experiments.quality.scores import ScoreTask, score
from evaluation.experiments.quality.text import read_text
from evaluation.results.other_work import OtherWork
from evaluation.results.paths import model_folder
from evaluation.results.progress import TokenProgress
from evaluation.results.provenance import model_identity
from evaluation.run import Point, PointResult, identity


def points_of(
    task: type[ScoreTask | AnswerTask], field: str, section: Mapping[str, Any], model: Path | None, text: Path | None
) -> list[Point]:
    """A point for each format that an experiment file's section lists under ``field``.

    Raises:
        ValueError: there is no model, or the list is empty; the message says what to do.
    """
    if not section[field]:
        raise ValueError(f"the experiment file lists no {field}: name one or more")
    folder = model_folder(model)
    tasks = [task(folder, **{**section, field: name}, text=text) for name in section[field]]
    return [Point(name, name, name, made) for name, made in zip(section[field], tasks, strict=True)]


def describe(points: Sequence[Point]) -> dict[str, Any]:
    """What decides the numbers of the points."""
    task = points[0].task
    return {"measured": identity(points), "model": model_identity(task.model), "text": read_text(task.text).digest}


def run_scores(point: Point, label: str, console: Console) -> PointResult:
    """Predict the text in a format and exactly."""
    task: ScoreTask = point.task
    with TokenProgress(label, task.sequences * (task.length - 1), console) as progress:
        return _result(point, lambda: score(task, lambda steps: progress.update(task.sequences * steps)))


def run_answers(point: Point, label: str, console: Console) -> PointResult:
    """Answer with the tier in a format and exact."""
    return _result(point, lambda: answer_both(point.task))


def _result(point: Point, measure: Callable[[], Mapping[str, Any]]) -> PointResult:
    others = OtherWork()
    values = measure()
    known = {"system": point.key, "backend": "torch-cpu", "model": point.task.model.name}
    return PointResult({**known, **values, "others_busy_cores": others.busy_cores()}, ())
