"""The ablation SIMULATED on a machine of the papers: its points, and the bound of any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from evaluation.experiments.ablation.options import Options
from evaluation.experiments.ablation.rows import chosen_rows, with_mix
from evaluation.experiments.adaptive.bound import bound_tokens_per_s
from evaluation.experiments.axes import SUBJECT
from evaluation.experiments.places import lengths_of, setting_of, simulate
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import Point, PointResult
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.kinds import distinct

SETTING = "apex-a10"
NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 300, 1000, 500


def make_points(options: Options) -> list[Point]:
    """A point per row: requests of about one size, all at once.

    Raises:
        ValueError: an option is not valid, or the setting does not take requests of that size; the message says what
            to do.
    """
    rows, place = chosen_rows(options.rows, simulated=True), {"setting": options.setting or SETTING}
    most = setting_of(place).limits.max_model_len
    place |= {
        "input_len": options.input_len or min(INPUT_LEN, most // 2),
        "output_len": options.output_len or min(OUTPUT_LEN, most // 4),
        "num_requests": options.num_requests or NUM_REQUESTS,
        "seed": options.seed,
    }
    lengths = lengths_of(place)
    if (longest := max(row.input_tokens + row.output_tokens for row in lengths.rows)) > most:
        raise ValueError(
            f"{place['setting']} takes at most {most} tokens a request, and the longest has {longest}: give a smaller "
            "--input-len or --output-len"
        )
    bound, cost = bound_tokens_per_s(simulate({**place, "system": SUBJECT})), float(lengths.total_output_tokens)
    points = []
    for row in rows:
        task = simulate({**place, "system": row.system}, row=row.name, bound_tokens_per_s=bound)
        task = replace(task, strategy=row.strategy)
        points.append(Point(row.name, row.name, row.name, task, concurrent=True, cost=cost))
    return points


def run_row(point: Point, label: str, console: Console) -> PointResult:
    """Run a point, and add what its strategies were."""
    return with_mix(run_point(point, label, console))


def bound_text(summary: Sequence[FlatRecord]) -> str:
    """The best row compared with the bound of any schedule, and how fast CPU attention was assumed to be."""
    best = max(summary, key=lambda record: record["output_tokens_per_s"] or 0.0)
    bound, rate = best["bound_tokens_per_s"], best["output_tokens_per_s"] or 0.0
    assumed = (record for record in summary if record["cpu_bandwidth_gb_s"] is not None)
    kernels = [
        f"{kernel} {gb_s:.0f} GB/s ({', '.join(distinct(here, 'system'))})"
        for (kernel, gb_s), here in grouped(assumed, "cpu_kernel", "cpu_bandwidth_gb_s").items()
    ]
    return (
        f"Bound of any schedule with the CPU attention of {SUBJECT}, without filling, draining and the attention "
        f"of prompts: {bound:.0f} tokens/s. Best row: {best['row']}, {rate:.1f} tokens/s, {rate / bound:.0%} of it.\n"
        f"CPU attention is assumed by kernel: {', '.join(kernels) or 'no row has it'}."
    )
