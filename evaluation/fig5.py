"""Figure 5: what to run, and how to tell what came of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from evaluation.claims import compare, load_claims
from evaluation.experiment import Point
from evaluation.figures import FigureText, Group
from evaluation.provenance import cpu_kernels, model_identity
from evaluation.results import FlatRecord
from evaluation.torch_point import TorchTask
from evaluation.traces import catalogue, load_trace
from evaluation.workloads import Lengths, WorkloadSpec, make_lengths
from swiftllm.config import EngineConfig


@dataclass(frozen=True)
class WorkloadPlan:
    """One workload of the figure; ``output_lens`` sweeps the average output length (before scaling)."""

    name: str
    panel: str
    num_requests: int
    scale: float
    output_lens: tuple[float, ...] = ()


@dataclass(frozen=True)
class Fig5Plan:
    """Everything that decides the figure's numbers, beside machine and code."""

    systems: tuple[str, ...]
    baseline: str
    seed: int
    repeats: int
    workloads: tuple[WorkloadPlan, ...]
    gpu_requests: int
    engine: EngineConfig
    trace_dir: Path | None = None
    stall_timeout_s: float = 120.0


def pool_blocks(lengths: Lengths, gpu_requests: int, block_size: int) -> tuple[int, int]:
    """GPU and CPU blocks for a workload.

    The GPU pool holds ``gpu_requests`` requests of average length, and at least the longest one; the CPU pool
    holds all requests at once.
    """
    blocks = [math.ceil((row.input_tokens + row.output_tokens) / block_size) for row in lengths.rows]
    mean = math.ceil(sum(blocks) / len(blocks))
    return max(gpu_requests * mean, max(blocks)), 1 << (sum(blocks) - 1).bit_length()


def make_points(plan: Fig5Plan) -> list[Point]:
    """All points; the systems of one workload follow each other, so that a machine's moods hit them alike."""
    points = []
    for workload in plan.workloads:
        trace = load_trace(workload.name, plan.trace_dir)
        for output_len in workload.output_lens or (None,):
            spec = WorkloadSpec(workload.name, workload.num_requests, workload.scale, output_len, seed=plan.seed)
            lengths = make_lengths(spec, trace)
            engine = with_pools(plan.engine, lengths, plan.gpu_requests)
            group = workload.name if output_len is None else f"{workload.name}-out{output_len:g}"
            label = f"{workload.name}, {lengths.mean_output_tokens:.0f} output tokens"
            for repeat in range(plan.repeats):
                turn = repeat % len(plan.systems)  # no system always goes first
                for system in plan.systems[turn:] + plan.systems[:turn]:
                    values = {"panel": workload.panel, "wanted_output_len": output_len}
                    task = TorchTask(system, engine, lengths, values, plan.stall_timeout_s)
                    key = f"{group}-{system}" + (f"-{repeat}" if plan.repeats > 1 else "")
                    points.append(Point(key, f"{group}-{system}", f"{label}, {system}", task))
    return points


def with_pools(engine: EngineConfig, lengths: Lengths, gpu_requests: int) -> EngineConfig:
    """``engine`` with the pools of :func:`pool_blocks` where it leaves them open."""
    gpu_blocks, cpu_blocks = pool_blocks(lengths, gpu_requests, engine.block_size)
    return replace(
        engine,
        num_gpu_blocks=gpu_blocks if engine.num_gpu_blocks is None else engine.num_gpu_blocks,
        num_cpu_blocks=cpu_blocks if engine.num_cpu_blocks is None else engine.num_cpu_blocks,
    )


def configuration(plan: Fig5Plan, points: Sequence[Point]) -> dict[str, Any]:
    """The plan as it goes into the run's identity: every engine option and the very lengths of each point."""

    def described(point: Point) -> dict[str, Any]:
        task: TorchTask = point.task
        return {
            "key": point.key,
            "system": task.system,
            "engine": {name: value for name, value in asdict(task.engine).items() if name != "model"},
            "workload": asdict(task.lengths.spec),
            "trace": {**asdict(task.lengths.origin), "lengths": task.lengths.digest()},
        }

    return {
        "experiment": "fig5",
        "model": model_identity(Path(plan.engine.model)),
        "cpu_kernels": cpu_kernels(),
        "repeats": plan.repeats,
        "gpu_requests": plan.gpu_requests,
        "points": [described(point) for point in points],
    }


