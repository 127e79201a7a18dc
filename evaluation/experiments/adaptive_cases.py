"""The cases that compare `adaptive` with the papers' schedulers: simulated points, a bound, and ratios of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from apex.perf.model import Curve, PerfModel
from apex.simulator.paper_settings import PaperSetting, load_setting
from apex.strategy import StrategyConfig
from evaluation.experiments.paper_settings import simulated_task
from evaluation.experiments.runner import Complete, Point
from evaluation.experiments.simulated_point import SimulatedTask
from evaluation.results.folder import FlatRecord
from evaluation.traces.catalogue import UniformTrace, load_trace
from evaluation.traces.workloads import Lengths, WorkloadSpec, make_lengths
from swiftllm.systems import find_system

IDEAS = {
    "prompt-chunks": StrategyConfig(disable_prompt_chunks=True),
    "free-running": StrategyConfig(disable_asynchronous_overlap=True),
    "lockstep": StrategyConfig(disable_asymmetric_pipelining=True),
}
"""The ideas of `adaptive`, each with the settings that switch it off."""
MOST_TOKENS = 4096  # the largest batch in which the bound looks for the cheapest linear time of a token


@dataclass(frozen=True)
class Case:
    """A machine and a workload. Either ``workload`` names a trace, or ``input_len`` and ``output_len`` are means."""

    case: str
    setting: str
    num_requests: int
    workload: str | None = None
    input_len: int | None = None
    output_len: float | None = None
    cpu_bandwidth_gb_s: float | None = None

    def lengths(self, seed: int, trace_dir: Path | None) -> Lengths:
        trace = load_trace(self.workload, trace_dir) if self.workload else UniformTrace(self.input_len, self.output_len)
        spec = WorkloadSpec(trace.name, self.num_requests, output_len=self.output_len, seed=seed)
        return make_lengths(spec, trace)

    def paper_setting(self, kernel: str | None) -> PaperSetting:
        """The setting with this case's CPU; ``kernel`` replaces the CPU kernels of all systems."""
        setting = load_setting(self.setting)
        kernels = {system: kernel or own for system, own in setting.cpu_kernels.items()}
        return replace(setting, cpu_kernels=kernels, cpu_bandwidth_gb_s=self.cpu_bandwidth_gb_s)


def make_case_points(
    settings: Mapping[str, Any],
    *,
    cases: Sequence[str] | None = None,
    systems: Sequence[str] | None = None,
    quick: bool = False,
    kernel: str | None = None,
    hand_over_us: float = 0.0,
    without: str | None = None,
    seed: int = 0,
    trace_dir: Path | None = None,
) -> list[Point]:
    """The points of an experiment file: each case with each system.

    Args:
        cases, systems: names; by default those of the file.
        quick: at most ``quick_num_requests`` requests each.
        kernel: CPU attention kernel of every system; by default the one of its paper.
        hand_over_us: what submitting a ticket costs the lane, in microseconds.
        without: one of ``IDEAS``, which `adaptive` does without.

    Raises:
        ValueError: a name is unknown, or ``hand_over_us`` is negative; the message says what is valid.
    """
    if hand_over_us < 0:
        raise ValueError(f"hand_over_us={hand_over_us} must not be negative")
    known = {raw["case"]: Case(**raw) for raw in settings["cases"]}
    if unknown := [name for name in cases or () if name not in known]:
        raise ValueError(f"no case {', '.join(unknown)} in the experiment file; there are {', '.join(known)}")
    systems = systems or settings["systems"]
    for system in systems:
        find_system(system)
    points = []
    for case in map(known.__getitem__, cases or known):
        if quick:
            case = replace(case, num_requests=min(case.num_requests, settings["quick_num_requests"]))
        lengths, setting = case.lengths(seed, trace_dir), case.paper_setting(kernel)
        reference = charge_hand_over(simulated_task(setting, "adaptive", lengths), hand_over_us)
        bound = bound_tokens_per_s(reference)
        for system in systems:
            idea = without if system == "adaptive" else None
            values = {
                "case": case.case, "without": idea, "hand_over_us": hand_over_us, "bound_tokens_per_s": bound
            }  # fmt: skip
            task = charge_hand_over(simulated_task(setting, system, lengths, values), hand_over_us)
            if idea is not None:
                task = replace(task, strategy=IDEAS[idea])
            key = f"{case.case}-{system}"
            points.append(Point(key, key, f"{case.case}, {system}", task, True, float(lengths.total_output_tokens)))
    return points


