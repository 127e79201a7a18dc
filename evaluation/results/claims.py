"""Compares the papers' claims with our results, and judges each."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.results.folder import PREDICTED, FlatRecord
from evaluation.results.paths import CLAIMS_FILE, evaluation_command
from evaluation.results.rows import (
    claimable,
    comparisons,
    distinct,
    grouped,
    is_full_size,
    is_simulated,
    label_of,
    of_kernels,
    reading_of,
)

if TYPE_CHECKING:
    from rich.console import Console

# The system that replaces one that was not run: the other GPU-only baseline.
STAND_INS = {"vllm": "swiftllm"}
SWEPT = ("output_len", "request_rate")
OF_SERVICE = ("best_effort", "rate_interval_s", "tpot_slo_s", "cpu_hosts", "admission_control")
"""What else distinguishes the points of figures with two classes of service."""


@dataclass(frozen=True)
class Claim:
    """A paper's claim: ``systems[0]`` over ``systems[1]`` in ``metric`` is ``ratio``, or at best ``ratio`` (``up_to``).

    ``ratio`` is None for a claim in ``words`` only. ``workload`` None means any. ``setting`` is the paper's machine
    (papers.yaml). ``output_lens`` are the first and last average output length to which the claim applies, ``at`` are
    values of fields to which it is limited. A claim about one system is about a metric that is a ratio or a share.
    """

    figure: str
    section: str
    hardware: str
    workload: str | None
    metric: str
    systems: tuple[str, ...]
    ratio: float | None
    up_to: bool
    setting: str | None = None
    output_lens: tuple[float, float] | None = None
    words: str | None = None
    at: Mapping[str, Any] | None = None

    @property
    def lower_is_better(self) -> bool:
        return "latency" in self.metric

    def covers(self, record: FlatRecord) -> bool:
        """Whether the claim is about this point, or about the same point measured on another machine."""
        setting = record.get("setting")
        return (
            self.workload in (None, record["workload"])
            and (self.setting is None or self.setting in (record.get("paper_setting"), setting) or setting is None)
            and all(record.get(field) == value for field, value in (self.at or {}).items())
            and (self.output_lens is None or self.output_lens[0] <= record["output_len"] <= self.output_lens[1])
        )

    def stated(self) -> str:
        """The claim as it is printed."""
        if self.ratio is None:
            return self.words or ""
        return ("up to " if self.up_to else "") + f"{self.ratio:.2f}" + (f" ({self.words})" if self.words else "")


@dataclass(frozen=True)
class Comparison:
    """A claim and our ratios for it by point (:func:`place_of`); ``systems`` are those that are compared.

    ``ran`` says whether there are rows about the claim. They may have no ratio: the other system's value is 0.
    """

    claim: Claim
    systems: tuple[str, ...]
    by_place: Mapping[tuple[Any, ...], float]
    ran: bool = False

    @property
    def ours(self) -> tuple[float, ...]:
        return tuple(self.by_place.values())

    @property
    def best_at(self) -> str:
        """The point of the best ratio of an "up to" claim, in words."""
        if not self.claim.up_to or len(self.by_place) < 2:
            return ""
        place = next(place for place, ratio in self.by_place.items() if ratio == self.summary)
        _, workload, output_len, rate, *others = place
        if output_len is None:  # of kernels
            return workload
        where = f"{output_len:.0f} out" if rate is None else f"{rate:g} req/s"
        if (interval_s := others[OF_SERVICE.index("rate_interval_s")]) is not None:
            where = f"every {interval_s:g} s"
        return where if self.claim.workload else f"{workload}, {where}"

    @property
    def summary(self) -> float | None:
        """Our ratio to compare with the claim: the best point for "up to", else the mean over the points."""
        if not self.ours:
            return None
        if self.claim.up_to:
            return min(self.ours) if self.claim.lower_is_better else max(self.ours)
        return statistics.fmean(self.ours)

    @property
    def differs(self) -> str:
        """Our ratio over the claim's, minus 1, as text; empty without one of them."""
        known = self.summary is not None and self.claim.ratio is not None
        return f"{self.summary / self.claim.ratio - 1.0:+.0%}" if known else ""

    @property
    def what(self) -> str:
        """Metric and systems, with the stand-in of a system that was not run."""
        stand_in = "" if self.systems == self.claim.systems else f" (here {' / '.join(self.systems)})"
        return f"{words_of(self.claim.metric)}, {' / '.join(self.claim.systems)}{stand_in}"

    def span(self, to: str) -> str:
        """The lowest and the highest of several ratios, with ``to`` between them."""
        return f"{min(self.ours):.2f}{to}{max(self.ours):.2f}" if len(self.ours) > 1 else ""


