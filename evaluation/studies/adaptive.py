"""The scheduler `adaptive` beside the papers' schedulers: cases, a map, latency under load, wrong profile
tables, and checks of what it must hold."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pandas as pd
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from apex.perf.model import PerfModel
from apex.simulator.paper_settings import load_setting
from evaluation.drivers import SimulatedTask
from evaluation.grid import FIELDS, OWN_KERNELS, SUBJECT, Place, concerns, simulate, simulated_point, trace_of
from evaluation.options import StudyOptions, experiment_settings
from evaluation.plots.charts import Bar, Cell, LinePanel, Plane, Series, heat_map, line_figure, rows_of_bars
from evaluation.plots.notes import known_notes, span_text
from evaluation.plots.style import FigureText, system_colour, times
from evaluation.results.folder import FlatRecord
from evaluation.results.rows import bases, distinct, frame_of, grouped, over, with_columns
from evaluation.results.tables import LATENCY_COLUMNS, Columns, rows_table
from evaluation.run import Point
from evaluation.study import RATE, Rows, Study, Table, command

NAME = "adaptive"
PUBLISHED = ("swiftllm", "neo", "apex")
"""The papers' systems, to which all are compared."""
PartName = Literal["cases", "map", "latency", "wrong-tables", "checks"]


@dataclass(frozen=True)
class Options(StudyOptions):
    """The scheduler `adaptive` beside the papers' schedulers, SIMULATED (predicted times, no GPU needed).

    The cases and all constants come from configs/experiments/adaptive.yaml. Results, figure and provenance go to
    results/adaptive/<run>/, those of the other parts to results/adaptive-<part>/<run>/. Running the same command again
    continues an interrupted run.
    """

    part: Annotated[tuple[PartName, ...], tyro.conf.arg(metavar="PART ...")] = ("cases",)
    """cases: throughput of 25 cases (two minutes on two cores).
    map: throughput over CPU bandwidth and output length (15 minutes on two cores).
    latency: latency of some cases under load, beside neo and apex.
    wrong-tables: throughput of the cases where the profile table is wrong about CPU attention.
    checks: what `adaptive` must hold, on workloads of no case (a minute on two cores).
    Fields to --set: kernel (native, ispc or llamafile for every system), hand_over_us (what submitting an attention
    task costs the GPU batch), with_bound (true: a column of the bound, see docs/simulator.md; half a minute a row),
    without (prompt-chunks, free-running or lockstep: adaptive without one of its ideas)."""


# -- points -----------------------------------------------------------------------------------------------------------

ERROR = ("actual_over_believed", "online_correction")
"""Fields of a row that name the error of its profile table; None for a system that has no table."""
ROW = ("case", "kernel", "without", "hand_over_us")
"""Fields that every row has."""
LIMITS = ("least_over_best", "most_ttft_over_best")
"""Fields of a row of the checks: what its ratios to the best published system must keep; None where any will do."""
CHANGES = {"hand_over_us": 0.0, "without": [None]}
"""Fields of all sections: no change."""


def cases_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The section of the cases."""
    return {**settings["cases"], **CHANGES, "kernel": OWN_KERNELS, "system": settings["system"]}


def loaded_cases_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The section of the cases under load."""
    section = {name: value for name, value in cases_of(settings).items() if name != "system"}
    return {**section, **{name: settings["latency"][name] for name in ("loaded_as", "load", "system")}}


def case_point(place: Place) -> Point:
    """A case with a system, all requests at once; in the cases of wrong tables with an error of the table."""
    names, error = (place["case"],), tuple(field for field in ERROR if field in place)
    if error and (ratio := place["actual_over_believed"]) is not None:
        names = (*names, f"x{ratio:g}", "corrected" if place["online_correction"] else "uncorrected")
    return named_point(names, place, error, bound_tokens_per_s=roofline_of(place))


def check_point(place: Place) -> Point:
    """A case of the checks with a system; where an idea of `adaptive` is switched off, named after it."""
    names = (place["case"], *([place["without"]] if place.get("without") else ()))
    return named_point(names, place, LIMITS, bound_tokens_per_s=roofline_of(place))


