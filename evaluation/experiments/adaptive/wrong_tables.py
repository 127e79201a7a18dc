"""The cases with a profile table that is wrong: CPU attention takes longer or shorter than schedulers believe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from apex.perf.online.correction import scaled_table
from evaluation.experiments.adaptive.bound import bound_tokens_per_s
from evaluation.experiments.adaptive.cases import (
    SUBJECT,
    Selection,
    case_point,
    case_task,
    chosen_cases,
    chosen_systems,
    seed_of,
)
from evaluation.experiments.adaptive.ratios import with_ratios
from evaluation.experiments.runner import Derive, Point
from evaluation.experiments.simulated_point import SimulatedTask
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import bases, frame_of, over, with_columns
from swiftllm.systems import find_system

ERROR = ("actual_over_believed", "online_correction")
"""Fields of a row that name its error; None for a system that has no table."""


def make_wrong_table_points(settings: Mapping[str, Any], selection: Selection) -> list[Point]:
    """Each case with each error of the section ``wrong_tables`` and each system, GPU-only systems once.

    Raises:
        ValueError: a name is unknown.
    """
    section, points = settings["wrong_tables"], []
    for case in chosen_cases(settings, selection):
        lengths = case.lengths(seed_of(settings, selection), selection.trace_dir)
        setting = case.paper_setting(selection.kernel)
        bound = bound_tokens_per_s(case_task(case, setting, SUBJECT, lengths, selection))
        for system in chosen_systems(settings, selection):
            errors = section["errors"] if find_system(system).needs_predictions else ({},)
            for error in errors:
                values = {field: error.get(field) for field in ERROR} | {"bound_tokens_per_s": bound}
                task = case_task(case, setting, system, lengths, selection, values)
                points.append(case_point((case.case, *error_words(error)), with_error(task, **error)))
    return points


def with_error(task: SimulatedTask, actual_over_believed: float = 1.0, online_correction: bool = True) -> SimulatedTask:
    """The task with a scheduler that believes another time of CPU attention; the machine stays as it is."""
    strategy = replace(task.strategy, disable_online_correction=not online_correction)
    if actual_over_believed == 1.0:
        return replace(task, strategy=strategy)
    believed = scaled_table(task.hardware.table, lane=1.0, cpu_attention=1.0 / actual_over_believed)
    return replace(task, strategy=strategy, believed=believed)


def error_words(error: Mapping[str, Any]) -> tuple[str, ...]:
    """An error for keys and labels; empty for a system that has no table."""
    if not error:
        return ()
    return f"x{error['actual_over_believed']:g}", "corrected" if error["online_correction"] else "uncorrected"


def with_error_ratios(published: Sequence[str]) -> Derive:
    """As ``with_ratios`` under the same error; also ``ratio_to_right_table``: throughput over that of the same system
    with a right table."""
    to_best = with_ratios(published, any_of=ERROR)

    def complete(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
        frame = frame_of(rows)
        right = bases(frame, frame["actual_over_believed"].fillna(1.0) == 1.0, ("case", "system"))
        return with_columns(to_best(rows), ratio_to_right_table=over(frame["output_tokens_per_s"], right))

    return complete