def load_claims(*figures: str, path: Path = CLAIMS_FILE) -> list[Claim]:
    """The claims of some figures, in the order of the file; without ``figures`` all."""
    import yaml  # figures of a machine that has little more than torch load this module, and no claims

    entries: list[dict[str, Any]] = yaml.safe_load(path.read_text())
    claims = [
        Claim(**{name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()})
        for entry in entries
    ]
    return [claim for claim in claims if not figures or claim.figure in figures]


def compare_claims(claims: Sequence[Claim], summary: Sequence[FlatRecord]) -> list[Comparison]:
    """Our ratios for each claim; none if no point of the claim was run.

    All records must be of one comparison (:func:`evaluation.results.rows.comparisons`). A system without any row
    among a claim's points is replaced by its stand-in.
    """
    compared = []
    for claim in claims:
        points = [record for record in summary if claim.covers(record)]
        # Rows of a benchmark may have no system. A claim without points keeps its own systems.
        systems_run = {record.get("system") for record in points} or set(claim.systems)
        pair = tuple(name if name in systems_run else STAND_INS.get(name, name) for name in claim.systems)
        ratios = ratios_by_point(points, claim.metric, *pair)
        compared.append(Comparison(claim, pair, ratios, ran=bool(points)))
    return compared


def place_of(record: FlatRecord) -> tuple[Any, ...]:
    """A record's point in its sweep: the values that all systems of the point share."""
    return (record.get("setting"), record["workload"], *(record.get(name) for name in (*SWEPT, *OF_SERVICE)))


def ratios_by_point(
    records: Iterable[FlatRecord], metric: str, system: str, other: str | None = None
) -> dict[tuple[Any, ...], float]:
    """``system`` over ``other`` in ``metric``, by point, where both have a value.

    Without ``other`` it is the value itself.
    """
    records = list(records)

    def values(name: str) -> dict[tuple[Any, ...], float]:
        return {place_of(r): r[metric] for r in records if r["system"] == name and r.get(metric)}

    ours = values(system)
    if other is None:
        return ours
    theirs = values(other)
    return {place: ours[place] / theirs[place] for place in ours if place in theirs}


