"""Prepares the measured half of a figure in a paper's setting: panels, settings, profiles, plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rich.console import Console

from evaluation.experiments.options import FigureOptions
from evaluation.experiments.runner import Point
from evaluation.experiments.simulated_sweeps import Sweep, make_sweep_points
from evaluation.measure.child import ChildEnded
from evaluation.measure.live_systems import LiveSystems
from evaluation.planning.local_setting import Choices, LocalSetting, local_setting
from evaluation.planning.panels import panels_for_rehearsal, panels_here
from evaluation.planning.plan import Plan, Planner, ProfiledSetting
from evaluation.planning.setting_points import (
    VLLM,
    Measuring,
    describe_setting_points,
    setting_point_maker,
)
from swiftllm.machine import Card, InsufficientMemory, available_host_bytes, first_card, usable_cores

REHEARSAL_SCALE = 0.1
"""Factor for the lengths of a rehearsal."""
REHEARSAL_FASTER = 100.0
"""Factor for the request rates of a rehearsal."""

STALL_TIMEOUT_S = 600.0
"""At least this many seconds without progress are allowed: first steps may compile kernels for minutes."""

Finish = Callable[[list[Point]], list[Point]]
"""Adds fields to the rows of a figure's points."""


@dataclass(frozen=True)
class MeasuredHalf:
    """Points to measure, and their description for the run's identity."""

    points: Sequence[Point]
    configuration: Mapping[str, Any]


@dataclass(frozen=True)
class SettingMeasurement:
    """The measured half of a figure, whose numbers of requests are not chosen yet."""

    planner: Planner
    measuring: Measuring

    def described(self, plan: Plan) -> MeasuredHalf:
        return MeasuredHalf(plan.points, describe_setting_points(plan.points, self.measuring))


def measures_settings(options: FigureOptions, card: Card | None) -> bool:
    """Whether a paper's setting is measured rather than a small model with scaled lengths."""
    if options.setting is not None or options.rehearse:
        return options.setting != "small"
    return card is not None and options.device != "cpu"


def prepare(
    sweep: Sweep,
    options: FigureOptions,
    live: LiveSystems,
    console: Console,
    paper: Literal["apex", "neo"] = "apex",
    finish: Finish = list,
    with_server: bool = True,
) -> SettingMeasurement:
    """Choose the panels and settings that apply here, and measure the profiles that are not cached.

    Without ``with_server`` no vLLM server is started, even if vLLM is installed.

    Raises:
        NotApplicable: the figure has no panel for this machine.
        ValueError: a setting does not fit this machine.
    """
    card = None if options.device == "cpu" else first_card()
    if card is None and options.device == "cuda":
        raise ValueError("--device cuda: nvidia-smi shows no GPU here")
    if options.rehearse:
        here = panels_for_rehearsal(replace(sweep, scale=REHEARSAL_SCALE), REHEARSAL_FASTER)
    else:
        here = panels_here(sweep, options.setting, card, paper)
    here = replace(here, scale=options.scale or here.scale)
    if options.output_lens is not None:
        panels = [replace(p, output_lens=options.output_lens) if p.output_lens else p for p in here.panels]
        here = replace(here, panels=tuple(panels))
    papers = {panel.setting.name: panel.setting for panel in here.panels}
    host_bytes = available_host_bytes()
    local = {name: local_setting(setting, card, host_bytes, choices_of(options)) for name, setting in papers.items()}
    vllm = vllm_here(here.systems, list(local.values()), console) if with_server else None
    measuring = Measuring(local, vllm, max(STALL_TIMEOUT_S, options.stall_timeout_s))
    profiled = profile_settings(local, live)
    make_point = setting_point_maker(measuring)
    jobs = options.jobs or usable_cores()
    planner = Planner(here, profiled, lambda chosen: finish(make_sweep_points(chosen, make_point)), jobs)
    return SettingMeasurement(planner, measuring)


def choices_of(options: FigureOptions) -> Choices:
    return Choices(
        model=None if options.model is None else str(options.model),
        load_format=options.load_format,
        pools="card" if options.all_gpu_blocks else "papers",
        num_gpu_blocks=options.num_gpu_blocks,
        num_layers=options.num_layers,
        on_cpu=options.device == "cpu",
        dtype=options.dtype,
        max_num_batched_tokens=options.max_num_batched_tokens,
        cpu_threads=options.cpu_threads,
        cpu_kernel=options.cpu_kernel,
        tiny=options.rehearse,
    )


def vllm_here(systems: Sequence[str], local: Sequence[LocalSetting], console: Console) -> Any:
    """The ``vllm`` command of this machine, if the systems have it; says what stands in for it where it is missing."""
    if VLLM not in systems:
        return None
    from evaluation.measure.vllm import how_to_install, vllm_program  # the HTTP client is needed only here

    device = local[0].engine.device
    program = vllm_program(device)
    if program is None:
        text = f"no vLLM here ({how_to_install(device)} installs it): `vllm` is our engine with vLLM's scheduling rules"
        console.print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)
    return program


def profile_settings(local: dict[str, LocalSetting], live: LiveSystems) -> dict[str, ProfiledSetting]:
    """The settings with this machine's profiles.

    Raises:
        ValueError: the engine of a setting does not start here.
    """
    profiled: dict[str, ProfiledSetting] = {}
    for name, setting in local.items():
        try:
            machine, start_s = live.profile(setting.engine)
        except (InsufficientMemory, ChildEnded) as error:
            raise ValueError(f"the engine of setting {name} does not start here: {error}") from error
        profiled[name] = ProfiledSetting(setting, machine, start_s)
    return profiled
