"""The ablation: the same requests with strategies forced, disabled or run synchronously, measured or simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from apex.cli.output import ratio, strategy_mix
from apex.cli.profile import attention_rate
from apex.replay.metrics import predicted_over_actual
from apex.schedulers.formulas import offload_bound_tokens_per_s
from apex.simulator.paper_settings import BLOCK_SIZE
from apex.strategy import StrategyConfig
from apex.workloads.catalogue import Origin
from apex.workloads.files import TraceRow
from apex.workloads.requests import Lengths, WorkloadSpec
from evaluation.drivers import TorchTask, run_point, run_torch_point
from evaluation.grid import IDEAS, OWN_KERNELS, SUBJECT, Place, lengths_of, setting_of, simulate
from evaluation.options import Folder, Names, ResultsDir, check_counts, flags, given
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import RESULTS_DIR, model_folder
from evaluation.results.rows import distinct, grouped
from evaluation.run import Point, PointResult
from swiftllm.config import DeviceName, DtypeName, EngineConfig, LoadFormat

if TYPE_CHECKING:
    from swiftllm.engine.engine import Engine


BASELINE = "swiftllm"
SYSTEMS, OF_APEX, OF_NEO, OURS = "systems", "apex with one change", "neo with one change", "this project's own"
RATE, TO_BASELINE, TO_UNCHANGED = "output_tokens_per_s", "ratio_to_swiftllm", "ratio_to_unchanged"
"""Fields: throughput, over that of the ``BASELINE``, and over that of the row without the change."""


@dataclass(frozen=True)
class AblationRow:
    """A row of the table: a system and its changed settings.

    Attributes:
        words: what it is, for readers who do not know its name.
        group: rows of a group stand together.
        synchronous: the GPU batch waits for CPU attention, without overlap.
        axes: further changes, as axes of a simulated point (``evaluation/grid.py``). Such a row is only simulated.
    """

    name: str
    system: str
    words: str
    group: str
    strategy: StrategyConfig = field(default_factory=StrategyConfig)
    synchronous: bool = False
    axes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unchanged(self) -> str | None:
        """The name of the row without the change; None of a whole system."""
        return None if self.name == self.system else self.system


SWITCHES = (
    (OF_APEX, "no-postponed-prompts", "apex", "disable_postponed_cpu_prompts", "without postponed CPU prompts"),
    (OF_APEX, "no-decode-limit", "apex", "disable_cpu_decode_limit", "without the limit of CPU decodes"),
    (OF_APEX, "no-request-limit", "apex", "disable_cpu_request_limit", "without the limit of CPU requests"),
    (OF_NEO, "neo-no-postponed-prompts", "neo", "disable_postponed_cpu_prompts", "without step 5: postponed prompts"),
    (OF_NEO, "neo-no-decode-limit", "neo", "disable_cpu_decode_limit", "without step 4: the limit of CPU decodes"),
    (OURS, "compare-overlap", "apex", "compare_overlap", "apex that also compares overlap"),
)
"""Group, name, system, field of :class:`StrategyConfig` that is switched, words."""


def switched(group: str) -> list[AblationRow]:
    """The group's rows of ``SWITCHES``."""
    return [
        AblationRow(name, system, words, group, StrategyConfig(**{switch: True}))
        for of, name, system, switch, words in SWITCHES
        if of == group
    ]


IDEA_WORDS = {
    "prompt-chunks": "adaptive without prompt chunks sized for the decodes",
    "free-running": "adaptive without CPU batches that run free",
    "lockstep": "adaptive without pipelining",
}
WHOLE_SWAPS = "KV cache copied whole, not layer by layer"

