"""Titles, subtitles and notes of figures: machine, scale, origin of the lengths, assumptions, how cards are known."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from apex.simulator.virtual.runtime import PAPERS_VLLM, VLLM, VLLM_DEFAULTS
from evaluation.plots.style import FigureText
from evaluation.results.claims import place_of
from evaluation.results.folder import FlatRecord
from evaluation.results.provenance import DISTURBING_CORES
from evaluation.results.rows import (
    MEASURED,
    OVER_HTTP,
    card_of,
    comparisons,
    distinct,
    grouped,
    in_papers_setting,
    is_served,
    is_simulated,
    kind_of,
    reading_of,
)
from swiftllm.systems import systems

# -- what simulated rows rest on --------------------------------------------------------------------------------------


def known_notes(records: Iterable[FlatRecord]) -> list[str]:
    """A note for each card and model of simulated rows, and one where `vllm` is among their systems.

    Cards and models that are not in ``configs``, such as the machine's own or a folder that is gone, have no note.
    """
    from apex.simulator.hardware.files import known_hardware, known_models, load_gpu, load_model_config
    from apex.simulator.prediction.calibrated_profile import how_known  # late: reading models imports torch

    simulated = [record for record in records if is_simulated(record)]
    cards, models, notes = {gpu.name: gpu for gpu in map(load_gpu, known_hardware("gpu"))}, known_models(), []
    for gpus, model in dict.fromkeys((record["gpu"], record["model"]) for record in simulated):
        card = cards.get(re.sub(r"^\d+x ", "", gpus))
        if card is not None and model in models:
            notes.append(f"{card.name} is known from {how_known(card, load_model_config(model))}.")
    for record in simulated:
        if record["system"] == VLLM:
            notes.append(f"{VLLM}: {VLLM_DEFAULTS if record.get('vllm_defaults') else PAPERS_VLLM}.")
    return list(dict.fromkeys(notes))


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


# -- panels -----------------------------------------------------------------------------------------------------------


def halves_of(records: Records) -> list[list[FlatRecord]]:
    """The rows of each comparison, simulated ones first."""
    return sorted(comparisons(records), key=lambda half: not is_simulated(half[0]))


def panels_of(records: Records) -> list[list[FlatRecord]]:
    """The rows of each panel of each half, simulated ones first."""
    return [panel for half in halves_of(records) for panel in grouped(half, "panel").values()]


def panel_name(records: Records) -> str:
    first = records[0]
    where = f"{first['model']} {measured_where(records)}"
    if is_simulated(first):
        where, reading = first["setting_title"], reading_of(first)
        if reading is not None:
            where = f"{where.split(' + ')[0]}, {reading}"  # the subtitle names the model
    elif in_papers_setting(first):
        where = f"measured, {first['setting_title']}"
    return f"{where}, {first['workload_title']}"


def half_word(records: Records) -> str:
    """How an axis names the kind of its values."""
    return "SIMULATED" if is_simulated(records[0]) else "measured"


def lettered_title(title: str, letter: str, records: Records) -> str:
    """A panel's title with its letter, if the figure of these records (both halves) has several panels."""
    return f"({letter}) {title}" if len(distinct(records, "panel")) > 1 else title


# -- title and subtitle -----------------------------------------------------------------------------------------------


def figure_text(
    what: str, records: Records, machine: Mapping[str, Any], *, in_title: bool = True, first_note: str = ""
) -> FigureText:
    """Title, subtitle and notes of a figure or half: machine, scale, origin of the lengths, assumptions.

    With ``in_title`` the title begins with ``what``; otherwise ``what`` is the first line of the subtitle.
    ``first_note`` stands above the other notes.
    """
    halves = halves_of(records)
    subtitles, notes = [] if in_title else [what], [first_note] if first_note else []
    for half in halves:
        subtitles.append(simulated_subtitle(half) if is_simulated(half[0]) else measured_subtitle(half, machine))
        notes += half_notes(half) if len(halves) > 1 else notes_of(half)
    if len(halves) > 1:
        kind = " and ".join(dict.fromkeys("SIMULATED" if is_simulated(half[0]) else "MEASURED" for half in halves))
    elif is_simulated(records[0]):
        reading = f", {reading_of(records[0])}" if reading_of(records[0]) else ""
        kind = f"SIMULATED: predicted times for {' and '.join(distinct(records, 'gpu'))}{reading}"
    elif in_papers_setting(records[0]):
        kind = f"MEASURED on {card_of(records)}: {' and '.join(distinct(records, 'setting_title'))}"
    else:
        kind = f"MEASURED {measured_where(records)}: {records[0]['model']}"
    title = f"{what} \u2014 {kind}" if in_title else kind
    return FigureText(title, "\n".join(subtitles), "\n".join(dict.fromkeys(notes)))


