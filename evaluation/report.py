"""Writes one self-contained HTML page about result folders: figures, tables, claims, failures, provenance.

python evaluation/report.py [FOLDER ...] [-o report.html] [--help]

The page needs no network and no other file. Its content comes from the result folders (evaluation/results/folder.py).
Only the ratios for the papers' claims are computed here.
"""

from __future__ import annotations

import base64
import datetime
import json
import re
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    import here

from typing import Annotated, Any

import jinja2
import tyro
from rich.console import Console

from apex.cli.parser import parse_options
from apex.replay.metrics import compute_metrics
from apex.source_tree import IS_SOURCE_TREE
from evaluation.results.claims import LIMITS, Comparison, compare_claims, load_claims, overview
from evaluation.results.folder import DRAWN, SWEPT, TABLE, FlatRecord, read_json
from evaluation.results.paths import RESULTS_DIR, evaluation_command
from evaluation.results.rows import MEASURED, claimable, kind_of, reading_of, what_ran
from evaluation.run import one_line_errors
from swiftllm.files import write_atomically

TEMPLATES_DIR = Path(__file__).resolve().parent / "templates"
KINDS = {".svg": "image/svg+xml", ".png": "image/png"}
# Metrics of replays that are not in the summary table: shown under "all columns", not in the short table.
SIDE_METRICS = {
    *compute_metrics([], 0.0), "iterations", "preemptions", "swapped_blocks", "gpu_busy_fraction", "extrapolated",
    "trace_note", "predicted_wall_s", "trace_file", "seed", "repeats", "max_send_lag_s", "others_busy_cores",
    *(f"{metric}_{end}" for metric in DRAWN for end in ("low", "high")),
}  # fmt: skip
OF_A_LINE = re.compile(r"_(layer|up_to)_\d+$")
"""Fields that are points of a figure's line: there are too many for the short table."""


@dataclass(frozen=True)
class Options:
    """Write one HTML page about results."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Result folders; by default the latest of every experiment."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = RESULTS_DIR / "report.html"
    """The page to write."""
    results_dir: Path = RESULTS_DIR
    """Folder in which to look for the latest results."""


class Section:
    """The content of one result folder, as the page shows it. ``device`` is its machine's GPU, or its CPU."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError if the folder is no result folder; the message says what is missing."""
        missing = [name for name in ("summary.json", "provenance.json") if not (folder / name).is_file()]
        if missing:
            raise ValueError(f"{folder} holds no {' and no '.join(missing)}: give a folder like results/fig5/latest")
        folder = folder.resolve()
        self.records: list[FlatRecord] = read_json(folder / "summary.json")
        provenance: dict[str, Any] = read_json(folder / "provenance.json")
        invocations = provenance["invocations"]
        self.experiment: str = provenance["configuration"].get("experiment", folder.parent.name)
        self.run: str = provenance["run"]
        self.anchor = f"{self.experiment}-{self.run}"
        self.device = ", ".join(provenance["machine"]["gpus"]) or provenance["machine"]["cpu"]
        self.date = invocations[-1]["date"].replace("T", " ").replace("+00:00", " UTC")
        self.origins = Counter(map(kind_of, self.records))
        self.figures = figures_of(folder)
        short, full, self.common = columns_of(self.records)
        self.short, self.full = make_table(self.records, short), make_table(self.records, full)
        self.claims = claim_rows(self.experiment, self.records)
        self.errors = [failed_point(path) for path in sorted((folder / "errors").glob("*.txt"))]
        planned, configuration = without_points(provenance["configuration"])
        known = {path.stem for path in (folder / "points").glob("*.json")} | {point["key"] for point in self.errors}
        self.unfinished = [key for key in planned if key not in known]
        self.failed_requests = sum(record.get("failed") or 0 for record in self.records)
        self.provenance = {**provenance, "invocations": [readable(item) for item in reversed(invocations)]}
        self.configuration = json.dumps(configuration, indent=1)
        self.trace_notes = sorted({record["trace_note"] for record in self.records if record.get("trace_note")})


def latest_folders(results_dir: Path) -> list[Path]:
    """The latest run of every experiment, ordered by name."""
    return [link.parent.resolve() for link in sorted(results_dir.glob("*/latest/summary.json"))]


