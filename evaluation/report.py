"""Writes one self-contained HTML page about result folders: figures, tables, claims, failures, provenance.

python evaluation/report.py [FOLDER ...] [-o report.html] [--help]

The page needs no network and no other file. Its content comes from the result folders (evaluation/results/folder.py).
Only the ratios for the papers' claims are computed here.
"""

from __future__ import annotations

import base64
import datetime
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any

import jinja2
import tyro
from rich.console import Console

from apex.cli.parser import parse_options
from apex.source_tree import IS_SOURCE_TREE
from evaluation.experiments.runner import one_line_errors
from evaluation.figures.overview import LIMITS, overview
from evaluation.figures.report_tables import Table, columns_of, make_table
from evaluation.results.claims import Comparison, compare_claims, load_claims
from evaluation.results.folder import FlatRecord
from evaluation.results.kinds import MEASURED, claimable, kind_of, what_ran
from evaluation.results.paths import RESULTS_DIR, evaluation_command
from swiftllm.files import write_atomically

TEMPLATES_DIR = Path(__file__).resolve().parent / "figures" / "templates"
KINDS = {".svg": "image/svg+xml", ".png": "image/png"}


@dataclass(frozen=True)
class Options:
    """Write one HTML page about results."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Result folders; by default the latest of every experiment."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = RESULTS_DIR / "report.html"
    """The page to write."""
    results_dir: Path = RESULTS_DIR
    """Folder in which to look for the latest results."""


@dataclass(frozen=True)
class ClaimRow:
    """A paper's claim in words, our ratio with its span over the points, and our ratio over the claim minus 1.

    ``origin`` is the kind of our rows, ``measured_on`` the setting and the card, if measured here.
    """

    origin: str
    measured_on: str
    hardware: str
    workload: str
    what: str
    section: str
    claimed: str
    ours: str
    span: str
    difference: str


@dataclass(frozen=True)
class FailedPoint:
    """``reason`` is the last line of ``text``, which is the traceback."""

    key: str
    reason: str
    text: str


@dataclass(frozen=True)
class Section:
    """The content of one result folder, as the page shows it. ``device`` is its machine's GPU, or its CPU."""

    anchor: str
    experiment: str
    run: str
    device: str
    date: str
    records: Sequence[FlatRecord]
    origins: Mapping[str, int]
    figures: Mapping[str, str]
    short: Table
    full: Table
    common: Mapping[str, str]
    claims: Sequence[ClaimRow]
    errors: Sequence[FailedPoint]
    unfinished: Sequence[str]
    failed_requests: int
    provenance: Mapping[str, Any]
    configuration: str
    trace_notes: Sequence[str] = field(default_factory=list)


def latest_folders(results_dir: Path) -> list[Path]:
    """The latest run of every experiment, ordered by name."""
    return [link.parent.resolve() for link in sorted(results_dir.glob("*/latest/summary.json"))]


def data_uri(path: Path) -> str:
    return f"data:{KINDS[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def figures_of(folder: Path) -> dict[str, str]:
    """Every figure of the folder as a data URI, by name; SVG is preferred over PNG."""
    found: dict[str, str] = {}
    for suffix in KINDS:
        for path in sorted(folder.glob(f"*{suffix}")):
            found.setdefault(path.stem, data_uri(path))
    return dict(sorted(found.items()))


def claim_rows(figure: str, records: Sequence[FlatRecord]) -> list[ClaimRow]:
    """The claims about a figure, separately for each comparison that concerns them."""
    return [claim_row(item, rows) for rows in claimable(records) for item in compare_claims(load_claims(figure), rows)]


def claim_row(comparison: Comparison, records: Sequence[FlatRecord]) -> ClaimRow:
    origin = kind_of(records[0])
    claim, ours, difference = comparison.claim, comparison.ours, comparison.difference
    stand_in = "" if comparison.systems == claim.systems else f" (here {' / '.join(comparison.systems)})"
    lengths = "" if claim.output_lens is None else ", {:g} to {:g} output tokens".format(*claim.output_lens)
    return ClaimRow(
        origin=origin,
        measured_on=what_ran(records) if origin == MEASURED else "",
        hardware=claim.hardware,
        workload=(claim.workload or "any") + lengths,
        what=f"{claim.metric.replace('_', ' ')}, {' / '.join(claim.systems)}{stand_in}",
        section=claim.section,
        claimed=claim.stated(),
        ours="not run" if comparison.summary is None else f"{comparison.summary:.2f}",
        span=f"{min(ours):.2f} to {max(ours):.2f}" + (f", best at {comparison.best_at}" if comparison.best_at else "")
        if len(ours) > 1
        else "",
        difference="" if difference is None else f"{difference:+.0%}",
    )


