"""Draws and prints the claims map of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from evaluation.figures.paper_figure import Run
from evaluation.results.claims import Claim


def show_map(claims: Sequence[Claim], run: Run, console: Console) -> None:
    console.print(f"{len(claims)} claims, {len(run.summary)} points")
