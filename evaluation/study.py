"""A study: points of an experiment file, ratios between their rows, tables and a figure. A command runs studies.

A study is a declaration, which stands in one file of ``evaluation/studies`` with the options of its command.
:func:`command` makes the ``main`` of a command that has one study or several, its parts.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from apex.cli.options import parse_options
from apex.cli.output import stdout_console
from evaluation.drivers import run_point
from evaluation.grid import FIELDS, Grid, Place, concerns, possible_points
from evaluation.options import RunOptions, StudyOptions, assignments, experiment_settings
from evaluation.plots.figure import Figure
from evaluation.results.folder import FlatRecord, ResultFolder, read_json
from evaluation.results.progress import print_line
from evaluation.results.provenance import machine_identity
from evaluation.results.rows import bases, frame_of, grouped, over, with_columns
from evaluation.results.tables import Columns, rows_table
from evaluation.run import (
    Derive,
    Point,
    Run,
    RunPoint,
    identity,
    one_line_errors,
    print_error,
    run_unfinished_points,
    summarise,
    unchanged_rows,
)
from swiftllm.machine import usable_cores
from swiftllm.systems import find_system

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

SENSITIVITY = "_sensitivity"
"""Suffix of the name of a study in which an assumption was varied."""
RATE = "output_tokens_per_s"

Rows = Sequence[FlatRecord]
Show = Callable[[Run, Console], None]
"""Prints a run's rows and draws its figure into its folder; ValueError where it cannot."""


# -- what becomes of rows ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ratio:
    """A row's ``metric`` over that of another row; None where either has none.

    Attributes:
        to: whether a row is one that others are compared with.
        at: fields in which a row and the one that it is compared with are equal.
    """

    to: Callable[[FlatRecord], bool]
    at: Sequence[str]
    metric: str = RATE


def with_ratios(rows: Rows, ratios: Mapping[str, Ratio]) -> list[FlatRecord]:
    """The rows with a further field for each ratio."""
    if not ratios:
        return list(rows)
    frame = frame_of(rows)
    frame = frame.reindex(columns=list(dict.fromkeys([*frame.columns, *(f for r in ratios.values() for f in r.at)])))

    def values(ratio: Ratio) -> Any:
        to = frame.index.isin([index for index, row in enumerate(rows) if ratio.to(row)])
        return over(frame[ratio.metric], bases(frame, to, ratio.at))

    return with_columns(rows, **{name: values(ratio) for name, ratio in ratios.items()})


@dataclass(frozen=True)
class Table:
    """A table of rows without the columns that are empty, or one for each group of rows. Called with rows, it prints
    them.

    Attributes:
        columns: title, field and format of each.
        says: printed above it.
        by: fields whose values make up a group.
        title: of a group's table; by default the values of ``by``.
        lines: what is printed of a group's rows.
    """

    columns: Columns
    says: str | Callable[[Rows], str] = ""
    by: Sequence[str] = ()
    title: Callable[[Rows], str] | None = None
    lines: Callable[[Rows], Rows] = list

    def __call__(self, rows: Rows, console: Console) -> None:
        if says := self.says(rows) if callable(self.says) else self.says:
            console.print(says, highlight=False, soft_wrap=True)
        for here in grouped(rows, *self.by).values() if self.by else [rows]:
            title = self.title(here) if self.title else " ".join(str(here[0][name]) for name in self.by)
            if title:
                print_line(console, title)
            lines = self.lines(here)
            columns = [column for column in self.columns if any(line.get(column[1]) is not None for line in lines)]
            console.print(rows_table(lines, columns))


# -- studies ----------------------------------------------------------------------------------------------------------


def as_simulated(points: Sequence[Point]) -> dict[str, Any]:
    """What decides the numbers of simulated points."""
    return {"simulated": identity(points)}


