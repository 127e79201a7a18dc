"""Titles, subtitles and notes of the papers' figures: machine, scale, origin of the lengths, assumptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evaluation.figures.style import FigureText
from evaluation.results.claims import place_of
from evaluation.results.folder import FlatRecord
from evaluation.results.kinds import (
    MEASURED,
    OVER_HTTP,
    card_of,
    comparisons,
    distinct,
    in_papers_setting,
    is_served,
    is_simulated,
    kind_of,
)
from evaluation.results.known import known_notes
from evaluation.results.other_work import DISTURBING_CORES
from swiftllm.systems import systems

Records = Sequence[FlatRecord]

TRACE_WORDS = {
    "measured": "lengths of a public record",
    "reconstructed": "drawn from a record's published plots",
    "fitted": "drawn from a record's quantiles, input and output independently",
    "synthetic": "made up, with the published or stated averages",
}


OVERLOAD = (
    "Above the rate that a system can serve its queue grows until the last request has come: latency there depends on "
    "how many are sent."
)

OWN_SYSTEM = "adaptive"
"""This project's own scheduler, in no paper."""
PREDICTION = "SIMULATED from this machine's profile"
"""Legend entry of predictions that are drawn beside measurements."""
POOLS = {
    "papers": "measured with the KV pools of the paper",
    "card": "measured with all KV blocks that the card holds",
    "chosen": "measured with a chosen number of KV blocks",
}
WEIGHTS = {"checkpoint": "weights of a checkpoint", "dummy": "dummy weights"}


def halves_of(records: Records) -> list[list[FlatRecord]]:
    """The rows of each comparison, simulated ones first."""
    return sorted(comparisons(records), key=lambda half: not is_simulated(half[0]))


def unique_values(records: Iterable[FlatRecord], field: str) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(record[field] for record in records))


def panel_name(records: Records) -> str:
    first = records[0]
    where = f"{first['model']} {measured_where(records)}"
    if is_simulated(first):
        where = first["setting_title"]
    elif in_papers_setting(first):
        where = f"measured, {first['setting_title']}"
    return f"{where}, {first['workload_title']}"


def half_word(records: Records) -> str:
    """How an axis names the kind of its values."""
    return "SIMULATED" if is_simulated(records[0]) else "measured"


def lettered_title(title: str, letter: str, records: Records) -> str:
    """A panel's title with its letter, if the figure of these records (both halves) has several panels."""
    return f"({letter}) {title}" if len(unique_values(records, "panel")) > 1 else title


def figure_text(what: str, records: Records, machine: Mapping[str, Any], *, in_title: bool = True) -> FigureText:
    """Title, subtitle and notes of a figure or half: machine, scale, origin of the lengths, assumptions.

    With ``in_title`` the title begins with ``what``; otherwise ``what`` is the first line of the subtitle.
    """
    halves = halves_of(records)
    subtitles, notes = [] if in_title else [what], []
    for half in halves:
        subtitles.append(simulated_subtitle(half) if is_simulated(half[0]) else measured_subtitle(half, machine))
        notes += half_notes(half) if len(halves) > 1 else notes_of(half)
    if len(halves) == 2:
        kind = "SIMULATED and MEASURED"
    elif is_simulated(records[0]):
        kind = f"SIMULATED: predicted times for {' and '.join(unique_values(records, 'gpu'))}"
    elif in_papers_setting(records[0]):
        kind = f"MEASURED on {card_of(records)}: {' and '.join(unique_values(records, 'setting_title'))}"
    else:
        kind = f"MEASURED {measured_where(records)}: {records[0]['model']}"
    title = f"{what} \u2014 {kind}" if in_title else kind
    return FigureText(title, "\n".join(subtitles), "\n".join(dict.fromkeys(notes)))


def simulated_subtitle(records: Records) -> str:
    parts = []
    for name in unique_values(records, "setting"):
        here = [record for record in records if record["setting"] == name]
        first = here[0]
        parts.append(
            f"{first['setting_title']} ({first['dtype']}) in {first['host']}: {gpu_pool(here)} GPU blocks "
            f"of 16 tokens, {first['cpu_kv_gb']:g} GB of host memory for KV cache"
        )
    return "\n".join(parts)


def gpu_pool(records: Records) -> str:
    """Blocks of the GPU pool, or their range."""
    return span_text(sorted(distinct(records, "num_gpu_blocks")))


def span_text(values: Sequence[float]) -> str:
    """Ascending values as text: one, or the first and the last."""
    return f"{values[0]} to {values[-1]}" if len(values) > 1 else str(values[0] if values else "-")


