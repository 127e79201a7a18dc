"""The command line that all ``reproduce_*.py`` share, as dataclasses for tyro. A field's docstring is its help text."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
import yaml

from evaluation.experiments.measured_sweeps import MeasuredPlan, WorkloadPlan
from evaluation.results.paths import EXPERIMENTS_DIR, RESULTS_DIR, model_folder
from evaluation.traces.workloads import select_by_workload
from swiftllm.config import DeviceName, DtypeName, EngineConfig, LoadFormat

if TYPE_CHECKING:
    from evaluation.replay.server import Server

# To add a backend: name it here, make its points in evaluation/figures/paper_figure.py, run them in
# evaluation/experiments/points.py.
Backend = Literal["simulated", "torch", "http"]

SettingName = Literal["small", "apex-t4", "apex-a10", "neo-t4", "neo-a10"]

# Options that many commands have. A command adds a docstring where the text names its own files.
Names = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="NAME ...")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")]
File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
ResultsDir = Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
FromFolder = Annotated[Folder, tyro.conf.arg(name="from", metavar="FOLDER")]
TraceDir = Annotated[Folder, tyro.conf.arg(help="Folder with trace files, searched before the cache.")]
Jobs = Annotated[
    int | None,
    tyro.conf.arg(help="Points to run in parallel; by default one per usable core. The results do not depend on it."),
]
Range = Annotated[str | None, tyro.conf.arg(metavar="NAME=LOW..HIGH")]

# Without a GPU the lane takes the GPU's part, so it must have the same size in all systems. The papers' systems have no
# prefix cache, and in one that has it a repeated run would not compute its prompts.
MEASURED = {"lane_threads": 1, "enable_prefix_caching": False}
SERVER_DECIDES = ("gpu_requests", "num_gpu_blocks", "device", "dtype", "load_format", "cpu_threads", "cpu_kernel")


@dataclass(frozen=True)
class CommonOptions:
    """Options of every figure. Where the default comes from the experiment file, --help names that file above.

    tyro keeps these line breaks in the help, so a line ends where a sentence or clause ends.
    """

    backend: Backend | None = None
    """simulated: predict the papers' GPUs in virtual time.
    torch: measure on this machine: on a GPU a paper's setting, without one a small model with scaled lengths.
    http: send the scaled workloads to running OpenAI-compatible servers (--url).
    The default is described above."""
    gpu: Literal["t4", "a10"] | None = None
    """Run only the panels of this GPU (simulated); by default all."""
    systems: Names = None
    """Systems to compare, in this order; by default those of the experiment file."""
    workloads: Names = None
    """Run only these workloads of the experiment file; by default all."""
    num_requests: int | None = None
    """Number of requests of every simulated point, or with --backend torch or http of every measured point.
    By default from the experiment file. NEO used 2000; the APEX paper gives no number."""
    seed: int = 0
    """Seed of all random draws: lengths, arrivals, prompts."""
    repeats: int | None = None
    """How many times to run every point; by default once. Simulated repeats use consecutive seeds.
    Tables show medians. Figures also show the lowest and the highest repeat."""
    jobs: int | None = None
    """Simulated points to run in parallel; by default one per usable core. The results do not depend on it."""
    sensitivity: Range = None
    """Instead of the figure, show how its ratios depend on an assumption (simulated).
    cpu_bandwidth=20..300: CPU attention reads 20 to 300 GB/s;
    gpu_blocks=54..400: the GPU pool has 54 to 400 KV blocks (choose the machine with --gpu)."""
    trace_dir: TraceDir = None
    config: File = None
    """Experiment file; by default the figure's own in configs/experiments."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to <figure>/<run>/ in this folder. Running the same command again continues an interrupted run."""
    from_folder: FromFolder = None
    """Run nothing; draw and print again from the summary.json of this result folder."""


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
class HttpOptions:
    """Options of backend http only."""

    url: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=URL")] = ()
    """A running server and the name of its system, e.g. vllm=http://127.0.0.1:8000. Repeat for each system.
    Start the server first, e.g. `vllm serve MODEL --port 8000`.
    Give the same server with other flags another name, or its earlier results count as finished.
    Ratios are to the figure's baseline if it is among the names, else to the first name."""
    ready_timeout_s: float = 60.0
    """Seconds to wait for a server to become ready (GET /health)."""
    request_timeout_s: float = 1800.0
    """Seconds after which a request counts as failed."""


@dataclass(frozen=True)
class FigureOptions(HttpOptions, MeasuredOptions, SettingOptions, CommonOptions):
    """All options of a figure that can be simulated and measured.

    Raises:
        ValueError: a count is below 1, or there is no time.
    """

    def __post_init__(self) -> None:
        check_counts(self, ("num_requests", "repeats", "gpu_requests", "jobs", "num_layers", "max_num_batched_tokens"))
        if self.hours <= 0:
            raise ValueError(f"hours={self.hours} must be above 0")