def map_point(place: Place) -> Point:
    """A cell with a system; GPU-only systems have one for each output length."""
    place = {**place, "case": f"out{place['output_len']}"}
    names, bound = (place["case"],), None
    if place["host_read_gb_s"] is not None:
        names, bound = (place["kernel"], f"{place['host_read_gb_s']:g}gbps", *names), roofline_of(place)
    return named_point(names, place, ["host_read_gb_s"], bound_tokens_per_s=bound)


def latency_points(options: Options) -> list[Point]:
    """Cases at each load with each system, Poisson arrivals, once it is known what the cases serve. Without --only of
    cases they are those that the experiment file names for this part.

    Raises:
        ValueError: a name is unknown, or no throughput is known.
    """
    places = PARTS["latency"].places(options)
    if not any(text.startswith("case=") for text in options.only):
        usual = experiment_settings(NAME, options.config)["latency"]["case"]
        places = [place for place in places if place["case"] in usual]
    at_once = {place["case"]: unloaded(place) for place in places}
    capacity = CAPACITY.run([named_point((case,), place) for case, place in at_once.items()], options.results_dir)
    if capacity.failed:
        raise ValueError(f"no throughput of {', '.join(capacity.failed)}; see errors/ in {capacity.folder}")
    served = {row["case"]: row[RATE] / row["output_len_mean"] for row in capacity.summary}  # requests per second
    return [loaded_point(place, place["load"] * served[place["case"]]) for place in places]


def unloaded(place: Place) -> Place:
    """The place with the system of which loads are fractions, all requests at once."""
    place = {**place, "system": place["loaded_as"], "load": None}
    return {field: value if concerns(field, place) else None for field, value in place.items()}


def loaded_point(place: Place, request_rate: float) -> Point:
    names = (place["case"], f"load{place['load']:.0%}")
    return named_point(names, {**place, "request_rate": request_rate}, ("load", "loaded_as"))


def named_point(names: Sequence[str], place: Place, row: Iterable[str] = (), **values: Any) -> Point:
    return simulated_point(names, simulate(place, (*ROW, *row), case_title=title_of(place), **values))


def title_of(place: Place) -> str:
    """Machine and workload in words, for figures."""
    gpu, _, model_and_host = load_setting(place["setting"]).title.partition(" + ")
    _, bracket, host = model_and_host.partition(" (")
    speed, output_len = place.get("cpu_bandwidth_gb_s"), place.get("output_len")
    cpu = f", CPU {speed:g} GB/s" if speed else ""
    workload = trace_of(place).title if place.get("workload") else f"{place['input_len']} in"
    return f"{gpu}{bracket}{host}{cpu}: {workload}" + (f", {output_len:g} out" if output_len else "")


# -- the bound --------------------------------------------------------------------------------------------------------

MOST_TOKENS = 4096  # the largest batch in which the roofline looks for the cheapest linear time of a token


def roofline_of(place: Place) -> float:
    """The roofline of a place, with the CPU attention of the ``SUBJECT``; tables that are wrong do not change it."""
    of_machine = {field: value for field, value in place.items() if field in FIELDS and field not in ERROR}
    return _roofline_of(frozenset({**of_machine, "system": SUBJECT}.items()))


@functools.cache
def _roofline_of(place: frozenset[tuple[str, Any]]) -> float:
    return roofline_tokens_per_s(simulate(dict(place)))


