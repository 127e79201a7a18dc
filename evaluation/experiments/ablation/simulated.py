"""The ablation SIMULATED on a machine of the papers: its points, and the bound of any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console

from apex.cli.output import strategy_mix
from apex.replay.metrics import predicted_over_actual
from apex.simulator.paper_settings import PaperSetting, load_setting
from evaluation.experiments.ablation.options import Options
from evaluation.experiments.ablation.rows import chosen_rows
from evaluation.experiments.adaptive.bound import bound_tokens_per_s
from evaluation.experiments.paper_settings import simulated_task
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import Point, PointResult
from evaluation.experiments.simulated_point import describe_simulated_points
from evaluation.results.folder import FlatRecord
from evaluation.traces.catalogue import UniformTrace
from evaluation.traces.workloads import Lengths, WorkloadSpec, make_lengths

SETTING = "apex-a10"
NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 300, 1000, 500
BOUND_SYSTEM = "adaptive"
"""The system whose CPU attention kernel the bound has."""


def make_points(options: Options) -> list[Point]:
    """A point per row.

    Raises:
        ValueError: an option is not valid; the message says what to do.
    """
    rows = chosen_rows(options.rows, simulated=True)
    setting = load_setting(options.setting or SETTING)
    lengths = workload(options, setting)
    bound = bound_tokens_per_s(simulated_task(setting, BOUND_SYSTEM, lengths))
    points = []
    for row in rows:
        values = {"row": row.name, "bound_tokens_per_s": bound}
        task = replace(simulated_task(setting, row.system, lengths, values), strategy=row.strategy)
        cost = float(lengths.total_output_tokens)
        points.append(Point(row.name, row.name, row.name, task, concurrent=True, cost=cost))
    return points


def workload(options: Options, setting: PaperSetting) -> Lengths:
    """Requests of about one size, all at once.

    Raises:
        ValueError: the setting does not take requests of that size.
    """
    most = setting.limits.max_model_len
    input_len = options.input_len or min(INPUT_LEN, most // 2)
    output_len = options.output_len or min(OUTPUT_LEN, most // 4)
    trace = UniformTrace(input_len, output_len)
    spec = WorkloadSpec(trace.name, options.num_requests or NUM_REQUESTS, output_len=output_len, seed=options.seed)
    lengths = make_lengths(spec, trace)
    longest = max(row.input_tokens + row.output_tokens for row in lengths.rows)
    if longest > most:
        raise ValueError(
            f"{setting.name} takes at most {most} tokens a request, and the longest has {longest}: give a smaller "
            "--input-len or --output-len"
        )
    return lengths


def configuration(points: Sequence[Point]) -> dict[str, Any]:
    """Everything that decides the numbers."""
    return {"experiment": "ablation", "simulated": describe_simulated_points(points)}


def run_row(point: Point, label: str, console: Console) -> PointResult:
    """Run a point, and add what its strategies were."""
    result = run_point(point, label, console)
    stats = result.details["engine_stats"]
    values = {
        **result.values,
        "strategy_mix": strategy_mix(stats["strategy_iterations"]),
        "predicted_over_actual": predicted_over_actual(stats),
    }
    return replace(result, values=values)


def bound_text(summary: Sequence[FlatRecord]) -> str:
    """The best row compared with the bound of any schedule, and how fast CPU attention was assumed to be."""
    best = max(summary, key=lambda record: record["output_tokens_per_s"] or 0.0)
    bound, rate = best["bound_tokens_per_s"], best["output_tokens_per_s"] or 0.0
    systems: dict[tuple[str, float], list[str]] = {}
    for record in summary:
        if record["cpu_bandwidth_gb_s"] is not None:
            systems.setdefault((record["cpu_kernel"], record["cpu_bandwidth_gb_s"]), []).append(record["system"])
    kernels = [
        f"{kernel} {gb_s:.0f} GB/s ({', '.join(dict.fromkeys(names))})" for (kernel, gb_s), names in systems.items()
    ]
    return (
        f"Bound of any schedule with the CPU attention of {BOUND_SYSTEM}, without filling, draining and the attention "
        f"of prompts: {bound:.0f} tokens/s. Best row: {best['row']}, {rate:.1f} tokens/s, {rate / bound:.0%} of it.\n"
        f"CPU attention is assumed by kernel: {', '.join(kernels) or 'no row has it'}."
    )
