"""The ablation measured on this machine: its points, and the bound of any schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rich.console import Console

from apex.cli.profile import attention_rate
from apex.schedulers.inequality import offload_bound_tokens_per_s
from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, WorkloadSpec
from evaluation.experiments.ablation.options import Options
from evaluation.experiments.ablation.rows import BASELINE, AblationRow, chosen_rows, with_mix
from evaluation.experiments.runner import Point, PointResult
from evaluation.experiments.torch_point import TorchTask, run_torch_point
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import model_folder
from swiftllm.config import EngineConfig

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine

NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 64, 32, 48


@dataclass(frozen=True)
class RowTask:
    row: AblationRow
    task: TorchTask


def make_points(options: Options) -> list[Point]:
    """A point per row and repeat.

    Raises:
        ValueError: an option is not valid; the message says what to do.
    """
    rows = chosen_rows(options.rows, simulated=False)
    num_requests = options.num_requests or NUM_REQUESTS
    input_len, output_len = options.input_len or INPUT_LEN, options.output_len or OUTPUT_LEN
    spec = WorkloadSpec(f"fixed-{input_len}-{output_len}", num_requests, seed=options.seed)
    origin = Origin("synthetic", "requests of one size, all at once")
    lengths = Lengths(spec, "Requests of one size", origin, (TraceRow(input_len, output_len, 0.0),) * num_requests)
    # On a CPU the GPU batch takes the GPU's part, so it must have the same size in every row.
    threads = {"gpu_batch_threads": 1, "cpu_threads": options.cpu_threads, "enable_prefix_caching": False}
    model = str(model_folder(options.model))
    engine = EngineConfig(model, device=options.device, dtype=options.dtype, load_format=options.load_format, **threads)
    blocks = -(-(input_len + output_len) // engine.block_size)
    engine = replace(engine, num_gpu_blocks=options.gpu_requests * blocks, num_cpu_blocks=(num_requests + 1) * blocks)
    points = []
    for repeat in range(options.repeats):
        first = repeat % len(rows)  # otherwise one row would always be measured first
        for row in rows[first:] + rows[:first]:
            task = TorchTask(row.system, replace(engine, synchronous=row.synchronous), lengths, {"row": row.name})
            key = row.name + (f"-{repeat}" if options.repeats > 1 else "")
            points.append(Point(key, row.name, row.name, RowTask(row, task)))
    return points


def run_row(point: Point, label: str, console: Console) -> PointResult:
    """Run a point with its row's strategy, and add the values from which the bound is computed."""
    row, task = point.task.row, point.task.task
    predictions: dict[str, float | None] = {}

    def build(system: str, config: EngineConfig) -> Engine:
        from apex.systems import build_system

        engine = build_system(system, config, row.strategy)
        predictions.update(figures_of_bound(engine, task.lengths.spec.num_requests))
        return engine

    result = run_torch_point(replace(point, task=task), label, console, build)
    return with_mix(replace(result, values={**result.values, **predictions}))


def figures_of_bound(engine: Engine, num_requests: int) -> dict[str, float | None]:
    """Values for the bound from the engine's profile table; empty for a system without a table.

    ``cpu_bytes_per_s`` is the rate at which the CPU reads KV cache. ``gpu_batch_limit_tokens_per_s`` is the GPU batch's
    maximum with linear layers alone and any batch up to ``num_requests``."""
    model = getattr(engine.scheduler, "model", None)
    if model is None:
        return {}
    backend, profile = engine.backend, model.table
    bytes_per_token = backend.cpu_kv_bytes_per_block / backend.block_size
    rate = attention_rate(profile.cpu_attention)
    batches = [n for n in (*map(int, profile.linear.sizes), num_requests) if n <= num_requests]
    return {
        "kv_bytes_per_token": bytes_per_token,
        "cpu_bytes_per_s": None if rate is None else rate * bytes_per_token / model.num_layers,
        "gpu_batch_limit_tokens_per_s": max(n / (model.num_layers * model.linear_s(n)) for n in batches),
    }


def bound_text(summary: Sequence[FlatRecord]) -> str:
    """The best row compared with the bound of any schedule, and what limited it instead."""
    base = next((record for record in summary if record["row"] == BASELINE), None)
    profiled = next((record for record in summary if record.get("cpu_bytes_per_s")), None)
    measured = [record for record in summary if record["output_tokens_per_s"]]
    if base is None or not base["output_tokens_per_s"] or profiled is None:
        return f"No bound: it takes the row {BASELINE} and one of a system that uses the CPU."
    best = max(measured, key=lambda record: record["output_tokens_per_s"])
    context = base["input_len"] + base["output_len"] / 2
    cpu, kv_bytes = profiled["cpu_bytes_per_s"], profiled["kv_bytes_per_token"]
    bound = offload_bound_tokens_per_s(base["output_tokens_per_s"], cpu, kv_bytes, context)
    text = (
        f"Bound: GPU-only {base['output_tokens_per_s']:.1f} + CPU attention {cpu / 1e9:.2f} GB/s / ({kv_bytes:.0f} B x "
        f"{context:.0f} tokens of context) = {bound:.0f} tokens/s. Best measured: {best['row']}, "
        f"{best['output_tokens_per_s']:.1f} tokens/s, {best['output_tokens_per_s'] / bound:.0%} of it."
    )
    limit = profiled["gpu_batch_limit_tokens_per_s"]
    on_cpu = base["backend"] == "torch-cpu"
    if limit < bound:
        text += (
            "\nThe bound ignores the cost of linear layers of offloaded requests. "
            f"{'On a CPU core, where they are bound by arithmetic,' if on_cpu else 'On ' + base['gpu']} they alone "
            f"allow at most {limit:.0f} tokens/s with up to {base['num_requests']} requests in a batch."
        )
    gpu_batch, cpu_worker = best["gpu_batch_busy_fraction"], best["cpu_busy_fraction"]
    if gpu_batch is not None and cpu_worker is not None:
        text += f"\nThe GPU batch of the best row was busy {gpu_batch:.0%} of the time, its CPU worker {cpu_worker:.0%}"
        if best is not base:
            text += (
                ". Overlap can have saved at most that share of the time; the rest of the gain is due to the larger "
                "batch that fits the CPU tier's memory"
            )
        text += "."
    return text