def roofline_tokens_per_s(task: SimulatedTask) -> float:
    """An upper bound of any schedule's output tokens per second, from the task's machine and lengths.

    Each token crosses the linear layers at the cheapest rate of any batch within the limits. Each decode attends on the
    GPU or on the CPU, and both read at their full rate. An iteration attends to at most the GPU pool on the GPU, and
    reads the weights once. The split between GPU and CPU is the best one. Filling, draining and the attention of
    prompts cost nothing, and the CPU tier holds everything; so no schedule reaches the roofline.
    :mod:`apex.simulator.bound` counts ramps, too.
    """
    model = PerfModel(task.hardware.table, task.hardware.num_layers)
    rows = task.lengths.rows
    output_tokens = sum(row.output_tokens for row in rows)
    all_tokens = sum(row.input_tokens + row.output_tokens for row in rows)
    attended = sum(row.output_tokens * (row.input_tokens + row.output_tokens / 2) for row in rows)
    limits = task.limits
    sizes = range(1, min(MOST_TOKENS, limits.max_num_batched_tokens + limits.max_num_seqs) + 1)
    compute_s = all_tokens * model.num_layers * min(model.linear_s(size) / size for size in sizes)
    ends_s = output_tokens * min(model.outside_layers_s(size) / size for size in sizes)
    context = 8192  # tokens of a request; rates are those of long contexts
    gpu_s, cpu_s = (
        model.num_layers * (attention_s(64, 128 * context) - attention_s(64, 64 * context)) / (64 * context)
        for attention_s in (model.gpu_attention_s, model.cpu_attention_s)
    )
    iteration_s = model.num_layers * model.linear_s(1) + model.outside_layers_s(1)
    gpu_pool_tokens = task.num_gpu_blocks * task.block_size
    gpu_batch = [(compute_s + ends_s, gpu_s), (0.0, iteration_s / gpu_pool_tokens + gpu_s)]
    return output_tokens / least_makespan_s(gpu_batch, attended, cpu_s)


def least_makespan_s(gpu_batch: Sequence[tuple[float, float]], attended: float, cpu_s: float) -> float:
    """Seconds of GPU and CPU together at the best split of ``attended`` context tokens between them.

    Args:
        gpu_batch: lower bounds (a, b) of the GPU's seconds: a + b y with y of the context tokens attended on the GPU.
        cpu_s: seconds per context token on the CPU.
    """
    crossings = [(attended * cpu_s - fixed_s) / (token_s + cpu_s) for fixed_s, token_s in gpu_batch]
    on_gpu = min(max(min(crossings), 0.0), attended)
    return max((attended - on_gpu) * cpu_s, *(fixed_s + token_s * on_gpu for fixed_s, token_s in gpu_batch))


# -- ratios -----------------------------------------------------------------------------------------------------------

MOST_WITHOUT = 1.005
"""A row without an idea may be faster than with all of them by this factor."""
LATENCY_RATIOS = {
    "per_token_latency_s_mean": "latency_over",
    "ttft_s_p99": "ttft_p99_over",
    "tpot_s_p99": "tpot_p99_over",
}
"""Metrics of which a row under load has ratios to other systems, and how the names of these begin."""


def with_best(rows: Rows, at: Sequence[str] = ("case",), any_of: Sequence[str] = ()) -> list[FlatRecord]:
    """Adds to each row ``fraction_of_bound``, ``best_published`` (the fastest of the papers' systems at its place) and
    ``ratio_to_best_published``; None where none of these ran. A row without tokens has ratios of 0.

    ``at`` and ``any_of`` are the fields of a place, as in ``bases``.
    """
    frame = frame_of(rows)
    rate = frame[RATE].astype(float).fillna(0.0)
    best = bases(frame, frame["system"].isin(PUBLISHED) & (rate > 0), at, any_of, best=rate)
    return with_columns(
        rows,
        fraction_of_bound=rate / frame["bound_tokens_per_s"].astype(float),
        best_published=best.map(frame["system"]),
        ratio_to_best_published=over(rate, best),
    )


def over_least(rows: Rows, metric: str, at: Sequence[str]) -> pd.Series:
    """The metric over the least of the published systems at the same place."""
    frame = frame_of(rows)
    values = frame[metric].astype(float)
    return over(values, bases(frame, frame["system"].isin(PUBLISHED) & (values > 0), at, best=-values))


