"""Figures drawn from summary records, readable without the paper that they reproduce."""

from evaluation.figures.bars import Group, Half, throughput_figure
from evaluation.figures.lines import Level, LinePanel, Series, line_figure
from evaluation.figures.style import COLOURS, FigureText, save_figure, system_colour

__all__ = [
    "COLOURS",
    "FigureText",
    "Group",
    "Half",
    "Level",
    "LinePanel",
    "Series",
    "line_figure",
    "save_figure",
    "system_colour",
    "throughput_figure",
]
