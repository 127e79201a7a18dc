"""OmniServe's evaluation of two service classes: latency-sensitive requests at a rate, best-effort ones behind them."""

from __future__ import annotations

import asyncio
import functools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import httpx
import numpy as np
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from apex.cli.output import table
from apex.replay.metrics import Targets
from apex.replay.records import RequestRecord
from apex.strategy import StrategyConfig
from apex.workloads.catalogue import load_trace
from apex.workloads.requests import Lengths, WorkloadSpec, make_lengths, merge_lengths
from evaluation.drivers import HttpTask, run_on_launched
from evaluation.grid import FIELDS, Grid, Place, simulate, simulated_point
from evaluation.measure.processes import stop_on_sigterm
from evaluation.measure.server import Server
from evaluation.options import Folder, StudyOptions, experiment_settings
from evaluation.plots.charts import Bar, BarPanel, LinePanel, Series, draw_bars, line_figure
from evaluation.plots.notes import Records, known_notes, span_text, trace_note
from evaluation.plots.style import FigureText, legend, sheet, system_colour, times
from evaluation.results.claims import load_claims, print_claims
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import model_folder
from evaluation.results.progress import print_line
from evaluation.results.provenance import model_identity
from evaluation.results.rows import bases, distinct, frame_of, grouped, label_of, over, with_columns
from evaluation.results.tables import Columns, rows_table
from evaluation.run import Point, PointResult, identity
from evaluation.study import Rows, Study, command, places_of
from swiftllm.config import EngineConfig
from swiftllm.core.request import ServiceClass
from swiftllm.systems import find_system

# -- simulated ---------------------------------------------------------------------------------------------------------

FigureName = Literal["a10", "a10-limits", "10", "11", "12", "13", "14", "15", "16", "17", "18", "19", "http"]
HTTP = "http"
SIMULATED = tuple(name for name in get_args(FigureName) if name != HTTP)
ALSO_DRAWN = {"15": "10", "16": "11"}
"""Figures of best-effort requests, and the figure of the same run for the latency-sensitive ones."""


@dataclass(frozen=True)
class Options(StudyOptions):
    """The figures of OmniServe's evaluation, SIMULATED (predicted times, no GPU needed), but for figure http.

    Defaults come from configs/experiments/omniserve.yaml. Results, figure and provenance go to
    results/omniserve-fig<figure>/<run>/ or results/omniserve-a10.../<run>/. Running the same command again continues an
    interrupted run.
    """

    part: Annotated[tuple[FigureName, ...], tyro.conf.arg(name="figure", metavar="FIGURE ...")] = SIMULATED
    """Figures of the paper. 10, 11, 12: attainment over request rate; 13: over the target; 14: under bursts;
    15, 16, 17: best-effort throughput (15 and 16 are drawn with 10 and 11); 18: CPU hosts; 19: admission control.
    a10: a GPU with little memory, which the paper does not have; a10-limits: where the gain on it ends.
    All of these by default. http: a small model on this machine, MEASURED at the client of one server after the
    other. A field to --set: duration_s, the seconds of every point, virtual ones but for http."""
    model: Folder = None
    """Folder of the model that figure http serves; by default SmolLM2-135M-Instruct."""


# -- the two streams of requests --------------------------------------------------------------------------------------

SPARE = 1.25
"""Arrivals that are drawn, over those expected: enough to fill the duration."""
OTHER_STREAM = 1000
"""Added to the seed for the best-effort stream."""
RATES = 3
"""Distinguishes the draws of rates from the others of a seed."""


def latency_sensitive(
    workload: str, request_rate: float, duration_s: float, seed: int, trace_dir: Path | None, scale: float = 1.0
) -> Lengths:
    """Poisson arrivals at ``request_rate`` per second over the duration. ``scale`` is a factor for all lengths.

    Raises:
        ValueError: the duration is not above 0.
    """
    if duration_s <= 0:
        raise ValueError(f"duration_s={duration_s:g} must be more than 0")
    spec = replace(poisson_spec(workload, request_rate, duration_s, seed), scale=scale)
    return cut(make_lengths(spec, load_trace(workload, trace_dir)), duration_s)


