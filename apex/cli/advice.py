"""What `apex simulate` says in the end: which system to choose, what binds, and how to start it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from apex.cli.options import StrategyFlags
from apex.cli.traffic import AT_ONCE
from apex.strategy import StrategyConfig
from swiftllm.systems import find_system

SAME = 0.02
"""Figures that differ by less are the same: the simulator does not know times better than that."""
BUSY = 0.9
"""Part of a run from which on a processor has no time left to speak of."""

Record = Mapping[str, Any]


@dataclass(frozen=True)
class SystemChoice:
    """The system to choose, by its record at the load at which it was judged, and the sentence that says why."""

    record: Record
    sentence: str


def choose(records: Sequence[Record], *, by_goodput: bool) -> SystemChoice | None:
    """The system with the highest goodput at any load; without targets, that with the most tokens/s at the last load.

    Of systems that are the same, the first one. None if no request was served.
    """
    field, unit = ("goodput_requests_per_s", "requests/s within the targets") if by_goodput else (
        "output_tokens_per_s", "tok/s"
    )  # fmt: skip
    last = records[-1]["load"]
    judged = [r for r in records if r[field] is not None and (by_goodput or r["load"] == last)]
    if not judged:
        return None
    best: dict[str, Record] = {}
    for record in judged:
        system = record["system"]
        if system not in best or record[field] > best[system][field]:
            best[system] = record
    most = max(record[field] for record in best.values())
    if most == 0:
        fastest = min(judged, key=lambda r: r["ttft_s_p99"])
        return SystemChoice(
            fastest,
            f"No request meets both targets at these loads: {fastest['system']} has its first tokens soonest, within "
            f"{fastest['ttft_s_p99']:.1f} s, and {fastest['tpot_s_p99'] or 0:.2f} s per token, {at(fastest)} (p99).",
        )
    chosen = next(record for record in best.values() if record[field] >= most * (1 - SAME))

    def figure(record: Record) -> str:
        return f"{record[field]:.2f}" if by_goodput else f"{record[field]:.0f}"

    others = [f"{figure(r)} with {s}" for s, r in best.items() if s != chosen["system"]]
    against = f", against {', '.join(others)}" if others else ""
    sentence = f"Choose {chosen['system']}: it reaches {figure(chosen)} {unit} {at(chosen)}{against}."
    return SystemChoice(chosen, sentence)


def at(record: Record) -> str:
    """The load of a record, in a sentence."""
    if record["request_rate"] is not None:
        rate = record["request_rate"]
        return f"at {rate:g} request{'' if rate == 1 else 's'} a second"
    return f"with {'all requests at once' if record['load'] == AT_ONCE else record['load']}"


def binding(record: Record, records: Sequence[Record]) -> str:
    """What keeps a system from serving more, at the heaviest of its loads."""
    heaviest = [one for one in records if one["system"] == record["system"]][-1]
    load, under_way, room = at(heaviest), heaviest["requests_under_way"], heaviest["gpu_tier_requests"]
    is_busy = heaviest["gpu_batch_busy_fraction"] >= BUSY
    busy = f"the GPU batch computes {heaviest['gpu_batch_busy_fraction']:.0%} of the time"
    if heaviest["stages_off_gpu"] and is_busy:
        return (
            f"What binds {load} are the weights: {heaviest['stages_off_gpu']} of {heaviest['stages']} stages are not "
            f"on the GPU, and every iteration waits for them ({busy})."
        )
    if under_way is not None and under_way > room:
        others = "the CPU attends to the others" if heaviest["cpu_busy_fraction"] else "the others wait"
        return (
            f"What binds {load} is the GPU's memory: beside the weights it has the KV cache of {room:.0f} requests "
            f"of mean size while {under_way:.0f} are under way, and {others} ({busy})."
        )
    if is_busy:
        return (
            f"What binds {load} is the GPU itself: it computes {heaviest['gpu_batch_busy_fraction']:.0%} of the time "
            f"for the {under_way or 0:.0f} requests under way, and its memory has room for {room:.0f}."
        )
    return f"Nothing binds {load}: {busy}, and its memory has room left."


def serve_line(model: str, record: Record, options: Mapping[str, Any], strategy: StrategyConfig) -> str:
    """The command that starts the system.

    Args:
        options: of `apex serve` beside model and system, by field name; those of None are left out.
        strategy: of systems that use the CPU; what differs from the defaults is given.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if find_system(record["system"]).needs_predictions:
        defaults = StrategyFlags()
        for item in fields(StrategyConfig):
            if (value := getattr(strategy, item.name)) != getattr(defaults, item.name):
                given[item.name] = value
    words = ["apex", "serve", model, "--system", record["system"]]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, str(value)]
    return shlex.join(words)