ROWS = {
    row.name: row
    for row in (
        AblationRow(BASELINE, "swiftllm", "GPU only", SYSTEMS),
        AblationRow(
            "simple-offloading", "fastdecode", "all KV cache on the CPU, no overlap", SYSTEMS, synchronous=True
        ),
        AblationRow("fastdecode", "fastdecode", "all KV cache on the CPU, pipelined", SYSTEMS),
        AblationRow("neo", "neo", "a part on the CPU, pipelined", SYSTEMS),
        AblationRow("apex", "apex", "a part on the CPU, pipelined or overlapped", SYSTEMS),
        AblationRow(
            "no-overlap", "apex", "without overlap", OF_APEX, StrategyConfig(disable_asynchronous_overlap=True)
        ),
        AblationRow(
            "no-pipelining", "apex", "without pipelining", OF_APEX, StrategyConfig(disable_asymmetric_pipelining=True)
        ),
        AblationRow(
            "force-overlap", "apex", "overlap at any time", OF_APEX, StrategyConfig(strategy="asynchronous-overlap")
        ),
        AblationRow(
            "force-pipelining", "apex", "pipelining at any time", OF_APEX,
            StrategyConfig(strategy="asymmetric-pipelining"),
        ),
        AblationRow(
            "no-threshold", "apex", "overlap with any number of CPU requests", OF_APEX,
            StrategyConfig(min_cpu_request_ratio=0),
        ),
        AblationRow(
            "cpu-batches-1", "apex", "one CPU batch at a time, not two", OF_APEX, StrategyConfig(max_cpu_batches=1)
        ),
        AblationRow(
            "cpu-batches-4", "apex", "up to four CPU batches, not two", OF_APEX, StrategyConfig(max_cpu_batches=4)
        ),
        AblationRow(
            "no-priority", "apex", "no priority of partial progress", OF_APEX,
            StrategyConfig(disable_partial_progress_priority=True),
        ),
        AblationRow(
            "no-correction", "apex", "predictions never corrected", OF_APEX,
            StrategyConfig(disable_online_correction=True),
        ),
        *switched(OF_APEX),
        AblationRow("ispc-kernel", "apex", "NEO's CPU kernel (ispc)", OF_APEX, axes={"kernel": "ispc"}),
        AblationRow("whole-swaps", "apex", WHOLE_SWAPS, OF_APEX, axes={"whole_swaps": True}),
        AblationRow("synchronous", "apex", "the GPU waits for CPU attention", OF_APEX, synchronous=True),
        *switched(OF_NEO),
        AblationRow(
            "neo-llamafile-kernel", "neo", "APEX's CPU kernel (llamafile)", OF_NEO, axes={"kernel": "llamafile"}
        ),
        AblationRow("neo-whole-swaps", "neo", WHOLE_SWAPS, OF_NEO, axes={"whole_swaps": True}),
        AblationRow("adaptive", "adaptive", "this project's scheduler", OURS),
        *(
            AblationRow(f"adaptive-no-{idea}", "adaptive", IDEA_WORDS[idea], OURS, strategy)
            for idea, strategy in IDEAS.items()
        ),
        AblationRow(
            "adaptive-synchronous", "adaptive", "adaptive whose GPU waits for CPU attention", OURS, synchronous=True
        ),
        *switched(OURS),
    )
}  # fmt: skip


def chosen_rows(names: Sequence[str] | None, simulated: bool, own_kernels: bool = True) -> list[AblationRow]:
    """The rows of these names; without names all that can be run.

    Args:
        own_kernels: whether each system computes with its own CPU kernel. Else a row with another says nothing.

    Raises:
        ValueError: there is no such row, or it cannot be run; the message lists those that can.
    """
    there = {
        name: row
        for name, row in ROWS.items()
        if (simulated or not row.axes) and (own_kernels or "kernel" not in row.axes)
    }
    if unknown := [name for name in names or () if name not in ROWS]:
        raise ValueError(f"no rows {', '.join(unknown)}; there are {', '.join(there)}")
    if refused := [name for name in names or () if name not in there]:
        why = "all systems have one kernel or one speed here" if simulated else "only --backend simulated has them"
        raise ValueError(f"no rows {', '.join(refused)}: {why}; there are {', '.join(there)}")
    return [there[name] for name in names or there]


def meanings(names: Sequence[str]) -> str:
    """The rows of these names in words."""
    return "; ".join(f"{name}: {ROWS[name].words}" for name in names)