def with_checks(rows: Rows) -> list[FlatRecord]:
    """As ``with_best``; also the p99 of the first token over the best of the published systems, and whether a row
    ``holds``: its ratios keep their limits. Without an idea it must not be faster than with all of them."""
    checked = with_columns(with_best(rows), ttft_over_best=over_least(rows, "ttft_s_p99", ("case",)))
    whole = {row["case"]: row[RATE] for row in checked if row["system"] == SUBJECT and not row["without"]}
    for row in checked:
        row["holds"] = None
        if row["system"] == SUBJECT and row["without"]:
            row["holds"] = None if row["case"] not in whole else row[RATE] <= MOST_WITHOUT * whole[row["case"]]
        elif row["system"] == SUBJECT:
            least, most = (row[limit] for limit in LIMITS)
            if None not in (row["ratio_to_best_published"], row["ttft_over_best"]):
                keeps_rate = least is None or row["ratio_to_best_published"] >= least
                row["holds"] = keeps_rate and (most is None or row["ttft_over_best"] <= most)
    return checked


def with_latency_ratios(rows: Rows) -> list[FlatRecord]:
    """Adds to each row its latencies over those of each published system at the same load, named as in
    ``LATENCY_RATIOS`` with the system's name, and over the least of these; None where that did not run."""
    frame, ratios = frame_of(rows), {}
    for system in PUBLISHED:
        base = bases(frame, frame["system"] == system, ("case", "load"))
        ratios |= {f"{name}_{system}": over(frame[metric], base) for metric, name in LATENCY_RATIOS.items()}
    ratios |= {f"{name}_best": over_least(rows, metric, ("case", "load")) for metric, name in LATENCY_RATIOS.items()}
    return with_columns(rows, **ratios)


def with_error_ratios(rows: Rows) -> list[FlatRecord]:
    """As ``with_best`` under the same error; also ``ratio_to_right_table``: throughput over that of the same system
    with a right table."""
    frame = frame_of(rows)
    right = bases(frame, frame["actual_over_believed"].fillna(1.0) == 1.0, ("case", "system"))
    return with_columns(with_best(rows, any_of=ERROR), ratio_to_right_table=over(frame[RATE], right))


# -- tables -----------------------------------------------------------------------------------------------------------

CELLS: Columns = (
    ("kernel", "kernel", "s"), ("CPU GB/s", "host_read_gb_s", "g"), ("mean output", "output_len", ".0f"),
    ("tok/s", RATE, ".1f"), ("best published", "best_published", "s"),
    ("over best", "ratio_to_best_published", ".3f"), ("of roofline", "fraction_of_bound", ".2f"),
)  # fmt: skip
WORST = 12
"""Cells in the table of the worst ones."""


def print_map(summary: Rows, console: Console) -> None:
    console.print(f"\nSIMULATED; the cells in which {SUBJECT} is worst, over the best of the published systems there")
    for here in grouped(subject_rows(summary), "kernel").values():
        here.sort(key=lambda row: row["ratio_to_best_published"])
        console.print(rows_table(here[:WORST], CELLS))
        ratios = [row["ratio_to_best_published"] for row in here]
        mean = statistics.geometric_mean(ratios)
        console.print(
            f"{len(ratios)} cells: {ratios[0]:.3f} to {ratios[-1]:.3f}, geometric mean {mean:.3f}, "
            f"{sum(ratio < 1 for ratio in ratios)} below 1\n"
        )


CHECKED: Columns = (
    ("case", "case", "s"), ("without", "without", "s"), ("tok/s", RATE, ".1f"), ("best", "best_published", "s"),
    ("over best", "ratio_to_best_published", ".3f"), ("least", "least_over_best", "g"),
    ("TTFT p99 (s)", "ttft_s_p99", ".1f"), ("over best", "ttft_over_best", ".3f"),
    ("most", "most_ttft_over_best", "g"), ("s/token", "per_token_latency_s_mean", ".3f"), ("holds", "holds", ""),
)  # fmt: skip


def print_checks(summary: Rows, console: Console) -> None:
    rows = subject_rows(summary)
    console.print(f"\nSIMULATED; {SUBJECT} over the best of the published systems: throughput, p99 of the first token")
    console.print(rows_table(rows, CHECKED))
    ratios = [row["ratio_to_best_published"] for row in rows if not row["without"] and row["ratio_to_best_published"]]
    broken = [row["case"] for row in rows if row["holds"] is False]
    if not ratios:
        return
    console.print(
        f"{len(ratios)} cases: {min(ratios):.3f} to {max(ratios):.3f}, geometric mean "
        f"{statistics.geometric_mean(ratios):.3f}; not held: {', '.join(broken) or 'none'}\n"
    )


