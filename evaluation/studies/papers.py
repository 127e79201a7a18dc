"""The points of the papers' figures: simulated on their machines, and of a small model or servers, scaled down."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from apex.simulator.paper_settings import load_setting
from evaluation.drivers import HttpTask, TorchTask
from evaluation.grid import (
    FIELDS,
    REQUESTS,
    Grid,
    Place,
    concerns,
    lengths_of,
    setting_of,
    simulate,
    values_of,
    workload_of,
)
from evaluation.options import (
    Folder,
    HttpOptions,
    Names,
    Range,
    TraceOptions,
    check_counts,
    experiment_settings,
    flags,
    given,
    parse_urls,
)
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import model_folder
from evaluation.results.provenance import cpu_kernels, model_identity
from evaluation.run import Point, identity
from evaluation.traces.workloads import Lengths
from swiftllm.config import DeviceName, DtypeName, EngineConfig, LoadFormat
from swiftllm.systems import find_system

if TYPE_CHECKING:
    from evaluation.measure.server import Server


# -- assumptions that --sensitivity varies ----------------------------------------------------------------------------

STEPS = 8


@dataclass(frozen=True)
class Assumption:
    """One figure of a :class:`~apex.simulator.paper_settings.PaperSetting` that can be replaced.

    ``name`` is its name on the command line and in a row's ``sensitivity``; ``field`` is the field of its value.
    ``words`` and ``unit`` name it in figures, ``column`` in tables, ``tag`` and ``unit`` in keys and labels of points.
    The field is an axis of ``evaluation/grid.py``. A system that does not depend on it runs once, with an
    empty field.
    """

    name: str
    field: str
    words: str
    unit: str
    column: str
    tag: str

    @property
    def axis(self) -> str:
        return f"{self.unit} (assumed)"


ASSUMPTIONS = {
    "cpu_bandwidth": Assumption(
        "cpu_bandwidth", "cpu_bandwidth_gb_s", "the speed of CPU attention", "GB/s of CPU attention", "CPU GB/s", "cpu"
    ),
    "gpu_blocks": Assumption(
        "gpu_blocks",
        "num_gpu_blocks",
        "the size of the GPU's KV pool",
        "KV blocks of 16 tokens on the GPU",
        "blocks",
        "blocks",
    ),
    "cpu_share": Assumption(
        "cpu_share",
        "cpu_of_gpu_attention",
        "the CPU's share of the GPU's speed",
        "of the GPU's rate of attention, with APEX's kernel",
        "CPU/GPU",
        "share",
    ),
    "kernel_ratio": Assumption(
        "kernel_ratio", "kernel_ratio", "APEX's CPU kernel", "times as fast as NEO's kernel", "kernel", "kernel"
    ),
}


def varied_in(records: Iterable[FlatRecord]) -> Assumption | None:
    """The assumption that a run varied, read from its rows; None for a run of the figure itself."""
    return ASSUMPTIONS.get(next(iter(records)).get("sensitivity"))


def parse_sensitivity(text: str) -> tuple[Assumption, tuple[float, ...]]:
    """``NAME=LOW..HIGH`` as values: both ends, and numbers of two digits between them, evenly spaced on a logarithmic
    axis.

    Raises:
        ValueError: the text has another form, or the name is unknown; the message shows what is valid.
    """
    match = re.fullmatch(r"(\w+)=([\d.]+)\.\.([\d.]+)", text)
    try:
        name, low, high = match[1], float(match[2]), float(match[3])
    except (TypeError, ValueError):
        raise ValueError(f"--sensitivity {text!r}: write it as NAME=LOW..HIGH, like cpu_bandwidth=20..300") from None
    if name not in ASSUMPTIONS:
        raise ValueError(f"--sensitivity {name}: what can be varied is {', '.join(ASSUMPTIONS)}")
    if not 0 < low < high:
        raise ValueError(f"--sensitivity {text!r}: the range must rise from above 0")
    between = (_two_digits(low * (high / low) ** (step / (STEPS - 1))) for step in range(1, STEPS - 1))
    return ASSUMPTIONS[name], (low, *sorted({value for value in between if low < value < high}), high)


def _two_digits(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(value)))


# -- the command line; tyro keeps the line breaks of help texts -------------------------------------------------------

# To add a backend: name it here, make its points in evaluation/studies/figures.py, run them in
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


# -- simulated points -------------------------------------------------------------------------------------------------

ROW = ("panel", "baseline")
"""Fields of a place that are fields of the rows of every figure."""
ROW_AT_LATENCY = (*ROW, "at_latency_s", "point")
"""With the latency (seconds) at which curves are compared, and the point's key, which names the file of its records."""


