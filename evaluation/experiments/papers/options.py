"""The command line of the papers' figures. A field's docstring is its help text; tyro keeps its line breaks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Annotated, Literal

import tyro

from evaluation.options import Folder, HttpOptions, Names, Range, TraceOptions, check_counts, flags
from swiftllm.config import DeviceName, DtypeName, LoadFormat

# To add a backend: name it here, make its points in evaluation/experiments/papers/jobs.py, run them in
# evaluation/drivers.py.
Backend = Literal["simulated", "torch", "http"]

SettingName = Literal["small", "apex-t4", "apex-a10", "neo-t4", "neo-a10"]
SERVER_DECIDES = ("gpu_requests", "num_gpu_blocks", "device", "dtype", "load_format", "cpu_threads", "cpu_kernel")


@dataclass(frozen=True)
class PaperOptions(TraceOptions):
    """Options of every figure of a paper. Where a default comes from the experiment file, --help names that file."""

    systems: Names = None
    """Systems to compare, in this order, the figure's baseline among them; by default those of the experiment file."""
    num_requests: int | None = None
    """Number of requests of every simulated point, or with --backend torch or http of every measured point.
    By default from the experiment file. NEO used 2000; the APEX paper gives no number."""
    seed: int = 0
    """Seed of all random draws: lengths, arrivals, prompts."""
    repeats: int | None = None
    """How many times to run every point; by default once. Simulated repeats use consecutive seeds.
    Tables show medians. Figures also show the lowest and the highest repeat."""
    sensitivity: Range = None
    """Instead of the figure (NEO's Figure 9), show how its ratios depend on an assumption (simulated).
    cpu_bandwidth=20..300: CPU attention reads 20 to 300 GB/s;
    cpu_share=0.02..0.2: it has 2 to 20% of the GPU's rate; kernel_ratio=1..2: APEX's kernel is 1 to 2 times NEO's;
    gpu_blocks=54..400: the GPU pool has 54 to 400 KV blocks (choose the machine with --gpu)."""
    neo_launches: bool = False
    """Charge neo and fastdecode with what NEO's own code spends on kernel launches (simulated; papers.yaml). By default
    they are NEO's schedule in this engine, whose launches are hidden."""


@dataclass(frozen=True)
class BackendOptions:
    """What is run of a figure of the APEX paper, and how."""

    backend: Backend | None = None
    """simulated: predict the papers' GPUs in virtual time.
    torch: measure on this machine: on a GPU a paper's setting, without one a small model with scaled lengths.
    http: send the scaled workloads to running OpenAI-compatible servers (--url).
    The default is described above."""
    gpu: Literal["t4", "a10"] | None = None
    """Run only the panels of this GPU (simulated); by default all."""
    workloads: Names = None
    """Run only these workloads of the experiment file; by default all."""


@dataclass(frozen=True)
class SettingOptions:
    """Options of measurements in a paper's setting (backend torch)."""

    setting: SettingName | None = None
    """Measure this setting of configs/experiments/papers.yaml: its model, pools and lengths.
    small: a small model with scaled lengths.
    By default the setting of this machine's GPU, or the one nearest to it; small without a GPU."""
    hours: float = 2.0
    """Time for all measured points of a setting. It decides how many requests each has;
    --num-requests with --backend torch gives the number instead."""
    plan: bool = False
    """Print the plan of a setting's points, with predicted throughput and time, and stop."""
    all_gpu_blocks: bool = False
    """Give the KV cache all memory that the GPU has left, in place of the paper's number of blocks."""
    num_layers: int | None = None
    """Only this many layers of the setting's model, with random weights: to try a shape on a small machine."""
    max_num_batched_tokens: int | None = None
    """Most tokens of an iteration, in place of the paper's."""
    rehearse: bool = False
    """Walk the same path with a tiny random model on the CPU: shows that all parts work, and measures nothing."""


@dataclass(frozen=True)
class MeasuredOptions:
    """Options of the measured part only (backends torch and http)."""

    model: Folder = None
    """Hugging Face folder of a Llama-family model; by default SmolLM2-135M-Instruct from the cache.
    A paper's setting also takes a name on the hub, and by default uses random weights.
    With --backend http give the model that the servers run: its tokenizer makes the prompts."""
    scale: float | None = None
    """Factor for input and output lengths of every measured workload; 1 keeps the lengths of the traces.
    By default from the experiment file; 1 in a paper's setting."""
    output_lens: Annotated[tuple[float, ...] | None, tyro.conf.arg(metavar="TOKENS ...")] = None
    """Average output lengths (tokens, before scaling) of measured workloads that sweep them."""
    gpu_requests: int | None = None
    """Size of the measured GPU pool, in requests of average length."""
    num_gpu_blocks: int | None = None
    """Size of the measured GPU pool, in KV blocks."""
    device: DeviceName | None = None
    """Device of the linear layers; by default from the experiment file."""
    dtype: DtypeName | None = None
    """Data type of weights, activations and KV cache; by default from the experiment file."""
    load_format: LoadFormat | None = None
    """dummy needs only the model's config.json; weights and prompts are random."""
    cpu_threads: int | None = None
    """Threads of the CPU attention worker."""
    cpu_kernel: str | None = None
    """CPU attention kernel: native, ispc or llamafile; by default the best for this machine and dtype."""
    stall_timeout_s: float = 120.0
    """Abandon a measured point after this many seconds without progress."""


@dataclass(frozen=True)
class FigureOptions(HttpOptions, MeasuredOptions, SettingOptions, PaperOptions, BackendOptions):
    """All options of a figure that can be simulated and measured.

    Raises:
        ValueError: a count is below 1, or there is no time.
    """

    def __post_init__(self) -> None:
        check_counts(self, ("num_requests", "repeats", "gpu_requests", "jobs", "num_layers", "max_num_batched_tokens"))
        if self.hours <= 0:
            raise ValueError(f"hours={self.hours} must be above 0")


def refuse_unused_options(options: FigureOptions, backends: Collection[str], in_setting: bool) -> None:
    """Check that one of these backends takes every given option. ``in_setting``: a paper's setting is measured.

    Raises:
        ValueError: none of them takes an option.
    """
    unused = [] if "http" in backends else [(HttpOptions, "--backend http")]
    unused += [] if {"torch", "http"}.intersection(backends) else [(MeasuredOptions, "--backend torch or http")]
    if not in_setting:
        unused.append((SettingOptions, "a measurement in a paper's setting (--backend torch --setting NAME)"))
    elif options.gpu_requests is not None:
        raise ValueError("--gpu-requests: a paper's setting has its own GPU pool; --num-gpu-blocks changes it")
    for group, remedy in unused:
        names = [field.name for field in fields(group) if getattr(options, field.name) != field.default]
        if names := [name for name in names if name != "setting"]:  # simulations take a setting, too
            raise ValueError(f"{flags(names)}: only {remedy} takes that")
    if options.setting == "small" and "torch" not in backends:
        raise ValueError("--setting small is measured: only --backend torch takes that")
