"""The plan of a measurement: its points with their predicted throughput and time, before anything is measured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evaluation.experiments.profile_check import ProfiledMachine
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_sweeps import Sweep
from evaluation.measure.launched_point import LaunchedTask
from evaluation.planning.local_setting import LocalSetting
from evaluation.planning.predictions import Prediction, predict
from evaluation.planning.request_counts import counts_within
from evaluation.results.progress import format_s
from swiftllm.machine import GIB

MakePoints = Callable[[Sweep], list[Point]]
SERVER_START_S = 120.0
"""Assumed seconds until a vLLM server is ready: it compiles the model and captures graphs. No GPU was at hand."""


@dataclass(frozen=True)
class ProfiledSetting:
    """A setting whose profile has been measured. ``start_s`` are the seconds that its engine took to start."""

    local: LocalSetting
    machine: ProfiledMachine
    start_s: float


@dataclass(frozen=True)
class Plan:
    """Points whose rows hold their predictions; ``start_s`` are the seconds that each session takes to start."""

    points: tuple[Point, ...]
    predictions: tuple[Prediction, ...]
    start_s: Mapping[Hashable, float]

    @property
    def total_s(self) -> float:
        return sum(prediction.wall_s or 0.0 for prediction in self.predictions) + sum(self.start_s.values())


class Planner:
    """Plans a sweep. ``settings`` are the sweep's settings by name; ``make`` makes the measured points of a sweep."""

    def __init__(self, sweep: Sweep, settings: Mapping[str, ProfiledSetting], make: MakePoints, jobs: int) -> None:
        self.sweep = sweep
        self.settings = settings
        self.make = make
        self.jobs = jobs

    @property
    def most(self) -> tuple[int, ...]:
        """The full number of requests of each panel."""
        return tuple(panel.num_requests for panel in self.sweep.panels)

    def plan_with(self, counts: Sequence[int]) -> Plan:
        """The plan with these numbers of requests, a number for each panel."""
        panels = [replace(panel, num_requests=n) for panel, n in zip(self.sweep.panels, counts, strict=True)]
        points = self.make(replace(self.sweep, panels=tuple(panels)))
        profiled = [self.settings[point.task.values["setting"]] for point in points]
        predictions = predict(points, [setting.machine for setting in profiled], self.jobs, "predicting the plan")
        start_s: dict[Hashable, float] = {}
        for point, setting in zip(points, profiled, strict=True):
            start_s[point.session] = SERVER_START_S if is_server(point) else setting.start_s
        return Plan(tuple(map(with_prediction, points, predictions)), tuple(predictions), start_s)


def plan_within(planners: Sequence[Planner], limit_s: float) -> list[Plan]:
    """Plans with the same fraction of each panel's requests, the largest whose points take ``limit_s`` seconds in all.

    Raises:
        TooLittleTime: even the fewest requests take longer.
    """
    most = [full for planner in planners for full in planner.most]

    def plans_with(counts: Sequence[int]) -> list[Plan]:
        left = iter(counts)
        return [planner.plan_with([next(left) for _ in planner.most]) for planner in planners]

    counts = counts_within(most, limit_s, lambda counts: sum(plan.total_s for plan in plans_with(counts)))
    return plans_with(counts)


def is_server(point: Point) -> bool:
    return isinstance(point.task, LaunchedTask)


def with_prediction(point: Point, prediction: Prediction) -> Point:
    """The point with its prediction in its row."""
    predicted = {
        "predicted_output_tokens_per_s": prediction.output_tokens_per_s,
        "predicted_wall_s": prediction.wall_s,
    }
    return replace(point, task=replace(point.task, values={**point.task.values, **predicted}))


def print_settings(settings: Sequence[LocalSetting], console: Console) -> None:
    """What each setting needs of this machine's memory, and how it differs from the paper's."""
    for local in settings:
        fit, engine = local.fit, local.engine
        pools = [
            f"{blocks:,} KV blocks {blocks * fit.bytes_per_block / GIB:.2f} GiB"
            for blocks in (engine.num_gpu_blocks, engine.num_cpu_blocks)
        ]
        rest = f"activations {fit.activation_bytes / GIB:.2f}, reserved {fit.reserved_bytes / GIB:.2f} GiB"
        weights = f"weights {fit.weight_bytes / GIB:.2f} GiB"
        lines = [f"setting {local.name}: {local.title}, {engine.dtype}"]
        if local.card is None:
            lines.append(
                f"  host memory: {fit.host_bytes / GIB:.1f} GiB available; {weights}, {rest}; GPU tier {pools[0]}, "
                f"CPU tier {pools[1]}"
            )
        else:
            lines += [
                f"  {local.card.name}: {fit.device_bytes / GIB:.1f} GiB; {weights}, {rest}, {pools[0]} of at most "
                f"{fit.max_gpu_blocks:,}",
                f"  host memory: {fit.host_bytes / GIB:.1f} GiB available; {pools[1]}",
            ]
        lines += [f"  differs from the paper: {difference}" for difference in local.differences]
        for line in lines:
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def print_plan(figure: str, plan: Plan, console: Console) -> None:
    """The points of a figure with their SIMULATED throughput and time, and the total."""
    table = Table(title=f"Plan of {figure}: points to measure", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for title in ("panel", "setting", "workload", "out", "req/s", "system", "requests", "SIMULATED tok/s", "time"):
        left = title in ("panel", "setting", "workload", "system")
        table.add_column(title, justify="left" if left else "right", no_wrap=True)
    for point, prediction in zip(plan.points, plan.predictions, strict=True):
        lengths, values = point.task.lengths, point.task.values
        rate, seconds = prediction.output_tokens_per_s, prediction.wall_s
        table.add_row(
            values["panel"],
            values["setting"],
            lengths.spec.name,
            f"{lengths.mean_output_tokens:.0f}",
            "" if lengths.spec.request_rate is None else f"{lengths.spec.request_rate:g}",
            f"{point.task.system} (server)" if is_server(point) else point.task.system,
            str(lengths.spec.num_requests),
            "?" if rate is None else f"{rate:.1f}",
            "?" if seconds is None else format_s(seconds),
        )
    console.print(table)
    starts = f"{len(plan.start_s)} starts of engines and servers in {format_s(sum(plan.start_s.values()))}"
    console.print(
        f"{len(plan.points)} points, predicted from this machine's own profile: {format_s(plan.total_s)} with {starts}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
    for problem in sorted({prediction.problem for prediction in plan.predictions if prediction.problem}):
        console.print(f"not predicted: {problem}", style="yellow", highlight=False, markup=False, soft_wrap=True)