def error_rows(summary: Rows) -> Iterator[FlatRecord]:
    """The lowest ratios of each error, over all cases."""
    for error, here in grouped(subject_rows(summary), *ERROR).items():
        worst = min(here, key=lambda row: row["ratio_to_best_published"])
        changed = [row for row in here if row["ratio_to_right_table"] is not None]
        most = min(changed, key=lambda row: row["ratio_to_right_table"], default={})
        yield {
            "actual_over_believed": error[0],
            "correction": "on" if error[1] else "off",
            "cases": len(here),
            "mean": math.exp(statistics.fmean(math.log(row["ratio_to_best_published"]) for row in here)),
            "lowest": worst["ratio_to_best_published"],
            "lowest_case": worst["case"],
            "lowest_right": most.get("ratio_to_right_table"),
            "lowest_right_case": most.get("case"),
        }


def subject_rows(summary: Rows) -> list[FlatRecord]:
    """The rows of `adaptive` that have a ratio."""
    return [row for row in summary if row["system"] == SUBJECT and row["ratio_to_best_published"] is not None]


# -- figures ----------------------------------------------------------------------------------------------------------

LATENCIES_DRAWN = (("per_token_latency_s_mean", "mean s per token"), ("ttft_s_p99", "p99 s to first token"))
LEAST_DECADES = 1.0
"""A vertical axis of latencies spans at least this, so that small differences look small."""
LEAST_SPAN = 1.1
"""The colours of the map span at least the ratios from 1/LEAST_SPAN to LEAST_SPAN."""


def draw_cases(summary: Rows) -> Figure:
    """Throughput of each system as a fraction of the roofline; a group of bars for each case."""
    systems = distinct(summary, "system")
    groups = []
    for rows in grouped(summary, "case").values():
        by_system = {row["system"]: row for row in rows}
        bars = [case_bar(by_system[system]) if system in by_system else Bar(0.0, "none") for system in systems]
        groups.append((rows[0]["case_title"], bars))
    text = FigureText(
        f"Throughput of {SUBJECT} and the papers' systems \u2014 SIMULATED",
        f"All requests at once; bars of {SUBJECT} are marked with its tokens/s and its ratio to the best of the others",
        "Predicted times, nothing measured. The roofline bounds any schedule: it ignores filling, draining and the "
        "attention of prompts, so no schedule reaches 1.\n"
        "Names: GPU (host, where it is not APEX's), CPU attention where it is not the kernel's own rate, workload with "
        "mean input and output tokens.\n" + "\n".join(known_notes(summary)),
    )
    return rows_of_bars(groups, systems, text, "output tokens/s over the roofline, SIMULATED")


def case_bar(row: FlatRecord) -> Bar:
    ratio, words = row["ratio_to_best_published"], ""
    if row["system"] == SUBJECT and ratio:
        words = f"{row[RATE]:.0f} tok/s, {ratio:.2f}\u00d7"
    return Bar(row["fraction_of_bound"], system_colour(row["system"]), words, bold=bool(words) and round(ratio, 2) < 1)


def draw_map(summary: Rows) -> Figure:
    """CPU bandwidth by output length: a plane for each kernel, a cell for each pair, marked with its ratio.

    Raises:
        ValueError: there is nothing to draw.
    """
    rows = subject_rows(summary)
    if not rows:
        raise ValueError("nothing to draw: no cell is finished")
    lengths, bandwidths = (sorted(set(distinct(rows, field))) for field in ("output_len", "host_read_gb_s"))
    planes = []
    for kernel, here in grouped(rows, "kernel").items():
        cells = {}
        for row in here:
            ratio = row["ratio_to_best_published"]
            place = bandwidths.index(row["host_read_gb_s"]), lengths.index(row["output_len"])
            cells[place] = Cell(ratio, f"{ratio:.2f}", bold=round(ratio, 2) < 1)
        own = kernel == OWN_KERNELS
        title = "Each system with its own CPU kernel" if own else f"All systems with the kernel {kernel}"
        x_label = "GB/s that the CPU's cores read from memory"
        columns, lines = ([f"{value:g}" for value in values] for values in (bandwidths, lengths))
        planes.append(Plane(title, "", x_label, "mean output (tokens)", columns, lines, cells))
    ratios = [row["ratio_to_best_published"] for row in rows]
    span = max(LEAST_SPAN, *(max(ratio, 1 / ratio) for ratio in ratios))
    return heat_map(planes, map_text(summary, rows), span, f"{SUBJECT} over the best of the others")


