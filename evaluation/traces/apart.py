"""Fetches a trace in a process of its own, with a limit of time for all of it."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path

from evaluation.measure.processes import Child, ChildHung
from evaluation.traces.sources import Source, TextOptions, fetch_trace

FETCH_S = 600.0
"""Seconds for a trace: the largest has 1.1 GB, and AWS instances read tens of MB/s. What takes longer is given up."""


def fetch_apart(source: Source, text: TextOptions, folder: Path, limit_s: float = FETCH_S) -> Path:
    """Fetch a trace in a process of its own, which is killed after ``limit_s`` seconds: a name server or a slow sender
    may hold it longer than any timeout of a read.

    Raises:
        TimeoutError: it took longer.
        RuntimeError: the process died, or as :func:`~evaluation.traces.sources.fetch_trace`.
        OSError, ValueError, KeyError: as there.
    """
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        child = Child("the download's process")
        stack.callback(child.stop)
        try:
            return child.call(_fetch_there, source, text, folder, scratch, limit_s=limit_s)
        except ChildHung:
            raise TimeoutError(f"it took longer than {limit_s:g} s") from None


def _fetch_there(source: Source, text: TextOptions, folder: Path, scratch: str) -> Path:
    tempfile.tempdir = scratch  # which the parent removes, however this process ends
    try:
        return fetch_trace(source, text, folder)
    except (OSError, HTTPException) as error:  # some cannot be sent to another process
        raise ConnectionError(str(error) or type(error).__name__) from None
