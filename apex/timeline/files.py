"""Writes a timeline as two files in one folder: a trace for viewers and a picture."""

from __future__ import annotations

import json
from pathlib import Path

from apex.timeline.perfetto import trace_json
from apex.timeline.spans import Timeline


def names_file(target: Path) -> bool:
    """Whether ``target`` names one of the two files; otherwise it is a folder for both."""
    return target.suffix in (".json", ".png")


def timeline_paths(target: Path, system: str) -> tuple[Path, Path]:
    """The paths of trace and picture, in one folder, see :func:`names_file`."""
    if names_file(target):
        return target.with_suffix(".json"), target.with_suffix(".png")
    return target / f"{system}-timeline.json", target / f"{system}-timeline.png"


def write_timeline(timeline: Timeline, target: Path) -> tuple[Path, Path]:
    """Write trace and picture, see :func:`timeline_paths`.

    Raises:
        OSError: the files cannot be written.
    """
    from apex.timeline.figure import draw_timeline  # here, because matplotlib loads slowly

    trace, picture = timeline_paths(target, timeline.system)
    trace.parent.mkdir(parents=True, exist_ok=True)
    trace.write_text(json.dumps(trace_json(timeline)) + "\n")
    draw_timeline(timeline).savefig(picture, dpi=160)
    return trace, picture
