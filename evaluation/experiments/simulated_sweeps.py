"""Simulated sweeps: the panels of a paper's figure as points over systems, lengths, rates and assumptions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from apex.simulator.paper_settings import PaperSetting, load_setting
from evaluation.experiments.paper_settings import simulated_task
from evaluation.experiments.runner import Point
from evaluation.experiments.sensitivity import Assumption, Variation
from evaluation.experiments.simulated_point import SimulatedTask
from evaluation.results.provenance import fingerprint
from evaluation.traces.catalogue import Trace, UniformTrace, load_trace, synthetic_name
from evaluation.traces.workloads import Lengths, WorkloadSpec, make_lengths, select_by_workload
from swiftllm.systems import find_system


@dataclass(frozen=True)
class Panel:
    """One panel: a setting, a workload, and the swept variables. Empty tuples sweep nothing.

    ``input_len`` (tokens) makes a synthetic workload of that average prompt length in place of the trace ``workload``;
    then ``output_lens`` must be given. ``request_rates`` (requests/s) are Poisson arrivals in place of all requests at
    once. ``sensitivity_at`` are the output lengths or request rates at which other assumptions are varied.
    """

    panel: str
    setting: PaperSetting
    num_requests: int
    workload: str | None = None
    input_len: int | None = None
    output_lens: tuple[float, ...] = ()
    request_rates: tuple[float, ...] = ()
    sensitivity_at: tuple[float, ...] = ()

    @property
    def workload_name(self) -> str:
        return self.workload or synthetic_name(self.input_len)

    def trace(self, output_len: float | None, trace_dir: Path | None) -> Trace:
        if self.workload is not None:
            return load_trace(self.workload, trace_dir)
        return UniformTrace(self.input_len, output_len)


@dataclass(frozen=True)
class Sweep:
    """The simulated part of a figure. Ratios are to ``baseline``."""

    systems: tuple[str, ...]
    baseline: str
    panels: tuple[Panel, ...]
    seed: int = 0
    repeats: int = 1
    """How many times every point runs, each with the next seed: nothing else in a simulation is random."""
    trace_dir: Path | None = None
    scale: float = 1.0
    """Factor for input and output lengths."""


def make_sweep(
    settings: Mapping[str, Any],
    *,
    gpu: str | None = None,
    systems: Sequence[str] | None = None,
    workloads: Sequence[str] | None = None,
    num_requests: int | None = None,
    seed: int = 0,
    repeats: int | None = None,
    trace_dir: Path | None = None,
) -> Sweep:
    """A sweep from the ``simulated`` section of a figure's experiment file, overridden by options.

    Raises:
        ValueError: an option is not valid here; the message says what is.
    """
    panels = []
    for raw in settings["panels"]:
        lists = {name: tuple(raw.get(name, ())) for name in ("output_lens", "request_rates", "sensitivity_at")}
        panels.append(Panel(**{**raw, "setting": load_setting(raw["setting"]), **lists}))
    panels = select_by_workload(panels, workloads)
    gpus = sorted({panel.setting.gpus for panel in panels})
    if gpu is not None:
        if gpu not in gpus:
            of_these = " of these workloads" if workloads else ""
            raise ValueError(f"the figure has no panel{of_these} on {gpu!r}; it has {', '.join(gpus)}")
        panels = [panel for panel in panels if panel.setting.gpus == gpu]
    if num_requests is not None:
        panels = [replace(panel, num_requests=num_requests) for panel in panels]
    chosen = tuple(systems or settings["systems"])
    for system in chosen:
        find_system(system)
    baseline = settings["baseline"]
    if baseline not in chosen:
        raise ValueError(f"ratios are to {baseline}: add it to --systems")
    return Sweep(chosen, baseline, tuple(panels), seed, repeats or 1, trace_dir)


MakePoint = Callable[[Sweep, Panel, Lengths, str], Point]
"""Makes a point from the sweep, one of its panels, the workload and the system's name."""


def make_sweep_points(sweep: Sweep, make_point: MakePoint) -> list[Point]:
    """All points of the figure, in the order panel, swept value, system."""
    points = []
    for panel in sweep.panels:
        for output_len in panel.output_lens or (None,):
            for rate in panel.request_rates or (None,):
                for lengths in _lengths(sweep, panel, output_len, rate):
                    points += [make_point(sweep, panel, lengths, system) for system in sweep.systems]
    return points


def make_simulated_points(sweep: Sweep) -> list[Point]:
    """All points of the figure, predicted on the papers' machines."""
    return make_sweep_points(sweep, _point)


