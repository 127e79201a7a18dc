"""Figure 1 of the APEX paper: a layer's linear operations and its decode attention, one call each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from rich.console import Console

import pacpu
from apex.simulator.hardware_files import LayerShape, load_gpu, load_host, load_model_config
from apex.simulator.predicted_profile import gpu_attention_s, hardware_profile
from evaluation.options import RunOptions, check_counts, experiment_settings
from evaluation.plots.charts import LinePanel, Series, line_figure
from evaluation.plots.style import FAINT, INK, FigureText, show_figure, system_colour
from evaluation.results.folder import FlatRecord
from evaluation.results.provenance import OtherWork
from evaluation.results.rows import distinct, grouped, is_simulated
from evaluation.results.tables import rows_table
from evaluation.run import Point, PointResult, Run, identity
from evaluation.study import Study, command
from swiftllm.kv.tensors import host_tensor
from swiftllm.machine import cpu_model, last_level_cache_bytes
from swiftllm.runtime.cpu_tuning import use_fastest_attention

DTYPE, ITEMSIZE = torch.float16, 2
BLOCK_SIZE = 16
HOST = "xeon-6342"
"""A profile table has a host; none of what is taken from it here depends on which."""
COLD_CACHES = 4
"""The caches of all layers together are at least so many times the last-level cache."""
MIN_TIMED_BYTES = 64 << 20
MEASURED_ATTENTION = "measured: CPU attention speed"


@dataclass(frozen=True)
class Predicted:
    """A predicted time. ``known_from`` says what it rests on."""

    operation: str
    device: str
    size: int
    seconds: float
    known_from: str


@dataclass(frozen=True)
class MeasuredAttention:
    """Decode attention of one layer of as many KV heads as heads, by a kernel of this machine."""

    kernel: str
    batch: int
    heads: int
    head_dim: int
    context: int
    rounds: int
    threads: int

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of a token."""
        return 2 * self.heads * self.head_dim * ITEMSIZE

    @property
    def num_bytes(self) -> int:
        return self.batch * self.context * self.token_bytes


def operation_points(settings: Mapping[str, Any], threads: int | None) -> list[Point]:
    """The points of an experiment file. ``threads`` replaces its number of them.

    Raises:
        ValueError: a name of it is unknown, or a kernel is not available here; the message says why.
    """
    linear, attention = settings["linear"], settings["attention"]
    config = load_model_config(linear["model"])
    table = hardware_profile(load_gpu(linear["gpu"]), load_host(HOST), config)
    tasks: list[Predicted | MeasuredAttention] = [
        Predicted("linear", load_gpu(linear["gpu"]).name, n, table.linear(n), table.identity["linear"])
        for n in linear["tokens"]
    ]
    heads, head_dim, context = (attention[name] for name in ("heads", "head_dim", "context"))
    shape = LayerShape(heads * head_dim, 0, heads, heads, head_dim)
    for name in attention["gpu"]:
        gpu = load_gpu(name)
        status = gpu.figures["decode_attention_fraction"].status
        tasks += [
            Predicted("attention", gpu.name, n, gpu_attention_s(gpu, shape, ITEMSIZE, n, context), f"{status} figures")
            for n in attention["batch"]
        ]
    sizes = heads, head_dim, context, attention["rounds"], threads or attention["threads"]
    for kernel in attention["kernel"]:
        if kernel not in pacpu.kernels("float16"):
            raise ValueError(f"no kernel {kernel!r}: {pacpu.unavailable().get(kernel, 'it does not compute float16')}")
        tasks += [MeasuredAttention(kernel, n, *sizes) for n in attention["batch"]]
    return [_point(task) for task in tasks]


def _point(task: Predicted | MeasuredAttention) -> Point:
    if isinstance(task, Predicted):
        key = f"{task.operation}-{task.device.lower()}-{task.size}"
        return Point(key, key, f"{task.operation}, {task.device}, {task.size}", task, concurrent=True)
    key = f"attention-{task.kernel}-{task.batch}"
    return Point(key, key, f"attention, {task.kernel} kernel, {task.batch}", task, cost=float(task.num_bytes))


def describe(points: Sequence[Point]) -> dict[str, Any]:
    """What decides the numbers of the points."""
    return {
        kind: identity([point for point in points if isinstance(point.task, task)])
        for kind, task in (("simulated", Predicted), ("measured", MeasuredAttention))
    }