def simulated_subtitle(records: Records) -> str:
    return "\n".join(
        f"{here[0]['setting_title']} ({here[0]['dtype']}) in {here[0]['host']}"
        f"{', ' + here[0]['reading'] if reading_of(here[0]) else ''}: {gpu_pool(here)} GPU blocks "
        f"of 16 tokens, {here[0]['cpu_kv_gb']:g} GB of host memory for KV cache"
        for here in grouped(records, "setting").values()
    )


def gpu_pool(records: Records) -> str:
    """Blocks of the GPU pool, or their range."""
    return span_text(sorted(distinct(records, "num_gpu_blocks")))


def span_text(values: Sequence[Any]) -> str:
    """Ascending values as text: one, or the first and the last."""
    return f"{values[0]} to {values[-1]}" if len(values) > 1 else str(values[0] if values else "-")


def measured_where(records: Records) -> str:
    return "over HTTP" if kind_of(records[0]) == OVER_HTTP else "on this machine"


def measured_subtitle(records: Records, machine: Mapping[str, Any]) -> str:
    """Device, model, pools and clocks of measured rows, in a paper's setting a line for each setting."""
    first = records[0]
    if in_papers_setting(first):
        return "\n".join([*map(setting_lines, grouped(records, "setting").values()), *clock_lines(records)])
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
    if not servers:
        return []
    others = distinct((record for record in records if not is_served(record)), "system")
    names = ", ".join(
        server if server.startswith(name) else f"{name} ({server})"
        for name, server in dict.fromkeys((record["system"], record["server"] or "") for record in servers)
    )
    in_process = [f"{', '.join(others)}: timed in the process"] if others else []
    return ["; ".join([f"{names}: a server on this machine, timed at its client", *in_process])]


# -- notes ------------------------------------------------------------------------------------------------------------


def notes_of(records: Records) -> list[str]:
    """Notes on lengths and clipping, the systems' origin, load, repeats, failures, CPU attention, oversized pools."""
    about_load = [OVERLOAD] if len({record["request_rate"] for record in records}) > 1 else []
    about_machine = [*known_notes(records), *cpu_attention_notes(records), *pool_notes(records)]
    about_run = [*own_system_notes(records), *neo_notes(records), *about_load, *repeat_notes(records)]
    failures = [*failure_notes(records), *missing_notes(records)]
    return [*length_notes(records), *about_run, *failures, *about_machine]


def half_notes(records: Records) -> list[str]:
    """The notes of one of two halves that share a text."""
    first, *rest = notes_of(records)
    return [first if is_simulated(records[0]) else f"Measured: {first}", *rest]


def length_notes(records: Records) -> list[str]:
    def what(record: FlatRecord) -> str:
        scaled = "" if record["scale"] == 1 else f", lengths \u00d7 {record['scale']:g}"
        return f"requests{' a point' * in_papers_setting(record)}{scaled}, {record['trace_origin']} trace"

    lines = [
        f"{title}: {span_text(sorted(distinct(here, 'num_requests')))} {line}"
        for (title, line), here in grouped(records, "workload_title", what).items()
    ]
    clipped = grouped((record for record in records if record.get("num_clipped")), place_of)
    return ["; ".join(lines) + ".", trace_note(records)] + [
        f"{first['workload_title']}, {first['output_len']:.0f} output tokens: {first['num_clipped']} of "
        f"{first['num_requests']} requests clipped to {first['max_model_len']} tokens "
        f"(mean output {first['output_len_mean']:.0f})."
        for first, *_ in clipped.values()
    ]


