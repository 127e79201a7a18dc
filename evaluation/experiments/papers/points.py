"""The simulated points of a paper's figure: a section of its experiment file as a grid, and its sensitivity."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from apex.simulator.paper_settings import load_setting
from apex.workloads.requests import Lengths
from evaluation.experiments.grid import Grid, Place, values_of
from evaluation.experiments.options import given
from evaluation.experiments.papers.options import FigureOptions
from evaluation.experiments.papers.sensitivity import ASSUMPTIONS, parse_sensitivity
from evaluation.experiments.places import FIELDS, concerns, lengths_of, setting_of, simulate, workload_of
from evaluation.experiments.runner import Point
from swiftllm.systems import find_system

ROW = ("panel", "baseline")
"""Fields of a place that are fields of the rows of every figure."""
ROW_AT_LATENCY = (*ROW, "at_latency_s", "point")
"""With the latency (seconds) at which curves are compared, and the point's key, which names the file of its records."""


def figure_grid(section: Mapping[str, Any], options: FigureOptions) -> Grid:
    """The grid of a section of an experiment file, as the options choose. Repeats have consecutive seeds, since nothing
    else in a simulation is random.

    Raises:
        ValueError: an option is not valid here; the message says what is.
    """
    variant = None if options.sensitivity is None else "sensitivity"
    grid = Grid.read(section, FIELDS | {*ROW_AT_LATENCY}, variant, notes=("shows",))
    grid = grid.only("workload", options.workloads, workload_of)
    grid = grid.only("gpu", options.gpu and [options.gpu], lambda panel: load_setting(panel["setting"]).gpus)
    for system in options.systems or ():
        find_system(system)
    for panel in grid.panels:
        if panel["baseline"] not in (options.systems or values_of(panel, "system")):
            raise ValueError(f"ratios are to {panel['baseline']}: add it to --systems")
    chosen = given(system=options.systems, num_requests=options.num_requests, trace_dir=options.trace_dir)
    chosen |= given(neo_launches=options.neo_launches or None)
    repeats = options.repeats or 1
    grid = grid.with_(**chosen, repeats=repeats, seed=range(options.seed, options.seed + repeats))
    return grid if options.sensitivity is None else with_assumption(grid, options.sensitivity)


def with_assumption(grid: Grid, text: str) -> Grid:
    """The grid with an axis for an assumption, of ``NAME=LOW..HIGH``.

    Raises:
        ValueError: the text is not valid, or a value is not possible in a setting; the message says what is.
    """
    assumption, values = parse_sensitivity(text)
    for setting in {panel["setting"]: load_setting(panel["setting"]) for panel in grid.panels}.values():
        if assumption.name == "gpu_blocks" and values[0] < setting.min_gpu_blocks:
            raise ValueError(
                f"--sensitivity gpu_blocks: {setting.title} needs {setting.min_gpu_blocks} blocks for its longest "
                "request; begin there, or choose another machine with --gpu"
            )
    return grid.with_(sensitivity=assumption.name, **{assumption.field: values})


def simulated_points(grid: Grid, row: Collection[str] = ROW) -> list[Point]:
    """The points of a figure, predicted on the papers' machines. Systems that do not depend on an assumption run once.

    ``row`` are fields of places for the rows.
    """
    return [_point(place, row) for place in grid.places(concerns)]


def _point(place: Place, row: Collection[str]) -> Point:
    setting, lengths = setting_of(place), lengths_of(place)
    assumption = ASSUMPTIONS.get(place.get("sensitivity"))
    value = place[assumption.field] if assumption else None
    varied = None if value is None else (f"{assumption.tag}{value:g}", f"{value:g} {assumption.unit}")
    parts, words = [f"sim-{place['panel']}", setting.name], [*filter(None, (setting.title, setting.reading))]
    key, group, label = point_names(parts, words, lengths, place, varied)
    fields = [*row, assumption.field] if assumption else row
    task = simulate({**place, "point": key}, fields, lengths, sensitivity=place.get("sensitivity"))
    return Point(key, group, label, task, concurrent=True, cost=float(lengths.total_output_tokens))


def point_names(
    parts: Sequence[str], words: Sequence[str], lengths: Lengths, place: Place, varied: tuple[str, str] | None = None
) -> tuple[str, str, str]:
    """Key, group and label of a point.

    ``parts`` begin the key and ``words`` the label. ``varied`` is a varied assumption, for both.
    """
    spec = lengths.spec
    parts, words = [*parts, spec.name], [*words, lengths.title]
    for tag, at, unit in (("out", spec.output_len, "output tokens"), ("rate", spec.request_rate, "requests/s")):
        if at is not None:
            parts.append(f"{tag}{at:g}")
            words.append(f"{at:g} {unit}")
    if varied is not None:
        parts.append(varied[0])
        words.append(varied[1])
    group = "-".join([*parts, place["system"]])
    label = ", ".join([*words, place["system"]])
    if place["repeats"] == 1:
        return group, group, label
    return f"{group}-seed{spec.seed}", group, f"{label}, seed {spec.seed}"