def run_operation(point: Point, label: str, console: Console) -> PointResult:
    """Measure the operation of a point, or note what was predicted of it."""
    task = point.task
    if isinstance(task, Predicted):
        values = {"gpu": task.device, "known_from": task.known_from, "operation_us": task.seconds * 1e6}
        size = {"tokens" if task.operation == "linear" else "batch": task.size}
        return PointResult({**_common(task.device, task.operation), "backend": "simulated", **size, **values}, ())
    others, seconds = OtherWork(), measure_attention(task)
    us = statistics.median(seconds) * 1e6
    low, _, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    values = {
        **_common(task.kernel, "attention"),
        **asdict(task),
        "backend": MEASURED_ATTENTION,
        "cpu": cpu_model(),
        "dtype": "float16",
        "isa": pacpu.isa(),
        "operation_us": us,
        "operation_us_low": low * 1e6,
        "operation_us_high": high * 1e6,
        "gb_s": task.num_bytes / us / 1e3,
        "others_busy_cores": others.busy_cores(),
    }
    return PointResult(values, ())


def _common(system: str, operation: str) -> dict[str, Any]:
    return {"system": system, "workload": operation}


def measure_attention(task: MeasuredAttention) -> list[float]:
    """Seconds of a call, in each round: of one thread by its time on its core, of several by the clock.

    Calls rotate over the caches of several layers, which together exceed the last-level cache.
    """
    use_fastest_attention()
    blocks_per_request = -(-task.context // BLOCK_SIZE)
    per_layer = task.batch * blocks_per_request
    layer_bytes = per_layer * BLOCK_SIZE * task.token_bytes
    num_layers = max(1, -(-COLD_CACHES * last_level_cache_bytes() // layer_bytes))
    cache = random_cache(num_layers * per_layer, task.heads, task.head_dim)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(num_layers * per_layer, generator=generator).int()
    tables = list(order.view(num_layers, task.batch, blocks_per_request))
    q, k, v = (torch.randn(task.batch, task.heads, task.head_dim, generator=generator).to(DTYPE) for _ in range(3))
    out, lengths = torch.empty_like(q), torch.full((task.batch,), task.context, dtype=torch.int32)
    calls = -(-MIN_TIMED_BYTES // task.num_bytes)
    clock = time.thread_time if task.threads == 1 else time.perf_counter
    seconds, layer = [], 0
    for _ in range(task.rounds + 1):  # the first one warms up
        start_s = clock()
        for _ in range(calls):
            pacpu.paged_attention(
                q, k, v, cache, tables[layer], lengths, out, task.head_dim**-0.5,
                num_threads=task.threads, kernel=task.kernel,
            )  # fmt: skip
            layer = (layer + 1) % num_layers
        seconds.append((clock() - start_s) / calls)
    return seconds[1:]


@lru_cache(1)
def random_cache(num_blocks: int, heads: int, head_dim: int) -> torch.Tensor:
    """A cache whose every page has been written, with other numbers in every block."""
    cache = host_tensor((num_blocks, heads, 2, BLOCK_SIZE, head_dim), DTYPE)
    pattern = torch.randn(999_983, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    flat = cache.view(-1)
    for at in range(0, len(flat), len(pattern)):
        flat[at : at + len(pattern)] = pattern[: len(flat) - at]
    return cache


# -- the command, its tables and figure -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Options(RunOptions):
    """Figure 1 of the APEX paper: (a) a layer's linear operations of Llama-3.1-8B on an A10 over the tokens, (b) a
    layer's attention on a GPU and on a CPU over the batch.

    The GPUs' times are SIMULATED (predicted, no GPU needed), the CPU's are measured on this machine in about half a
    minute, on one core. What the paper states in numbers is drawn as marks. Sizes come from
    configs/experiments/fig1.yaml. Results, figure and provenance go to results/fig1/<run>/.
    """

    threads: int | None = None
    """Threads of CPU attention; by default one, measured by the time that it has its core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, ("threads",))


NAME = "fig1"
KERNEL_COLOURS = dict(
    zip(("native", "llamafile", "ispc"), map(system_colour, ("adaptive", "apex", "neo")), strict=True)
)
GPU_COLOURS = (FAINT, "#A5A5A5")
STATED_COLOUR = INK


LINEAR = (("tokens", "tokens", "d"), ("us, SIMULATED", "operation_us", ",.0f"), ("/ 1 token", "over_first", ".2f"))
ATTENTION = (
    ("who", "system", "s"), ("kind", "kind", "s"), ("batch", "batch", "d"), ("us", "operation_us", ",.0f"),
    ("GB/s", "gb_s", ".0f"), ("others", "others_busy_cores", ".2f"),
)  # fmt: skip


def points(options: Options) -> list[Point]:
    return operation_points(experiment_settings(NAME, options.config), options.threads)


def kv_bytes(attention: Mapping[str, Any], batch: int) -> int:
    """Bytes of K and V in 16 bits that a call of attention reads."""
    return batch * attention["context"] * 2 * attention["heads"] * attention["head_dim"] * 2


def stated_words(settings: Mapping[str, Any]) -> str:
    """What the paper states, with the rates that it implies."""
    attention, parts, rates = settings["attention"], [], []
    for mark in settings["stated"]:
        rates.append(kv_bytes(attention, mark["batch"]) / mark["us"] / 1e3)
        parts.append(f"{mark['us']:,} us on {mark['what']} ({rates[-1]:.0f} GB/s)")
    batch = settings["stated"][0]["batch"]
    return (
        f"the paper states, at batch {batch}, {' and '.join(parts)} for {kv_bytes(attention, batch) / 1e6:.1f} MB: "
        f"{min(rates) / max(rates):.1%}"
    )


def show(settings: Mapping[str, Any], run: Run, console: Console) -> None:
    linear, attention = ([row for row in run.summary if row["workload"] == name] for name in ("linear", "attention"))
    words = stated_words(settings)
    if linear:
        first = linear[0]["operation_us"]
        console.print(
            f"[bold]SIMULATED[/]: linear operations of a layer on {linear[0]['gpu']}, {linear[0]['known_from']}"
        )
        console.print(rows_table([{**row, "over_first": row["operation_us"] / first} for row in linear], LINEAR))
    console.print("Attention of a layer; others: cores that other work on this machine kept busy", highlight=False)
    console.print(rows_table([with_rate(settings, row) for row in attention], ATTENTION))
    console.print(words[0].upper() + words[1:], highlight=False, soft_wrap=True)
    show_figure(
        line_figure(panels(settings, linear, attention), text_of(words, linear, attention)), run.folder, console
    )


def with_rate(settings: Mapping[str, Any], row: FlatRecord) -> FlatRecord:
    kind = "SIMULATED" if is_simulated(row) else "measured"
    return {**row, "kind": kind, "gb_s": kv_bytes(settings["attention"], row["batch"]) / row["operation_us"] / 1e3}


def panels(
    settings: Mapping[str, Any], linear: Sequence[FlatRecord], attention: Sequence[FlatRecord]
) -> list[LinePanel]:
    lines, gpus = [], iter(GPU_COLOURS)
    for (system,), rows in grouped(attention, lambda row: (row["system"],)).items():
        simulated = is_simulated(rows[0])
        colour = next(gpus, FAINT) if simulated else KERNEL_COLOURS.get(system) or system_colour(system)
        name = f"{system}, sim." if simulated else f"CPU, {system}"
        lines.append(Series(name, colour, [(row["batch"], row["operation_us"]) for row in rows], dashed=simulated))
    for mark in settings["stated"]:
        lines.append(Series(f"paper: {mark['what']}", STATED_COLOUR, [(mark["batch"], mark["us"])], width=4.0))
    over_tokens = [(row["tokens"], row["operation_us"] / 1e3) for row in linear]
    a10 = Series("", system_colour("apex"), over_tokens)
    names = f"{settings['linear']['model']}, {settings['linear']['gpu'].upper()}"
    return [
        LinePanel(f"(a) Linear operations of a layer, {names}", "tokens", "ms, SIMULATED", [a10], log_x=True),
        LinePanel("(b) Decode attention of a layer", "requests in a batch", "us", lines, log_x=True, log_y=True),
    ]


def text_of(words: str, linear: Sequence[FlatRecord], attention: Sequence[FlatRecord]) -> FigureText:
    measured = [row for row in attention if not is_simulated(row)]
    threads = " and ".join(f"{count:g} thread{'s' * (count > 1)}" for count in distinct(measured, "threads"))
    on = f"CPU: MEASURED on {' and '.join(distinct(measured, 'cpu'))}, {threads}" if measured else "CPU: not measured"
    size = measured[0] if measured else None
    shape = "" if size is None else f"{size['heads']} heads of {size['head_dim']}, {size['context']:,} tokens each. "
    first = linear[0] if linear else None
    table = "" if first is None else f"(a) {first['gpu']}: {first['known_from']}. "
    rests_on = distinct(attention, "known_from")
    known = f"(b) GPUs by the simulator's formula, {rests_on[0]}; " if rests_on else "(b) "
    return FigureText(
        "Why attention on the CPU can help, and how slow it is \u2014 SIMULATED and MEASURED",
        f"GPUs: SIMULATED. {on}\n(b) {shape}Marks: what the paper states.",
        f"{table}{known}CPU: time of the thread on its core for one thread, else by the clock. In (b) {words}. It does "
        "not show its CPU's latencies at batch 64 and 128.",
    )


def parts(options: Options) -> dict[str, Study]:
    settings = experiment_settings(NAME, options.config)
    return {NAME: Study(NAME, partial(show, settings), points, run_point=run_operation, describe=describe)}


main = command(Options, parts)