def read_section(folder: Path) -> Section:
    """Everything that the page shows of a folder.

    Raises:
        ValueError: the folder is no result folder; the message says what is missing.
    """
    missing = [name for name in ("summary.json", "provenance.json") if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} holds no {' and no '.join(missing)}: give a folder like results/fig5/latest")
    folder = folder.resolve()
    records: list[FlatRecord] = json.loads((folder / "summary.json").read_text())
    provenance: dict[str, Any] = json.loads((folder / "provenance.json").read_text())
    experiment = provenance["configuration"].get("experiment", folder.parent.name)
    run = provenance["run"]
    planned, configuration = without_points(provenance["configuration"])
    finished = {path.stem for path in (folder / "points").glob("*.json")}
    errors = [failed_point(path) for path in sorted((folder / "errors").glob("*.txt"))]
    short, full, common = columns_of(records)
    origins = [kind_of(record) for record in records]
    last = provenance["invocations"][-1]
    return Section(
        anchor=f"{experiment}-{run}",
        experiment=experiment,
        run=run,
        device=", ".join(provenance["machine"]["gpus"]) or provenance["machine"]["cpu"],
        date=last["date"].replace("T", " ").replace("+00:00", " UTC"),
        records=records,
        origins={origin: origins.count(origin) for origin in dict.fromkeys(origins)},
        figures=figures_of(folder),
        short=make_table(records, short),
        full=make_table(records, full),
        common=common,
        claims=claim_rows(experiment, records),
        errors=errors,
        unfinished=[key for key in planned if key not in finished | {point.key for point in errors}],
        failed_requests=sum(record.get("failed") or 0 for record in records),
        provenance={**provenance, "invocations": [readable(item) for item in reversed(provenance["invocations"])]},
        configuration=json.dumps(configuration, indent=1),
        trace_notes=sorted({record["trace_note"] for record in records if record.get("trace_note")}),
    )


def failed_point(path: Path) -> FailedPoint:
    text = path.read_text()
    return FailedPoint(path.stem, (text.strip().splitlines() or ["no text"])[-1], text)


def without_points(configuration: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Keys of the points that a configuration lists at any depth, and the configuration without these lists."""
    keys, rest = [], {}
    for name, value in configuration.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) and "key" in item for item in value):
            keys += [item["key"] for item in value]
            rest[name] = f"{len(value)} points, see provenance.json"
        elif isinstance(value, dict):
            inner_keys, rest[name] = without_points(value)
            keys += inner_keys
        else:
            rest[name] = value
    return keys, rest


def readable(invocation: Mapping[str, Any]) -> dict[str, Any]:
    """An invocation with its command as typed in a shell and an abbreviated commit."""
    commit = invocation["git"]["commit"]
    return {**invocation, "command": shlex.join(invocation["command"]), "commit": commit[:12] if commit else None}


def render(sections: Sequence[Section]) -> str:
    """The whole page. Everything from the folders is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES_DIR),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    written = datetime.datetime.now(datetime.UTC).isoformat(sep=" ", timespec="minutes").replace("+00:00", " UTC")
    runs = [(section.experiment, section.records) for section in sections]
    content = {"sections": sections, "overview": overview(load_claims(), runs), "limits": LIMITS, "written": written}
    return environment.get_template("report.html.j2").render(content)


@one_line_errors
def main(options: Options) -> int:
    """Write the page. Returns the exit status: 2 when there is nothing to show."""
    folders = list(dict.fromkeys(map(Path.resolve, options.folders))) or latest_folders(options.results_dir)
    if not folders:
        command = "make fig5" if IS_SOURCE_TREE else evaluation_command("reproduce_fig5")
        raise ValueError(f"no results in {options.results_dir}: type `{command}` first, or name result folders")
    sections = [read_section(folder) for folder in folders]
    write_atomically(options.output, render(sections))
    shown = ", ".join(f"{section.experiment}/{section.run}" for section in sections)
    Console().print(f"{options.output}: {shown}", highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