def bursty(
    workload: str,
    lowest: float,
    highest: float,
    interval_s: float,
    duration_s: float,
    seed: int,
    trace_dir: Path | None,
) -> Lengths:
    """Poisson arrivals at a rate that is drawn anew every ``interval_s`` (OmniServe, Figure 14).

    Rates are uniform between the lowest and the highest. Arrivals of rate 1 are mapped onto the sum of the rates.
    """
    rng = np.random.default_rng([seed, RATES])
    rates = rng.uniform(lowest, highest, math.ceil(duration_s / interval_s))
    expected = np.concatenate([[0.0], np.cumsum(rates) * interval_s])
    edges = np.arange(len(expected)) * interval_s
    spec = poisson_spec(workload, 1.0, float(expected[-1]), seed)
    steady = make_lengths(spec, load_trace(workload, trace_dir))
    rows = tuple(
        replace(row, arrival_s=float(np.interp(row.arrival_s, expected, edges)))
        for row in steady.rows
        if row.arrival_s < expected[-1]
    )
    mean_rate = round(float(expected[-1]) / float(edges[-1]), 6)
    changed = replace(steady, spec=replace(spec, request_rate=mean_rate), rows=rows)
    return cut(changed, duration_s)


def best_effort(settings: Mapping[str, Any], duration_s: float, seed: int, trace_dir: Path | None) -> Lengths:
    """The stream of a section: a Poisson stream of ``request_rate``, or a backlog that is there at once.

    The backlog is of ``backlog`` requests and ``backlog_per_s`` for each second of the run, lengths times ``scale``.
    ``output_len``: their mean output in tokens, before scaling; by default that of the workload.
    """
    workload, seed = settings["workload"], seed + OTHER_STREAM
    if "request_rate" in settings:
        return latency_sensitive(workload, settings["request_rate"], duration_s, seed, trace_dir)
    count = settings["backlog"] + math.ceil(settings.get("backlog_per_s", 0.0) * duration_s)
    spec = WorkloadSpec(workload, count, settings.get("scale", 1.0), settings.get("output_len"), seed=seed)
    return make_lengths(spec, load_trace(workload, trace_dir))


def with_best_effort(
    urgent: Lengths, settings: Mapping[str, Any] | None, duration_s: float, seed: int, trace_dir: Path | None
) -> Lengths:
    """The requests beside the best-effort stream of a section; alone for None."""
    if settings is None:
        return urgent
    return merge_lengths(urgent, best_effort(settings, duration_s, seed, trace_dir))


def poisson_spec(workload: str, rate: float, duration_s: float, seed: int) -> WorkloadSpec:
    count = math.ceil(SPARE * rate * duration_s) + 20
    return WorkloadSpec(workload, count, arrivals="poisson", request_rate=rate, seed=seed)


def cut(lengths: Lengths, duration_s: float) -> Lengths:
    """The requests that arrive within the duration."""
    rows = tuple(row for row in lengths.rows if row.arrival_s < duration_s)
    return replace(lengths, spec=replace(lengths.spec, num_requests=len(rows)), rows=rows)


# -- points -----------------------------------------------------------------------------------------------------------

WITHOUT_CLASSES = ("neo", "apex", "adaptive", "swiftllm", "vllm", "fastdecode")
"""Systems that know one class of requests."""
USUAL = {
    "best_effort": None,
    "request_rate": None,
    "rate_interval_s": None,
    "tpot_slo_s": None,
    "cpu_hosts": 1,
    "admission_control": True,
    "slower": 1.0,
}
"""Fields of a panel that does not have them, in the order in which they vary.

``best_effort`` is the name of the best-effort stream; None for latency-sensitive requests alone. The rate of arrivals
changes after each ``rate_interval_s`` seconds, between ``lowest_rate`` and ``highest_rate``; None for a steady rate.
"""
ROW = ("panel", "baseline", *USUAL, "ttft_slo_s", "one_class")
KNOWN = FIELDS | {"panel", "baseline", "best_effort", "rate_interval_s", "lowest_rate", "highest_rate"}
NOTES = ("shows", "x", "metrics", "differs")
"""Entries of a section that say how its figure is drawn."""


