"""The points of the figures: a machine, a stream of latency-sensitive requests, a best-effort stream, a system."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apex.perf.online.correction import scaled_table
from apex.simulator.paper_settings import PaperSetting, load_setting
from apex.strategy import StrategyConfig
from evaluation.experiments.omniserve.streams import bursty, latency_sensitive, with_best_effort
from evaluation.experiments.paper_settings import simulated_task
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_point import SimulatedTask
from evaluation.traces.workloads import Lengths
from swiftllm.systems import find_system

WITHOUT_CLASSES = ("neo", "apex", "adaptive", "swiftllm", "vllm", "fastdecode")
"""Systems that know one class of requests."""


@dataclass(frozen=True)
class Selection:
    """What a run covers; None leaves it to the experiment file.

    Attributes:
        quick: the short duration of the experiment file.
        duration_s: virtual seconds of each point.
    """

    systems: Sequence[str] | None = None
    quick: bool = False
    duration_s: float | None = None
    seed: int | None = None
    trace_dir: Path | None = None


@dataclass(frozen=True)
class Place:
    """A point of a panel, for all its systems.

    Attributes:
        best_effort: name of the best-effort stream; None for latency-sensitive requests alone.
        rate_interval_s: seconds after which the rate of arrivals changes; None for a steady rate.
        slower: times on the machine over those in the scheduler's profile table.
    """

    setting: str
    best_effort: str | None
    request_rate: float | None
    rate_interval_s: float | None
    tpot_slo_s: float
    cpu_hosts: int
    admission_control: bool
    num_gpu_blocks: int | None
    slower: float

    @property
    def parts(self) -> tuple[str, ...]:
        """What distinguishes the place, for keys."""
        arrivals = f"rate{self.request_rate:g}" if self.rate_interval_s is None else f"every{self.rate_interval_s:g}s"
        return (
            self.setting,
            self.best_effort or "alone",
            arrivals,
            f"tpot{self.tpot_slo_s:g}",
            f"hosts{self.cpu_hosts}",
            *([f"blocks{self.num_gpu_blocks}"] if self.num_gpu_blocks else []),
            *([f"slower{self.slower:g}"] if self.slower != 1.0 else []),
            *([] if self.admission_control else ["admit-all"]),
        )


def make_omniserve_points(settings: Mapping[str, Any], section: str, selection: Selection) -> list[Point]:
    """The points of a section of the experiment file.

    Raises:
        ValueError: a name is unknown.
    """
    here = settings["figures"][section]
    points = []
    for panel in here["panels"]:
        for place in places(settings, panel):
            lengths = lengths_at(place, settings, here, panel, selection)
            for system in systems_of(here, panel, selection):
                task = task_at(place, settings, here, panel, system, lengths, selection)
                key = "-".join([panel["panel"], *place.parts, system])
                label = ", ".join([*place.parts, system])
                cost = task.duration_s * (2.0 if find_system(system).needs_predictions else 1.0)
                points.append(Point(key, key, label, task, concurrent=True, cost=cost))
    return points


def systems_of(section: Mapping[str, Any], panel: Mapping[str, Any], selection: Selection) -> Sequence[str]:
    systems = panel.get("systems") or section["systems"]
    for system in selection.systems or systems:
        find_system(system)
    return [system for system in systems if selection.systems is None or system in selection.systems]


def places(settings: Mapping[str, Any], panel: Mapping[str, Any]) -> Iterator[Place]:
    """All combinations of what the panel sweeps."""
    targets = settings["targets"][panel["setting"]]
    for best_effort, rate, interval_s, tpot_s, hosts, admits in itertools.product(
        panel["best_effort"],
        panel.get("request_rates", [None]),
        panel.get("rate_intervals_s", [None]),
        panel.get("tpot_slos_s", [targets["tpot_slo_s"]]),
        panel.get("cpu_hosts", [1]),
        panel.get("admission_control", [True]),
    ):
        yield Place(
            panel["setting"],
            None if best_effort == "none" else best_effort,
            rate,
            interval_s,
            tpot_s,
            hosts,
            admits,
            panel.get("num_gpu_blocks"),
            panel.get("slower", 1.0),
        )


def duration_of(section: Mapping[str, Any], selection: Selection) -> float:
    return selection.duration_s or section["quick_duration_s" if selection.quick else "duration_s"]


def lengths_at(
    place: Place,
    settings: Mapping[str, Any],
    section: Mapping[str, Any],
    panel: Mapping[str, Any],
    selection: Selection,
) -> Lengths:
    duration_s, folder = duration_of(section, selection), selection.trace_dir
    seed = settings["seed"] if selection.seed is None else selection.seed
    workload = settings["latency_sensitive"]
    if place.rate_interval_s is None:
        urgent = latency_sensitive(workload, place.request_rate, duration_s, seed, folder)
    else:
        urgent = bursty(workload, *panel["between_rates"], place.rate_interval_s, duration_s, seed, folder)
    stream = None if place.best_effort is None else settings["best_effort"][place.best_effort]
    return with_best_effort(urgent, stream, duration_s, seed, folder)


def paper_setting(place: Place) -> PaperSetting:
    setting = replace(load_setting(place.setting), cpu_hosts=place.cpu_hosts)
    if place.num_gpu_blocks is None:
        return setting
    return setting.with_figures("all that the card holds", num_gpu_blocks=place.num_gpu_blocks)


def task_at(
    place: Place,
    settings: Mapping[str, Any],
    section: Mapping[str, Any],
    panel: Mapping[str, Any],
    system: str,
    lengths: Lengths,
    selection: Selection,
) -> SimulatedTask:
    ttft_s = settings["targets"][place.setting]["ttft_slo_s"]
    row = {
        "panel": panel["panel"],
        "baseline": section["baseline"],
        "best_effort": place.best_effort,
        "request_rate": place.request_rate,
        "rate_interval_s": place.rate_interval_s,
        "ttft_slo_s": ttft_s,
        "tpot_slo_s": place.tpot_slo_s,
        "admission_control": place.admission_control,
        "slower": place.slower,
        "cpu_hosts": place.cpu_hosts,
        "one_class": system in WITHOUT_CLASSES,
    }
    task = simulated_task(paper_setting(place), system, lengths, row)
    strategy = StrategyConfig(
        ttft_slo_s=ttft_s, tpot_slo_s=place.tpot_slo_s, disable_admission_control=not place.admission_control
    )
    duration_s = duration_of(section, selection)
    task = replace(task, strategy=strategy, duration_s=duration_s, one_class=system in WITHOUT_CLASSES)
    return slowed(task, place.slower)


def slowed(task: SimulatedTask, slower: float) -> SimulatedTask:
    """The task on a machine that takes ``slower`` times as long as the scheduler's profile table says."""
    if slower == 1.0:
        return task
    table = task.hardware.table
    hardware = replace(task.hardware, table=scaled_table(table, lane=slower, cpu_attention=slower))
    return replace(task, hardware=hardware, believed=table)
