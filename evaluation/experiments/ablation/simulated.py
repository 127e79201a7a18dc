"""The ablation SIMULATED on machines of the papers: its points, and the bound of any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console

from apex.simulator.paper_settings import BLOCK_SIZE
from apex.workloads.requests import Lengths
from evaluation.experiments.ablation.options import Options
from evaluation.experiments.ablation.rows import RATE, ROWS, chosen_rows, with_mix
from evaluation.experiments.adaptive.bound import bound_tokens_per_s
from evaluation.experiments.axes import OWN_KERNELS, SUBJECT
from evaluation.experiments.grid import Place
from evaluation.experiments.options import given
from evaluation.experiments.places import lengths_of, setting_of, simulate
from evaluation.experiments.points import run_point
from evaluation.experiments.runner import Point, PointResult
from evaluation.results.folder import FlatRecord
from evaluation.results.frame import grouped
from evaluation.results.kinds import distinct

SETTINGS = ("apex-a10-as-measured", "apex-a10")
"""Both readings of the paper's A10."""
NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 300, 1000, 500


def make_points(options: Options) -> list[Point]:
    """A point per setting and row; the rows of a setting share their requests.

    Raises:
        ValueError: an option is not valid, or a setting does not take requests of that size; the message says what to
            do.
    """
    names = options.setting or SETTINGS
    return [point for name in names for point in _points_of(name, options, several=len(names) > 1)]


def _points_of(name: str, options: Options, several: bool) -> list[Point]:
    own_kernels = options.kernel == OWN_KERNELS and options.cpu_bandwidth is None
    rows, place = chosen_rows(options.rows, simulated=True, own_kernels=own_kernels), _place(name, options)
    lengths = lengths_of(place)
    _check_sizes(place, lengths)
    bound, cost = bound_tokens_per_s(simulate({**place, "system": SUBJECT})), float(lengths.total_output_tokens)
    points = []
    for row in rows:
        here = {**place, "system": row.system, "synchronous": row.synchronous or None, **row.axes}
        task = simulate(here, case=name, row=row.name, bound_tokens_per_s=bound)
        key = f"{name}-{row.name}" if several else row.name
        task = replace(task, strategy=row.strategy)
        points.append(Point(key, key, key, task, concurrent=True, cost=cost))
    return points


def _place(name: str, options: Options) -> Place:
    most = setting_of({"setting": name}).limits.max_model_len
    requests = {"num_requests": options.num_requests or NUM_REQUESTS, "seed": options.seed}
    if options.workload is None:
        requests["input_len"] = options.input_len or min(INPUT_LEN, most // 2)
        requests["output_len"] = options.output_len or min(OUTPUT_LEN, most // 4)
    machine = {"host": options.host, "num_gpu_blocks": options.num_gpu_blocks, "cpu_kv_gb": options.cpu_kv_gb}
    attention = {"kernel": options.kernel, "cpu_bandwidth_gb_s": options.cpu_bandwidth}
    trace = {"workload": options.workload, "output_len": options.output_len, "request_rate": options.request_rate}
    return {"setting": name, **requests, **given(**machine, **attention, **trace)}


def _check_sizes(place: Place, lengths: Lengths) -> None:
    """
    Raises:
        ValueError: the longest request does not fit the setting's limit, or one of the pools.
    """
    setting = setting_of({**place, "system": SUBJECT})
    most = setting.limits.max_model_len
    longest = max(row.input_tokens + row.output_tokens for row in lengths.rows)
    if longest > most and "workload" not in place:  # requests of a trace are clipped, as in the papers' figures
        raise ValueError(
            f"{place['setting']} takes at most {most} tokens a request, and the longest has {longest}: give a smaller "
            "--input-len or --output-len"
        )
    blocks = -(-min(longest, most) // BLOCK_SIZE)
    for option, there in (("--num-gpu-blocks", setting.num_gpu_blocks), ("--cpu-kv-gb", setting.num_cpu_blocks)):
        if there < blocks:
            raise ValueError(
                f"{place['setting']}: the longest request takes {blocks} blocks of {BLOCK_SIZE} tokens, and the pool "
                f"has {there}: give a larger {option}, or shorter requests"
            )


def run_row(point: Point, label: str, console: Console) -> PointResult:
    """Run a point, and add what its strategies were."""
    return with_mix(run_point(point, label, console))


def bound_text(summary: Sequence[FlatRecord]) -> str:
    """The best row of a setting compared with the bound of any schedule, and how fast CPU attention was assumed to
    be."""
    best = max(summary, key=lambda record: record[RATE] or 0.0)
    bound, rate = best["bound_tokens_per_s"], best[RATE] or 0.0
    return (
        f"Bound of any schedule with the CPU attention of {SUBJECT}, without filling, draining and the attention "
        f"of prompts: {bound:.0f} tokens/s. Best row: {best['row']}, {rate:.1f} tokens/s, {rate / bound:.0%} of it.\n"
        f"{attention_text(summary)}"
    )


def attention_text(summary: Sequence[FlatRecord]) -> str:
    """How fast attention was assumed to be: on the CPU by kernel, with the systems that have it as their own."""
    unchanged = [record for record in summary if "kernel" not in ROWS[record["row"]].axes]
    assumed = [record for record in unchanged if record["cpu_bandwidth_gb_s"] is not None]
    kernels = [
        f"{kernel} {gb_s:.0f} GB/s ({', '.join(distinct(here, 'system'))})"
        for (kernel, gb_s), here in grouped(assumed, "cpu_kernel", "cpu_bandwidth_gb_s").items()
    ]
    gpu_gb_s = summary[0]["gpu_attention_gb_s"]
    return f"Attention is assumed: GPU {gpu_gb_s:.0f} GB/s; CPU by kernel: {', '.join(kernels) or 'no row has it'}."