def figure_grid(section: Mapping[str, Any], options: FigureOptions) -> Grid:
    """The grid of a section of an experiment file, as the options choose. Repeats have consecutive seeds, since nothing
    else in a simulation is random.

    Raises:
        ValueError: an option is not valid here; the message says what is.
    """
    variant = None if options.sensitivity is None else "sensitivity"
    grid = Grid.read(section, FIELDS | {*ROW_AT_LATENCY}, variant, notes=("shows",))
    grid = grid.only("workload", options.workloads, workload_of)
    grid = grid.only("gpu", options.gpu and [options.gpu], lambda panel: load_setting(panel["setting"]).gpus)
    for system in options.systems or ():
        find_system(system)
    for panel in grid.panels:
        if panel["baseline"] not in (options.systems or values_of(panel, "system")):
            raise ValueError(f"ratios are to {panel['baseline']}: add it to --systems")
    chosen = given(system=options.systems, num_requests=options.num_requests, trace_dir=options.trace_dir)
    chosen |= given(neo_launches=options.neo_launches or None)
    repeats = options.repeats or 1
    grid = grid.with_(**chosen, repeats=repeats, seed=range(options.seed, options.seed + repeats))
    return grid if options.sensitivity is None else with_assumption(grid, options.sensitivity)


def with_assumption(grid: Grid, text: str) -> Grid:
    """The grid with an axis for an assumption, of ``NAME=LOW..HIGH``.

    Raises:
        ValueError: the text is not valid, or a value is not possible in a setting; the message says what is.
    """
    assumption, values = parse_sensitivity(text)
    for setting in {panel["setting"]: load_setting(panel["setting"]) for panel in grid.panels}.values():
        if assumption.name == "gpu_blocks" and values[0] < setting.min_gpu_blocks:
            raise ValueError(
                f"--sensitivity gpu_blocks: {setting.title} needs {setting.min_gpu_blocks} blocks for its longest "
                "request; begin there, or choose another machine with --gpu"
            )
    return grid.with_(sensitivity=assumption.name, **{assumption.field: values})


def simulated_points(grid: Grid, row: Collection[str] = ROW) -> list[Point]:
    """The points of a figure, predicted on the papers' machines. Systems that do not depend on an assumption run once.

    ``row`` are fields of places for the rows.
    """
    return [_point(place, row) for place in grid.places(concerns)]


def _point(place: Place, row: Collection[str]) -> Point:
    setting, lengths = setting_of(place), lengths_of(place)
    assumption = ASSUMPTIONS.get(place.get("sensitivity"))
    value = place[assumption.field] if assumption else None
    varied = None if value is None else (f"{assumption.tag}{value:g}", f"{value:g} {assumption.unit}")
    parts, words = [f"sim-{place['panel']}", setting.name], [*filter(None, (setting.title, setting.reading))]
    key, group, label = point_names(parts, words, lengths, place, varied)
    fields = [*row, assumption.field] if assumption else row
    task = simulate({**place, "point": key}, fields, lengths, sensitivity=place.get("sensitivity"))
    return Point(key, group, label, task, concurrent=True, cost=float(lengths.total_output_tokens))


def point_names(
    parts: Sequence[str], words: Sequence[str], lengths: Lengths, place: Place, varied: tuple[str, str] | None = None
) -> tuple[str, str, str]:
    """Key, group and label of a point.

    ``parts`` begin the key and ``words`` the label. ``varied`` is a varied assumption, for both.
    """
    spec = lengths.spec
    parts, words = [*parts, spec.name], [*words, lengths.title]
    for tag, at, unit in (("out", spec.output_len, "output tokens"), ("rate", spec.request_rate, "requests/s")):
        if at is not None:
            parts.append(f"{tag}{at:g}")
            words.append(f"{at:g} {unit}")
    if varied is not None:
        parts.append(varied[0])
        words.append(varied[1])
    group = "-".join([*parts, place["system"]])
    label = ", ".join([*words, place["system"]])
    if place["repeats"] == 1:
        return group, group, label
    return f"{group}-seed{spec.seed}", group, f"{label}, seed {spec.seed}"


# -- measured points, scaled down -------------------------------------------------------------------------------------

NOTES = ("system", "baseline", "repeats", "pool", "engine")


