"""The papers' claims over a plane of simulated machines: every panel of a claim, once for each machine.

A machine of the plane is a setting with another speed of CPU attention and another number of KV blocks on the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from rich.console import Console

from apex.simulator.paper_settings import PaperSetting
from evaluation.grid import FIELDS, REFERENCE, Grid, Place, concerns, setting_of, simulate, simulated_point, workload_of
from evaluation.options import StudyOptions, experiment_settings
from evaluation.plots.charts import Cell, Plane, heat_map
from evaluation.plots.notes import known_notes, length_notes
from evaluation.plots.style import FigureText, show_figure
from evaluation.results.claims import (
    AGREES,
    METRIC_WORDS,
    Claim,
    Comparison,
    agrees,
    compare_claims,
    load_claims,
    where_of,
)
from evaluation.results.folder import FlatRecord, markdown_table
from evaluation.results.rows import distinct, grouped
from evaluation.results.tables import rows_table
from evaluation.run import Point, Run
from evaluation.study import RATE, Study, command
from swiftllm.files import write_atomically
from swiftllm.systems import systems

NAME = "claims-map"
METRIC = RATE


@dataclass(frozen=True)
class Options(StudyOptions):
    """Where in the plane of CPU bandwidth and GPU blocks the papers' claims would hold, SIMULATED (predicted times, no
    GPU needed). The map takes long and shows the time left.

    The plane and the panels come from configs/experiments/claims-map.yaml, the claims from configs/claims.yaml.
    Results, figure, table and provenance go to results/claims-map/<run>/. Running the same command again continues an
    interrupted run.
    """


@dataclass(frozen=True)
class PlaneCell:
    """A cell of a setting's plane: GB/s of CPU attention with the ``REFERENCE``'s kernel, and KV blocks on the GPU."""

    cpu_gb_s: float
    gpu_blocks: int

    @classmethod
    def of(cls, setting: PaperSetting) -> PlaneCell:
        """The setting as it is."""
        return cls(setting.cpu_attention_gb_s(REFERENCE), setting.num_gpu_blocks)


def plane(setting: PaperSetting, speeds: Sequence[float], pools: Sequence[float]) -> list[PlaneCell]:
    """The machines of a setting's plane, pools and speeds ascending.

    Args:
        speeds: of CPU attention, in GB/s. The setting's own is added, and replaces those within a tenth of it.
        pools: times the setting's own. The own and the largest of the card are added. Those that hold less than the
            longest request, or that the card does not hold, are left out.
    """
    own = PlaneCell.of(setting)
    blocks = {own.gpu_blocks, setting.max_gpu_blocks, *(round(times * own.gpu_blocks) for times in pools)}
    fitting = sorted(number for number in blocks if setting.min_gpu_blocks <= number <= setting.max_gpu_blocks)
    others = {float(speed) for speed in speeds if abs(speed / own.cpu_gb_s - 1) > 0.1}
    return [PlaneCell(speed, number) for number in fitting for speed in sorted({own.cpu_gb_s, *others})]


def mappable(claim: Claim) -> bool:
    """Whether the map shows the claim: a number on throughput, about one setting, of systems that are scheduled."""
    is_number = claim.ratio is not None and claim.metric == METRIC
    return is_number and claim.setting is not None and systems().keys() >= set(claim.systems)


def map_points(options: Options) -> list[Point]:
    """The points of all panels on all machines of their planes. A GPU-only system runs once for each pool.

    Raises:
        ValueError: an option or the experiment file is not valid; the message says what is.
    """
    settings, claims, points = experiment_settings(NAME, options.config), load_claims(), []
    for place in STUDY.places(options):
        setting, own = setting_of(place), PlaneCell.of(setting_of(place))
        systems = _systems(place, setting, claims)
        machines = [
            {
                "num_gpu_blocks": None if machine.gpu_blocks == own.gpu_blocks else machine.gpu_blocks,
                "reference_cpu_gb_s": machine.cpu_gb_s,
            }
            for machine in plane(setting, settings["cpu_attention_gb_s"], settings["gpu_pools"])
        ]
        cells = Grid((place,)).with_(machine=machines, system=systems).places(concerns)
        charged = bool(place.get("neo_launches"))
        points += [_point(cell, setting, own, systems[-1], charged) for cell in cells]
    return points


def _systems(place: Place, setting: PaperSetting, claims: Sequence[Claim]) -> tuple[str, ...]:
    """The systems of the claims about a panel."""
    names = (setting.name, setting.like)
    about = [c for c in claims if mappable(c) and c.figure == place["figure"] and c.setting in names]
    about = [claim for claim in about if claim.workload in (None, workload_of(place))]
    return tuple(dict.fromkeys(system for claim in about for system in claim.systems))


def _point(cell: Place, setting: PaperSetting, own: PlaneCell, baseline: str, charged: bool) -> Point:
    """``charged``: whether the panel charges NEO's launches, which not all of its systems have."""
    values = {"baseline": baseline, "own_cpu_gb_s": own.cpu_gb_s, "own_gpu_blocks": own.gpu_blocks}
    variant = ", ".join(filter(None, (setting.reading, "with NEO's launches" if charged else None)))
    task = simulate(cell, ("figure", "reference_cpu_gb_s"), variant=variant, **values)
    speed, output_len = cell["reference_cpu_gb_s"], cell.get("output_len")
    names = (
        "map",
        cell["figure"],
        setting.name,
        workload_of(cell),
        *([] if output_len is None else [f"out{output_len:g}"]),
        *([] if speed is None else [f"cpu{speed:.4g}"]),
        *(["launches"] if charged else []),
        f"blocks{task.num_gpu_blocks}",
    )
    return simulated_point(names, task)


