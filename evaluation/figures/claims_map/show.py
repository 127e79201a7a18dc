"""Draws and prints the claims map of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from evaluation.experiments.axes import REFERENCE
from evaluation.experiments.claims_map.points import mappable
from evaluation.experiments.runner import Run
from evaluation.figures.claims_map.cells import Cell, MappedClaim, judge_cells, why_not_mapped
from evaluation.figures.claims_map.heat_map import STAR, draw_map
from evaluation.figures.style import FigureText, show_figure
from evaluation.figures.words import length_notes
from evaluation.results.claims import AGREES, Claim, where_of
from evaluation.results.folder import FlatRecord, markdown_table
from evaluation.results.kinds import distinct
from swiftllm.files import write_atomically

COLUMNS = {
    "claim": "claim",
    "about": "about",
    "says": "says",
    "ours": f"ours {STAR}",
    "holds": "cells",
    "nearest": f"nearest to {STAR} that holds",
}


def show_map(claims: Sequence[Claim], run: Run, console: Console) -> None:
    """Print the table; draw the figure and write the table into the run's folder.

    Raises:
        ValueError: no point of a mapped claim is finished, or the folder cannot be written to.
    """
    items = judge_cells(claims, run.summary)
    rows = [table_row(item) for item in items]
    left_out = [
        f"{claim.section}, {where_of(claim)}: {why_not_mapped(claim)}." for claim in claims if not mappable(claim)
    ]
    console.print(f"SIMULATED; cells: those within {AGREES:.0%} of the claim; {STAR}: the machine of our figures")
    console.print(printed_table(rows))
    console.print("Not mapped:")
    for line in left_out:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    show_figure(draw_map(items, figure_text(run.summary)), run.folder, console)
    lines = "".join(f"- {line}\n" for line in left_out)
    columns = [(name, title, "{}") for name, title in COLUMNS.items()]
    write_atomically(run.folder / "claims.md", f"{markdown_table(rows, columns)}\nNot mapped:\n\n{lines}")


def table_row(item: MappedClaim) -> dict[str, str]:
    claim = item.claim
    return {
        "claim": f"{claim.section}: {where_of(claim)}",
        "about": "/".join(claim.systems),
        "says": claim.stated(),
        "ours": "-" if item.ours is None else f"{item.ours:.2f}",
        "holds": f"{len(item.holding)} of {len(item.cells)}",
        "nearest": nearest_words(item),
    }


def nearest_words(item: MappedClaim) -> str:
    """Where the claim holds, as near to the figures' machine as possible, or how close it comes."""
    if item.nearest is not None:
        return "there" if item.nearest.machine == item.own else place_words(item.nearest)
    return f"nowhere; closest {place_words(item.closest)}" if item.closest else "-"


def place_words(cell: Cell) -> str:
    return f"{cell.ours:.2f} at {cell.machine.cpu_gb_s:.0f} GB/s, {cell.machine.gpu_blocks} blocks"


def printed_table(rows: Sequence[Mapping[str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name, title in COLUMNS.items():
        table.add_column(title, justify="right" if name in ("ours", "holds") else "left")
    for row in rows:
        table.add_row(*(row[name] for name in COLUMNS))
    return table


def figure_text(rows: Sequence[FlatRecord]) -> FigureText:
    kernels = []
    for title in distinct(rows, "setting_title"):
        here = [row for row in rows if row["setting_title"] == title and row["reference_cpu_gb_s"]]
        rates = {row["system"]: row["cpu_bandwidth_gb_s"] / row["reference_cpu_gb_s"] for row in here}
        others = [
            f"{system}'s reads {times:.2f} times as fast" for system, times in rates.items() if system != REFERENCE
        ]
        kernels += [f"{title}: {', '.join(others)}."] * bool(others)
    return FigureText(
        f"On which machine would the papers' claims hold? \u2014 SIMULATED for {' and '.join(distinct(rows, 'gpu'))}",
        "A cell is a machine: how fast attention on the CPU reads the KV cache, and how many KV blocks of 16 tokens "
        "the GPU holds, up to all that fit the card beside the weights. The number is our ratio of output tokens/s "
        "there, all requests at once. A claim of \u201cup to\u201d is compared with our best point, any other with "
        "the mean.",
        "\n".join([f"CPU attention: with {REFERENCE}'s kernel. " + " ".join(kernels), *length_notes(rows)]),
    )
