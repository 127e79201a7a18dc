"""Which panels of a paper's figure apply to this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from apex.simulator.hardware import load_host
from apex.simulator.paper_settings import PaperSetting, gpu_kind, load_setting, nearest_setting
from evaluation.experiments.simulated_sweeps import Panel, Sweep
from swiftllm.machine import Card

GB = 1e9
SAME_MEMORY = 0.15
"""Relative difference of host memory within which a host is taken for one of the papers'."""

REHEARSED_REQUESTS = 32


class NotApplicable(ValueError):
    """The figure has no panel for this machine; the message says which it has."""


def panels_here(sweep: Sweep, wanted: str | None, card: Card | None, paper: Literal["apex", "neo"]) -> Sweep:
    """The sweep with the panels to measure on this machine.

    With ``wanted``, those of the same GPU as that setting, in that setting. Else those of the card's kind, and on a
    card that no paper used those of the nearest setting.

    Raises:
        NotApplicable: there is no such panel.
    """
    panels = [panel for panel in sweep.panels if not _has_several_cards(panel.setting)]
    if wanted is not None:
        setting = load_setting(wanted)
        chosen = [replace(panel, setting=setting) for panel in panels if panel.setting.gpu == setting.gpu]
    else:
        gpu = gpu_kind(card.name)
        if gpu not in {panel.setting.gpu for panel in sweep.panels}:
            nearest = load_setting(nearest_setting(gpu, card.total_bytes, paper))
            gpu = nearest.gpu
        chosen = [panel for panel in panels if panel.setting.gpu == gpu]
    if not chosen:
        there = ", ".join(sorted({panel.setting.name for panel in panels})) or "machines with several GPUs alone"
        of_what = wanted or f"{card.name}, {card.total_bytes / GB:.0f} GB"
        raise NotApplicable(f"the figure has no panel for {of_what}; it has {there}")
    return replace(sweep, panels=tuple(chosen))


def panels_for_rehearsal(sweep: Sweep, faster: float) -> Sweep:
    """All panels of single cards: the ends of their sweeps, few requests, one host, request rates times ``faster``."""
    panels: dict[tuple[str, str], Panel] = {}
    for panel in sweep.panels:
        if _has_several_cards(panel.setting):
            continue
        ends = {name: _ends(getattr(panel, name)) for name in ("output_lens", "request_rates")}
        ends["request_rates"] = tuple(rate * faster for rate in ends["request_rates"])
        few = min(panel.num_requests, REHEARSED_REQUESTS)
        panels.setdefault((panel.panel, panel.workload_name), replace(panel, num_requests=few, **ends))
    if not panels:
        raise NotApplicable("the figure has panels for machines with several GPUs alone")
    return replace(sweep, panels=tuple(panels.values()))


def _has_several_cards(setting: PaperSetting) -> bool:
    """Whether a setting needs more GPUs than the one that an engine uses."""
    return setting.tensor_parallel > 1


def _ends(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(dict.fromkeys((*values[:1], *values[-1:])))


def hosts_here(hosts: Sequence[str], host_bytes: int) -> list[str]:
    """Those of the papers' hosts that have as much memory as this machine."""
    here = [(host, load_host(host)["memory_gb"] * GB) for host in hosts]
    return [host for host, there in here if abs(host_bytes / there - 1.0) < SAME_MEMORY]