@dataclass(frozen=True)
class Study:
    """Points and what becomes of their rows.

    Attributes:
        name: of its result folder.
        file: the name of its experiment file; by default its own.
        section: of the experiment file, the part that is its grid; by default all of it.
        fields: what places of the grid may have.
        is_place: whether a place of the grid is one of the study.
        point: the point of a place.
        refused: a place in words, for studies that leave out the places of which ``point`` raises ValueError.
        points: the points that a command's options choose, for studies that are not one grid; ValueError where an
            option is not valid.
        ratios: further fields of the rows.
        derive: adds fields to the rows that are computed from all rows together, before the ratios.
        tables: print the rows, one after the other.
        figure: declared, or what draws a run; None where tables say it all. ValueError where there is nothing to draw.
        show: shows a run in place of ``tables`` and ``figure``.
        run_point: runs a point.
        describe: what decides the numbers of points, JSON-able: a run is continued only where it is equal.
    """

    name: str
    show: Show | None = None
    points: Callable[[Any], Sequence[Point]] | None = None
    derive: Derive = unchanged_rows
    run_point: RunPoint = run_point
    describe: Callable[[Sequence[Point]], Mapping[str, Any]] = as_simulated
    file: str | None = None
    section: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda settings: settings
    fields: Collection[str] = FIELDS
    is_place: Callable[[Place], bool] = lambda place: True
    point: Callable[[Place], Point] | None = None
    refused: Callable[[Place], str] | None = None
    ratios: Mapping[str, Ratio] = field(default_factory=dict)
    tables: Sequence[Callable[[Rows, Console], None]] = ()
    figure: Figure | Callable[[Run], Drawing] | None = None

    def points_of(self, options: Any) -> list[Point]:
        """The points that the options choose.

        Raises:
            ValueError: an option or the experiment file is not valid; the message says what is.
        """
        if self.points is not None:
            return list(self.points(options))
        places = self.places(options)
        if self.refused is None:
            return [self.point(place) for place in places]
        return possible_points(places, self.point, self.refused)

    def places(self, options: StudyOptions) -> list[Place]:
        """The places of the experiment file that the options choose.

        Raises:
            ValueError: an option or the experiment file is not valid; the message says what is.
        """
        section = self.section(experiment_settings(self.file or self.name, options.config))
        places = places_of(Grid.read(section, self.fields, "quick" if options.quick else None), options, self.fields)
        return [place for place in places if self.is_place(place)]

    def derived(self, rows: Rows) -> list[FlatRecord]:
        """The rows with the fields that are computed from all rows together."""
        return with_ratios(self.derive(rows), self.ratios)

    def show_run(self, run: Run, console: Console) -> None:
        """Print a run's rows, and draw its figure into its folder.

        Raises:
            ValueError: there is nothing to draw, or the folder cannot be written to.
        """
        if self.show is not None:
            self.show(run, console)
            return
        for table in self.tables:
            table(run.summary, console)
        if self.figure is not None:
            from evaluation.plots.charts import draw  # matplotlib takes a second to import
            from evaluation.plots.style import show_figure

            drawing = draw(self.figure, run) if isinstance(self.figure, Figure) else self.figure(run)
            show_figure(drawing, run.folder, console)

    def run(
        self,
        points: Sequence[Point],
        results_dir: Path,
        jobs: int | None = None,
        *,
        run_alone: RunPoint | None = None,
        console: Console | None = None,
    ) -> Run:
        """Run the points that are not finished, write the summary of all that are, and show it.

        If a point raises, its traceback goes to ``errors/`` and the other points still run; the next run tries it
        again. First the concurrent points run, then the others one by one.

        Args:
            jobs: simulated points to run in parallel; by default one per usable core. What runs them is picklable then.
            run_alone: runs the points that measure, in place of ``run_point``.

        Raises:
            SystemExit: the run was interrupted, or the folder cannot be written to. A message has been printed.
        """
        keys = [point.key for point in points]
        if len(set(keys)) < len(keys):
            raise ValueError(f"points share keys: {sorted(key for key in set(keys) if keys.count(key) > 1)}")
        console = console or stdout_console()
        try:
            folder = ResultFolder(self.name, {"experiment": self.name, **self.describe(points)}, results_dir)
            folder.record_invocation()
        except OSError as error:
            print_error(f"cannot write results: {error}; choose another folder with --results-dir", console)
            raise SystemExit(2) from None
        try:
            jobs = jobs or usable_cores()
            run_unfinished_points(folder, points, self.run_point, run_alone or self.run_point, jobs, console)
        except KeyboardInterrupt:
            kept = sum(folder.finished_point(key) is not None for key in keys)
            kept_text = f"{kept} of {len(points)} points are kept in {folder.path}"
            print_line(console, f"interrupted: {kept_text}; the same command continues there", "yellow")
            raise SystemExit(128 + signal.SIGINT) from None
        finished = summarise(folder, points)
        summary = self.derived(finished) if finished else []
        folder.save_summary(summary)
        failed = [point.label for point in points if folder.finished_point(point.key) is None]
        run = Run(folder.path, self.name, summary, folder.identity["machine"], failed)
        if summary:
            self.show_run(run, console)
        return run


