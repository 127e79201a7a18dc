"""What a command does with its points: it shows what is finished, and says what is not."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from evaluation.options import RunOptions
from evaluation.run import Point, PointResult, Run, one_line_errors
from evaluation.study import Study, command, show_again


@dataclass(frozen=True)
class Chosen(RunOptions):
    part: tuple[str, ...] = ()


def run_task(point: Point, label: str, console: Console) -> PointResult:
    if point.task is None:
        raise RuntimeError("no task")
    return PointResult({"system": point.task, "backend": "simulated", "output_tokens_per_s": 2.0, "failed": 0}, [])


def run(tmp_path: Path, tasks: Sequence[str | None]) -> tuple[int, list[Run], str]:
    """The exit status, the runs that were shown, and what was printed."""
    shown: list[Run] = []
    further = {"more": 1}
    experiment = Study(
        "x",
        lambda run, _: shown.append(run),
        derive=lambda rows: [row | further for row in rows],
        run_point=run_task,
        describe=lambda points: {"tasks": len(points)},
    )
    console = Console(file=io.StringIO(), width=200)
    status = experiment.run(points_of(tasks), tmp_path, console=console).print_outcome(console)
    return status, shown, console.file.getvalue()


def points_of(tasks: Sequence[str | None]) -> list[Point]:
    return [Point(f"p{number}", f"p{number}", f"point {number}", task) for number, task in enumerate(tasks)]


def test_finished_points_are_shown_with_their_further_fields_and_failures_are_said(tmp_path: Path) -> None:
    status, (shown,), printed = run(tmp_path, ["a", None])
    assert status == 1 and [(row["system"], row["more"]) for row in shown.summary] == [("a", 1)]
    assert list(shown.failed) == ["point 1"] and shown.experiment == "x"
    assert "failed: point 1, see errors/" in printed
    assert json.loads((shown.folder / "provenance.json").read_text())["configuration"] == {
        "experiment": "x",
        "tasks": 2,
    }


def test_nothing_is_shown_of_a_run_without_a_finished_point(tmp_path: Path) -> None:
    status, shown, printed = run(tmp_path, [None])
    assert status == 1 and not shown and "failed: point 0" in printed


def test_a_folder_is_shown_again_by_its_own_experiment(tmp_path: Path) -> None:
    _, (shown,), _ = run(tmp_path, ["a"])
    again: list[tuple[str, Run]] = []
    experiments = [Study(name, lambda run, console, name=name: again.append((name, run))) for name in ("w", "x")]
    assert show_again(shown.folder, experiments) == 0
    ((name, run_again),) = again
    assert name == "x" and run_again.summary == shown.summary
    with pytest.raises(ValueError, match="holds results of x, not of w"):
        show_again(shown.folder, experiments[:1])
    (shown.folder / "provenance.json").unlink()
    with pytest.raises(ValueError, match="unknown which of w, x it holds"):
        show_again(shown.folder, experiments)
    assert show_again(shown.folder, experiments[:1]) == 0  # a folder without provenance is taken at its word


def test_a_command_runs_what_its_options_choose_in_their_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    def experiment(name: str, tasks: Sequence[str | None]) -> Study:
        return Study(
            name,
            lambda run, console: shown.append(run.experiment),
            lambda options: points_of(tasks),
            run_point=run_task,
            describe=lambda points: {},
        )

    def no_points(options: RunOptions) -> list[Point]:
        raise ValueError("no such thing")

    known = [
        experiment("x", ["a"]),
        experiment("y", ["a", None]),
        experiment("z", ["a"]),
        Study("w", points=no_points),
    ]
    parts = {study.name: study for study in known}
    options = Chosen(jobs=1, results_dir=tmp_path, part=("z", "x", "z"))
    assert command(Chosen, parts)(options) == 0
    assert shown == ["z", "x"]
    options = RunOptions(jobs=1, results_dir=tmp_path)
    assert command(RunOptions, {"x": known[0], "y": known[1]})(options) == 1 and shown[2:] == ["x", "y"]
    again = Chosen(from_folder=tmp_path / "z/latest", part=("x",))
    assert command(Chosen, lambda options: parts)(again) == 0 and shown[4:] == ["z"]
    assert command(RunOptions, parts)(options) == 2 and len(shown) == 5  # seen before anything ran
    assert capsys.readouterr().out.endswith("error: no such thing\n")


def test_an_invalid_option_ends_as_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    @one_line_errors
    def main(options: str) -> int:
        raise ValueError(f"no {options} here")

    assert main("gpu") == 2 and capsys.readouterr().out == "error: no gpu here\n"