def trace_note(records: Records) -> str:
    """The meaning of the kinds of traces that the notes name."""
    return "Traces: " + "; ".join(f"{kind}: {TRACE_WORDS[kind]}" for kind in distinct(records, "trace_origin")) + "."


def own_system_notes(records: Records) -> list[str]:
    """Which system the paper does not have, if it is drawn beside the paper's."""
    there = OWN_SYSTEM in distinct(records, "system")
    return [f"{OWN_SYSTEM} is this project's own scheduler; the paper does not have it."] * there


def neo_notes(records: Records) -> list[str]:
    """Which NEO a simulated `neo` is: its schedule in this engine, with or without the launches of NEO's code."""
    rows = [record for record in records if is_simulated(record) and record.get("attention_launch_us") is not None]
    if not rows:
        return []
    names, charged = " and ".join(distinct(rows, "system")), max(row["attention_launch_us"] for row in rows)
    launches = (
        f"charged with {charged:g} us an attention task for the launches of NEO's code"
        if charged
        else ("the launches of NEO's own code are not charged (--neo-launches)")
    )
    return [f"{names}: the paper's schedule in this project's engine; {launches}."]


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
    failed = {name: sum(row.get("failed") or 0 for row in rows) for name, rows in grouped(records, "system").items()}
    text = ", ".join(f"{system} {count:g}" for system, count in failed.items() if count)
    return [f"FAILED requests, which count in nothing that is drawn: {text}."] if text else []


def missing_notes(records: Records) -> list[str]:
    """Points in a paper's setting that lack a system which other points have."""
    missing: dict[str, list[str]] = {}
    for here in grouped(filter(in_papers_setting, records), place_of).values():
        first, there = here[0], {record["system"] for record in here if record["output_tokens_per_s"]}
        point = f"{first['workload_title']}, {swept_words(first)}"
        for system in distinct(records, "system"):
            if system not in there:
                missing.setdefault(system, []).append(point)
    text = ". ".join(f"{system}: {'; '.join(points)}" for system, points in missing.items())
    return [f"Without a result (failed, or not run yet): {text}."] if text else []


def swept_words(record: FlatRecord) -> str:
    rate = record["request_rate"]
    return f"{record['output_len']:.0f} output tokens" if rate is None else f"{rate:g} requests/s"


def cpu_attention_notes(records: Records) -> list[str]:
    """The CPU attention kernel of each system, and its speed where that is assumed."""
    notes = []
    # Rows may hold systems of plugins that are not loaded now.
    gpu_only = {name for name, system in systems().items() if not system.needs_predictions}
    kernels = {r["system"]: r.get("cpu_kernel") for r in records if r["system"] not in gpu_only}
    for title, here in grouped(filter(is_simulated, records), "setting_title").items():
        rates = {name: distinct(rows, "cpu_bandwidth_gb_s") for name, rows in grouped(here, "system").items()}
        rates = {name: values for name, values in rates.items() if values}
        if title and rates and all(len(values) == 1 for values in rates.values()):
            gpu_rate = here[0]["gpu_attention_gb_s"]
            text = ", ".join(
                f"{name} ({kernels[name]} kernel) {values[0]:.0f} GB/s, {values[0] / gpu_rate:.1%}"
                for name, values in rates.items()
            )
            where = ", ".join(filter(None, (title, reading_of(here[0]))))
            notes.append(f"{where}: attention on the CPU assumed at {text} of the GPU's {gpu_rate:.0f} GB/s.")
    text = ", ".join(f"{system} ({kernel} kernel)" for system, kernel in kernels.items() if kernel is not None)
    if kind_of(records[0]) == MEASURED and text:
        notes.append(f"Attention on the CPU: {text}.")
    return notes


def pool_notes(records: Records) -> list[str]:
    simulated = [r for r in records if is_simulated(r) and r.get("max_gpu_blocks") is not None]
    beyond = grouped((r for r in simulated if r["num_gpu_blocks"] > r["max_gpu_blocks"]), "setting_title")
    return [
        f"{title}: the card itself holds at most {here[0]['max_gpu_blocks']} blocks beside the weights; "
        "more need a larger one."
        for title, here in beyond.items()
    ]