def small_points(figure: str, options: FigureOptions) -> tuple[list[Point], dict[str, Any]]:
    """The points of the ``torch`` section of an experiment file, and what decides their numbers.

    The systems of one workload run one after the other, so that slow drift affects them alike. Servers are asked for
    their model.

    Raises:
        ValueError: an option is not valid here; the message says what to do.
        ServerNotReady: a server does not answer; the message says what to start.
    """
    section = experiment_settings(figure, options.config)["torch"]
    grid = Grid.read(section, {"panel", *REQUESTS}, notes=NOTES).only("workload", options.workloads, workload_of)
    changes = given(num_requests=options.num_requests, scale=options.scale, trace_dir=options.trace_dir)
    grid = with_output_lens(grid.with_(**changes, seed=options.seed), options.output_lens)
    servers = connect_servers(options) if options.backend == "http" else {}
    systems = tuple(servers) or options.systems or tuple(section["system"])
    baseline = systems[0] if servers and section["baseline"] not in systems else section["baseline"]
    for system in systems if not servers else ():
        find_system(system)
    engine = engine_config(section["engine"], options)
    gpu_requests = options.gpu_requests or section["pool"]["gpu_requests"]
    repeats = options.repeats or section["repeats"]

    def task(system: str, lengths: Lengths, values: Mapping[str, Any]) -> TorchTask | HttpTask:
        if system in servers:
            limits = (options.stall_timeout_s, options.request_timeout_s, None, options.ready_timeout_s)
            return HttpTask(servers[system], Path(engine.model), lengths, values, *limits)
        pools = with_pools(engine, lengths, gpu_requests)
        return TorchTask(system, pools, lengths, {**values, "gpu_requests": gpu_requests}, options.stall_timeout_s)

    points = []
    for place in grid.places():
        lengths, rate = lengths_of(place), place.get("request_rate")
        swept = {"out": place.get("output_len"), "rate": rate}
        group = "-".join([lengths.spec.name, *(f"{tag}{at:g}" for tag, at in swept.items() if at is not None)])
        label = f"{lengths.spec.name}, {lengths.mean_output_tokens:.0f} output tokens"
        label += "" if rate is None else f", {rate:g} requests/s"
        for repeat in range(repeats):
            first = repeat % len(systems)  # otherwise one system would always be measured first
            for system in systems[first:] + systems[:first]:
                key = f"{group}-{system}" + (f"-{repeat}" if repeats > 1 else "")
                made = task(system, lengths, {"panel": place["panel"], "baseline": baseline})
                points.append(Point(key, f"{group}-{system}", f"{label}, {system}", made))
    configuration = {
        "model": model_identity(Path(engine.model)),
        "repeats": repeats,
        **({} if servers else {"cpu_kernels": cpu_kernels(), "gpu_requests": gpu_requests}),
        "points": identity(points),
    }
    return points, configuration


def with_output_lens(grid: Grid, output_lens: Sequence[float] | None) -> Grid:
    """The grid with other average output lengths, where a panel sweeps these."""
    if output_lens is None:
        return grid
    swept = {"output_len": list(output_lens)}
    return Grid(tuple({**panel, **swept} if panel.get("output_len") else panel for panel in grid.panels))


def engine_config(fields: Mapping[str, Any], options: FigureOptions) -> EngineConfig:
    """The engine of measured points.

    Raises:
        ValueError: there is no model; the message says what to do.
    """
    names = ("num_gpu_blocks", "device", "dtype", "load_format", "cpu_threads", "cpu_kernel")
    chosen = given(**{name: getattr(options, name) for name in names})
    # Without a GPU the GPU batch takes the GPU's part, so it has the same size in all systems. The papers' systems have
    # no prefix cache, and in one that has it a repeated run would not compute its prompts.
    same = {"gpu_batch_threads": 1, "enable_prefix_caching": False}
    return EngineConfig(str(model_folder(options.model)), **{**same, **fields, **chosen})


def pool_blocks(lengths: Lengths, gpu_requests: int, block_size: int) -> tuple[int, int]:
    """Numbers of GPU and CPU blocks for a workload.

    The GPU pool holds ``gpu_requests`` requests of average length, and at least the longest one. The CPU pool
    holds all requests at once.
    """
    blocks = [math.ceil((row.input_tokens + row.output_tokens) / block_size) for row in lengths.rows]
    mean = math.ceil(sum(blocks) / len(blocks))
    return max(gpu_requests * mean, max(blocks)), 1 << (sum(blocks) - 1).bit_length()


def with_pools(engine: EngineConfig, lengths: Lengths, gpu_requests: int) -> EngineConfig:
    """``engine`` with pool sizes from :func:`pool_blocks` where it has none."""
    gpu_blocks, cpu_blocks = pool_blocks(lengths, gpu_requests, engine.block_size)
    return replace(
        engine,
        num_gpu_blocks=gpu_blocks if engine.num_gpu_blocks is None else engine.num_gpu_blocks,
        num_cpu_blocks=cpu_blocks if engine.num_cpu_blocks is None else engine.num_cpu_blocks,
    )


def connect_servers(options: FigureOptions) -> dict[str, Server]:
    """The servers of --url by name, ready to be measured.

    Raises:
        ValueError: an option is not valid here; the message says what is.
        ServerNotReady: a server does not answer; the message says what to start.
    """
    from evaluation.measure.server import connect_server  # the HTTP client is needed only here

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
    return {name: connect_server(name, urls[name], options.ready_timeout_s) for name in options.systems or urls}
