"""Draws and prints the claims map of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from evaluation.experiments.claims_map.cells import JudgedCell, MappedClaim, judge_cells, why_not_mapped
from evaluation.experiments.claims_map.points import mappable
from evaluation.grid import REFERENCE
from evaluation.plots import heat_map
from evaluation.plots.notes import length_notes
from evaluation.plots.style import FigureText, show_figure
from evaluation.results.claims import AGREES, Claim, where_of
from evaluation.results.folder import FlatRecord, markdown_table
from evaluation.results.frame import grouped
from evaluation.results.kinds import distinct
from evaluation.results.known import known_notes
from evaluation.results.tables import rows_table
from evaluation.run import Run
from swiftllm.files import write_atomically

STAR = "\u2605"
SPAN = 2.0
"""The colours reach from half the claimed ratio to twice it."""
COLUMNS = (
    ("claim", "claim", "s"), ("about", "about", "s"), ("says", "says", "s"), (f"ours {STAR}", "ours", ""),
    ("cells", "holds", ""), (f"nearest to {STAR} that holds", "nearest", "s"),
)  # fmt: skip


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
    console.print(rows_table(rows, COLUMNS))
    console.print("Not mapped:")
    for line in left_out:
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    show_figure(draw_map(items, figure_text(run.summary)), run.folder, console)
    lines = "".join(f"- {line}\n" for line in left_out)
    columns = [(field, title, "{}") for title, field, _ in COLUMNS]
    write_atomically(run.folder / "claims.md", f"{markdown_table(rows, columns)}\nNot mapped:\n\n{lines}")


def table_row(item: MappedClaim) -> dict[str, str]:
    claim = item.claim
    return {
        "claim": ", ".join(filter(None, (f"{claim.section}: {where_of(claim)}", item.variant))),
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


def place_words(cell: JudgedCell) -> str:
    return f"{cell.ours:.2f} at {cell.machine.cpu_gb_s:.0f} GB/s, {cell.machine.gpu_blocks} blocks"


# -- the figure -------------------------------------------------------------------------------------------------------


def draw_map(items: Sequence[MappedClaim], text: FigureText) -> heat_map.Figure:
    """A panel for each claim: speed of CPU attention by GPU blocks, coloured by our ratio over the claimed one.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not items:
        raise ValueError("nothing to draw: no point of a mapped claim is finished")
    meaning = "our ratio over the claimed one (darkest: half and less, twice and more)"
    words = f"framed: within {AGREES:.0%} of the claim\n{STAR}: the machine that our figures assume"
    return heat_map.heat_map([plane_of(item) for item in items], text, SPAN, meaning, words)


def plane_of(item: MappedClaim) -> heat_map.Plane:
    """One claim. Framed cells hold, a star marks the machine that the figures assume."""
    claim = item.claim
    speeds = sorted({cell.machine.cpu_gb_s for cell in item.cells})
    pools = sorted({cell.machine.gpu_blocks for cell in item.cells})
    cells = {}
    for cell in item.cells:
        number = "-" if cell.ours is None else f"{cell.ours:.3g}" if cell.ours >= 10 else f"{cell.ours:.2f}"
        star = STAR if cell.machine == item.own else ""
        ratio = cell.ours / claim.ratio if cell.ours else None
        place = speeds.index(cell.machine.cpu_gb_s), pools.index(cell.machine.gpu_blocks)
        cells[place] = heat_map.Cell(ratio, number + star, framed=cell.holds)
    return heat_map.Plane(
        f"{' over '.join(claim.systems)}: {'up to ' if claim.up_to else ''}{claim.ratio:g}x",
        ", ".join(filter(None, (f"{where_of(claim)} ({claim.section})", item.variant))),
        "CPU attention (GB/s)",
        "GPU blocks",
        [f"{speed:.0f}" for speed in speeds],
        [f"{blocks} ({blocks / item.own.gpu_blocks:.2g}x)" for blocks in pools],
        cells,
    )


def figure_text(rows: Sequence[FlatRecord]) -> FigureText:
    kernels = []
    for title, here in grouped((row for row in rows if row["reference_cpu_gb_s"]), "setting_title").items():
        rates = {row["system"]: row["cpu_bandwidth_gb_s"] / row["reference_cpu_gb_s"] for row in here}
        others = [f"{name}'s reads {times:.2f} times as fast" for name, times in rates.items() if name != REFERENCE]
        kernels += [f"{title}: {', '.join(others)}."] * bool(others)
    return FigureText(
        f"On which machine would the papers' claims hold? \u2014 SIMULATED for {' and '.join(distinct(rows, 'gpu'))}",
        "A cell is a machine: how fast attention on the CPU reads the KV cache, and how many KV blocks of 16 tokens "
        "the GPU holds, up to all that fit the card beside the weights. The number is our ratio of output tokens/s "
        "there, all requests at once. A claim of \u201cup to\u201d is compared with our best point, any other with "
        "the mean.",
        "\n".join(
            [f"CPU attention: with {REFERENCE}'s kernel. " + " ".join(kernels), *length_notes(rows), *known_notes(rows)]
        ),
    )