def charge_hand_over(task: SimulatedTask, hand_over_us: float) -> SimulatedTask:
    """The task on a machine whose lane spends ``hand_over_us`` microseconds on submitting each ticket."""
    if not hand_over_us:
        return task
    table = replace(task.hardware.table, hand_over=Curve((1, 2), (hand_over_us * 1e-6,) * 2))
    return replace(task, hardware=replace(task.hardware, table=table))


def with_ratios(published: Sequence[str]) -> Complete:
    """Adds to each row ``fraction_of_bound``, and ``ratio_to_best_published``: its throughput over the highest of the
    ``published`` systems in its case; None where none of these ran."""

    def complete(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
        best: dict[str, float] = {}
        for row in rows:
            if row["system"] in published and row["output_tokens_per_s"]:
                best[row["case"]] = max(best.get(row["case"], 0.0), row["output_tokens_per_s"])
        return [{**row, **ratios(row, best.get(row["case"]))} for row in rows]

    def ratios(row: FlatRecord, best: float | None) -> FlatRecord:
        rate = row["output_tokens_per_s"] or 0.0
        return {
            "fraction_of_bound": rate / row["bound_tokens_per_s"],
            "ratio_to_best_published": rate / best if best else None,
        }

    return complete


# -- the bound --------------------------------------------------------------------------------------------------------


def bound_tokens_per_s(task: SimulatedTask) -> float:
    """An upper bound of any schedule's output tokens per second, from the task's machine and lengths.

    Each token crosses the linear layers at the cheapest rate of any batch within the limits. Each decode attends on the
    GPU or on the CPU, and both read at their full rate. An iteration attends to at most the GPU pool on the GPU, and
    reads the weights once. The split between GPU and CPU is the best one. Filling, draining and the attention of
    prompts cost nothing, and the CPU tier holds everything; so no schedule reaches the bound.
    """
    model = PerfModel(task.hardware.table, task.hardware.num_layers)
    rows = task.lengths.rows
    output_tokens = sum(row.output_tokens for row in rows)
    all_tokens = sum(row.input_tokens + row.output_tokens for row in rows)
    attended = sum(row.output_tokens * (row.input_tokens + row.output_tokens / 2) for row in rows)
    limits = task.limits
    sizes = range(1, min(MOST_TOKENS, limits.max_num_batched_tokens + limits.max_num_seqs) + 1)
    compute_s = all_tokens * model.num_layers * min(model.linear_s(size) / size for size in sizes)
    ends_s = output_tokens * min(model.ends_s(size) / size for size in sizes)
    context = 8192  # tokens of a request; rates are those of long contexts
    gpu_s, cpu_s = (
        model.num_layers * (attention_s(64, 128 * context) - attention_s(64, 64 * context)) / (64 * context)
        for attention_s in (model.gpu_attention_s, model.cpu_attention_s)
    )
    iteration_s = model.num_layers * model.linear_s(1) + model.ends_s(1)
    gpu_pool_tokens = task.num_gpu_blocks * task.block_size
    lane = [(compute_s + ends_s, gpu_s), (0.0, iteration_s / gpu_pool_tokens + gpu_s)]
    return output_tokens / least_makespan_s(lane, attended, cpu_s)


def least_makespan_s(lane: Sequence[tuple[float, float]], attended: float, cpu_s: float) -> float:
    """Seconds of GPU and CPU together at the best split of ``attended`` context tokens between them.

    Args:
        lane: lower bounds (a, b) of the GPU's seconds: a + b y with y of the context tokens attended on the GPU.
        cpu_s: seconds per context token on the CPU.
    """
    crossings = [(attended * cpu_s - fixed_s) / (token_s + cpu_s) for fixed_s, token_s in lane]
    on_gpu = min(max(min(crossings), 0.0), attended)
    return max((attended - on_gpu) * cpu_s, *(fixed_s + token_s * on_gpu for fixed_s, token_s in lane))
