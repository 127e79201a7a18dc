"""Latency under load: small panels, two for each case."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from evaluation.experiments.adaptive.ratios import LATENCY_RATIOS
from evaluation.experiments.axes import SUBJECT
from evaluation.figures.adaptive.tables import rows_by_case
from evaluation.figures.style import (
    FAINT,
    FigureText,
    figure_legend,
    figure_style,
    set_words,
    system_colour,
    tidy_axes,
    words_inches,
)
from evaluation.figures.words import span_text
from evaluation.results.folder import FlatRecord

Records = Sequence[FlatRecord]

METRICS = (("per_token_latency_s_mean", "mean latency per token (s)"), ("ttft_s_p99", "p99 time to first token (s)"))
LEAST_DECADES = 1.0
"""A vertical axis spans at least this, so that small differences look small."""
CASES_IN_A_ROW = 2
WIDTH, AXES_HEIGHT = 11.5, 1.35
LEFT, RIGHT, BETWEEN, BELOW, ABOVE = 0.55, 0.15, 0.6, 0.5, 0.45
"""Inches around a panel."""


def draw_latency(summary: Records) -> plt.Figure:
    """For each case the mean latency per token and the p99 time to first token, over the load.

    Raises:
        ValueError: there is nothing to draw.
    """
    cases = rows_by_case(summary)
    systems = tuple(dict.fromkeys(row["system"] for row in summary))
    text = latency_text(summary)
    columns = CASES_IN_A_ROW * len(METRICS)
    rows = math.ceil(len(cases) / CASES_IN_A_ROW)
    height = words_inches(text, WIDTH) + rows * (AXES_HEIGHT + BELOW + ABOVE)
    panel_width = (WIDTH - LEFT - RIGHT - (columns - 1) * BETWEEN) / columns
    with figure_style():
        figure = plt.figure(figsize=(WIDTH, height))
        bottom, top = set_words(figure, text, WIDTH, height)
        figure_legend(figure, systems, WIDTH, height)
        axes = figure.subplots(rows, columns, squeeze=False)
        figure.subplots_adjust(
            left=LEFT / WIDTH,
            right=1 - RIGHT / WIDTH,
            bottom=bottom + BELOW / height,
            top=top - ABOVE / height,
            wspace=BETWEEN / panel_width,
            hspace=(BELOW + ABOVE) / AXES_HEIGHT,
        )
        panels = iter(axes.flat)
        for here in cases.values():
            for place, (metric, words) in enumerate(METRICS):
                ax = next(panels)
                draw_lines(ax, here, systems, metric)
                ax.set_xlabel("load", fontsize=8, color=FAINT, labelpad=1)
                ax.set_title(words, loc="left", fontsize=8, color=FAINT, pad=3)
                if place == 0:
                    title = {"fontsize": 9.5, "fontweight": "bold", "xytext": (0, 16), "textcoords": "offset points"}
                    ax.annotate(here[0]["case_title"], (0, 1), xycoords="axes fraction", **title)
        for ax in panels:
            ax.set_visible(False)
    return figure


def draw_lines(ax: Axes, rows: Records, systems: Sequence[str], metric: str) -> None:
    """A line for each system, those drawn first wider; at the bottom the ratios of `adaptive`."""
    over = f"{LATENCY_RATIOS[metric]}_{rows[0]['loaded_as']}"
    mark = {"fontsize": 7.5, "color": system_colour(SUBJECT), "ha": "center"}
    for place, system in enumerate(systems):
        here = sorted((row for row in rows if row["system"] == system and row[metric]), key=lambda row: row["load"])
        wider = len(systems) - 1 - place
        loads, values = [row["load"] for row in here], [row[metric] for row in here]
        style = {"marker": "o", "markersize": 3.5 + 1.5 * wider, "linewidth": 1.5 + 1.3 * wider}
        ax.plot(loads, values, color=system_colour(system), **style)
        for row in here if system == SUBJECT else ():
            if row[over]:
                ax.text(row["load"], 0.03, f"{row[over]:.2f}\u00d7", transform=ax.get_xaxis_transform(), **mark)
    values = [row[metric] for row in rows if row[metric]]
    low, high = math.log10(min(values)), math.log10(max(values))
    pad = max(0.0, LEAST_DECADES - (high - low)) / 2
    ax.set_ylim(10 ** (low - pad - 0.3), 10 ** (high + pad + 0.1))
    loads = sorted({row["load"] for row in rows})
    ax.set_xticks(loads, [f"{load:.0%}" for load in loads])
    ax.set_xlim(loads[0] - 0.05, loads[-1] + 0.05)
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    tidy_axes(ax)


def latency_text(summary: Records) -> FigureText:
    first = summary[0]
    counts = span_text(sorted(set(row["num_requests"] for row in summary)))
    return FigureText(
        "Latency under load \u2014 SIMULATED",
        f"Poisson arrivals; a load of 100% is what {first['loaded_as']} serves when all requests are there at once. "
        "Lower is better; vertical axes are logarithmic\n"
        f"Numbers at the bottom of a panel: the latency of {SUBJECT} over that of {first['loaded_as']}",
        f"Predicted times, nothing measured. {counts} requests a point, seed {first['seed']}. "
        "Latency per token: a request's time from arrival to its last token, over its output tokens.",
    )