def machine_of(record: FlatRecord) -> str:
    """The machine of a row where there are several: its setting, in its reading."""
    said = (record.get("setting_title"), record.get("reading"))
    return ", ".join(filter(None, said)) or record["backend"]


def with_mix(result: PointResult) -> PointResult:
    """The result with what its strategies were, and how well iterations were predicted."""
    stats = result.details["engine_stats"]
    mix = {
        "strategy_mix": strategy_mix(stats["strategy_iterations"]),
        "predicted_over_actual": predicted_over_actual(stats),
    }
    return replace(result, values={**result.values, **mix})


def with_ratios(rows: Sequence[FlatRecord]) -> list[FlatRecord]:
    """The rows with their throughput over that of the baseline, and of the row without the change, on one machine."""
    rates = {case: {row["row"]: row[RATE] for row in here} for case, here in grouped(rows, "case").items()}
    return [
        {
            **row,
            TO_BASELINE: ratio(row[RATE], rates[row.get("case")].get(BASELINE)),
            TO_UNCHANGED: ratio(row[RATE], rates[row.get("case")].get(ROWS[row["row"]].unchanged)),
        }
        for row in rows
    ]


MEASURED_ONLY = ("model", "load_format", "gpu_requests", "repeats", "device", "dtype", "cpu_threads")
SIMULATED_ONLY = (
    "setting", "host", "kernel", "cpu_bandwidth", "num_gpu_blocks", "cpu_kv_gb", "workload", "request_rate", "jobs",
)  # fmt: skip


@dataclass(frozen=True)
class Options:
    """Force and disable strategies on one workload, and print and draw the throughput of each variant.

    By default this machine is measured: the GPU tier holds a few requests of a small model, and all others wait or go
    to the CPU tier. With --backend simulated machines of the papers are SIMULATED (predicted times), which takes no
    model and no GPU. Running the same command again continues an interrupted run. Table, figure, CSV and LaTeX go to
    results/ablation/<run>/.
    """

    backend: Literal["torch", "simulated"] = "torch"
    """torch: measure on this machine. simulated: predict a machine of the papers in virtual time."""
    setting: Names = None
    """Machines, models and pools to simulate: settings of configs/experiments/papers.yaml; by default APEX's A10 in
    both readings, apex-a10-as-measured and apex-a10."""
    host: str | None = None
    """Host to simulate: a name in configs/hardware; by default the setting's. Its CPU pool grows with its cores."""
    kernel: Literal["own", "native", "llamafile", "ispc"] = "own"
    """CPU attention kernel to simulate; own: each system computes with that of its paper."""
    cpu_bandwidth: float | None = None
    """GB/s at which CPU attention reads KV cache; by default that of the kernel. Simulated only."""
    num_gpu_blocks: int | None = None
    """KV blocks of 16 tokens on the GPU; by default the setting's. Simulated only."""
    cpu_kv_gb: float | None = None
    """GB of KV cache on the host; by default the setting's. Simulated only."""
    workload: str | None = None
    """Trace to simulate, such as azure-conv, livebench, dolphin-r1 or osc; by default requests of about one size."""
    request_rate: float | None = None
    """Requests per second, Poisson arrivals; by default all are there at once. Simulated only."""
    model: Folder = None
    """Hugging Face folder of a Llama-family model; by default SmolLM2-135M-Instruct from the cache. Measured only."""
    load_format: LoadFormat = "auto"
    """dummy: random weights in the shapes of config.json, as for configs/models/attention-heavy. Measured only."""
    rows: Names = None
    """Rows of the table to run; by default all. Rows with another kernel or with whole swaps are only simulated."""
    num_requests: int | None = None
    """Number of requests, all sent at the start; by default 64, simulated 300."""
    input_len: int | None = None
    """Prompt tokens of each request; by default 32. Simulated prompts differ by up to 10% from it;
    by default 1000, at most half of what the setting takes."""
    output_len: int | None = None
    """Output tokens of each request; by default 48. Simulated outputs differ by up to 10% from it;
    by default 500, at most a quarter of what the setting takes."""
    gpu_requests: int = 4
    """Number of requests that fit the GPU tier at once. Measured only: a setting has its own pools."""
    repeats: int = 1
    """How many times to measure every row; the table shows medians. Measured only."""
    device: DeviceName = "auto"
    """Device of the linear layers. Measured only."""
    dtype: DtypeName = "auto"
    """Data type of weights, activations and KV cache. Measured only."""
    cpu_threads: int = 1
    """Threads of the CPU attention worker. Measured only."""
    seed: int = 0
    """Seed of the prompts, and of simulated lengths."""
    jobs: int | None = None
    """Rows to simulate in parallel; by default one per usable core. The results do not depend on it."""
    results_dir: ResultsDir = RESULTS_DIR
    """Results go to ablation/<run>/ in this folder."""

    @property
    def is_simulated(self) -> bool:
        return self.backend == "simulated"

    def check(self) -> None:
        """
        Raises:
            ValueError: a count is below 1, or the backend does not take an option.
        """
        counts = ("num_requests", "input_len", "output_len", "gpu_requests", "repeats", "jobs", "num_gpu_blocks")
        check_counts(self, counts)
        for name in ("cpu_bandwidth", "cpu_kv_gb", "request_rate"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"{name}={value} must be more than 0")
        if self.workload is not None and self.input_len is not None:
            raise ValueError("--input-len: a --workload has prompts of its own; leave one of them out")
        others = MEASURED_ONLY if self.is_simulated else SIMULATED_ONLY
        defaults = {field.name: field.default for field in fields(self)}
        if unused := [name for name in others if getattr(self, name) != defaults[name]]:
            backend = "torch" if self.is_simulated else "simulated"
            raise ValueError(f"{flags(unused)}: only --backend {backend} takes that")


