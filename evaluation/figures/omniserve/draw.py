"""Figures of two classes of service: lines over what was swept, or bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from evaluation.figures.bars import times
from evaluation.figures.lines import LinePanel, Series, line_figure
from evaluation.figures.omniserve.words import (
    ATTAINMENT,
    AXES,
    BEST_EFFORT,
    METRICS,
    SHARES,
    Records,
    figure_text,
    line_label,
    panel_words,
)
from evaluation.figures.style import (
    FAINT,
    INK,
    figure_style,
    panel_legend,
    panel_title,
    set_words,
    system_colour,
    tidy_axes,
    words_inches,
)
from evaluation.figures.words import unique_values

UNCONTROLLED_COLOUR = "#848484"
BARS_WIDTH, BARS_HEIGHT, SPACE = 12.0, 2.5, 0.75
"""Inches: of the bars' figure, of one row of it, and below each row."""


def draw_omniserve(section: Mapping[str, Any], records: Records) -> plt.Figure:
    """The figure of a section of the experiment file: lines over its ``x``, or bars without one.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not records:
        raise ValueError("nothing to draw: no point is finished")
    return draw_bars(section, records) if section.get("x") is None else draw_lines(section, records)


# -- lines ------------------------------------------------------------------------------------------------------------


def draw_lines(section: Mapping[str, Any], records: Records) -> plt.Figure:
    """A row for each metric and a column for each panel of the section; one row if there is one panel."""
    drawn = [row for row in records if row["best_effort"]]
    letters = unique_values(drawn, "panel")
    panels = [
        line_panel([row for row in drawn if row["panel"] == letter], section["x"], metric)
        for metric in section["metrics"]
        for letter in letters
    ]
    return line_figure(panels, figure_text(section["shows"], records), len(letters) if len(letters) > 1 else 3)


def line_panel(records: Records, x: str, metric: str) -> LinePanel:
    with_admission = len(unique_values(records, "admission_control")) > 1
    lines: dict[str, list] = {}
    for row in records:
        lines.setdefault(line_label(row, with_admission=with_admission), []).append(row)
    series = [
        Series(
            label,
            line_colour(rows[0]),
            tuple((row[x], row[metric]) for row in rows if row.get(metric) is not None),
        )
        for label, rows in lines.items()
    ]
    reach = 1.0 if metric in SHARES else 0.0
    return LinePanel(panel_words(records[0]), AXES[x], f"{METRICS[metric]}, SIMULATED", tuple(series), y_to=reach)


def line_colour(row: Mapping[str, Any]) -> str:
    return system_colour(row["system"]) if row["admission_control"] else UNCONTROLLED_COLOUR


# -- bars -------------------------------------------------------------------------------------------------------------


def draw_bars(section: Mapping[str, Any], records: Records) -> plt.Figure:
    """Best-effort throughput above, attainment below; a group for each panel and best-effort stream."""
    groups: dict[tuple[str, ...], list] = {}
    for row in records:
        if row["best_effort"]:
            groups.setdefault((row["panel"], row["best_effort"]), []).append(row)
    systems = tuple(name for name in section["system"] if name in unique_values(records, "system"))
    baseline = section["baseline"]
    text = figure_text(
        section["shows"],
        records,
        f"Above: best-effort throughput, with its ratio to {baseline}. "
        "Below: share of latency-sensitive requests within both targets",
    )
    height = words_inches(text, BARS_WIDTH) + 2 * (BARS_HEIGHT + SPACE)
    with figure_style():
        figure = plt.figure(figsize=(BARS_WIDTH, height))
        bottom, top = set_words(figure, text, BARS_WIDTH, height)
        upper, lower = figure.subplots(2, 1)
        figure.subplots_adjust(
            left=0.75 / BARS_WIDTH,
            right=1 - 0.15 / BARS_WIDTH,
            bottom=bottom + SPACE / height,
            top=top - 0.35 / height,
            hspace=SPACE / BARS_HEIGHT,
        )
        rows = list(groups.values())
        draw_groups(upper, rows, systems, BEST_EFFORT, baseline)
        draw_groups(lower, rows, systems, ATTAINMENT, baseline)
        panel_legend(upper, systems)
        panel_title(upper, "Best-effort tokens/s, SIMULATED")
        panel_title(lower, "Latency-sensitive requests within their targets, SIMULATED")
    return figure


def draw_groups(ax: Axes, groups: Sequence[Records], systems: Sequence[str], metric: str, baseline: str) -> None:
    width = 0.84 / len(systems)
    highest = max((row.get(metric) or 0.0 for group in groups for row in group), default=1.0) or 1.0
    for index, group in enumerate(groups):
        for place, system in enumerate(systems):
            row = next((row for row in group if row["system"] == system), None)
            if row is None or row.get(metric) is None:
                continue
            x = index + (place - (len(systems) - 1) / 2) * width
            ax.bar(x, row[metric], width * 0.92, color=system_colour(system))
            text = bar_text(row, metric, baseline)
            ax.annotate(
                text, (x, row[metric]), xytext=(0, 3), textcoords="offset points", ha="center", fontsize=6.3, color=INK
            )
    ax.set_xticks(range(len(groups)), [group_label(group[0]) for group in groups], linespacing=1.3, color=FAINT)
    ax.set_xlim(-0.6, len(groups) - 0.4)
    ax.set_ylim(0, 1.15 * highest)
    ax.tick_params(axis="x", length=0)
    tidy_axes(ax)


def bar_text(row: Mapping[str, Any], metric: str, baseline: str) -> str:
    if metric == ATTAINMENT:
        return f"{row[metric]:.1%}"
    ratio = row["best_effort_over_baseline"]
    return f"{row[metric]:.0f}" if ratio is None or row["system"] == baseline else times(ratio)


def group_label(row: Mapping[str, Any]) -> str:
    stream = row["best_effort"].removesuffix("-backlog")
    slower = row["slower"] - 1
    error = f"\n{abs(slower):.0%} {'slower' if slower > 0 else 'faster'} than believed" if slower else ""
    return f"{stream}\n{row['num_gpu_blocks']} GPU blocks{error}"