def map_text(summary: Rows, rows: Rows) -> FigureText:
    first = rows[0]
    published = [system for system in distinct(summary, "system") if system != first["system"]]
    return FigureText(
        f"{first['system']} over the best of {', '.join(published)} \u2014 SIMULATED",
        "Output tokens/s, all requests at once; above 1 (blue) "
        f"{first['system']} is faster, below 1 (red, bold) another system is\n"
        f"{first['setting_title']} in {first['host']}; prompts of about {round(first['input_len'], -1):.0f} tokens",
        f"Predicted times, nothing measured. {counts(rows)} requests a cell, lengths uniform within "
        f"10% of the mean, seed {first['seed']}. {first['num_gpu_blocks']} GPU blocks of 16 tokens, "
        f"{first['cpu_kv_gb']:g} GB of host memory for KV cache.\n"
        "Own kernels: neo computes CPU attention with ISPC, apex and adaptive with llamafile. A kernel reaches less "
        "than the cores read, the more arithmetic it does.\n" + "\n".join(known_notes(rows)),
    )


def counts(rows: Rows) -> str:
    return span_text(sorted(set(distinct(rows, "num_requests"))))


def draw_latency(summary: Rows) -> Figure:
    """For each case the mean latency per token and the p99 time to first token, over the load."""
    first, cases = summary[0], grouped(summary, "case").values()
    panels = [latency_panel(rows, *drawn) for rows in cases for drawn in LATENCIES_DRAWN]
    text = FigureText(
        "Latency under load \u2014 SIMULATED",
        f"Poisson arrivals; a load of 100% is what {first['loaded_as']} serves when all requests are there at once. "
        "Lower is better; vertical axes are logarithmic\n"
        f"Numbers at the bottom of a panel: the latency of {SUBJECT} over that of {first['loaded_as']}",
        f"Predicted times, nothing measured. {counts(summary)} requests a point, seed {first['seed']}. "
        "Latency per token: a request's time from arrival to its last token, over its output tokens.\n"
        + "\n".join(known_notes(summary)),
    )
    return line_figure(panels, text, columns=4, panel_width=3.2, height=1.35)


def latency_panel(rows: Rows, metric: str, words: str) -> LinePanel:
    """A line for each system, those drawn first wider; at the bottom the ratios of `adaptive`."""
    over = f"{LATENCY_RATIOS[metric]}_{rows[0]['loaded_as']}"
    by_system = grouped((row for row in rows if row[metric]), "system")
    lines = [
        Series(
            system, system_colour(system), [(100 * row["load"], row[metric]) for row in here], width=1.5 + 1.3 * wider
        )
        for wider, (system, here) in zip(reversed(range(len(by_system))), by_system.items(), strict=True)
    ]
    marks = [(100 * row["load"], times(row[over])) for row in by_system.get(SUBJECT, ()) if row[over]]
    title = rows[0]["case_title"] if metric == LATENCIES_DRAWN[0][0] else ""
    axes = {"x_from_0": False, "log_y": True, "decades": LEAST_DECADES}
    return LinePanel(title, "load (%)", words, lines, **axes, marks=marks)


# -- parts ------------------------------------------------------------------------------------------------------------