def figures_of(folder: Path) -> dict[str, str]:
    """Every figure of the folder as a data URI, by name; SVG is preferred over PNG."""
    found: dict[str, str] = {}
    for suffix, kind in KINDS.items():
        for path in folder.glob(f"*{suffix}"):
            found.setdefault(path.stem, f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}")
    return dict(sorted(found.items()))


def claim_rows(figure: str, records: Sequence[FlatRecord]) -> list[dict[str, str]]:
    """The claims about a figure, separately for each comparison that concerns them."""
    return [claim_row(item, rows) for rows in claimable(records) for item in compare_claims(load_claims(figure), rows)]


def claim_row(item: Comparison, records: Sequence[FlatRecord]) -> dict[str, str]:
    """A claim in words, beside our ratio with its span over the points."""
    claim, origin = item.claim, kind_of(records[0])
    lengths = "" if claim.output_lens is None else ", {:g} to {:g} output tokens".format(*claim.output_lens)
    return {
        "origin": origin,
        "measured_on": what_ran(records) if origin == MEASURED else reading_of(records[0]) or "",
        "hardware": claim.hardware,
        "workload": (claim.workload or "any") + lengths,
        "what": item.what,
        "section": claim.section,
        "claimed": claim.stated(),
        "ours": "not run" if item.summary is None else f"{item.summary:.2f}",
        "span": item.span(" to ") + (f", best at {item.best_at}" if item.best_at else ""),
        "difference": item.differs,
    }


def failed_point(path: Path) -> dict[str, str]:
    """A failed point: ``reason`` is the last line of ``text``, which is the traceback."""
    text = path.read_text()
    return {"key": path.stem, "reason": (text.strip().splitlines() or ["no text"])[-1], "text": text}


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


# -- tables -----------------------------------------------------------------------------------------------------------


def make_cell(value: Any, form: str | None = None) -> dict[str, Any]:
    """A value as ``text``, and as ``order``, by which a column is sorted: a number if the value is one."""
    if value is None:
        return {"text": "\u2013", "order": ""}
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return {"text": str(value), "order": str(value)}
    if form is None:
        form = "{:.4g}" if isinstance(value, float) and abs(value) < 1e4 else "{:.0f}"
    return {"text": form.format(value), "order": value}


def make_table(records: Sequence[FlatRecord], names: Sequence[str]) -> dict[str, Any]:
    """The named fields of the records, with titles and formats of summary.md if it has the field.

    ``origins`` says for each row whether it is simulated or measured.
    """
    known = {name: (title, form) for name, title, form in TABLE}
    rows = [[make_cell(record.get(name), known.get(name, ("", None))[1]) for name in names] for record in records]
    columns = [
        {
            "title": known.get(name, (name.replace("_", " "), None))[0],
            "name": name,
            "numeric": any(not isinstance(row[place]["order"], str) for row in rows),
            "simulated": name.startswith(("simulated_", "predicted_wall")),
        }
        for place, name in enumerate(names)
    ]
    return {"columns": columns, "rows": rows, "origins": [kind_of(record) for record in records]}


def columns_of(records: Sequence[FlatRecord]) -> tuple[list[str], list[str], dict[str, str]]:
    """Names for the short table, names of all fields that have a value, and the inputs that all rows share.

    The short table has the system, the swept variables, the main metrics, and every other input that differs.
    """
    values = {name: [record.get(name) for record in records] for record in records for name in record}
    names = [name for name, given in values.items() if any(value is not None for value in given)]
    headline = [name for name, _, _ in TABLE if name in names]
    inputs = [
        name for name in names if name not in SIDE_METRICS and name not in headline and not OF_A_LINE.search(name)
    ]
    same = [name for name in inputs if len(set(values[name])) == 1 and len(records) > 1]
    common = {name: make_cell(values[name][0])["text"] for name in same}
    first = [name for name in ("system", "workload", *SWEPT) if name in names and name not in common]
    return list(dict.fromkeys([*first, *headline, *(name for name in inputs if name not in common)])), names, common


# -- the page ---------------------------------------------------------------------------------------------------------


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
    sections = [Section(folder) for folder in folders]
    write_atomically(options.output, render(sections))
    shown = ", ".join(f"{section.experiment}/{section.run}" for section in sections)
    Console().print(f"{options.output}: {shown}", highlight=False, markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(parse_options(Options)))
