"""Reproduces Figure 5 of the APEX paper on this machine: throughput of the systems over its four workloads.

python evaluation/reproduce_fig5.py [--help]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import tyro
import yaml
from rich.console import Console

from evaluation import figures
from evaluation.experiment import run_experiment
from evaluation.fig5 import (
    Fig5Plan,
    WorkloadPlan,
    configuration,
    figure_text,
    groups,
    make_points,
    print_results,
)
from evaluation.paths import EXPERIMENTS_DIR, RESULTS_DIR, default_model
from evaluation.provenance import machine_identity
from evaluation.torch_point import run_torch_point
from evaluation.traces import catalogue
from swiftllm.config import DeviceName, DtypeName, EngineConfig, LoadFormat


@dataclass(frozen=True)
class Options:
    """Replay request traces under several systems and draw their throughput.

    What is not given is taken from the experiment file. Running the same command again goes on where the last
    one stopped; any change of options, code or machine starts a new result folder.
    """

    config: Path = EXPERIMENTS_DIR / "fig5.yaml"
    """Experiment file: systems, workloads, request counts, scales, pool rule, engine options."""
    model: Path | None = None
    """Hugging Face folder of a Llama-family model; by default SmolLM2-135M-Instruct from the cache."""
    systems: tuple[Literal["swiftllm", "neo", "fastdecode", "apex"], ...] | None = None
    """Systems to compare, in order."""
    workloads: tuple[str, ...] | None = None
    """Only these workloads of the experiment file."""
    num_requests: int | None = None
    """Requests of every workload."""
    scale: float | None = None
    """Multiplies input and output lengths of every workload; 1 is the traces' own."""
    output_lens: tuple[float, ...] | None = None
    """Average output lengths of panel (a), before scaling."""
    gpu_requests: int | None = None
    """Cap the GPU pool to this many requests of average length."""
    num_gpu_blocks: int | None = None
    """Cap the GPU pool to this many KV blocks instead."""
    device: DeviceName | None = None
    """Where the linear layers run."""
    dtype: DtypeName | None = None
    """Weights, activations and KV cache."""
    load_format: LoadFormat | None = None
    """dummy needs only the model's config.json and draws prompts at random."""
    cpu_threads: int | None = None
    """Threads of the CPU attention worker."""
    cpu_kernel: str | None = None
    """CPU attention kernel (native, ispc)."""
    seed: int | None = None
    """Seed of everything drawn: lengths, prompts."""
    repeats: int | None = None
    """Measure every point so often and take medians."""
    trace_dir: Path | None = None
    """Folder with trace files, searched first."""
    results_dir: Path = RESULTS_DIR
    """Results go to fig5/<run>/ in this folder."""
    stall_timeout_s: float = 120.0
    """Give a point up after so many seconds without progress."""


def make_plan(options: Options) -> Fig5Plan:
    """The experiment file with the options laid over it.

    Raises:
        ValueError: an option does not fit; the message says what to do.
    """
    settings = yaml.safe_load(options.config.read_text())
    workloads = [WorkloadPlan(**{**w, "output_lens": tuple(w.get("output_lens", ()))}) for w in settings["workloads"]]
    if options.workloads is not None:
        unknown = set(options.workloads) - {workload.name for workload in workloads}
        if unknown:
            raise ValueError(f"workloads {sorted(unknown)} are not in {options.config}: {[w.name for w in workloads]}")
        workloads = [workload for workload in workloads if workload.name in options.workloads]
    changes = given(num_requests=options.num_requests, scale=options.scale)
    workloads = [replace(workload, **changes) for workload in workloads]
    if options.output_lens is not None:
        workloads = [replace(w, output_lens=options.output_lens) if w.output_lens else w for w in workloads]
    model = options.model or default_model()
    if not (model / "config.json").is_file():
        remedy = (
            "point --model at a Hugging Face folder"
            if options.model
            else "type `make setup` to fetch the default model"
        )
        raise ValueError(f"no model in {model}: {remedy}")
    engine = {
        **settings["engine"],
        **given(
            num_gpu_blocks=options.num_gpu_blocks,
            device=options.device,
            dtype=options.dtype,
            load_format=options.load_format,
            cpu_threads=options.cpu_threads,
            cpu_kernel=options.cpu_kernel,
        ),
    }
    return Fig5Plan(
        systems=options.systems or tuple(settings["systems"]),
        baseline=settings["baseline"],
        seed=settings["seed"] if options.seed is None else options.seed,
        repeats=options.repeats or settings["repeats"],
        workloads=tuple(workloads),
        gpu_requests=options.gpu_requests or settings["pool"]["gpu_requests"],
        engine=EngineConfig(model=str(model), **engine),
        trace_dir=options.trace_dir,
        stall_timeout_s=options.stall_timeout_s,
    )


def given(**options: object) -> dict[str, object]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def main(options: Options) -> int:
    """Run, draw, tell. Returns the exit status: 0 when every point is finished."""
    console = Console()
    try:
        plan = make_plan(options)
        points = make_points(plan)
    except (ValueError, FileNotFoundError) as error:
        console.print(f"error: {error}", style="bold red", highlight=False, markup=False)
        return 2
    outcome = run_experiment("fig5", configuration(plan, points), points, run_torch_point, options.results_dir, console)
    if outcome.summary:
        text = figure_text(outcome.summary, plan.baseline, machine_identity())
        panel_a, panel_b = groups(outcome.summary, "a"), groups(outcome.summary, "b")
        titles = {catalogue()[workload.name]["title"] for workload in plan.workloads if workload.panel == "a"}
        figure = figures.figure5(panel_a, panel_b, plan.systems, plan.baseline, text, ", ".join(sorted(titles)))
        figures.save(figure, outcome.folder)
        print_results(outcome.summary, plan.baseline, console)
    for label in outcome.failed:
        console.print(f"failed: {label}", style="bold red", highlight=False, markup=False)
    console.print(f"summary, figure, raw records and provenance: {outcome.folder}", highlight=False, soft_wrap=True)
    return 1 if outcome.failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
