"""Draws what a client sees of systems over the request rate: latencies, and the requests that meet their targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# The hues of Okabe and Ito, distinct for every common kind of colour vision, and distinct in lightness for grey prints.
COLOURS = {
    "vllm": "#E3A5C9",
    "swiftllm": "#848484",
    "fastdecode": "#009A70",
    "neo": "#E69F00",
    "apex": "#0B5CAD",
    "adaptive": "#7A0019",
    "llumnix": "#A6D8F5",
    "sarathi": "#1A1A1A",
    "omniserve": "#D55E00",
    "omniserve-stepping": "#5A3A8C",
}
OTHER_COLOURS = ("#56B4E9", "#C9B800", "#7A4FA3", "#9FB827")
INK, FAINT, GRID = "#222222", "#666666", "#E2E2E2"
LATENCIES = (
    ("time to first token (s)", "ttft_s", "ttft_target_s"),
    ("time per output token (s)", "tpot_s", "tpot_target_s"),
)
MEDIAN: dict[str, Any] = {"linestyle": (0, (4, 2)), "linewidth": 1.2}
TAIL: dict[str, Any] = {"linewidth": 2.0}


def draw_service(records: Sequence[Mapping[str, Any]], setting: str, how: str) -> Figure:
    """A line for each system over the request rate, in three panels.

    Args:
        records: with the fields of :func:`apex.replay.metrics.compute_metrics`, system and request_rate; those without
            a rate are left out.
        setting: what runs where.
        how: SIMULATED or MEASURED, which the title and every axis say.
    """
    figure = Figure(figsize=(12.0, 4.6))
    panels = figure.subplots(1, 3)
    figure.subplots_adjust(left=0.055, right=0.985, bottom=0.2, top=0.78, wspace=0.24)
    by_system: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if record["request_rate"] is not None:
            by_system.setdefault(record["system"], []).append(record)
    rates = sorted({record["request_rate"] for of_system in by_system.values() for record in of_system})
    others = iter(OTHER_COLOURS * len(by_system))
    colours = {system: COLOURS.get(system) or next(others) for system in by_system}
    for ax, (title, name, target) in zip(panels, LATENCIES, strict=False):
        for system, of_system in by_system.items():
            line(ax, of_system, f"{name}_p99", colours[system], **TAIL)
            line(ax, of_system, f"{name}_p50", colours[system], **MEDIAN)
        ax.axhline(records[0][target], color=FAINT, linewidth=1.0, linestyle=":", zorder=1)
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        finish(ax, f"{how}: {title}", rates)
    goodput = panels[2]
    for system, of_system in by_system.items():
        line(goodput, of_system, "goodput_requests_per_s", colours[system], **TAIL)
    goodput.plot(rates, rates, color=FAINT, linewidth=1.0, linestyle=":", zorder=1)
    goodput.set_ylim(bottom=0)
    finish(goodput, f"{how}: goodput (requests/s)", rates)
    figure.text(0.012, 0.97, how, fontsize=13, fontweight="bold", va="top", color=INK)
    figure.text(0.012, 0.915, setting, fontsize=8.5, va="top", color=FAINT)
    handles = [Line2D([], [], color=colour, label=system, **TAIL) for system, colour in colours.items()]
    handles += [
        Line2D([], [], color=FAINT, label="p99, and goodput", **TAIL),
        Line2D([], [], color=FAINT, label="p50", **MEDIAN),
    ]
    targets = " and ".join(f"{records[0][target]:g} s" for _, _, target in LATENCIES)
    label = f"targets: {targets}; goodput if every request met them"
    handles.append(Line2D([], [], color=FAINT, linewidth=1.0, linestyle=":", label=label))
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, fontsize=8.5)
    return figure


def line(ax: Axes, records: Sequence[Mapping[str, Any]], field: str, colour: str, **style: Any) -> None:
    """A field over the request rate, without the runs that have none."""
    points = sorted((record["request_rate"], record[field]) for record in records if record[field] is not None)
    ax.plot(*zip(*points, strict=True) if points else ([], []), color=colour, marker="o", markersize=3.5, **style)


def finish(ax: Axes, title: str, rates: Sequence[float]) -> None:
    ax.set_title(title, fontsize=9.5, loc="left", color=INK)
    ax.set_xticks(rates, [f"{rate:g}" for rate in rates])
    ax.set_xlabel("requests a second", fontsize=9, color=INK)
    ax.grid(color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    ax.tick_params(labelsize=8.5, colors=FAINT)
    ax.spines[["top", "right"]].set_visible(False)
