"""Draws a :class:`evaluation.study.Figure`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from matplotlib.figure import Figure as Drawing

from evaluation.plots.charts import Bar, BarPanel, Half, LinePanel, Series, line_figure, throughput_figure
from evaluation.plots.notes import figure_text
from evaluation.plots.style import system_colour
from evaluation.results.folder import FlatRecord
from evaluation.results.rows import distinct, grouped
from evaluation.run import Run

if TYPE_CHECKING:
    from evaluation.study import Axis, Figure


def draw(figure: Figure, run: Run) -> Drawing:
    """The panels of a figure, those of each vertical axis in a row.

    Raises:
        ValueError: there is nothing to draw.
    """
    text = figure_text(figure.title, run.summary, run.machine, first_note=figure.notes)
    drawn = [row for row in run.summary if figure.is_drawn(row)]
    panels = [(rows, y) for y in figure.y for rows in grouped(drawn, *figure.panel).values()]
    if figure.kind == "bars":
        return throughput_figure(
            [Half([bar_panel(figure, *panel) for panel in panels], distinct(drawn, "system"), text)]
        )
    lines = [line_panel(figure, *panel) for panel in panels]
    return line_figure(lines, text, columns=len(panels) // len(figure.y))


def title_of(figure: Figure, row: FlatRecord) -> str:
    return figure.title_of(row) if figure.title_of else ", ".join(str(row[name]) for name in figure.panel)


def line_panel(figure: Figure, rows: Sequence[FlatRecord], y: Axis) -> LinePanel:
    lines = []
    for here in grouped(rows, *figure.series).values():
        first, points = here[0], [(row[figure.x], row[y.field]) for row in here if row[y.field] is not None]
        label = figure.label_of(first) if figure.label_of else ", ".join(str(first[name]) for name in figure.series)
        lines.append(Series(label, system_colour(first["system"]), points, **figure.look_of(first)))
    return LinePanel(title_of(figure, rows[0]), figure.x_label, y.label, lines, log_x=figure.log_x, log_y=y.log)


def bar_panel(figure: Figure, rows: Sequence[FlatRecord], y: Axis) -> BarPanel:
    """Each group has a place for each series, which is empty where there is no result."""

    def bar(row: FlatRecord) -> Bar | None:
        value = row.get(y.field)
        return None if value is None else Bar(value, system_colour(row["system"]), **figure.look_of(row))

    series, groups = grouped(rows, *figure.series), []
    for x, here in grouped(rows, figure.x).items():
        there = {key: of_one[0] for key, of_one in grouped(here, *figure.series).items()}
        groups.append((str(x), [bar(there.get(key, {})) for key in series]))
    return BarPanel(title_of(figure, rows[0]), figure.x_label, groups, y.label)
