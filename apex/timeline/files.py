"""Writes a timeline as two files in one folder: a trace for viewers and a picture."""

from __future__ import annotations

import json
from pathlib import Path

from apex.timeline.spans import Timeline, trace_json


def names_file(target: Path) -> bool:
    """Whether ``target`` names one of the two files; otherwise it is a folder for both."""
    return target.suffix in (".json", ".png")


def write_timeline(timeline: Timeline, target: Path) -> tuple[Path, Path]:
    """Write trace and picture in one folder, see :func:`names_file`; returns their paths.

    Raises:
        OSError: the files cannot be written.
    """
    import apex.environment  # noqa: F401  before matplotlib
    from apex.timeline.figure import draw_timeline  # here, because matplotlib loads slowly

    stem = target.with_suffix("") if names_file(target) else target / f"{timeline.system}-timeline"
    trace, picture = Path(f"{stem}.json"), Path(f"{stem}.png")
    trace.parent.mkdir(parents=True, exist_ok=True)
    trace.write_text(json.dumps(trace_json(timeline)) + "\n")
    draw_timeline(timeline).savefig(picture, dpi=160)
    return trace, picture
