"""Which panels of a paper's figure apply to this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from apex.simulator.hardware.files import load_host
from apex.simulator.paper_settings import gpu_kind, load_setting, nearest_setting
from evaluation.grid import Grid, Panel, values_of, workload_of
from swiftllm.machine import Card

GB = 1e9
SAME_MEMORY = 0.15
"""Relative difference of host memory within which a host is taken for one of the papers'."""

REHEARSED_REQUESTS = 32
REHEARSAL_SCALE = 0.1
"""Factor for the lengths of a rehearsal."""
REHEARSAL_FASTER = 100.0
"""Factor for the request rates of a rehearsal."""


class NotApplicable(ValueError):
    """The figure has no panel for this machine; the message says which it has."""


def panels_here(grid: Grid, wanted: str | None, card: Card | None, paper: Literal["apex", "neo"]) -> Grid:
    """The grid with the panels to measure on this machine.

    With ``wanted``, those of the same GPU as that setting, in that setting. Else those of the card's kind, and on a
    card that no paper used those of the nearest setting.

    Raises:
        NotApplicable: there is no such panel.
    """
    panels = measurable(grid)
    if wanted is not None:
        gpu = load_setting(wanted).gpu
    else:
        gpu = gpu_kind(card.name)
        if gpu not in {load_setting(panel["setting"]).gpu for panel in grid.panels}:
            gpu = load_setting(nearest_setting(gpu, card.total_bytes, paper)).gpu
    chosen = [panel for panel in panels if load_setting(panel["setting"]).gpu == gpu]
    if not chosen:
        there = ", ".join(sorted({panel["setting"] for panel in panels})) or "machines with several GPUs alone"
        of_what = wanted or f"{card.name}, {card.total_bytes / GB:.0f} GB"
        raise NotApplicable(f"the figure has no panel for {of_what}; it has {there}")
    here = Grid(tuple(chosen))
    return here if wanted is None else here.with_(setting=wanted)


def on_hosts_here(grid: Grid, host_bytes: int) -> Grid:
    """The grid with those of the papers' hosts that have as much memory as this machine.

    Raises:
        NotApplicable: no panel is left.
    """
    panels = []
    for panel in grid.panels:
        hosts = [host for host in values_of(panel, "host") if has_memory(host, host_bytes)]
        if hosts or "host" not in panel:
            panels.append({**panel, "host": hosts} if hosts else panel)
    if not panels:
        raise NotApplicable(f"the figure has no panel for a host of {host_bytes / GB:.0f} GB")
    return Grid(tuple(panels))


def has_memory(host: str, num_bytes: int) -> bool:
    return abs(num_bytes / (load_host(host)["memory_gb"] * GB) - 1.0) < SAME_MEMORY


def panels_for_rehearsal(grid: Grid) -> Grid:
    """All panels of single cards: the ends of their sweeps, few short requests at high rates, one host."""
    panels: dict[tuple[str, str], Panel] = {}
    for panel in measurable(grid):
        few: dict[str, Any] = {
            "num_requests": min(panel["num_requests"], REHEARSED_REQUESTS),
            "scale": REHEARSAL_SCALE,
            "request_rate": [rate * REHEARSAL_FASTER for rate in ends(values_of(panel, "request_rate"))],
            "output_len": ends(values_of(panel, "output_len")),
            "host": values_of(panel, "host")[:1],
        }
        few = {name: value for name, value in few.items() if value}
        panels.setdefault((panel["panel"], workload_of(panel)), {**panel, **few})
    if not panels:
        raise NotApplicable("the figure has panels for machines with several GPUs alone")
    return Grid(tuple(panels.values()))


def measurable(grid: Grid) -> list[Panel]:
    """The panels whose settings need no more GPUs than the one that an engine uses, each machine once.

    Other readings of a machine assume another speed of CPU attention, which a measurement has by itself.
    """
    settings = {panel["setting"]: load_setting(panel["setting"]) for panel in grid.panels}
    kept = {name for name, setting in settings.items() if setting.tensor_parallel == 1 and setting.like is None}
    return [panel for panel in grid.panels if panel["setting"] in kept]


def ends(values: Sequence[float]) -> list[float]:
    return list(dict.fromkeys((*values[:1], *values[-1:])))
