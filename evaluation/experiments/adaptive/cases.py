"""The cases that compare `adaptive` with the papers' schedulers, and what all experiments about them share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apex.perf.model import Curve
from apex.simulator.paper_settings import PaperSetting, load_setting
from apex.strategy import StrategyConfig
from evaluation.experiments.adaptive.bound import bound_tokens_per_s
from evaluation.experiments.paper_settings import simulated_task
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_point import SimulatedTask
from evaluation.traces.catalogue import Trace, UniformTrace, load_trace
from evaluation.traces.workloads import Lengths, WorkloadSpec, make_lengths
from swiftllm.systems import find_system

SUBJECT = "adaptive"
OWN_KERNELS = "own"
"""A row's ``kernel`` where each system computes with the CPU kernel of its paper."""
IDEAS = {
    "prompt-chunks": StrategyConfig(disable_prompt_chunks=True),
    "free-running": StrategyConfig(disable_asynchronous_overlap=True),
    "lockstep": StrategyConfig(disable_asymmetric_pipelining=True),
}
"""The ideas of `adaptive`, each with the settings that switch it off."""


@dataclass(frozen=True)
class Selection:
    """What a run covers; None leaves it to the experiment file.

    Attributes:
        cases, systems: names.
        quick: at most ``quick_num_requests`` requests each.
        kernel: CPU attention kernel of every system; by default the one of its paper.
        hand_over_us: what submitting a ticket costs the lane, in microseconds.
        without: one of ``IDEAS``, which `adaptive` does without.

    Raises:
        ValueError: ``hand_over_us`` is negative.
    """

    cases: Sequence[str] | None = None
    systems: Sequence[str] | None = None
    quick: bool = False
    kernel: str | None = None
    hand_over_us: float = 0.0
    without: str | None = None
    seed: int | None = None
    trace_dir: Path | None = None

    def __post_init__(self) -> None:
        if self.hand_over_us < 0:
            raise ValueError(f"hand_over_us={self.hand_over_us} must not be negative")


@dataclass(frozen=True)
class Case:
    """A machine and a workload. Either ``workload`` names a trace, or ``input_len`` and ``output_len`` are means."""

    case: str
    setting: str
    num_requests: int
    workload: str | None = None
    input_len: int | None = None
    output_len: float | None = None
    cpu_bandwidth_gb_s: float | None = None

    def trace(self, trace_dir: Path | None = None) -> Trace:
        return load_trace(self.workload, trace_dir) if self.workload else UniformTrace(self.input_len, self.output_len)

    def lengths(self, seed: int, trace_dir: Path | None = None, request_rate: float | None = None) -> Lengths:
        """The requests, all at once or as Poisson arrivals at a rate; the lengths are the same."""
        trace = self.trace(trace_dir)
        arrivals = "at-once" if request_rate is None else "poisson"
        spec = WorkloadSpec(
            trace.name,
            self.num_requests,
            output_len=self.output_len,
            arrivals=arrivals,
            request_rate=request_rate,
            seed=seed,
        )
        return make_lengths(spec, trace)

    def paper_setting(self, kernel: str | None) -> PaperSetting:
        """The setting with this case's CPU; ``kernel`` replaces the CPU kernels of all systems."""
        setting = load_setting(self.setting)
        kernels = {system: kernel or own for system, own in setting.cpu_kernels.items()}
        return replace(setting, cpu_kernels=kernels, cpu_bandwidth_gb_s=self.cpu_bandwidth_gb_s)

    def title(self, trace: Trace) -> str:
        """Machine and workload in words, for figures."""
        gpu, _, model_and_host = load_setting(self.setting).title.partition(" + ")
        _, bracket, host = model_and_host.partition(" (")
        cpu = f", CPU {self.cpu_bandwidth_gb_s:g} GB/s" if self.cpu_bandwidth_gb_s else ""
        if self.workload is None:
            return f"{gpu}{bracket}{host}{cpu}: {self.input_len} in, {self.output_len:g} out"
        return f"{gpu}{bracket}{host}{cpu}: {trace.title}" + (f", {self.output_len:g} out" if self.output_len else "")


def make_case_points(settings: Mapping[str, Any], selection: Selection) -> list[Point]:
    """The points of an experiment file: each case with each system, all requests at once.

    Raises:
        ValueError: a name is unknown; the message says what is valid.
    """
    points = []
    for case in chosen_cases(settings, selection):
        lengths, setting = (
            case.lengths(seed_of(settings, selection), selection.trace_dir),
            case.paper_setting(selection.kernel),
        )
        bound = bound_tokens_per_s(case_task(case, setting, SUBJECT, lengths, selection))
        for system in chosen_systems(settings, selection):
            task = case_task(case, setting, system, lengths, selection, {"bound_tokens_per_s": bound})
            points.append(case_point((case.case,), task))
    return points


# -- what the other experiments share ---------------------------------------------------------------------------------


def chosen_cases(settings: Mapping[str, Any], selection: Selection, default: Sequence[str] | None = None) -> list[Case]:
    """The cases of the selection, else those of ``default``, else all.

    Raises:
        ValueError: a name is unknown; the message lists the known ones.
    """
    known = {raw["case"]: Case(**raw) for raw in settings["cases"]}
    if unknown := [name for name in selection.cases or () if name not in known]:
        raise ValueError(f"no case {', '.join(unknown)} in the experiment file; there are {', '.join(known)}")
    cases = [known[name] for name in selection.cases or default or known]
    return [shortened(case, settings) for case in cases] if selection.quick else cases


def shortened(case: Case, settings: Mapping[str, Any]) -> Case:
    return replace(case, num_requests=min(case.num_requests, settings["quick_num_requests"]))


def chosen_systems(settings: Mapping[str, Any], selection: Selection) -> Sequence[str]:
    """The systems of the selection, else those of ``settings``.

    Raises:
        ValueError: a name is unknown.
    """
    systems = selection.systems or settings["systems"]
    for system in systems:
        find_system(system)
    return systems


def seed_of(settings: Mapping[str, Any], selection: Selection) -> int:
    return settings["seed"] if selection.seed is None else selection.seed


def case_task(
    case: Case,
    setting: PaperSetting,
    system: str,
    lengths: Lengths,
    selection: Selection,
    values: Mapping[str, Any] | None = None,
) -> SimulatedTask:
    """The task of a system in a case; ``values`` are further fields of its row."""
    idea = selection.without if system == SUBJECT else None
    row = {
        "case": case.case,
        "case_title": case.title(case.trace(selection.trace_dir)),
        "kernel": selection.kernel or OWN_KERNELS,
        "without": idea,
        "hand_over_us": selection.hand_over_us,
        **(values or {}),
    }
    task = charge_hand_over(simulated_task(setting, system, lengths, row), selection.hand_over_us)
    return replace(task, strategy=IDEAS[idea]) if idea else task


def charge_hand_over(task: SimulatedTask, hand_over_us: float) -> SimulatedTask:
    """The task on a machine whose lane spends ``hand_over_us`` microseconds on submitting each ticket."""
    if not hand_over_us:
        return task
    table = replace(task.hardware.table, hand_over=Curve((1, 2), (hand_over_us * 1e-6,) * 2))
    return replace(task, hardware=replace(task.hardware, table=table))


def case_point(names: Sequence[str], task: SimulatedTask) -> Point:
    """The point of a task; ``names`` and the system's name make up its key and label."""
    names = (*names, task.system)
    key = "-".join(names)
    cost = float(task.lengths.total_output_tokens)
    return Point(key, key, ", ".join(names), task, concurrent=True, cost=cost)