# -- every claim judged in every cell ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgedCell:
    """A machine, and our ratio for the claim there; None if a point of the claim is not finished."""

    machine: PlaneCell
    ours: float | None
    holds: bool


@dataclass(frozen=True)
class MappedClaim:
    """A claim over its plane; ``own`` is the machine that the figures assume, ``variant`` its reading in words."""

    claim: Claim
    own: PlaneCell
    cells: tuple[JudgedCell, ...]
    variant: str = ""

    @property
    def ours(self) -> float | None:
        """Our ratio on the machine that the figures assume."""
        return next((cell.ours for cell in self.cells if cell.machine == self.own), None)

    @property
    def holding(self) -> list[JudgedCell]:
        return [cell for cell in self.cells if cell.holds]

    @property
    def nearest(self) -> JudgedCell | None:
        """The cell that holds and differs least from ``own``, both factors counted alike; None if none holds."""
        return min(self.holding, key=lambda cell: self._distance(cell.machine), default=None)

    @property
    def closest(self) -> JudgedCell | None:
        """The cell whose ratio comes closest to the claimed one; None if no cell is finished."""
        finished = [cell for cell in self.cells if cell.ours]
        return min(finished, key=lambda cell: abs(math.log(cell.ours / self.claim.ratio)), default=None)

    def _distance(self, machine: PlaneCell) -> float:
        return math.hypot(
            math.log(machine.cpu_gb_s / self.own.cpu_gb_s), math.log(machine.gpu_blocks / self.own.gpu_blocks)
        )


def judge_cells(claims: Sequence[Claim], rows: Sequence[FlatRecord]) -> list[MappedClaim]:
    """The mappable claims about which there are rows, in their order, once for each variant of the machine."""
    variants = grouped(rows, "variant")
    judged = [
        _judged(claim, [r for r in here if r["figure"] == claim.figure and claim.covers(r)])
        for claim in claims
        for here in variants.values()
    ]
    return [item for item in judged if item is not None]


def _judged(claim: Claim, rows: Sequence[FlatRecord]) -> MappedClaim | None:
    """``rows`` are those that the claim covers."""
    if not (mappable(claim) and rows):
        return None
    own = PlaneCell(rows[0]["own_cpu_gb_s"], rows[0]["own_gpu_blocks"])
    speeds = sorted({row["reference_cpu_gb_s"] for row in rows} - {None})
    pools = sorted({row["num_gpu_blocks"] for row in rows})
    compared = {
        machine: _compared(claim, rows, machine)
        for machine in (PlaneCell(speed, blocks) for blocks in pools for speed in speeds)
    }
    points = max(len(item.by_place) for item in compared.values())
    cells = []
    for machine, item in compared.items():
        ours = item.summary if points and len(item.by_place) == points else None  # else some points are not finished
        cells.append(JudgedCell(machine, ours, agrees(claim.ratio, ours)))
    return MappedClaim(claim, own, tuple(cells), rows[0].get("variant") or "")


def _compared(claim: Claim, rows: Sequence[FlatRecord], machine: PlaneCell) -> Comparison:
    """The claim on one machine. GPU-only systems have no speed of CPU attention."""
    here = [
        row
        for row in rows
        if row["num_gpu_blocks"] == machine.gpu_blocks and row["reference_cpu_gb_s"] in (None, machine.cpu_gb_s)
    ]
    return compare_claims([claim], here)[0]


def why_not_mapped(claim: Claim) -> str:
    """Why a claim that is not mappable is not."""
    if claim.ratio is None:
        return "states no number"
    if claim.metric != METRIC:
        over_rates = "latency" in claim.metric or "rate" in claim.metric
        why = "needs many request rates in each cell" if over_rates else "is no throughput of two systems at a point"
        return f"is about {METRIC_WORDS.get(claim.metric, claim.metric)}, which {why}"
    if claim.setting is not None:
        return "is about a paper whose systems are no schedulers"
    return "names no machine"


# -- table and figure -------------------------------------------------------------------------------------------------

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


def draw_map(items: Sequence[MappedClaim], text: FigureText) -> Figure:
    """A panel for each claim: speed of CPU attention by GPU blocks, coloured by our ratio over the claimed one.

    Raises:
        ValueError: there is nothing to draw.
    """
    if not items:
        raise ValueError("nothing to draw: no point of a mapped claim is finished")
    meaning = "our ratio over the claimed one (darkest: half and less, twice and more)"
    words = f"framed: within {AGREES:.0%} of the claim\n{STAR}: the machine that our figures assume"
    return heat_map([plane_of(item) for item in items], text, SPAN, meaning, words)


def plane_of(item: MappedClaim) -> Plane:
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
        cells[place] = Cell(ratio, number + star, framed=cell.holds)
    return Plane(
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


STUDY = Study(
    NAME,
    section=lambda settings: {
        "seed": 0, **{name: it for name, it in settings.items() if name not in ("cpu_attention_gb_s", "gpu_pools")}
    },
    fields=FIELDS | {"figure"},
    points=map_points,
    show=lambda run, console: show_map(load_claims(), run, console),
)  # fmt: skip
main = command(Options, {NAME: STUDY})
