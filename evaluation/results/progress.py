"""Progress of a run: a bar with rate and time left on a terminal, elsewhere a plain line every 15 seconds."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_LINE_EVERY_S = 15.0


class TerminalBar:
    """A bar with a text beside it, which is there on a terminal only. A context manager."""

    def __init__(self, console: Console, label: str, total: float, clock: ProgressColumn) -> None:
        self.console = console
        described, text = TextColumn("{task.description}"), TextColumn("{task.fields[text]}")
        columns = (SpinnerColumn(), described, BarColumn(), TaskProgressColumn(), text, clock)
        self.bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self.task = self.bar.add_task(label, total=total, text="")
        self.start = time.monotonic()

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.bar.stop()


class TokenProgress(TerminalBar):
    """Progress of one replay in output tokens."""

    def __init__(self, label: str, total_tokens: int, console: Console | None = None) -> None:
        super().__init__(console or Console(), label, total_tokens, TimeRemainingColumn())
        self.label = label
        self.total_tokens = total_tokens
        self.last_line = self.start

    def update(self, tokens: int) -> None:
        """``tokens`` output tokens are done so far."""
        now = time.monotonic()
        rate = tokens / max(now - self.start, 1e-9)
        if not self.bar.disable:
            self.bar.update(self.task, completed=tokens, text=f"{rate:.0f} tok/s")
        elif now - self.last_line >= PLAIN_LINE_EVERY_S:
            self.last_line = now
            left = f"{(self.total_tokens - tokens) / rate:.0f} s left" if rate > 0 else "time left unknown"
            print_line(self.console, f"{self.label}: {tokens}/{self.total_tokens} tokens, {rate:.0f} tok/s, {left}")


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
        self.print_numbered(f"{label}: finished before")

    def finish_point(self, label: str, outcome: str) -> None:
        self.finished_s.append(time.monotonic() - self.point_start)
        self.print_numbered(f"{label}: {outcome}")

    def print_plan(self, together: int, processes: int, alone: int) -> None:
        """Print the plan: points in parallel processes, then points one after the other."""
        parts = [f"{together} points {processes} at a time"] * bool(together)
        parts += [f"{alone} points one after the other"] * bool(alone)
        if parts:
            print_line(self.console, f"to run: {', then '.join(parts)}")

    def pool_progress(self, total_cost: float) -> PoolProgress:
        """Progress of points that run in parallel; ``total_cost`` is the sum of their costs."""
        return PoolProgress(self, total_cost)

    def print_numbered(self, text: str) -> None:
        print_line(self.console, f"{self.index}/{self.total_points} {text}")


class PoolProgress(TerminalBar):
    """A line per finished point, and one bar over the total cost."""

    def __init__(self, run: RunProgress, total_cost: float) -> None:
        super().__init__(run.console, "these points", total_cost, TimeElapsedColumn())
        self.run = run
        self.total_cost = total_cost
        self.done_cost = 0.0

    def finish_point(self, label: str, outcome: str, cost: float) -> None:
        self.run.index += 1
        self.done_cost += cost
        left_s = (time.monotonic() - self.start) * (self.total_cost - self.done_cost) / self.done_cost
        left = f"~{format_s(left_s)} left" if left_s > 0 else ""
        self.bar.update(self.task, advance=cost, text=left)
        self.run.print_numbered(f"{label}: {outcome}" + (f" ({left} of these)" if left else ""))


def print_line(console: Console, text: str, style: str | None = None) -> None:
    """Print a line as it is: nothing in it is marked up, coloured by its kind, or wrapped."""
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


def format_s(seconds: float) -> str:
    """Seconds as text: 42 s, 3 min 05 s."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
