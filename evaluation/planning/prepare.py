"""Prepares the measured half of a figure in a paper's setting: panels, settings, profiles, plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from evaluation.grid import Grid, setting_of
from evaluation.measure.child import ChildEnded
from evaluation.measure.live_systems import LiveSystems
from evaluation.planning.local_setting import LocalSetting, local_setting
from evaluation.planning.panels import on_hosts_here, panels_for_rehearsal, panels_here
from evaluation.planning.plan import VLLM, Planner, ProfiledSetting
from evaluation.results.progress import print_line
from evaluation.studies.papers import FigureOptions, with_output_lens
from swiftllm.machine import Card, InsufficientMemory, available_host_bytes, first_card, host_memory_bytes, usable_cores

if TYPE_CHECKING:
    from evaluation.studies.figures import PaperFigure

STALL_TIMEOUT_S = 600.0
"""At least this many seconds without progress are allowed: first steps may compile kernels for minutes."""


def measures_settings(options: FigureOptions, card: Card | None) -> bool:
    """Whether a paper's setting is measured rather than a small model with scaled lengths."""
    if options.setting is not None or options.rehearse:
        return options.setting != "small"
    return card is not None and options.device != "cpu"


def prepare(
    grid: Grid,
    options: FigureOptions,
    live: LiveSystems,
    console: Console,
    figure: PaperFigure,
    with_server: bool = True,
) -> Planner:
    """Choose the panels and settings that apply here, and measure the profiles that are not cached.

    Without ``with_server`` no vLLM server is started, even if vLLM is installed.

    Raises:
        NotApplicable: the figure has no panel for this machine.
        ValueError: a setting does not fit this machine.
    """
    card = None if options.device == "cpu" else first_card()
    if card is None and options.device == "cuda":
        raise ValueError("--device cuda: nvidia-smi shows no GPU here")
    here = panels_to_measure(grid, options, card, figure)
    if options.scale:
        here = here.with_(scale=options.scale)
    here = with_output_lens(here, options.output_lens)
    places = here.places()
    papers = {setting.name: setting for setting in map(setting_of, places)}
    host_bytes = available_host_bytes()
    local = {name: local_setting(setting, card, host_bytes, options) for name, setting in papers.items()}
    systems = {place["system"] for place in places}
    vllm = vllm_here(systems, local, console) if with_server else None
    stall_timeout_s = max(STALL_TIMEOUT_S, options.stall_timeout_s)
    jobs = options.jobs or usable_cores()
    return Planner(here, profile_settings(local, live), vllm, stall_timeout_s, figure.row, jobs)


def panels_to_measure(grid: Grid, options: FigureOptions, card: Card | None, figure: PaperFigure) -> Grid:
    """The panels of the figure's grid that apply to this machine.

    Raises:
        NotApplicable: there is none.
    """
    if options.rehearse:
        return panels_for_rehearsal(grid)
    return panels_here(on_hosts_here(grid, host_memory_bytes()), options.setting, card, figure.paper)


def vllm_here(systems: Collection[str], local: Mapping[str, LocalSetting], console: Console) -> Path | None:
    """The ``vllm`` command of this machine, if the systems have it; says what stands in for it where it is missing."""
    if VLLM not in systems:
        return None
    from evaluation.measure.vllm import how_to_install, vllm_program  # the HTTP client is needed only here

    device = next(iter(local.values())).engine.device
    program = vllm_program(device)
    if program is None:
        text = f"no vLLM here ({how_to_install(device)} installs it): `vllm` is our engine with vLLM's scheduling rules"
        print_line(console, text, "yellow")
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