def print_claims(
    claims: Sequence[Claim], summary: Sequence[FlatRecord], console: Console, *, with_assumptions: bool = True
) -> None:
    """Print claims, our ratios and the differences per comparison, then the assumptions behind simulated ratios.

    Several readings of a paper's machine stand beside each other. Rehearsals and the like are left out, see
    :func:`claimable`.
    """
    from apex.cli.output import table  # as yaml above

    def show(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    parts, by_metric = claimable(summary), grouped_claims(claims)
    readings = [rows for rows in parts if reading_of(rows[0]) is not None]
    if len(readings) > 1:
        for metric, about in by_metric.items():
            show(f"{words_of(metric).capitalize()}: the papers' claims and our SIMULATED ratios")
            console.print(table(*beside_each_other(about, readings), left=("claim", "about", "says", "verdict")))
        show(LIMITS)
    for records in parts:
        simulated = is_simulated(records[0])
        kind = "our SIMULATED ratios" if simulated else f"ratios {label_of(records)}"
        for metric, about in by_metric.items() if len(readings) < 2 or records not in readings else ():
            show(f"{words_of(metric).capitalize()}: the papers' claims and {kind}")
            rows = [
                (
                    *words_of_claim(item.claim, item.systems),
                    ratio_words(item),
                    item.span("-"),
                    item.best_at,
                    item.differs,
                )
                for item in compare_claims(about, records)
            ]
            left = ("claim", "about", "says", "range", "best at")
            console.print(table(("claim", "about", "says", "ours", "range", "best at", "differs"), rows, left=left))
        if simulated and claims and with_assumptions:
            for line in assumptions(records, evaluation_command(f"reproduce_{claims[0].figure.split('-')[0]}")):
                show(line)


def grouped_claims(claims: Sequence[Claim]) -> dict[str, list[Claim]]:
    """The claims by metric, in their order."""
    return {metric: [c for c in claims if c.metric == metric] for metric in dict.fromkeys(c.metric for c in claims)}


def beside_each_other(
    claims: Sequence[Claim], readings: Sequence[Sequence[FlatRecord]]
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """A table of claims with our ratio and the verdict in each reading of the paper's machine: head and rows."""
    head = [part for rows in readings for part in (f"ours,\n{reading_of(rows[0])}", "verdict")]
    by_reading = [compare_claims(claims, rows) for rows in readings]
    lines = []
    for claim, *items in zip(claims, *by_reading, strict=True):
        cells = [words_of_claim(claim, claim.systems)]
        for item in items:
            span = item.span("-")
            judged = verdict(claim.ratio, item.summary).removesuffix(f" within {AGREES:.0%}")
            cells.append((ratio_words(item) + (f" ({span})" if span else ""), judged))
        lines.append(tuple(cell for part in cells for cell in part))
    return ("claim", "about", "says", *head), lines


def words_of_claim(claim: Claim, systems: Sequence[str]) -> tuple[str, str, str]:
    """Where a claim is and of what machine, the systems that are compared, and what it says."""
    return f"{claim.section}: {where_of(claim)}", "/".join(systems), claim.stated()


def ratio_words(item: Comparison) -> str:
    if item.summary is None:
        return "no ratio" if item.ran else "not run"
    return f"{item.summary:.2f}"


METRIC_WORDS = {
    "output_tokens_per_s": "throughput",
    "slo_attainment": "share of requests within targets",
    "best_effort_tokens_per_s": "best-effort throughput",
    "best_effort_over_one_host": "best-effort throughput over that with one CPU host",
    "tpot_over_one_host": "median time per token over that with one CPU host",
    "attainment_over_alone": "share within targets over that without best-effort requests",
    "ttft_attainment_admitted": "share of first tokens in time",
    "ttft_over_uncontrolled": "share of first tokens in time over that without admission control",
    "throughput_over_uncontrolled": "throughput over that without admission control",
    "request_rate_at_latency": "request rate at which latency gets there",
    "gain_over_600": "gain over neo over that at 600 output tokens",
    "gain_over_b_a": "gain over swiftllm over S = b / a",
    "layer_latency_s": "latency of a layer",
    "attention_gb_s": "attention speed",
    "request_latency_s": "latency of a generation",
    "per_token_latency_s_mean": "mean per-token latency",
    "per_token_latency_s_p50": "median per-token latency",
    "per_token_latency_s_p99": "99th percentile of per-token latency",
}


def words_of(metric: str) -> str:
    return METRIC_WORDS.get(metric, metric.replace("_", " "))


def where_of(claim: Claim) -> str:
    """Machine, workload and output lengths of a claim, in words."""
    parts = [claim.hardware.split(" + ")[0], claim.workload or "any workload"]
    if claim.output_lens is not None:
        parts.append("{:g}-{:g} out".format(*claim.output_lens))
    parts += [f"{value:g} s" for field, value in (claim.at or {}).items() if field == "tpot_slo_s"]
    return ", ".join(parts)


def assumptions(records: Sequence[FlatRecord], script: str) -> list[str]:
    """For each machine, the two most important assumptions, and the command that shows their effect.

    Settings that differ only in their host share a line.
    """
    offloading = (record for record in records if record["cpu_bandwidth_gb_s"] is not None)
    lines = []
    for here in grouped(offloading, "gpu", "model", "num_gpu_blocks").values():
        first, titles = here[0], distinct(here, "setting_title")
        title = titles[0] if len(titles) == 1 else f"{titles[0].split(' (')[0]} ({len(titles)} hosts)"
        title = ", ".join(filter(None, (title, reading_of(first))))
        blocks, most, gpu_rate = first["num_gpu_blocks"], first["max_gpu_blocks"], first["gpu_attention_gb_s"]
        rates = {name: distinct(rows, "cpu_bandwidth_gb_s") for name, rows in grouped(here, "system").items()}
        rates_text = ", ".join(
            f"{system} {_span(values, '.0f')} GB/s ({_span([value / gpu_rate for value in values], '.0%')})"
            for system, values in rates.items()
        )
        lines += [
            f"{title}: where ours differs, look first at the GPU's KV pool, {blocks} blocks of 16 tokens "
            f"({first['num_gpu_blocks_status']}; the card holds at most {most} beside the weights), and at CPU "
            f"attention, assumed {rates_text} of the GPU's {gpu_rate:.0f} GB/s.",
            f"  What they change: {script} --gpu {first['gpu_option']} --sensitivity gpu_blocks={blocks}..{most} "
            "(or cpu_bandwidth=5..300)",
        ]
    return lines


def _span(values: Sequence[float], form: str) -> str:
    """A value, or the range of several."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low}-{high}"


# -- the verdict on every claim ---------------------------------------------------------------------------------------

AGREES = 0.10
"""Largest relative difference of two ratios that agree."""
AGREEMENT = f"agrees within {AGREES:.0%}"
NO_DIRECTION = 0.02
"""A ratio this near to 1 favours neither system."""
LIMITS = (
    f"Agrees: our ratio is within {AGREES:.0%} of the paper's. Larger, smaller: the effect differs by more than that. "
    f"Opposite direction: the other system is ahead, by more than {NO_DIRECTION:.0%}. Claims in words are not judged."
)
POOLS = {"papers": "paper's KV pools", "card": "all KV blocks it holds", "chosen": "a chosen KV pool"}


def verdict(claimed: float | None, ours: float | None) -> str:
    """Our ratio judged by the claimed one, in a word or two; :data:`LIMITS` states the rules.

    ``claimed`` is None for a claim in words, which is not judged. Ratios below 1 (latencies) are turned over, so that
    "larger" always means a larger effect.
    """
    if ours is None:
        return "not run"
    if claimed is None:
        return "not judged"
    effect, claimed_effect = (ours, claimed) if claimed >= 1 else (1 / ours, 1 / claimed)
    if effect < 1 - NO_DIRECTION:
        return "opposite direction"
    difference = effect / claimed_effect - 1
    if abs(difference) <= AGREES:
        return AGREEMENT
    return "larger" if difference > 0 else "smaller"


def agrees(claimed: float | None, ours: float | None) -> bool:
    """Whether the :func:`verdict` is that both ratios agree."""
    return verdict(claimed, ours) == AGREEMENT


@dataclass(frozen=True)
class ClaimOverview:
    """A claim and our comparisons for it.

    ``measured`` and ``predicted`` are of one run in the paper's setting; ``where`` names its setting and pools, or the
    reading of ``simulated`` where nothing was measured.
    ``simulated`` is of the paper's machine. Comparisons without a ratio are None.
    """

    claim: Claim
    where: str = ""
    measured: Comparison | None = None
    predicted: Comparison | None = None
    simulated: Comparison | None = None

    @property
    def judged(self) -> Comparison | None:
        """What the verdict is about: the measured ratio, or the simulated one where nothing was measured."""
        return self.measured or self.simulated

    @property
    def judged_word(self) -> str:
        return "measured" if self.measured else "simulated" if self.simulated else ""

    @property
    def verdict(self) -> str:
        return verdict(self.claim.ratio, self.judged.summary if self.judged else None)

    @property
    def what(self) -> str:
        return (self.judged or Comparison(self.claim, self.claim.systems, {})).what


def overview(claims: Sequence[Claim], runs: Sequence[tuple[str, Sequence[FlatRecord]]]) -> list[ClaimOverview]:
    """The claims in their order, each once for every run that measured it in a paper's setting, else for every reading
    of the paper's machine that was simulated.

    Args:
        claims: claims of any figures.
        runs: name of the experiment and rows of each result folder. Rows of another model, of a CPU and of scaled
            lengths are left out.
    """
    found = []
    for claim in claims:
        groups = [rows for name, records in runs if name == claim.figure for rows in comparisons(records)]
        simulated = [
            ClaimOverview(claim, reading_of(rows[0]) or "", simulated=comparison)
            for rows in groups
            if is_simulated(rows[0]) and (comparison := compared(claim, rows))
        ]
        here = [measured_overview(claim, list(filter(is_full_size, rows))) for rows in groups]
        first = simulated[0].simulated if simulated else None
        found += (
            [replace(item, simulated=first) for item in here if item is not None] or simulated or [ClaimOverview(claim)]
        )
    return found


def compared(claim: Claim, records: Sequence[FlatRecord]) -> Comparison | None:
    """The claim's ratios in rows of one comparison, None if there are none."""
    (item,) = compare_claims([claim], records)
    return item if item.ours else None


def measured_overview(claim: Claim, records: Sequence[FlatRecord]) -> ClaimOverview | None:
    """The claim in rows that one run measured in a paper's setting at full size, and the prediction of the same
    points; None without such rows."""
    rows = [record for record in records if claim.covers(record)]
    measured = compared(claim, rows)
    if measured is None:
        return None
    predicted = None
    if claim.metric == "output_tokens_per_s":
        predicted = compared(claim, [{**row, claim.metric: row.get(PREDICTED)} for row in rows])
    pools = [POOLS.get(origin, origin) for origin in distinct(rows, "setting_origin")]
    where = [*distinct(rows, "setting_title"), *pools, *(distinct(rows, "cpu") if of_kernels(rows[0]) else ())]
    return ClaimOverview(claim, ", ".join(where), measured, predicted)
