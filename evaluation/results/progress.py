"""Progress of a run: a bar with rate and time left on a terminal, elsewhere a plain line every 15 seconds."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_LINE_EVERY_S = 15.0


class TokenProgress:
    """Progress of one replay in output tokens. A context manager."""

    def __init__(self, label: str, total_tokens: int, console: Console | None = None) -> None:
        self.label = label
        self.total_tokens = total_tokens
        self.console = console or Console()
        self.bar: Progress | None = None

    def __enter__(self) -> TokenProgress:
        self.start = self.last_line = time.monotonic()
        if self.console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
            )
            self.bar = Progress(*columns, console=self.console, transient=True)
            self.task = self.bar.add_task(self.label, total=self.total_tokens, rate="")
            self.bar.start()
        return self

    def update(self, tokens: int) -> None:
        """``tokens`` output tokens are done so far."""
        now = time.monotonic()
        rate = tokens / max(now - self.start, 1e-9)
        if self.bar is not None:
            self.bar.update(self.task, completed=tokens, rate=f"{rate:.0f} tok/s")
        elif now - self.last_line >= PLAIN_LINE_EVERY_S:
            self.last_line = now
            left = f"{(self.total_tokens - tokens) / rate:.0f} s left" if rate > 0 else "time left unknown"
            self.console.print(
                f"{self.label}: {tokens}/{self.total_tokens} tokens, {rate:.0f} tok/s, {left}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()


class RunProgress:
    """Progress of a run in points. Numbers the labels and estimates the time left."""

    def __init__(self, total_points: int, console: Console | None = None) -> None:
        self.total_points = total_points
        self.console = console or Console()
        self.index = 0
        self.finished_s: list[float] = []

    def start_point(self, label: str) -> str:
        """A numbered label for the next point, with the time left once a point has finished."""
        self.index += 1
        self.point_start = time.monotonic()
        left = ""
        if self.finished_s:
            mean = sum(self.finished_s) / len(self.finished_s)
            left = f" (all: ~{format_s(mean * (self.total_points - self.index + 1))} left)"
        return f"{self.index}/{self.total_points} {label}{left}"

    def skip_point(self, label: str) -> None:
        self.index += 1
        self._print(f"{label}: finished before")

    def finish_point(self, label: str, outcome: str) -> None:
        self.finished_s.append(time.monotonic() - self.point_start)
        self._print(f"{label}: {outcome}")

    def print_plan(self, together: int, processes: int, alone: int) -> None:
        """Print the plan: points in parallel processes, then points one after the other."""
        parts = [f"{together} points {processes} at a time"] * bool(together)
        parts += [f"{alone} points one after the other"] * bool(alone)
        if parts:
            self.console.print(f"to run: {', then '.join(parts)}", highlight=False, markup=False, soft_wrap=True)

    def pool_progress(self, total_cost: float) -> PoolProgress:
        """Progress of points that run in parallel; ``total_cost`` is the sum of their costs."""
        return PoolProgress(self, total_cost)

    def _print(self, text: str) -> None:
        numbered = f"{self.index}/{self.total_points} {text}"
        self.console.print(numbered, highlight=False, markup=False, soft_wrap=True)


class PoolProgress:
    """A line per finished point, and one bar over the total cost. A context manager."""

    def __init__(self, run: RunProgress, total_cost: float) -> None:
        self.run = run
        self.total_cost = total_cost
        self.done_cost = 0.0
        self.start = time.monotonic()
        texts = TextColumn("{task.description}"), TextColumn("{task.fields[left]}")
        columns = (SpinnerColumn(), texts[0], BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), texts[1])
        self.bar = Progress(*columns, console=run.console, transient=True, disable=not run.console.is_terminal)

    def __enter__(self) -> PoolProgress:
        self.bar.start()
        self.task = self.bar.add_task("these points", total=self.total_cost, left="")
        return self

    def finish_point(self, label: str, outcome: str, cost: float) -> None:
        self.run.index += 1
        self.done_cost += cost
        passed = time.monotonic() - self.start
        left_s = passed * (self.total_cost - self.done_cost) / self.done_cost
        left = f"~{format_s(left_s)} left" if left_s > 0 else ""
        self.bar.update(self.task, advance=cost, left=left)
        self.run._print(f"{label}: {outcome}" + (f" ({left} of these)" if left else ""))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()


def format_s(seconds: float) -> str:
    """Seconds as text: 42 s, 3 min 05 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