def check_counts(options: object, names: Collection[str]) -> None:
    """Check that the options of these names are at least 1, or None.

    Raises:
        ValueError: one is below 1.
    """
    for name in names:
        if (value := getattr(options, name)) is not None and value < 1:
            raise ValueError(f"{name}={value} must be at least 1")


def experiment_settings(figure: str, config: Path | None = None) -> dict[str, Any]:
    """The experiment file of a figure: sections ``simulated`` and ``torch``."""
    return yaml.safe_load((config or EXPERIMENTS_DIR / f"{figure}.yaml").read_text())


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


def make_measured_plan(figure: str, options: FigureOptions) -> MeasuredPlan:
    """The ``torch`` section of the experiment file, overridden by the options; servers are asked for their model.

    Raises:
        ValueError: an option is not valid here; the message says what to do.
        ServerNotReady: a server does not answer; the message says what to start.
    """
    settings = experiment_settings(figure, options.config)["torch"]
    workloads = chosen_workloads(settings, options)
    servers = connect_servers(options) if options.backend == "http" else ()
    systems = tuple(server.name for server in servers) or options.systems or tuple(settings["systems"])
    baseline = settings["baseline"]
    return MeasuredPlan(
        systems=systems,
        baseline=systems[0] if servers and baseline not in systems else baseline,
        seed=options.seed,
        repeats=options.repeats or settings["repeats"],
        workloads=workloads,
        gpu_requests=options.gpu_requests or settings["pool"]["gpu_requests"],
        engine=engine_config(settings, options),
        trace_dir=options.trace_dir,
        stall_timeout_s=options.stall_timeout_s,
        servers=servers,
        request_timeout_s=options.request_timeout_s,
        ready_timeout_s=options.ready_timeout_s,
    )


def chosen_workloads(settings: Mapping[str, Any], options: FigureOptions) -> tuple[WorkloadPlan, ...]:
    """The chosen workloads of the ``torch`` section, at the chosen sizes.

    Raises:
        ValueError: a chosen workload does not exist.
    """
    lists = ("output_lens", "request_rates")
    workloads = [
        WorkloadPlan(**{**raw, **{name: tuple(raw.get(name, ())) for name in lists}}) for raw in settings["workloads"]
    ]
    workloads = select_by_workload(workloads, options.workloads)
    changes = given(num_requests=options.num_requests, scale=options.scale)
    workloads = [replace(workload, **changes) for workload in workloads]
    if options.output_lens is not None:
        workloads = [replace(w, output_lens=options.output_lens) if w.output_lens else w for w in workloads]
    return tuple(workloads)


def engine_config(settings: Mapping[str, Any], options: FigureOptions) -> EngineConfig:
    """The engine of measured points.

    Raises:
        ValueError: there is no model; the message says what to do.
    """
    chosen = given(
        num_gpu_blocks=options.num_gpu_blocks,
        device=options.device,
        dtype=options.dtype,
        load_format=options.load_format,
        cpu_threads=options.cpu_threads,
        cpu_kernel=options.cpu_kernel,
    )
    return EngineConfig(str(model_folder(options.model)), **{**MEASURED, **settings["engine"], **chosen})


def connect_servers(options: FigureOptions) -> tuple[Server, ...]:
    """The servers of --url, ready to be measured.

    Raises:
        ValueError: an option is not valid here; the message says what is.
        ServerNotReady: a server does not answer; the message says what to start.
    """
    from evaluation.replay.server import connect_server  # the HTTP client is needed only here

    if not options.url:
        raise ValueError("--backend http needs a running server: --url NAME=http://127.0.0.1:8000")
    if unfit := [name for name in SERVER_DECIDES if getattr(options, name) is not None]:
        raise ValueError(
            f"{flags(unfit)}: with --backend http the server decides this; give it when you start the server"
        )
    urls = parse_urls(options.url)
    if unknown := set(options.systems or ()) - set(urls):
        raise ValueError(
            f"--systems {' '.join(sorted(unknown))}: give the server's address, --url NAME=http://HOST:PORT"
        )
    return tuple(connect_server(name, urls[name], options.ready_timeout_s) for name in options.systems or urls)


def parse_urls(texts: Sequence[str]) -> dict[str, str]:
    """The addresses of --url by name.

    Raises:
        ValueError: a text is not an address, or two have the same name.
    """
    urls: dict[str, str] = {}
    for text in texts:
        match = re.fullmatch(r"([\w.-]+)=(https?://[^/]+)(/v1)?/?", text)
        if match is None:
            raise ValueError(f"--url {text!r}: write it as NAME=http://HOST:PORT, e.g. vllm=http://127.0.0.1:8000")
        if match[1] in urls:
            raise ValueError(f"--url: two servers have the name {match[1]}; give each a name of its own")
        urls[match[1]] = match[2]
    return urls


def flags(names: Sequence[str]) -> str:
    """Option names as they are typed on the command line."""
    return ", ".join("--" + name.replace("_", "-") for name in names)


def given(**options: object) -> dict[str, object]:
    """The options that are not None."""
    return {name: value for name, value in options.items() if value is not None}