OF_CASES = FIELDS | {"case"}
CAPACITY = Study(f"{NAME}-capacity")
"""The throughput of which the loads of part latency are fractions."""
PARTS = {
    "cases": Study(
        NAME,
        section=cases_of,
        fields=OF_CASES,
        point=case_point,
        derive=with_best,
        tables=[
            Table(
                (
                    ("case", "case", "s"), ("system", "system", "s"), ("tok/s", RATE, ".1f"),
                    ("over best", "ratio_to_best_published", ".3f"), ("of roofline", "fraction_of_bound", ".2f"),
                    ("of the bound", "of_the_bound", ".2f"), ("binds", "binds", "s"),
                    ("TTFT p50", "ttft_s_p50", ".1f"), ("p99 (s)", "ttft_s_p99", ".1f"),
                    ("TPOT p50", "tpot_s_p50", ".3f"), ("p99 (s)", "tpot_s_p99", ".3f"),
                    ("GPU batch", "gpu_batch_busy_fraction", ".0%"), ("CPU", "cpu_busy_fraction", ".0%"),
                ),
                "\nSIMULATED; over best: throughput over the best of the published systems",
            )
        ],
        figure=lambda run: draw_cases(run.summary),
    ),
    "map": Study(
        f"{NAME}-map",
        file=NAME,
        section=lambda settings: {**settings["map"], **CHANGES, "system": settings["system"]},
        fields=OF_CASES,
        point=map_point,
        derive=lambda rows: with_best(rows, ("output_len",), ("kernel", "host_read_gb_s")),
        tables=[print_map],
        figure=lambda run: draw_map(run.summary),
    ),
    "latency": Study(
        f"{NAME}-latency",
        file=NAME,
        section=loaded_cases_of,
        fields=OF_CASES | {"loaded_as", "load"},
        points=latency_points,
        derive=with_latency_ratios,
        tables=[
            Table(
                (
                    ("case", "case", "s"), ("load", "load", ".0%"), ("req/s", "request_rate", ".3g"),
                    ("system", "system", "s"), ("s/token", "per_token_latency_s_mean", ".3f"), *LATENCY_COLUMNS,
                ),
                lambda rows: (
                    f"\nSIMULATED; load: requests/s over what {rows[0]['loaded_as']} serves when all are there at once"
                ),
            ),
            Table(
                (
                    ("case", "case", "s"), ("load", "load", ".0%"), ("s/token / neo", "latency_over_neo", ".3f"),
                    ("/ apex", "latency_over_apex", ".3f"), ("TTFT p99 / neo", "ttft_p99_over_neo", ".3f"),
                    ("/ apex", "ttft_p99_over_apex", ".3f"), ("TPOT p99 / neo", "tpot_p99_over_neo", ".3f"),
                    ("/ apex", "tpot_p99_over_apex", ".3f"), ("s/token / best", "latency_over_best", ".3f"),
                    ("TTFT p99 / best", "ttft_p99_over_best", ".3f"),
                ),
                f"\nlatencies of {SUBJECT} over those of the others",
                lines=lambda rows: [row for row in rows if row["system"] == SUBJECT],
            ),
        ],
        figure=lambda run: draw_latency(run.summary),
    ),
    "wrong-tables": Study(
        f"{NAME}-wrong-tables",
        file=NAME,
        section=lambda settings: {**cases_of(settings), **settings["wrong_tables"]},
        fields=OF_CASES,
        point=case_point,
        derive=with_error_ratios,
        tables=[
            Table(
                (
                    ("actual / believed", "actual_over_believed", "g"), ("correction", "correction", "s"),
                    ("cases", "cases", "d"), ("mean", "mean", ".3f"), ("over best", "lowest", ".3f"),
                    ("in", "lowest_case", "s"), ("over right", "lowest_right", ".3f"), ("in", "lowest_right_case", "s"),
                ),
                f"\nSIMULATED; {SUBJECT} where CPU attention takes longer or shorter than its profile table says:\n"
                "lowest ratio over the best published system with the same error (mean: geometric, over the cases), "
                "and over\nitself with a right table",
                lines=lambda rows: list(error_rows(rows)),
            )
        ],
    ),
    "checks": Study(
        f"{NAME}-checks",
        file=NAME,
        section=lambda settings: {**CHANGES, **settings["checks"], "system": settings["system"]},
        fields=OF_CASES | set(LIMITS),
        point=check_point,
        derive=with_checks,
        tables=[print_checks],
    ),
}  # fmt: skip
main = command(Options, PARTS)