def places_of(grid: Grid, options: StudyOptions, known: Collection[str]) -> list[Place]:
    """The places of a grid that the options choose, with the values that they set.

    Raises:
        ValueError: a field or a system is unknown, or no place has a value.
    """
    given: dict[str, Any] = {}
    for name, values in assignments("--set", options.set).items():
        if name not in known:
            raise ValueError(f"--set: a place has no {name}; it may have {', '.join(sorted(known))}")
        if name == "system":
            values = [find_system(str(value)).name for value in values]
        varies = len(values) > 1 or any(isinstance(panel.get(name), list) for panel in grid.panels)
        given[name] = values if varies else values[0]
    places = grid.with_(trace_dir=options.trace_dir, **given).places(concerns)
    for name, values in assignments("--only", options.only).items():
        there = dict.fromkeys(place.get(name) for place in places)
        if missing := [str(value) for value in values if value not in there]:
            raise ValueError(f"--only: no {name} {', '.join(missing)}; there are {', '.join(map(str, there))}")
        places = [place for place in places if place.get(name) in values]
    return places


Options = TypeVar("Options", bound=RunOptions)
Main = Callable[..., int]
"""The ``main`` of a command: options, by default those of the command line, to the exit status."""


def command(
    options_type: type[Options],
    parts: Mapping[str, Study] | Callable[[Options], Mapping[str, Study]],
    run: Callable[[Options], int] | None = None,
) -> Main:
    """The ``main`` of a command that runs studies, or with ``--from`` shows a finished run of one of them.

    Its exit status is 0 when every point is finished, 1 when some failed, 2 for invalid options. The points of all
    chosen studies are made before any of them runs, so that an invalid option is seen at once.

    Args:
        parts: all studies of the command. The option ``part``, where it has one, chooses among them.
        run: runs them in another way, to the exit status.
    """

    @one_line_errors
    def main(options: Options | None = None) -> int:
        options = parse_options(options_type) if options is None else options
        known = parts(options) if callable(parts) else parts
        if options.from_folder is not None:
            return show_again(options.from_folder, list(known.values()))
        if run is not None:
            return run(options)
        chosen = {known[part].name: known[part] for part in getattr(options, "part", known)}
        points = {name: study.points_of(options) for name, study in chosen.items()}
        console, status = stdout_console(), 0
        for name, here in points.items():
            finished = chosen[name].run(here, options.results_dir, options.jobs, console=console)
            status |= finished.print_outcome(console)
        return status

    return main


def show_again(folder: Path, studies: Sequence[Study]) -> int:
    """Show a finished run of one of the studies, or of its sensitivity. Returns the exit status 0.

    Raises:
        ValueError: the folder has no results, or those of another study, or does not say of which.
    """
    by_name = {study.name: study for study in studies}
    summary_file, provenance_file = folder / "summary.json", folder / "provenance.json"
    if not summary_file.is_file() or not (summary := read_json(summary_file)):
        example = f"results/{studies[0].name}/latest"
        raise ValueError(f"no results in {folder}: give a folder that has a summary.json, such as {example}")
    name, machine = None, machine_identity()
    if provenance_file.is_file():
        provenance = read_json(provenance_file)
        name, machine = provenance["configuration"].get("experiment", "something else"), provenance["machine"]
        if name.removesuffix(SENSITIVITY) not in by_name:
            raise ValueError(f"{folder} holds results of {name}, not of {' or '.join(by_name)}")
    elif len(by_name) > 1:
        raise ValueError(f"{folder} has no provenance.json, so it is unknown which of {', '.join(by_name)} it holds")
    study = by_name[(name or studies[0].name).removesuffix(SENSITIVITY)]
    study.show_run(Run(folder.resolve(), name, summary, machine), stdout_console())
    return 0