def section_of(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The section of a figure in the experiment file as a grid, each panel with the targets of its setting."""
    section, targets = settings["figures"][name], settings["targets"]
    panels = [{**USUAL, **targets[panel["setting"]], **panel} for panel in section["panels"]]
    shared = {field: value for field, value in section.items() if field not in NOTES}
    return {**shared, "panels": panels, "seed": settings["seed"]}


def service_point(settings: Mapping[str, Any], lengths: dict[tuple[str, ...], Lengths], place: Place) -> Point:
    """The point of a place. ``lengths`` are the requests made before: the systems of a place share them."""
    place = {**place, "one_class": place["system"] in WITHOUT_CLASSES}
    parts = parts_of(place)
    if parts not in lengths:
        lengths[parts] = lengths_at(place, settings)
    cost = place["duration_s"] * (2.0 if find_system(place["system"]).needs_predictions else 1.0)
    return simulated_point(parts, simulate(place, ROW, lengths[parts]), cost)


def parts_of(place: Place) -> tuple[str, ...]:
    """What distinguishes the place, for keys."""
    rate, interval_s = place["request_rate"], place["rate_interval_s"]
    blocks, slower = place.get("num_gpu_blocks"), place["slower"]
    return (
        place["panel"],
        place["setting"],
        place["best_effort"] or "alone",
        f"rate{rate:g}" if interval_s is None else f"every{interval_s:g}s",
        f"tpot{place['tpot_slo_s']:g}",
        f"hosts{place['cpu_hosts']}",
        *([f"blocks{blocks}"] if blocks else []),
        *([f"slower{slower:g}"] if slower != 1.0 else []),
        *([] if place["admission_control"] else ["admit-all"]),
    )


def lengths_at(place: Place, settings: Mapping[str, Any]) -> Lengths:
    """The requests of both streams."""
    workload, interval_s = settings["latency_sensitive"], place["rate_interval_s"]
    of_run = (place["duration_s"], place["seed"], place["trace_dir"])
    if interval_s is None:
        urgent = latency_sensitive(workload, place["request_rate"], *of_run)
    else:
        urgent = bursty(workload, place["lowest_rate"], place["highest_rate"], interval_s, *of_run)
    name = place["best_effort"]
    return with_best_effort(urgent, None if name is None else settings["best_effort"][name], *of_run)


# -- ratios between rows of a figure ----------------------------------------------------------------------------------

PLACE = (
    "setting",
    "num_gpu_blocks",
    "best_effort",
    "request_rate",
    "rate_interval_s",
    "tpot_slo_s",
    "cpu_hosts",
    "admission_control",
    "slower",
)
"""Fields of a row that name its point."""
COMPARED = (
    "slo_attainment",
    "best_effort_tokens_per_s",
    "latency_sensitive_tpot_s_p50",
    "latency_sensitive_tokens_per_s",
    "ttft_attainment_admitted",
)


def with_service_ratios(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """Adds to each row what it compares with, None where that did not run.

    - ``best_effort_over_baseline``: best-effort tokens/s over those of the figure's baseline.
    - ``best_effort_over_one_host``, ``tpot_over_one_host``: best-effort tokens/s and the median time per token of
      latency-sensitive requests, over those of the same system with the GPUs' own CPU host only.
    - ``points_over_alone``: attainment with best-effort requests minus attainment without, in percentage points;
      ``attainment_over_alone`` is the ratio. Without is the same system, else the baseline, on as many CPU hosts, else
      on one.
    - ``ttft_over_uncontrolled``, ``throughput_over_uncontrolled``: TTFT attainment of admitted requests, and tokens/s
      of latency-sensitive requests, over those without admission control.
    """
    frame = frame_of(rows, ("system", "baseline", *PLACE, *COMPARED))
    is_baseline, one_host = frame["system"] == frame["baseline"], frame["cpu_hosts"] == 1
    controlled, is_alone = frame["admission_control"].astype(bool), frame["best_effort"].isna()
    beside = ~is_alone
    attained, tokens = frame["slo_attainment"].astype(float), frame["best_effort_tokens_per_s"]

    def place(who: str, *others: str) -> list[str]:
        """The fields of a place, but for those in which the other row differs."""
        return [who, *(field for field in PLACE if field not in others)]

    baseline = bases(frame, is_baseline, place("baseline"))
    on_one_host = bases(frame, one_host, place("system", "cpu_hosts"), lines=~one_host)
    uncontrolled = bases(frame, ~controlled, place("system", "admission_control"), lines=controlled)
    alone = bases(frame, is_alone, place("system", "best_effort"), lines=beside)
    for to, fields in (
        (is_alone & one_host, place("system", "best_effort", "cpu_hosts")),
        (is_alone & is_baseline, place("baseline", "best_effort")),
        (is_alone & is_baseline & one_host, place("baseline", "best_effort", "cpu_hosts")),
    ):
        alone = alone.fillna(bases(frame, to, fields, lines=beside))
    return with_columns(
        rows,
        best_effort_over_baseline=over(tokens, baseline),
        best_effort_over_one_host=over(tokens, on_one_host),
        tpot_over_one_host=over(frame["latency_sensitive_tpot_s_p50"], on_one_host),
        points_over_alone=100 * (attained - alone.map(attained)),
        attainment_over_alone=over(attained, alone),
        ttft_over_uncontrolled=over(frame["ttft_attainment_admitted"], uncontrolled),
        throughput_over_uncontrolled=over(frame["latency_sensitive_tokens_per_s"], uncontrolled),
    )


# -- words of tables and figures --------------------------------------------------------------------------------------

BEST_EFFORT, ATTAINMENT = "best_effort_tokens_per_s", "slo_attainment"
AXES = {
    "request_rate": "latency-sensitive requests/s (Poisson arrivals)",
    "rate_interval_s": "seconds between changes of the request rate",
    "tpot_slo_s": "target: seconds per output token",
    "cpu_hosts": "CPU hosts, the GPUs' own included",
}
METRICS = {
    BEST_EFFORT: "best-effort tokens/s",
    ATTAINMENT: "share of requests within targets",
    "best_effort_over_one_host": "best-effort tokens/s over 1 host",
    "latency_sensitive_tpot_s_p50": "median seconds per token",
    "latency_sensitive_tokens_per_s": "latency-sensitive tokens/s",
    "ttft_attainment": "first tokens in time, of offered",
    "ttft_attainment_admitted": "first tokens in time, of admitted",
}
SHARES = (ATTAINMENT, "ttft_attainment", "ttft_attainment_admitted")
UNCONTROLLED_COLOUR = "#848484"
SYSTEM_NOTES = {
    "neo": "neo knows one class of requests, and serves them in the order of arrival.",
    "omniserve-stepping": "omniserve-stepping (a line's name: stepping) is this project's own scheduler; the paper "
    "does not have it.",
}

SWEPT: Columns = (
    ("req/s", "request_rate", "g"), ("burst s", "rate_interval_s", "g"), ("target", "tpot_slo_s", "g"),
    ("hosts", "cpu_hosts", "d"), ("blocks", "num_gpu_blocks", "d"), ("slower", "slower", "g"),
    ("control", "admission_control", ""),
)  # fmt: skip
"""Shown where they differ."""
COLUMNS: Columns = (
    ("system", "system", "s"), ("in SLO", "slo_attainment", ".2%"), ("points", "points_over_alone", "+.2f"),
    ("refused", "refused", "d"), ("TTFT p99", "latency_sensitive_ttft_s_p99", ".2f"),
    ("TPOT p50", "latency_sensitive_tpot_s_p50", ".3f"), ("p99", "latency_sensitive_tpot_s_p99", ".3f"),
    ("LS tok/s", "latency_sensitive_tokens_per_s", ".0f"), ("BE tok/s", "best_effort_tokens_per_s", ".1f"),
    ("ratio", "best_effort_over_baseline", ".2f"),
)  # fmt: skip
OF_HOSTS: Columns = (("/ 1 host", "best_effort_over_one_host", ".2f"),)
OF_ADMISSION: Columns = (
    ("TTFT ok", "ttft_attainment", ".2%"),
    ("admitted", "ttft_attainment_admitted", ".2%"),
    ("LS / all", "throughput_over_uncontrolled", ".3f"),
)
"""Where hosts, or admission control, differ."""


# -- tables -----------------------------------------------------------------------------------------------------------


def print_omniserve(shows: str, summary: Records, console: Console) -> None:
    """A table for each machine and best-effort stream, with what differs in it."""
    kind, baseline = label_of(summary), summary[0]["baseline"]
    console.print(
        f"\n{shows}, {kind}. in SLO: share of offered latency-sensitive requests (LS) within both targets; "
        f"points: that minus attainment without best effort (BE); ratio: BE tokens/s over {baseline}'s",
        highlight=False,
        soft_wrap=True,
    )
    for title, rows in grouped(summary, panel_words).items():
        console.print(title, style="bold", highlight=False)
        console.print(rows_table(rows, shown_columns(rows)))


def shown_columns(rows: Records) -> list[tuple[str, str, str]]:
    """What differs among the rows, and what is known of them."""
    varied = {field for _, field, _ in SWEPT if len({row.get(field) for row in rows}) > 1}
    columns = [column for column in SWEPT if column[1] in varied] + list(COLUMNS)
    columns += OF_HOSTS if "cpu_hosts" in varied else ()
    if "admission_control" in varied:
        columns = [column for column in columns if column[0] not in ("ratio", "p99", "TPOT p50")] + list(OF_ADMISSION)
    return [column for column in columns if any(row.get(column[1]) is not None for row in rows)]


# -- figures ----------------------------------------------------------------------------------------------------------


def draw_omniserve(section: Mapping[str, Any], records: Records) -> Figure:
    """The figure of a section of the experiment file: lines over its ``x``, or bars without one.

    Raises:
        ValueError: there is nothing to draw.
    """
    drawn = [row for row in records if row["best_effort"]]
    if not drawn:
        raise ValueError("nothing to draw: no point is finished")
    if section.get("x") is None:
        return draw_groups(section, drawn, records)
    panels = grouped(drawn, "panel").values()
    lines = [line_panel(rows, section["x"], metric) for metric in section["metrics"] for rows in panels]
    return line_figure(lines, figure_text(section["shows"], records), len(panels) if len(panels) > 1 else 3)


def line_panel(records: Records, x: str, metric: str) -> LinePanel:
    """A line for each system, or for each way to admit requests where rows differ in that."""
    by_control = len({row["admission_control"] for row in records}) > 1
    lines = []
    for (system, control), rows in grouped(records, "system", "admission_control").items():
        label = ("admission" if control else "admit all") if by_control else system.removeprefix("omniserve-")
        colour = system_colour(system) if control else UNCONTROLLED_COLOUR
        points = [(row[x], row[metric]) for row in rows if row.get(metric) is not None]
        lines.append(Series(label, colour, points))
    reach = 1.0 if metric in SHARES else 0.0
    return LinePanel(panel_words(records[0]), AXES[x], f"{METRICS[metric]}, SIMULATED", lines, y_to=reach)


def draw_groups(section: Mapping[str, Any], drawn: Records, records: Records) -> Figure:
    """Best-effort throughput above, attainment below; a group for each panel and best-effort stream."""
    systems = [name for name in section["system"] if name in distinct(records, "system")]
    baseline = section["baseline"]
    text = figure_text(
        section["shows"],
        records,
        f"Above: best-effort throughput, with its ratio to {baseline}. "
        "Below: share of latency-sensitive requests within both targets",
    )
    titles = {
        BEST_EFFORT: "Best-effort tokens/s, SIMULATED",
        ATTAINMENT: "Latency-sensitive requests within their targets, SIMULATED",
    }
    figure, axes = sheet(text, len(titles), width=12.0, height=2.4, below=0.7, above=0.35)
    for ax, (metric, title) in zip(axes.flat, titles.items(), strict=True):
        groups = []
        for rows in grouped(drawn, "panel", "best_effort").values():
            by_system = {row["system"]: row for row in rows}
            bars = [service_bar(by_system.get(system, {}), metric, baseline) for system in systems]
            groups.append((group_label(rows[0]), bars))
        draw_bars(ax, BarPanel(title, "", groups), size=6.3)
    legend(axes[0, 0], systems)
    return figure


def service_bar(row: Mapping[str, Any], metric: str, baseline: str) -> Bar:
    value = row.get(metric)
    if value is None:
        return Bar(0.0, "none")
    ratio = row["best_effort_over_baseline"]
    words = f"{value:.0f}" if ratio is None or row["system"] == baseline else times(ratio)
    return Bar(value, system_colour(row["system"]), f"{value:.1%}" if metric == ATTAINMENT else words)


def group_label(row: FlatRecord) -> str:
    stream = row["best_effort"].removesuffix("-backlog")
    slower = row["slower"] - 1
    error = f"\n{abs(slower):.0%} {'slower' if slower > 0 else 'faster'} than believed" if slower else ""
    return f"{stream}\n{row['num_gpu_blocks']} GPU blocks{error}"


# -- words ------------------------------------------------------------------------------------------------------------


def panel_words(record: FlatRecord) -> str:
    """Machine and best-effort stream of a row."""
    stream = record["best_effort"] or "no best effort"
    return f"{record['setting_title']}, {stream.removesuffix('-backlog')}"


def figure_text(shows: str, records: Records, subtitle: str = "") -> FigureText:
    first = records[0]
    one_target = len({row["tpot_slo_s"] for row in records}) <= 2
    targets = dict.fromkeys(
        f"{row['setting_title']}: {row['ttft_slo_s']:g} s to the first token"
        + (f" and {row['tpot_slo_s']:g} s per token" if one_target else "")
        for row in records
    )
    pools = dict.fromkeys(
        f"{row['setting_title']}: {row['num_gpu_blocks']} GPU blocks of 16 tokens, {row['cpu_kv_gb']:g} GB of KV cache "
        "in each CPU host"
        for row in records
    )
    durations = span_text([f"{value:g}" for value in sorted(distinct(records, "window_s"))])
    notes = [
        f"Latency-sensitive requests: {trace_title(first)}, {first['trace_origin']} lengths. {trace_note(records)} "
        "Best-effort lengths are synthetic shapes with the stated means, or Dolphin-r1's.",
        f"{durations} virtual seconds a point, seed {first['seed']}; tokens are "
        "counted within them, from the start, while CPU memory still fills. A refused request misses its targets.",
        "; ".join(pools) + ".",
        *(note for system, note in SYSTEM_NOTES.items() if system in distinct(records, "system")),
        *known_notes(records),
    ]
    lines = [*([subtitle] if subtitle else []), "Targets: " + "; ".join(targets)]
    return FigureText(f"{shows} \u2014 SIMULATED", "\n".join(lines), "\n".join(notes))


def trace_title(record: FlatRecord) -> str:
    return record["workload_title"].split(" beside ")[0]


# -- parts ------------------------------------------------------------------------------------------------------------


def print_claims_of(name: str, section: Mapping[str, Any], rows: Rows, console: Console) -> None:
    """The paper's claims about a figure, and why ours differs."""
    if claims := load_claims(name):
        print_claims(claims, rows, console, with_assumptions=False)
        for line in section.get("differs", ()):
            print_line(console, f"Why it differs: {line}")


def parts(options: Options) -> dict[str, Study]:
    """The studies of the experiment file, by figure."""
    settings = experiment_settings("omniserve", options.config)

    def study(section: str) -> Study:
        here, name = settings["figures"][section], f"omniserve-{section}"
        return Study(
            name,
            file="omniserve",
            section=functools.partial(section_of, section),
            fields=KNOWN,
            point=functools.partial(service_point, settings, {}),
            derive=with_service_ratios,
            tables=[functools.partial(print_omniserve, here["shows"]), functools.partial(print_claims_of, name, here)],
            figure=lambda run: draw_omniserve(here, run.summary),
        )

    made = {section.removeprefix("fig"): study(section) for section in settings["figures"]}
    return {**made, **{also: made[figure] for also, figure in ALSO_DRAWN.items()}, HTTP: http_study(options, settings)}


# -- measured over HTTP ------------------------------------------------------------------------------------------------
# Two classes of service over HTTP on this machine: a server for each point, MEASURED at the client.
#
# First come latency-sensitive requests alone, on a GPU pool that never fills. Their median gap between tokens and their
# most KV blocks at once decide the targets and the pool of all other points.

NAME = "omniserve-http"
HTTP_KNOWN = (
    "panel", "baseline", "system", "best_effort", "num_cpu_blocks", "ttft_slo_s", "slo_margin", "duration_s", "seed",
)  # fmt: skip
HTTP_NOTES = ("shows", "streams", "tpot_over_alone", "pool_over_alone", "ample_blocks")
FLAGS = ("tpot_slo_s", "ttft_slo_s", "slo_margin", "num_gpu_blocks", "num_cpu_blocks")
"""Fields of a place that are options of its server."""
BLOCK_SIZE = EngineConfig("").block_size
READY_TIMEOUT_S = 300.0
URGENT = ServiceClass.LATENCY_SENSITIVE.value


@dataclass(frozen=True)
class ServedTask:
    """A server and what it is sent. ``values`` are fields of the row that are known beforehand.

    With ``tries_refusals`` the server is also asked what it must refuse (:func:`refusals`).
    """

    system: str
    model: Path = field(compare=False)
    flags: Mapping[str, Any]
    lengths: Lengths
    targets: Targets
    duration_s: float
    values: Mapping[str, Any]
    logs: Path = field(compare=False)
    tries_refusals: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """The server's command without address and port."""
        flags = [part for name, value in self.flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        flags += ["--no-enable-prefix-caching"]  # as in the paper; not all systems here have one
        return (sys.executable, "-m", "apex", "serve", str(self.model), "--system", self.system, *flags)


def found_here(section: Mapping[str, Any], alone: FlatRecord) -> dict[str, Any]:
    """Target in seconds per token, and GPU pool in blocks, from the row of latency-sensitive requests alone."""
    tpot_s = section["tpot_over_alone"] * alone["latency_sensitive_gap_s_p50"]
    blocks = math.ceil(section["pool_over_alone"] * alone["latency_sensitive_blocks"])
    return {"tpot_slo_s": round(tpot_s, 4), "num_gpu_blocks": blocks}


def served_point(place: Place, streams: Mapping[str, Any], model: Path, logs: Path) -> Point:
    """The point of a place of the grid that also has a pool, a seed and ``trace_dir``."""
    of_run = {name: place[name] for name in ("duration_s", "seed", "trace_dir")}
    urgent = latency_sensitive(**streams["latency_sensitive"], **of_run)
    stream = streams[place["best_effort"]] if place.get("best_effort") else None
    place = {"tpot_slo_s": StrategyConfig().tpot_slo_s, **place}
    flags = {name: place[name] for name in FLAGS if name in place}
    targets = Targets(place["ttft_slo_s"], place["tpot_slo_s"])
    row = {
        "panel": place["panel"],
        "baseline": place["baseline"],
        "setting": None,
        "setting_title": "this machine",
        "best_effort": stream and stream["workload"],
        "best_effort_queued": stream and stream["backlog"],
        "ttft_slo_s": targets.ttft_s,
        "tpot_slo_s": targets.tpot_s,
        "num_gpu_blocks": place["num_gpu_blocks"],
        "num_cpu_blocks": place.get("num_cpu_blocks", 0),
        "cpu_hosts": 1,
        "admission_control": True,
        "rate_interval_s": None,
        "slower": 1.0,
    }
    lengths = with_best_effort(urgent, stream, **of_run)
    names = (place["panel"], place["system"])
    key = "-".join(names)
    log, refuses = logs / f"{key}.log", place["panel"] == "queued"
    task = ServedTask(place["system"], model, flags, lengths, targets, place["duration_s"], row, log, refuses)
    return Point(key, key, ", ".join(names), task)


def run_served_point(point: Point, label: str, console: Console) -> PointResult:
    """Start the point's server, send it the requests, and stop it.

    Raises:
        ServerNotReady, ServerEnded, NothingServed: the server did not start, died or served nothing.
    """
    from evaluation.measure.server import ServerCommand, launched_server  # the HTTP client is needed only here

    task: ServedTask = point.task
    command = ServerCommand(task.system, task.arguments)
    with launched_server(command, task.logs, READY_TIMEOUT_S) as running:
        http = HttpTask(
            running.server,
            task.model,
            task.lengths,
            task.values,
            duration_s=task.duration_s,
            targets=task.targets,
            launched=running,
        )
        result = run_on_launched(point, http, command, label, console)
        refused = refusals(running.server, task.flags["num_gpu_blocks"] * BLOCK_SIZE) if task.tries_refusals else {}
    urgent = [record for record in result.records if record.service_class == URGENT]
    values = {
        **result.values,
        "backend": "server",
        "server": "apex serve",
        "latency_sensitive_gap_s_p50": median_gap_s(urgent),
        "latency_sensitive_blocks": most_blocks(urgent),
        "latency_sensitive_refused": sum(record.refused for record in urgent),
        "best_effort_refused": sum(record.refused for record in result.records) - sum(r.refused for r in urgent),
        **refused,
    }
    return replace(result, values=values)


def median_gap_s(records: Sequence[RequestRecord]) -> float | None:
    """The median of all gaps between two tokens of a request."""
    gaps = [
        later - earlier
        for record in records
        for earlier, later in zip(record.token_times_s, record.token_times_s[1:], strict=False)
    ]
    return sorted(gaps)[len(gaps) // 2] if gaps else None


def most_blocks(records: Sequence[RequestRecord]) -> int:
    """The most KV blocks that requests hold at once, if each has all that it ever needs from its arrival to its end."""
    changes = []
    for record in records:
        if record.token_times_s:
            blocks = -(-(record.prompt_len + record.wanted_output_len - 1) // BLOCK_SIZE)
            changes += [(record.arrival_s, blocks), (record.last_token_s, -blocks)]
    held = most = 0
    for _, blocks in sorted(changes):
        held += blocks
        most = max(most, held)
    return most


def contract(rows: Sequence[FlatRecord]) -> list[tuple[str, str, str, bool]]:
    """What must hold over HTTP: words, bound, number found, and whether it holds. A row that is missing is left out."""
    at = {(row["panel"], row["system"]): row for row in rows}
    lines = []
    for (panel, system), row in at.items():
        if panel != "both" or system == row["baseline"]:
            continue
        if (share := row["slo_attainment"]) is not None:
            lines.append((f"{system}: share within both targets", "95% at least", f"{share:.1%}", share >= 0.95))
        if (points := row["points_over_alone"]) is not None:
            words = f"{system}: points over latency-sensitive requests alone"
            lines.append((words, "-3 at least", f"{points:+.2f}", points >= -3))
        if (ratio := row["best_effort_over_baseline"]) is not None:
            words = f"{system}: best-effort tokens/s over {row['baseline']}"
            lines.append((words, "1.3 at least", f"{ratio:.2f}", ratio >= 1.3))
    if queued := at.get(("queued", "omniserve")):
        refused, waiting = queued["latency_sensitive_refused"], queued["best_effort_queued"]
        words = f"latency-sensitive requests refused beside {waiting:,} best-effort ones"
        found = f"{refused} of {queued['latency_sensitive_arrived']}"
        lines.append((words, "0", found, refused == 0))
        status = queued["contradiction_status"]
        lines.append(("status of fields that contradict each other", "400", f"{status}", status == 400))
        refused, least_s = queued["burst_refused"], queued["burst_least_retry_after_s"]
        words = f"refused of a burst of {queued['burst']}: 429 with Retry-After"
        lines.append((words, "1 at least", f"{refused}, {least_s} s or more", refused > 0 and (least_s or 0) >= 1))
    return lines


# -- what a server must refuse ----------------------------------------------------------------------------------------

BURST = 64
TIMEOUT_S = 120.0
LONGEST_PROMPT = 512


def refusals(server: Server, pool_tokens: int) -> dict[str, Any]:
    """Fields of a row: the status of contradictory fields, and how a burst of prompts was answered.

    Each prompt takes half of the pool's ``pool_tokens`` at most, so that it can be served.
    """
    return asyncio.run(_refusals(server, min(LONGEST_PROMPT, pool_tokens // 2)))


async def _refusals(server: Server, prompt_len: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, trust_env=False) as client:

        async def answer(tokens: int, **fields: Any) -> httpx.Response:
            body = {"model": server.model, "prompt": [1] * tokens, "max_tokens": 1, **fields}
            return await client.post("/v1/completions", json=body)

        contradiction = await answer(1, service_tier="flex", priority=-1)
        answers = await asyncio.gather(*(answer(prompt_len) for _ in range(BURST)))
    refused = [each for each in answers if each.status_code == httpx.codes.TOO_MANY_REQUESTS]
    waits_s = [int(each.headers.get("retry-after", 0)) for each in refused]
    return {
        "contradiction_status": contradiction.status_code,
        "burst": BURST,
        "burst_served": sum(each.is_success for each in answers),
        "burst_refused": len(refused),
        "burst_least_retry_after_s": min(waits_s, default=None),
    }


# -- the study --------------------------------------------------------------------------------------------------------


def http_study(options: Options, settings: Mapping[str, Any]) -> Study:
    """Figure http, of what is served here: the points, what they print, and what decides their numbers."""
    section, model = settings[HTTP], functools.cache(lambda: model_folder(options.model))
    return Study(
        NAME,
        points=lambda options: served_points(options, settings, model()),
        derive=with_service_ratios,
        run_point=run_served_point,
        describe=lambda points: described(points, model()),
        tables=[functools.partial(print_omniserve, section["shows"]), print_contract],
    )


def described(points: Sequence[Point], model: Path) -> dict[str, Any]:
    return {"model": model_identity(model), "points": identity(points)}


def served_points(options: Options, settings: Mapping[str, Any], model: Path) -> list[Point]:
    """The points of figure http. Latency-sensitive requests alone come first: they decide the targets and the pool.

    Raises:
        ValueError: they could not be measured.
    """
    stop_on_sigterm()
    section, logs = settings[HTTP], options.results_dir / NAME / "logs"
    grid = Grid.read({**section, "seed": settings["seed"]}, HTTP_KNOWN, "quick" if options.quick else None, HTTP_NOTES)

    def points(names: Sequence[str], options: StudyOptions, **found: Any) -> list[Point]:
        places = places_of(grid.only("panel", names).with_(**found), options, HTTP_KNOWN)
        return [served_point(place, section["streams"], model, logs) for place in places]

    unchosen = replace(options, only=())  # of latency-sensitive requests alone, whatever runs beside them
    ample = points(["alone"], unchosen, panel="ample", num_gpu_blocks=section["ample_blocks"])
    alone = Study(f"{NAME}-alone", run_point=run_served_point, describe=lambda points: described(points, model))
    measured = alone.run(ample, options.results_dir)
    if not measured.summary:
        raise ValueError(f"nothing was measured on this machine; see errors/ in {measured.folder}")
    found = found_here(section, measured.summary[0])
    return points(["alone"], unchosen, **found) + points(["both", "queued"], options, **found)


def print_contract(rows: Rows, console: Console) -> None:
    lines = [(words, bound, found, "yes" if holds else "NO") for words, bound, found, holds in contract(rows)]
    console.print(
        table(("what must hold", "bound", "found", "holds"), lines, left=("what must hold", "bound", "found"))
    )


main = command(Options, parts)
