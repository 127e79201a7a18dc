"""Fetches the published traces of workloads before these are measured, so that a run replays them and not tables."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from http.client import HTTPException
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from rich.console import Console

from apex.simulator.paper_settings import PaperSetting
from apex.source_tree import python_command
from apex.workloads.catalogue import fetchable, load_catalogue, trace_dirs
from apex.workloads.sources import LIVEBENCH_MODEL, MAX_ROWS, Source, TextOptions, fetch_trace
from evaluation.experiments.grid import Grid
from evaluation.experiments.papers.options import FigureOptions
from evaluation.experiments.places import setting_of
from evaluation.measure.child import Child, ChildHung
from evaluation.results.paths import default_model
from evaluation.results.progress import print_line
from swiftllm.files import is_kept, keep
from swiftllm.model.folder.hub import HUB_NAME

FAILED = ".failed"
"""Suffix of the file that remembers a trace which could not be fetched."""


def fetch_traces(grid: Grid, options: FigureOptions, console: Console) -> None:
    """Fetch the traces of a grid's workloads that are not there yet; say which could not be had.

    Such a workload is drawn from its quantile tables, which the ``trace_origin`` of its rows says. A failure is
    remembered: traces are part of a run's identity, and an interrupted run is to be found again.
    """
    places = {place["workload"]: place for place in grid.places() if place.get("workload") in load_catalogue()}
    for workload, place in places.items():
        text = TextOptions(tokenizer_of(setting_of(place), options), MAX_ROWS, LIVEBENCH_MODEL)
        _fetch_one(workload, text, options.trace_dir, console)


def tokenizer_of(paper: PaperSetting, options: FigureOptions) -> Path:
    """The folder whose tokenizer counts texts: the measured model's where it is there, else the default model's."""
    model = options.model or Path(paper.hub_name)
    if (model / "tokenizer.json").is_file():
        return model
    cached = try_to_load_from_cache(str(model), "tokenizer.json") if HUB_NAME.fullmatch(str(model)) else None
    return Path(cached).parent if isinstance(cached, str) else default_model()


def _fetch_one(workload: str, text: TextOptions, trace_dir: Path | None, console: Console) -> None:
    files = [entry["file"] for entry in load_catalogue()[workload]["sources"] if entry["kind"] == "measured"]
    if any(is_kept(folder / file) for folder in trace_dirs(trace_dir) for file in files):
        return
    (folder,) = trace_dirs()
    for source in sorted(fetchable(workload), key=lambda source: files.index(source.file)):
        remembered = folder / (source.file + FAILED)
        if is_kept(remembered):
            reason = f"it failed before: {remembered.read_text().strip()}"
        else:
            print_line(console, f"fetching {source.name} ({source.licence}, {source.size}) from {source.origin}")
            try:
                path = fetch_apart(source, text, folder)
                print_line(console, f"  {path}, a trace of {workload}")
                return
            except (OSError, RuntimeError, ValueError, KeyError) as error:
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                keep(remembered, reason + "\n")
        print_line(console, f"not fetched: {source.name}: {reason}", "yellow")
    print_line(
        console,
        f"{workload} is drawn from quantile tables, and its rows say so (trace_origin). To fetch it: "
        f"{_command(fetchable(workload), text)}",
        "yellow",
    )


def _command(sources: Iterable[Source], text: TextOptions) -> str:
    names = " ".join(source.name for source in sources)
    own = "" if text.tokenizer == default_model() else f" --tokenizer {text.tokenizer}"
    return f"{python_command()} scripts/download_traces.py {names}{own}"


# -- in a process of its own ------------------------------------------------------------------------------------------

FETCH_S = 600.0
"""Seconds for a trace: the largest has 1.1 GB, and AWS instances read tens of MB/s. What takes longer is given up."""


def fetch_apart(source: Source, text: TextOptions, folder: Path, limit_s: float = FETCH_S) -> Path:
    """Fetch a trace in a process of its own, which is killed after ``limit_s`` seconds: a name server or a slow sender
    may hold it longer than any timeout of a read.

    Raises:
        TimeoutError: it took longer.
        RuntimeError: the process died, or as :func:`~apex.workloads.sources.fetch_trace`.
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