def measured_where(records: Records) -> str:
    return "over HTTP" if kind_of(records[0]) == OVER_HTTP else "on this machine"


def measured_subtitle(records: Records, machine: Mapping[str, Any]) -> str:
    """Device, model, pools and clocks of measured rows, in a paper's setting a line for each setting."""
    first = records[0]
    if in_papers_setting(first):
        lines = [setting_lines([r for r in records if r["setting"] == name]) for name in distinct(records, "setting")]
        return "\n".join([*lines, *clock_lines(records)])
    if kind_of(first) == OVER_HTTP:
        servers = dict.fromkeys(f"{record['system']}: {record['server']}" for record in records)
        return f"{first['model']}, timed at the client; {'; '.join(servers)}"
    device = first["gpu"] or (f"{machine['cpu']}, {machine['usable_cores']} cores, no GPU" if machine else "a CPU")
    return (
        f"{first['model']} ({first['dtype']}), measured on {device}; GPU tier capped at {gpu_pool(records)} KV blocks"
    )


def setting_lines(records: Records) -> str:
    """Model, weights and card, then the pools, of the rows of one paper's setting.

    Rows of a server know only some of these.
    """

    def said(field: str, words: Mapping[str, str] | None = None) -> str:
        return ", ".join((words or {}).get(value, str(value)) for value in distinct(records, field)) or "not stated"

    pools = f"{said('setting_origin', POOLS)}: {gpu_pool(records)} GPU blocks of 16 tokens"
    host = ", ".join(f"{value:g} GB" for value in distinct(records, "cpu_kv_gb") if value)
    return f"{said('model')} ({said('dtype')}, {said('weights', WEIGHTS)}) measured on {card_of(records)}\n{pools}" + (
        f", {host} of host memory" if host else ""
    )


def clock_lines(records: Records) -> list[str]:
    """Where times were taken, if some systems ran as servers."""
    servers = [record for record in records if is_served(record)]
    others = distinct((record for record in records if not is_served(record)), "system")
    names = ", ".join(
        server if server.startswith(name) else f"{name} ({server})"
        for name, server in dict.fromkeys((record["system"], record["server"] or "") for record in servers)
    )
    timed = [f"{names}: a server on this machine, timed at its client"] * bool(servers)
    timed += [f"{', '.join(others)}: timed in the process"] * bool(servers and others)
    return ["; ".join(timed)] * bool(timed)


def notes_of(records: Records) -> list[str]:
    """Notes on lengths and clipping, the systems' origin, load, repeats, failures, CPU attention, oversized pools."""
    about_load = [OVERLOAD] if len({record["request_rate"] for record in records}) > 1 else []
    about_machine = [*known_notes(records), *cpu_attention_notes(records), *pool_notes(records)]
    failures = [*failure_notes(records), *missing_notes(records)]
    about_run = [*own_system_notes(records), *about_load, *repeat_notes(records)]
    return [*length_notes(records), *about_run, *failures, *about_machine]


def half_notes(records: Records) -> list[str]:
    """The notes of one of two halves that share a text."""
    first, *rest = notes_of(records)
    return [first if is_simulated(records[0]) else f"Measured: {first}", *rest]


def length_notes(records: Records) -> list[str]:
    counts: dict[tuple[str, str], set[int]] = {}
    for record in records:
        scaled = "" if record["scale"] == 1 else f", lengths \u00d7 {record['scale']:g}"
        trace = f"requests a point{scaled}" if in_papers_setting(record) else f"requests{scaled}"
        line = f"{trace}, {record['trace_origin']} trace"
        counts.setdefault((record["workload_title"], line), set()).add(record["num_requests"])
    lines = [f"{title}: {span_text(sorted(numbers))} {line}" for (title, line), numbers in counts.items()]
    notes = ["; ".join(lines) + ".", trace_note(records)]
    cut = [record for record in records if record.get("num_clipped")]
    for place in dict.fromkeys(place_of(record) for record in cut):
        first = next(record for record in cut if place_of(record) == place)
        notes.append(
            f"{first['workload_title']}, {first['output_len']:.0f} output tokens: {first['num_clipped']} of "
            f"{first['num_requests']} requests clipped to {first['max_model_len']} tokens "
            f"(mean output {first['output_len_mean']:.0f})."
        )
    return notes


def own_system_notes(records: Records) -> list[str]:
    """Which system the paper does not have, if it is drawn beside the paper's."""
    there = OWN_SYSTEM in unique_values(records, "system")
    return [f"{OWN_SYSTEM} is this project's own scheduler; the paper does not have it."] * there