def make_sensitivity_points(sweep: Sweep, variation: Variation) -> list[Point]:
    """The points of ``sensitivity_at`` of every panel, once for each value of an assumption.

    Systems that do not depend on the assumption run once: GPU-only systems compute no attention on the CPU.

    Raises:
        ValueError: a value is not possible in a setting; the message says which are.
    """
    assumption = variation.assumption
    points = []
    for panel in sweep.panels:
        for output_len, rate in _places(panel):
            for lengths, system in itertools.product(_lengths(sweep, panel, output_len, rate), sweep.systems):
                for value in variation.values if assumption.concerns(panel.setting, system) else (None,):
                    points.append(_point(sweep, panel, lengths, system, assumption, value))
    return points


def _places(panel: Panel) -> list[tuple[float | None, float | None]]:
    """(output length, request rate) of the points at which assumptions are varied."""
    if panel.request_rates:
        return [(output_len, rate) for output_len in panel.output_lens or (None,) for rate in panel.sensitivity_at]
    return [(output_len, None) for output_len in panel.sensitivity_at or (None,)]


def _lengths(sweep: Sweep, panel: Panel, output_len: float | None, rate: float | None) -> list[Lengths]:
    """The workload of a panel's point, once for each repeat."""
    trace = panel.trace(output_len, sweep.trace_dir)
    arrivals = "at-once" if rate is None else "poisson"
    first = WorkloadSpec(
        trace.name, panel.num_requests, sweep.scale, output_len, arrivals, request_rate=rate, seed=sweep.seed
    )
    seeds = range(sweep.seed, sweep.seed + sweep.repeats)
    return [make_lengths(replace(first, seed=seed), trace) for seed in seeds]


def _point(
    sweep: Sweep,
    panel: Panel,
    lengths: Lengths,
    system: str,
    assumption: Assumption | None = None,
    value: float | None = None,
) -> Point:
    """A point of a panel; ``value`` replaces what its setting assumes."""
    setting = panel.setting
    if value is not None:
        setting = assumption.replaced(setting, value)
    values = {
        "panel": panel.panel, "baseline": sweep.baseline, "sensitivity": assumption.name if assumption else None
    }  # fmt: skip
    task = simulated_task(setting, system, lengths, values)
    parts, words = [f"sim-{panel.panel}", setting.name], [setting.title]
    varied = None if value is None else (f"{assumption.tag}{value:g}", f"{value:g} {assumption.unit}")
    key, group, label = point_names(parts, words, lengths, system, sweep.repeats, varied)
    return Point(key, group, label, task, concurrent=True, cost=float(lengths.total_output_tokens))


def point_names(
    parts: Sequence[str],
    words: Sequence[str],
    lengths: Lengths,
    system: str,
    repeats: int,
    varied: tuple[str, str] | None = None,
) -> tuple[str, str, str]:
    """Key, group and label of a point.

    ``parts`` begin the key and ``words`` the label. ``varied`` is a varied assumption, for both.
    """
    spec = lengths.spec
    parts, words = [*parts, spec.name], [*words, lengths.title]
    for tag, at, unit in (("out", spec.output_len, "output tokens"), ("rate", spec.request_rate, "requests/s")):
        if at is not None:
            parts.append(f"{tag}{at:g}")
            words.append(f"{at:g} {unit}")
    if varied is not None:
        parts.append(varied[0])
        words.append(varied[1])
    group = "-".join([*parts, system])
    label = ", ".join([*words, system])
    if repeats == 1:
        return group, group, label
    return f"{group}-seed{spec.seed}", group, f"{label}, seed {spec.seed}"


def describe_simulated_points(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Simulated points for the run's identity: everything that decides their numbers."""
    return [_described(point, point.task) for point in points]


def _described(point: Point, task: SimulatedTask) -> dict[str, Any]:
    remote = task.hardware.remote_hosts
    return {
        "key": point.key,
        "system": task.system,
        "setting": task.values.get("setting"),
        "profile": {**task.hardware.table.identity, "times": fingerprint(asdict(task.hardware.table))},
        "believed": fingerprint(asdict(task.believed)) if task.believed else None,
        "pools": [task.num_gpu_blocks, task.num_cpu_blocks, task.block_size],
        "limits": asdict(task.limits),
        "strategy": asdict(task.strategy),
        **({"remote_hosts": asdict(remote)} if remote is not None else {}),
        **({"duration_s": task.duration_s} if task.duration_s is not None else {}),
        **({"one_class": True} if task.one_class else {}),
        "workload": asdict(task.lengths.spec),
        "trace": {**asdict(task.lengths.origin), "lengths": task.lengths.digest()},
    }