def groups(summary: Sequence[FlatRecord], panel: str) -> list[Group]:
    """The bars of one panel, in the order of the summary."""
    by_place: dict[tuple[str, float], list[FlatRecord]] = {}
    for record in summary:
        if record["panel"] == panel:
            by_place.setdefault((record["workload"], record["output_len"]), []).append(record)
    return [Group(group_label(records[0]), tuple(records)) for records in by_place.values()]


def group_label(record: FlatRecord) -> str:
    if record["panel"] == "a":
        return f"{record['output_len']:.0f}"
    return f"{title_of(record)}\n{record['input_len']:.0f} / {record['output_len']:.0f}"


def title_of(record: FlatRecord) -> str:
    return catalogue()[record["workload"]]["title"]


def figure_text(summary: Sequence[FlatRecord], baseline: str, machine: Mapping[str, Any]) -> FigureText:
    """Says what was measured where, at what scale, and where the request lengths come from."""
    first = summary[0]
    device = first["gpu"] or f"{machine['cpu']}, {machine['usable_cores']} cores, no GPU"
    how = "SIMULATED" if first["backend"] == "simulated" else "measured"
    blocks = sorted({record["num_gpu_blocks"] for record in summary if record["num_gpu_blocks"] is not None})
    pool = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else str(blocks[0] if blocks else "-")
    lines: dict[str, str] = {}
    for record in summary:
        lines[record["workload"]] = (
            f"{title_of(record)}: {record['num_requests']} requests, lengths \u00d7 {record['scale']:g}, "
            f"{record['trace_origin']} trace"
        )
    notes = list(lines.values())
    pairs = ["; ".join(notes[i : i + 2]) for i in range(0, len(notes), 2)]
    return FigureText(
        title="Output throughput under GPU memory pressure",
        subtitle=(
            f"{first['model']} ({first['dtype']}), {how} on {device}\n"
            f"GPU tier capped at {pool} KV blocks; all requests arrive at once; "
            f"ratios are to {baseline}"
        ),
        notes="\n".join(pairs),
    )


def print_results(summary: Sequence[FlatRecord], baseline: str, console: Console) -> None:
    """Our figures in short (summary.md has them all), then our ratios beside the papers' claims."""
    title = f"Figure 5: output tokens/s, ratio to {baseline}, mean per-token latency, busy lane and CPU worker"
    table = Table(title=title, title_justify="left")
    for title in ("workload", "out", "system", "tok/s", "ratio", "s/token", "lane", "CPU", "fail"):
        words = title in ("workload", "system")
        table.add_column(title, justify="left" if words else "right", no_wrap=True)
    reference: dict[tuple[str, float], float | None] = {
        (r["workload"], r["output_len"]): r["output_tokens_per_s"] for r in summary if r["system"] == baseline
    }
    place = None
    for record in summary:
        here, rate = (record["workload"], record["output_len"]), record["output_tokens_per_s"]
        if here != place and place is not None:
            table.add_section()
        base = reference.get(here)
        table.add_row(
            record["workload"] if here != place else "",
            f"{record['output_len']:.0f}" if here != place else "",
            record["system"],
            cell(rate, ".1f"),
            cell(rate / base if rate and base else None, ".2f"),
            cell(record.get("per_token_latency_s_mean"), ".3f"),
            cell(record.get("lane_busy_fraction"), ".0%"),
            cell(record.get("cpu_busy_fraction"), ".0%"),
            str(record.get("failed", "-")),
        )
        place = here
    console.print(table)

    claims = Table(title="Beside the papers' claims: other hardware and models", title_justify="left")
    for title in ("workload", "here", "", "paper", "", "on"):
        claims.add_column(title)
    for item in compare(load_claims("fig5"), summary):
        claim = item.claim
        ours = " ".join(f"{ratio:.2f}" for ratio in item.ours) or "not run"
        stated = ("up to " if claim.up_to else "") + f"{claim.ratio:.2f}"
        pairs = "/".join(item.systems), "/".join(claim.systems)
        claims.add_row(str(claim.workload), pairs[0], ours, pairs[1], stated, claim.hardware.split(" + ")[0])
    console.print(claims)


def cell(value: float | None, form: str) -> str:
    """A number as a table cell; a dash where it does not apply."""
    return "-" if value is None else format(value, form)