# -- measured on this machine -----------------------------------------------------------------------------------------

MEASURED_SIZES = {"num_requests": 64, "input_len": 32, "output_len": 48}


@dataclass(frozen=True)
class RowTask:
    row: AblationRow
    task: TorchTask


def measured_points(options: Options) -> list[Point]:
    """A point per row and repeat.

    Raises:
        ValueError: an option is not valid; the message says what to do.
    """
    rows = chosen_rows(options.rows, simulated=False)
    num_requests, input_len, output_len = (getattr(options, name) or usual for name, usual in MEASURED_SIZES.items())
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


def run_measured(point: Point, label: str, console: Console) -> PointResult:
    """Run a point with its row's strategy, and add the values from which the bound is computed."""
    row, task = point.task.row, point.task.task
    predictions: dict[str, float | None] = {}

    def build(system: str, config: EngineConfig) -> Engine:
        from apex.build import build_system

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


def measured_bound(summary: Sequence[FlatRecord]) -> str:
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


# -- SIMULATED on machines of the papers ------------------------------------------------------------------------------

SETTINGS = ("apex-a10-as-measured", "apex-a10")
"""Both readings of the paper's A10."""
NUM_REQUESTS, INPUT_LEN, OUTPUT_LEN = 300, 1000, 500


def simulated_points(options: Options) -> list[Point]:
    """A point per setting and row; the rows of a setting share their requests.

    Raises:
        ValueError: an option is not valid, or a setting does not take requests of that size; the message says what to
            do.
    """
    names = options.setting or SETTINGS
    return [point for name in names for point in _points_of(name, options, several=len(names) > 1)]


def _points_of(name: str, options: Options, several: bool) -> list[Point]:
    from evaluation.studies.adaptive import roofline_tokens_per_s  # it draws, which processes that run points do not

    own_kernels = options.kernel == OWN_KERNELS and options.cpu_bandwidth is None
    rows, place = chosen_rows(options.rows, simulated=True, own_kernels=own_kernels), _place(name, options)
    lengths = lengths_of(place)
    _check_sizes(place, lengths)
    bound, cost = roofline_tokens_per_s(simulate({**place, "system": SUBJECT})), float(lengths.total_output_tokens)
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


def run_simulated(point: Point, label: str, console: Console) -> PointResult:
    """Run a point, and add what its strategies were."""
    return with_mix(run_point(point, label, console))


def simulated_bound(summary: Sequence[FlatRecord]) -> str:
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
