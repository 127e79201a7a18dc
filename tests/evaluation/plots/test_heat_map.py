"""Ratios as coloured cells: colours on one scale, numbers that can be read on them, and axes that say what is what."""

from __future__ import annotations

import pytest
from matplotlib import colors
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from evaluation.plots.charts import MAP_COLOURS, NO_VALUE, Cell, Plane, heat_map
from evaluation.plots.style import INK, FigureText

TEXT = FigureText("", "", "")
CELLS = {(0, 0): Cell(0.5, "0.50"), (1, 0): Cell(1.0, "1.00", bold=True), (0, 1): Cell(2.0, "2.00", framed=True),
         (1, 1): Cell(None, "-")}  # fmt: skip
PLANE = Plane("title", "subtitle", "length", "rate", ["short", "long"], ["slow", "fast"], CELLS)


def lightness(colour: tuple[float, ...]) -> float:
    red, green, blue, _ = colour
    return 0.299 * red + 0.587 * green + 0.114 * blue


def test_colours_are_of_one_scale_and_numbers_contrast_with_them() -> None:
    figure = heat_map([PLANE], TEXT, span=2.0, meaning="faster")
    ax = figure.axes[0]
    boxes = {box.get_xy(): box for box in ax.patches if isinstance(box, Rectangle) and box.get_width() == 1}
    shades = {place: box.get_facecolor() for place, box in boxes.items()}
    ends = [MAP_COLOURS(0.0), MAP_COLOURS(0.5), MAP_COLOURS(1.0), NO_VALUE]
    for place, shade in zip(CELLS, ends, strict=True):
        assert shades[place] == pytest.approx(shade, abs=0.02)
    numbers = {text.get_text(): text for text in ax.texts}
    for place, cell in CELLS.items():
        ink = (*colors.to_rgb(numbers[cell.text].get_color()), 1.0)
        assert abs(lightness(ink) - lightness(shades[place])) > 0.4
        x, y = numbers[cell.text].get_position()
        assert place == (int(x), int(y)) and numbers[cell.text].get_fontweight() == ("bold" if cell.bold else "normal")
    assert numbers["1.00"].get_color() == INK != numbers["0.50"].get_color()
    (frame,) = [box for box in ax.patches if not box.get_fill()]
    assert frame.get_x() < 1 <= frame.get_y() + 0.5
    plt.close(figure)


def test_axes_and_scale_say_what_they_are() -> None:
    figure = heat_map([PLANE, PLANE], TEXT, span=1.5, meaning="faster")
    ax, scale = figure.axes[0], figure.axes[-1]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["short", "long"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["slow", "fast"]
    assert (ax.get_xlabel(), ax.get_ylabel(), scale.get_xlabel()) == ("length", "rate", "faster")
    assert [label.get_text() for label in scale.get_xticklabels()] == ["0.7", "0.8", "0.9", "1", "1.1", "1.25", "1.5"]
    assert scale.get_xlim() == pytest.approx((1 / 1.5, 1.5))
    plt.close(figure)
