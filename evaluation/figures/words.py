"""Titles, subtitles and notes of the papers' figures: machine, scale, origin of the lengths, assumptions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from evaluation.figures.style import FigureText
from evaluation.results.claims import place_of
from evaluation.results.folder import FlatRecord
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


def is_simulated(records: Records) -> bool:
    return records[0]["backend"] == "simulated"


def halves_of(records: Records) -> list[list[FlatRecord]]:
    """Simulated records, then measured ones; empty halves are left out."""
    parts = [[r for r in records if (r["backend"] == "simulated") is simulated] for simulated in (True, False)]
    return [part for part in parts if part]


def unique_values(records: Iterable[FlatRecord], field: str) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(record[field] for record in records))


def panel_name(records: Records) -> str:
    first = records[0]
    where = first["setting_title"] if is_simulated(records) else f"{first['model']} {measured_where(records)}"
    return f"{where}, {first['workload_title']}"


def lettered_title(title: str, letter: str, records: Records) -> str:
    """A panel's title with its letter, if the figure of these records has several panels."""
    return f"({letter}) {title}" if len(unique_values(records, "panel")) > 1 else title


def figure_text(what: str, records: Records, machine: Mapping[str, Any], *, in_title: bool = True) -> FigureText:
    """Title, subtitle and notes of a figure or half: machine, scale, origin of the lengths, assumptions.

    With ``in_title`` the title begins with ``what``; otherwise ``what`` is the first line of the subtitle.
    """
    halves = halves_of(records)
    subtitles, notes = [] if in_title else [what], []
    for half in halves:
        subtitles.append(simulated_subtitle(half) if is_simulated(half) else measured_subtitle(half, machine))
        notes += notes_of(half)
    if len(halves) == 2:
        kind = "SIMULATED and MEASURED"
    elif is_simulated(records):
        kind = f"SIMULATED: predicted times for {' and '.join(unique_values(records, 'gpu'))}"
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
    blocks = sorted({record["num_gpu_blocks"] for record in records if record["num_gpu_blocks"] is not None})
    return f"{blocks[0]} to {blocks[-1]}" if len(blocks) > 1 else str(blocks[0] if blocks else "-")


def measured_where(records: Records) -> str:
    return "over HTTP" if records[0]["backend"] == "http" else "on this machine"


def measured_subtitle(records: Records, machine: Mapping[str, Any]) -> str:
    first = records[0]
    if first["backend"] == "http":
        servers = dict.fromkeys(f"{record['system']}: {record['server']}" for record in records)
        return f"{first['model']}, timed at the client; {'; '.join(servers)}"
    device = first["gpu"] or f"{machine['cpu']}, {machine['usable_cores']} cores, no GPU"
    return (
        f"{first['model']} ({first['dtype']}), measured on {device}; GPU tier capped at {gpu_pool(records)} KV blocks"
    )


def notes_of(records: Records) -> list[str]:
    """Notes on request lengths and clipping, load, repeats, failures, CPU attention, and oversized pools."""
    about_load = [OVERLOAD] if len({record["request_rate"] for record in records}) > 1 else []
    about_machine = [*cpu_attention_notes(records), *pool_notes(records)]
    return [*length_notes(records), *about_load, *repeat_notes(records), *failure_notes(records), *about_machine]


def length_notes(records: Records) -> list[str]:
    lines = []
    for record in records:
        scaled = "" if record["scale"] == 1 else f", lengths \u00d7 {record['scale']:g}"
        lines.append(
            f"{record['workload_title']}: {record['num_requests']} requests{scaled}, {record['trace_origin']} trace"
        )
    notes = ["; ".join(dict.fromkeys(lines)) + ".", trace_note(records)]
    cut = [record for record in records if record.get("num_clipped")]
    for place in dict.fromkeys(place_of(record) for record in cut):
        first = next(record for record in cut if place_of(record) == place)
        notes.append(
            f"{first['workload_title']}, {first['output_len']:.0f} output tokens: {first['num_clipped']} of "
            f"{first['num_requests']} requests clipped to {first['max_model_len']} tokens "
            f"(mean output {first['output_len_mean']:.0f})."
        )
    return notes


def repeat_notes(records: Records) -> list[str]:
    """The number of repeats, and how busy the machine was with other work."""
    repeats = max(record.get("repeats", 1) for record in records)
    seeds = ", each with its own seed" if is_simulated(records) else ""
    text = f"Medians of {repeats} repeats{seeds}; thin vertical lines span the lowest and the highest of them."
    notes = [text] if repeats > 1 else [] if is_simulated(records) else ["Measured once."]
    others = max(record.get("others_busy_cores") or 0.0 for record in records)
    return notes + [f"Other work kept up to {others:.1f} cores busy meanwhile."] * (others > DISTURBING_CORES)


def failure_notes(records: Records) -> list[str]:
    """Systems with failed requests. Their metrics count only the completed ones."""
    failed: dict[str, float] = {}
    for record in records:
        failed[record["system"]] = failed.get(record["system"], 0) + (record.get("failed") or 0)
    text = ", ".join(f"{system} {count:g}" for system, count in failed.items() if count)
    return [f"FAILED requests, which count in nothing that is drawn: {text}."] if text else []


def trace_note(records: Records) -> str:
    """The meaning of the kinds of traces that the notes name."""
    kinds = unique_values(records, "trace_origin")
    return "Traces: " + "; ".join(f"{kind}: {TRACE_WORDS[kind]}" for kind in kinds) + "."


def cpu_attention_notes(records: Records) -> list[str]:
    """The CPU attention kernel of each system, and its speed where that is assumed."""
    notes = []
    # Rows may hold systems of plugins that are not loaded now.
    gpu_only = {name for name, system in systems().items() if not system.offloads}
    kernels = {r["system"]: r["cpu_kernel"] for r in records if r["system"] not in gpu_only}
    for title in unique_values((r for r in records if r.get("setting_title")), "setting_title"):
        rates: dict[str, set[float]] = {}
        for record in records:
            if record.get("setting_title") == title and record["cpu_bandwidth_gb_s"] is not None:
                rates.setdefault(record["system"], set()).add(record["cpu_bandwidth_gb_s"])
        if rates and all(len(values) == 1 for values in rates.values()):
            text = ", ".join(f"{system} ({kernels[system]} kernel) {min(v):.0f} GB/s" for system, v in rates.items())
            gpu_rate = next(r["gpu_attention_gb_s"] for r in records if r.get("setting_title") == title)
            notes.append(f"{title}: attention on the CPU assumed at {text}; on the GPU {gpu_rate:.0f} GB/s.")
    if records[0]["backend"].startswith("torch") and kernels:
        text = ", ".join(f"{system} ({kernel} kernel)" for system, kernel in kernels.items())
        notes.append(f"Attention on the CPU: {text}.")
    return notes


def pool_notes(records: Records) -> list[str]:
    notes = []
    beyond = [r for r in records if r.get("max_gpu_blocks") is not None and r["num_gpu_blocks"] > r["max_gpu_blocks"]]
    for title in unique_values(beyond, "setting_title"):
        most = next(r["max_gpu_blocks"] for r in beyond if r["setting_title"] == title)
        notes.append(
            f"{title}: the card itself holds at most {most} blocks beside the weights; more need a larger one."
        )
    return notes