def repeat_notes(records: Records) -> list[str]:
    """The number of repeats, and how busy the machine was with other work."""
    repeats = max(record.get("repeats", 1) for record in records)
    seeds = ", each with its own seed" if is_simulated(records[0]) else ""
    text = f"Medians of {repeats} repeats{seeds}; thin vertical lines span the lowest and the highest of them."
    notes = [text] if repeats > 1 else [] if is_simulated(records[0]) else ["Measured once."]
    others = max(record.get("others_busy_cores") or 0.0 for record in records)
    return notes + [f"Other work kept up to {others:.1f} cores busy meanwhile."] * (others > DISTURBING_CORES)


def failure_notes(records: Records) -> list[str]:
    """Systems with failed requests. Their metrics count only the completed ones."""
    failed: dict[str, float] = {}
    for record in records:
        failed[record["system"]] = failed.get(record["system"], 0) + (record.get("failed") or 0)
    text = ", ".join(f"{system} {count:g}" for system, count in failed.items() if count)
    return [f"FAILED requests, which count in nothing that is drawn: {text}."] if text else []


def missing_notes(records: Records) -> list[str]:
    """Points in a paper's setting that lack a system which other points have."""
    places: dict[tuple[Any, ...], list[FlatRecord]] = {}
    for record in records:
        if in_papers_setting(record):
            places.setdefault(place_of(record), []).append(record)
    missing: dict[str, list[str]] = {}
    for here in places.values():
        first, there = here[0], {record["system"] for record in here if record["output_tokens_per_s"]}
        at_once, rate = first["request_rate"] is None, first["request_rate"]
        swept = f"{first['output_len']:.0f} output tokens" if at_once else f"{rate:g} requests/s"
        for system in distinct(records, "system"):
            if system not in there:
                missing.setdefault(system, []).append(f"{first['workload_title']}, {swept}")
    text = ". ".join(f"{system}: {'; '.join(points)}" for system, points in missing.items())
    return [f"Without a result (failed, or not run yet): {text}."] if text else []


def trace_note(records: Records) -> str:
    """The meaning of the kinds of traces that the notes name."""
    kinds = unique_values(records, "trace_origin")
    return "Traces: " + "; ".join(f"{kind}: {TRACE_WORDS[kind]}" for kind in kinds) + "."


def cpu_attention_notes(records: Records) -> list[str]:
    """The CPU attention kernel of each system, and its speed where that is assumed."""
    notes = []
    # Rows may hold systems of plugins that are not loaded now.
    gpu_only = {name for name, system in systems().items() if not system.needs_predictions}
    kernels = {r["system"]: r.get("cpu_kernel") for r in records if r["system"] not in gpu_only}
    assumed = [record for record in records if is_simulated(record)]
    for title in unique_values((r for r in assumed if r.get("setting_title")), "setting_title"):
        rates: dict[str, set[float]] = {}
        for record in assumed:
            if record.get("setting_title") == title and record["cpu_bandwidth_gb_s"] is not None:
                rates.setdefault(record["system"], set()).add(record["cpu_bandwidth_gb_s"])
        if rates and all(len(values) == 1 for values in rates.values()):
            text = ", ".join(f"{system} ({kernels[system]} kernel) {min(v):.0f} GB/s" for system, v in rates.items())
            gpu_rate = next(r["gpu_attention_gb_s"] for r in assumed if r.get("setting_title") == title)
            notes.append(f"{title}: attention on the CPU assumed at {text}; on the GPU {gpu_rate:.0f} GB/s.")
    kernels = {system: kernel for system, kernel in kernels.items() if kernel is not None}
    if kind_of(records[0]) == MEASURED and kernels:
        text = ", ".join(f"{system} ({kernel} kernel)" for system, kernel in kernels.items())
        notes.append(f"Attention on the CPU: {text}.")
    return notes


def pool_notes(records: Records) -> list[str]:
    notes = []
    simulated = [r for r in records if is_simulated(r) and r.get("max_gpu_blocks") is not None]
    beyond = [r for r in simulated if r["num_gpu_blocks"] > r["max_gpu_blocks"]]
    for title in unique_values(beyond, "setting_title"):
        most = next(r["max_gpu_blocks"] for r in beyond if r["setting_title"] == title)
        notes.append(
            f"{title}: the card itself holds at most {most} blocks beside the weights; more need a larger one."
        )
    return notes
