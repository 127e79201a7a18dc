"""Runs a point of any backend. The processes of a sweep call this."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from apex.replay.records import summary_of
from evaluation.experiments.http_point import HttpTask, run_http_point
from evaluation.experiments.runner import Point, PointResult
from evaluation.experiments.simulated_point import SimulatedTask, run_simulated_point
from evaluation.experiments.torch_point import TorchTask, run_torch_point


def run_point(point: Point, label: str, console: Console) -> PointResult:
    """Run a point according to the type of its task.

    Simulations keep summaries of requests, without the times of single tokens. Full records of thousands of requests
    are large, and a simulation can be repeated bit for bit.

    Raises:
        TypeError: no backend runs such a task.
    """
    if isinstance(point.task, SimulatedTask):
        result = run_simulated_point(point, label, console)
        return replace(result, records=[summary_of(record) for record in result.records])
    if isinstance(point.task, TorchTask):
        return run_torch_point(point, label, console)
    if isinstance(point.task, HttpTask):
        return run_http_point(point, label, console)
    raise TypeError(f"nothing runs a {type(point.task).__name__}")
