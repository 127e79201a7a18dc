"""Points of prefix caches: systems, where they keep blocks, and GPU pools relative to what a workload fills."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from apex.simulator.paper_settings import PaperSetting, load_setting
from apex.simulator.virtual.backend import PLACEHOLDER_TOKEN
from apex.simulator.virtual.runtime import VLLM
from apex.workloads.catalogue import load_trace, turns_of
from apex.workloads.requests import Lengths, WorkloadSpec
from evaluation.experiments.grid import Grid, Place
from evaluation.experiments.paper_settings import clip_lengths, simulated_task
from evaluation.experiments.places import simulated_point
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import Point, PointResult
from evaluation.experiments.simulated_point import SimulatedTask
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import bases, frame_of, over, with_columns
from swiftllm.core.request import Tier

CACHES = {"off": (), "gpu": (Tier.GPU,), "store": tuple(Tier), "tiers": tuple(Tier)}
"""Where a cache keeps blocks. The system decides whether it copies those of host memory back before it uses them."""
LIMITS = ("max_model_len", "cpu_kv_gb")
"""Figures of a setting that a panel may have its own of."""
FIELDS = {"setting", "workload", "num_requests", "seed", "pool", "system", "cache", "variant", *LIMITS}
BLOCK_SIZE = 16


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts of requests that have segments, by row."""

    lengths: Lengths

    def __call__(self, row: int) -> tuple[int, ...]:
        return self.lengths.rows[row].prompt


def working_set(lengths: Lengths) -> int:
    """The different full blocks of all prompts and their outputs: what a cache holds that forgets nothing."""
    known: dict[Any, int] = {}
    for row in lengths.rows:
        tokens, parent = row.prompt + (PLACEHOLDER_TOKEN,) * row.output_tokens, -1
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = known.setdefault((parent, tokens[start : start + BLOCK_SIZE]), len(known))
    return len(known)


@functools.cache
def requests_of(
    workload: str, num_requests: int, seed: int, longest: int, trace_dir: Path | None
) -> tuple[Lengths, int]:
    """Consecutive requests of a workload, none of more than ``longest`` tokens, and their working set in blocks."""
    trace = load_trace(workload, trace_dir)
    rows = tuple(trace.window(num_requests, seed))
    spec = WorkloadSpec(workload, num_requests, arrivals="trace", seed=seed)
    lengths, _ = clip_lengths(Lengths(spec, trace.title, trace.origin, rows), longest)
    return lengths, working_set(lengths)


def setting_of(place: Place) -> PaperSetting:
    return load_setting(place["setting"]).with_figures(
        "varied", **{name: place[name] for name in LIMITS if name in place}
    )


def simulated_points(section: dict[str, Any], quick: bool, trace_dir: Path | None) -> list[Point]:
    """The points of an experiment file's section."""
    points = []
    for place in Grid.read(section, FIELDS, "quick" if quick else None).places():
        setting = setting_of(place)
        longest = setting.limits.max_model_len
        lengths, in_all = requests_of(place["workload"], place["num_requests"], place["seed"], longest, trace_dir)
        fitting = max(-(-(row.input_tokens + row.output_tokens) // BLOCK_SIZE) for row in lengths.rows) + 2
        setting = setting.with_figures("varied", num_gpu_blocks=max(round(place["pool"] * in_all), fitting))
        values = {"cache": place["cache"], "pool": place["pool"], "working_set_blocks": in_all}
        values["vllm_defaults"] = place["system"] == VLLM or None
        task = simulated_task(setting, place["system"], lengths, values)
        task = replace(
            task,
            prompts=SharedPrompts(task.lengths),
            cached_tiers=CACHES[place["cache"]],
            vllm_defaults=place["system"] == VLLM,  # today's, not that of the papers
        )
        names = [place["setting"], place["workload"], f"pool {place['pool']:g}", place["cache"]]
        points.append(simulated_point(names, task))
    return points


def run_prefix_point(point: Point, label: str, console: Console) -> PointResult:
    """A simulated point with what its cache found, and the time to first token by turn."""
    task: SimulatedTask = point.task
    result = run_point(point, label, console)
    stats = result.details["engine_stats"]
    asked = stats["prefix_queries"]
    found = {
        f"found_on_{tier.value}": stats["prefix_hits"].get(tier.value, 0) / asked if asked else 0.0 for tier in Tier
    }
    by_turn: dict[int, list[float]] = {}
    for record, turn in zip(result.records, turns_of(task.lengths.rows), strict=True):
        if record.failure is None:
            by_turn.setdefault(turn, []).append(record.first_token_s - record.arrival_s)
    turns = {
        f"ttft_s_turn_{turn}": float(np.mean(times)) for turn, times in sorted(by_turn.items()) if len(by_turn) > 1
    }
    return replace(result, values={**result.values, **found, **turns})


def with_ratios(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """Throughput over that of the same system without a cache, and over that of `vllm` with a cache on the GPU."""
    frame = frame_of(rows)
    rates, place = frame["output_tokens_per_s"], ["setting", "workload", "pool"]
    off = bases(frame, frame["cache"] == "off", at=[*place, "system"])
    gpu = bases(frame, (frame["cache"] == "gpu") & (frame["system"] == VLLM), at=place)
    return with_columns(rows, over_off=over(rates, off), over_gpu_only=over(rates, gpu))
