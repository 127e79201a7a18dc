"""A progress bar on a terminal; elsewhere one line at the start and one at the end."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float, str], None]]:
    """Yields ``report(fraction_done, what)``. All output goes to stderr."""
    if not sys.stderr.isatty():
        print(f"{title} ...", file=sys.stderr, flush=True)
        yield lambda done, what: None
        print(f"{title}: done", file=sys.stderr, flush=True)
        return
    # Imported here because a machine whose output goes to a file needs no rich.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda done, what: progress.update(task, completed=done, description=f"{title}: {what}")
