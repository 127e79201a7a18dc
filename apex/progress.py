"""A progress bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[float, str], None]]:
    """Yields ``report(fraction_done, what)``. Everything goes to stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        print(f"{title} ...", file=sys.stderr, flush=True)
        yield lambda done, what: None
        print(f"{title}: done", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(title, total=1.0)
        yield lambda done, what: progress.update(task, completed=done, description=f"{title}: {what}")
