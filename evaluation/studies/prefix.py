"""Prefix caches: what they bring by where they keep blocks, simulated, and what they save on this machine, measured."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console

from apex.placement.search import UniformLoad
from apex.simulator.backend import PLACEHOLDER_TOKEN, VLLM
from apex.simulator.paper_settings import PaperSetting, load_setting
from apex.simulator.predicted_machine import PlacedMachine, PredictedMachine, WeightPlacer, predict_machine
from apex.workloads.catalogue import load_trace, turns_of
from apex.workloads.requests import Lengths, WorkloadSpec, load_prompt_tokens
from evaluation.drivers import ENGINE_FIELDS, SimulatedHardware, SimulatedTask, build_engine, run_point
from evaluation.grid import Place, clip_lengths, simulated_point, simulated_task
from evaluation.options import Folder, StudyOptions, experiment_settings
from evaluation.plots.figure import Axis, Figure
from evaluation.results.folder import FlatRecord
from evaluation.results.paths import model_folder
from evaluation.results.provenance import OtherWork, model_identity
from evaluation.run import Point, PointResult, identity
from evaluation.study import RATE, Ratio, Rows, Study, Table, command
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.machine import GIB
from swiftllm.runtime.memory import embedding_bytes
from swiftllm.scheduling.validation import SchedulerLimits

if TYPE_CHECKING:
    from swiftllm.core.request import Request
    from swiftllm.engine.engine import Engine

NAME = "prefix"


@dataclass(frozen=True)
class Options(StudyOptions):
    """Throughput and time to first token with prefix caches off, on the GPU only, with host memory as a store from
    which blocks are copied back, and over both tiers, attended where they lie. SIMULATED (predicted times, no GPU
    needed).

    Workloads, systems and sizes of the GPU pool come from configs/experiments/prefix.yaml. Results, figure and
    provenance go to results/prefix/<run>/. Running the same command again continues an interrupted run.
    """

    part: Annotated[
        tuple[Literal["simulated", "agents", "torch"], ...], tyro.conf.arg(name="backend", metavar="BACKEND ...")
    ] = ("simulated",)
    """agents: as simulated, of models with linear attention on whole cards, asked by agents alone. torch: measure on
    this machine with a small model what a cache saves in the second turn of a conversation, and where 64 requests share
    1,000 of 1,100 tokens."""
    model: Folder = None
    """Folder of the model (torch); by default the one of `make setup`."""


# -- simulated --------------------------------------------------------------------------------------------------------

CACHES = {"off": (), "gpu": (Tier.GPU,), "store": tuple(Tier), "tiers": tuple(Tier)}
"""Where a cache keeps blocks. The system decides whether it copies those of host memory back before it uses them."""
LIMITS = ("max_model_len", "cpu_kv_gb")
"""Figures of a setting that a panel may have its own of."""
FIELDS = {"setting", "workload", "num_requests", "seed", "pool", "system", "cache", "variant", *LIMITS}
BLOCK_SIZE = 16


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts of requests that have segments, by row."""

    lengths: Lengths

    def __call__(self, row: int) -> tuple[int, ...]:
        return self.lengths.rows[row].prompt


def working_set(lengths: Lengths) -> int:
    """The different full blocks of all prompts and their outputs: what a cache holds that forgets nothing."""
    known: dict[Any, int] = {}
    for row in lengths.rows:
        tokens, parent = row.prompt + (PLACEHOLDER_TOKEN,) * row.output_tokens, -1
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            parent = known.setdefault((parent, tokens[start : start + BLOCK_SIZE]), len(known))
    return len(known)


@functools.cache
def requests_of(
    workload: str, num_requests: int, seed: int, longest: int, trace_dir: Path | None
) -> tuple[Lengths, int]:
    """Consecutive requests of a workload, none of more than ``longest`` tokens, and their working set in blocks."""
    trace = load_trace(workload, trace_dir)
    rows = tuple(trace.window(num_requests, seed))
    spec = WorkloadSpec(workload, num_requests, arrivals="trace", seed=seed)
    lengths, _ = clip_lengths(Lengths(spec, trace.title, trace.origin, rows), longest)
    return lengths, working_set(lengths)


def setting_of(place: Place) -> PaperSetting:
    return load_setting(place["setting"]).with_figures(
        "varied", **{name: place[name] for name in LIMITS if name in place}
    )


def point(place: Place) -> Point:
    setting = setting_of(place)
    longest = setting.limits.max_model_len
    lengths, in_all = requests_of(place["workload"], place["num_requests"], place["seed"], longest, place["trace_dir"])
    fitting = max(-(-(row.input_tokens + row.output_tokens) // BLOCK_SIZE) for row in lengths.rows) + 2
    setting = setting.with_figures("varied", num_gpu_blocks=max(round(place["pool"] * in_all), fitting))
    values = {"cache": place["cache"], "pool": place["pool"], "working_set_blocks": in_all}
    values["vllm_defaults"] = place["system"] == VLLM or None
    task = simulated_task(setting, place["system"], lengths, values)
    task = replace(
        task,
        prompts=SharedPrompts(task.lengths),
        cached_tiers=CACHES[place["cache"]],
        vllm_defaults=place["system"] == VLLM,  # today's, not that of the papers
    )
    return simulated_point([place["setting"], place["workload"], f"pool {place['pool']:g}", place["cache"]], task)


def run_prefix_point(point: Point, label: str, console: Console) -> PointResult:
    """A simulated point with what its cache found, and the time to first token by turn."""
    task: SimulatedTask = point.task
    result = run_point(point, label, console)
    stats = result.details["engine_stats"]
    asked = stats["prefix_queries"]
    found = {
        f"found_on_{tier.value}": stats["prefix_hits"].get(tier.value, 0) / asked if asked else 0.0 for tier in Tier
    }
    by_turn: dict[int, list[float]] = {}
    for record, turn in zip(result.records, turns_of(task.lengths.rows), strict=True):
        if record.failure is None:
            by_turn.setdefault(turn, []).append(record.first_token_s - record.arrival_s)
    turns = {
        f"ttft_s_turn_{turn}": float(np.mean(times)) for turn, times in sorted(by_turn.items()) if len(by_turn) > 1
    }
    return replace(result, values={**result.values, **found, **turns})


# -- simulated: agents of models with linear attention -----------------------------------------------------------------

OF_MACHINE = ("gpu", "host", "model", "dtype")
OF_AGENTS = {
    *OF_MACHINE, "host_memory_gib", "workload", "num_requests", "seed", "max_num_seqs", "max_num_batched_tokens",
    "system", "cache", "variant",
}  # fmt: skip


@functools.cache
def placed_machine(
    gpu: str, host: str, model: str, dtype: str, host_memory_gib: float, max_tokens: int, max_num_seqs: int
) -> tuple[PredictedMachine, PlacedMachine]:
    """A predicted machine, and the same with all weights on the GPU but the embedding."""
    machine = predict_machine(
        gpu,
        host,
        model,
        dtype,
        weights="int4",
        host_memory_gib=host_memory_gib,
        block_size=BLOCK_SIZE,
        max_tokens=max_tokens,
        max_num_seqs=max_num_seqs,
    )
    placer = WeightPlacer(machine, BLOCK_SIZE)
    on_gpu_gib = (machine.weight_bytes - embedding_bytes(machine.model, getattr(torch, dtype))) / GIB
    return machine, placer.place(on_gpu_gib, UniformLoad(max_num_seqs, 1, 1), offloads=False)


def agents_point(place: Place) -> Point:
    """
    Raises:
        ValueError: the model does not fit the card.
    """
    tokens, requests = place["max_num_batched_tokens"], place["max_num_seqs"]
    machine, placed = placed_machine(*(place[name] for name in OF_MACHINE), place["host_memory_gib"], tokens, requests)
    longest = machine.model.most_positions
    lengths, in_all = requests_of(place["workload"], place["num_requests"], place["seed"], longest, place["trace_dir"])
    gpu, cpu = placed.num_blocks(None, None)
    cpu, is_vllm = machine.beside_snapshots(cpu), place["system"] == VLLM
    states = machine.states(cpu, BLOCK_SIZE, caches=True)
    hardware = SimulatedHardware(
        machine.gpu.name,
        machine.model_name,
        machine.dtype,
        placed.table,
        machine.model.num_layers,
        interconnect=placed.interconnect,
        weights=placed.weights,
        states=states,
    )
    values = {
        "host": machine.host.name,
        "weights": placed.table.identity["weights"],
        "cache": place["cache"],
        "max_num_seqs": requests,
        "num_snapshots": None if states is None else states.num_snapshots,
        "working_set_blocks": in_all,
        "cpu_bandwidth_gb_s": float(placed.table.identity["cpu_attention_gb_s"]),
        "vllm_defaults": is_vllm or None,
    }
    task = SimulatedTask(
        place["system"],
        hardware,
        gpu,
        cpu,
        lengths,
        SchedulerLimits(tokens, requests, longest),
        BLOCK_SIZE,
        values=values,
        believed=placed.scheduler_table,
        vllm_defaults=is_vllm,
        cached_tiers=CACHES[place["cache"]],
        prompts=SharedPrompts(lengths),
    )
    return simulated_point([place["model"], place["gpu"], str(place["num_requests"]), place["cache"]], task)


def run_agents_point(point: Point, label: str, console: Console) -> PointResult:
    """A simulated point, and the seconds that a turn takes from its arrival to its last token."""
    result = run_prefix_point(point, label, console)
    turns = [each.last_token_s - each.arrival_s for each in result.records if each.last_token_s is not None]
    return replace(result, values={**result.values, "turn_s_p50": float(np.median(turns)) if turns else None})


# -- measured ---------------------------------------------------------------------------------------------------------

Tokens = Sequence[int]


@dataclass(frozen=True)
class SharingTask:
    """Lengths in tokens. ``history`` is of the first turn, ``message`` of what the second adds to it and its answer.

    ``sharers`` requests have ``prompt`` tokens each, of which the first ``shared`` are the same.
    """

    system: str
    engine: EngineConfig
    history: int
    message: int
    answer: int
    repeats: int
    sharers: int
    shared: int
    prompt: int
    strangers: int
    """Requests of ``history`` / 10 tokens that share nothing: what the cache costs."""


def measured_points(options: Options) -> list[Point]:
    """A point for each system of the experiment file's section.

    Raises:
        ValueError: there is no model; the message says what to do.
    """
    section = experiment_settings(NAME, options.config)["torch"]
    sizes = {name: section[name] for name in SharingTask.__dataclass_fields__ if name in section}
    engine = EngineConfig(str(model_folder(options.model)), **section["engine"])
    tasks = [SharingTask(**{**sizes, "system": system, "engine": engine}) for system in section["system"]]
    return [Point(task.system, task.system, task.system, task) for task in tasks]


def describe(points: Sequence[Point]) -> dict[str, Any]:
    """What decides the numbers of measured points."""
    return {"measured": identity(points), "model": model_identity(Path(points[0].task.engine.model))}


def run_sharing_point(point: Point, label: str, console: Console) -> PointResult:
    """Build the system and ask it: conversations of two turns one by one, then the sharers all at once."""
    task: SharingTask = point.task
    engine = build_engine(task.system, task.engine)
    try:
        others = OtherWork()
        values = {**turn_times(engine, task), **shared_tokens(engine, task)}
        values |= cost_without_hits(engine, task)
        description = engine.describe()
    finally:
        engine.close()
    known = {
        "system": task.system,
        "backend": f"torch-{engine.backend.device.type}",
        "model": Path(task.engine.model).name,
        **{name: description[name] for name in ENGINE_FIELDS},
        "others_busy_cores": others.busy_cores(),
    }
    return PointResult({**known, **values}, (), {"engine": description})


def prompts_for(task: SharingTask, lengths: Tokens, seed: int) -> list[list[int]]:
    return [list(prompt) for prompt in load_prompt_tokens(Path(task.engine.model)).prompts(lengths, seed)]


def ask(engine: Engine, prompts: Sequence[Tokens], max_tokens: int) -> list[Request]:
    """Send prompts all at once, and wait for all answers."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    sent = [engine.add(engine.make_request(str(i), prompt, params)) for i, prompt in enumerate(prompts)]
    while engine.has_unfinished():
        engine.step()
    return sent


def turn_times(engine: Engine, task: SharingTask) -> dict[str, float]:
    """Medians of the seconds to the first token in both turns; the first conversation warms up and does not count."""
    firsts, seconds, found = [], [], []
    texts = prompts_for(task, [task.history + task.message] * (1 + task.repeats), seed=0)
    for text in texts:
        history, message = text[: task.history], text[task.history :]
        (first,) = ask(engine, [history], task.answer)
        (second,) = ask(engine, [[*history, *first.output_token_ids, *message]], task.answer)
        firsts.append(first.token_times_s[0] - first.arrival_s)
        seconds.append(second.token_times_s[0] - second.arrival_s)
        found.append(second.num_cached_tokens)
    first_s, second_s = statistics.median(firsts[1:]), statistics.median(seconds[1:])
    times = {"ttft_s_turn_1": first_s, "ttft_s_turn_2": second_s, "turn_2_over_1": second_s / first_s}
    return {**times, "found_tokens": statistics.median(found)}


def shared_tokens(engine: Engine, task: SharingTask) -> dict[str, float]:
    """Prompt tokens computed for the sharers over the fewest possible: whole blocks are shared, each computed once."""
    head, *tails = prompts_for(task, [task.shared] + [task.prompt - task.shared] * task.sharers, seed=1)
    before = engine.stats().prompt_tokens
    ask(engine, [[*head, *tail] for tail in tails], task.answer)
    computed = engine.stats().prompt_tokens - before
    in_blocks = task.shared // task.engine.block_size * task.engine.block_size
    fewest = task.sharers * task.prompt - (task.sharers - 1) * in_blocks
    return {"computed_tokens": computed, "computed_over_fewest": computed / fewest}


def cost_without_hits(engine: Engine, task: SharingTask) -> dict[str, float]:
    """Tokens a CPU second with the cache over those without, where no request finds anything.

    Medians of rounds in turn. CPU time counts, so that other work on the machine is left out."""
    without = build_engine(task.system, replace(task.engine, enable_prefix_caching=False))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    try:
        for turn in range(2 * (1 + task.repeats)):
            caches = turn % 2 == 0
            prompts = prompts_for(task, [task.history // 10] * task.strangers, seed=2 + turn)
            start_s = time.process_time()
            ask(engine if caches else without, prompts, max_tokens=4 * task.answer)
            seconds[caches].append(time.process_time() - start_s)
    finally:
        without.close()
    on_s, off_s = (statistics.median(seconds[caches][1:]) for caches in (True, False))  # the first warms up
    return {"no_hits_on_over_off": off_s / on_s}


# -- parts ------------------------------------------------------------------------------------------------------------

PLACE = ("setting", "workload", "pool")
DRAWN = {("vllm", "gpu"), ("swiftllm", "store"), ("apex", "tiers"), ("adaptive", "tiers")}


def title_of(rows: Rows) -> str:
    first = rows[0]
    origin = f"{first['num_requests']} requests, {first['working_set_blocks']} blocks in all"
    return f"{first['setting_title']}, {first['workload_title']} ({first['trace_origin']}; {origin})"


def lines_of(rows: Rows) -> list[FlatRecord]:
    named = [{**row, "variant": f"{row['system']}, {row['cache']}"} for row in rows]
    return sorted(named, key=lambda row: row["pool"])


def label_of(row: FlatRecord) -> str:
    system, cache = row["system"], row["cache"]
    return system if cache == "tiers" else f"{system} {cache}" if cache != "store" else cache


PARTS = {
    "simulated": Study(
        NAME,
        section=lambda settings: settings["simulated"],
        fields=FIELDS,
        point=point,
        run_point=run_prefix_point,
        ratios={
            "over_off": Ratio(lambda row: row["cache"] == "off", (*PLACE, "system")),
            "over_gpu_only": Ratio(lambda row: row["cache"] == "gpu" and row["system"] == VLLM, PLACE),
        },
        tables=[
            Table(
                (
                    ("pool", "pool", "g"), ("system, cache", "variant", "s"),
                    ("tok/s", RATE, ",.0f"), ("/ off", "over_off", ".2f"), ("/ gpu", "over_gpu_only", ".2f"),
                    ("TTFT mean", "ttft_s_mean", ".2f"), ("p50", "ttft_s_p50", ".2f"), ("p99", "ttft_s_p99", ".2f"),
                    *((f"turn {turn}", f"ttft_s_turn_{turn}", ".2f") for turn in range(1, 5)),
                    ("found GPU", "found_on_gpu", ".0%"), ("CPU", "found_on_cpu", ".0%"),
                ),
                "[bold]SIMULATED[/]: output tokens per second, and seconds to the first token (TTFT)\n"
                "pool: of the GPU over the working set; / off: over the same system's without a cache\n"
                "/ gpu: over vllm's with a cache on the GPU; found: prompt tokens in either tier's cache",
                by=("setting_title", "workload_title"),
                title=title_of,
                lines=lines_of,
            )
        ],
        figure=Figure(
            "Prefix caches by where they keep blocks",
            "lines",
            x="pool",
            x_label="GPU pool over the working set",
            y=[
                Axis(RATE, "output tokens/s, SIMULATED"),
                Axis("ttft_s_mean", "mean s to first token, SIMULATED", log=True),
            ],
            panel=("gpu", "workload_title"),
            series=("system", "cache"),
            label_of=label_of,
            look_of=lambda row: {"dashed": row["cache"] == "off"},
            is_drawn=lambda row: (
                (row["system"], row["cache"]) in DRAWN or (row["cache"] == "off" and row["system"] != "apex")
            ),
            log_x=True,
            notes="off: no cache. gpu: in GPU memory only. store: swiftllm, which copies what host memory has back "
            "before it uses it. Others: a cache over both tiers, attended where it lies.",
        ),
    ),
    "agents": Study(
        f"{NAME}-agents",
        file=NAME,
        section=lambda settings: settings["agents"],
        fields=OF_AGENTS,
        point=agents_point,
        run_point=run_agents_point,
        ratios={"over_gpu_only": Ratio(lambda row: row["system"] == VLLM, ("gpu", "model", "num_requests"))},
        tables=[
            Table(
                (
                    ("model", "model", "s"), ("card", "gpu", "s"), ("requests", "num_requests", "d"),
                    ("system, cache", "variant", "s"), ("tok/s", RATE, ",.1f"), ("/ gpu", "over_gpu_only", ".2f"),
                    ("turn p50", "turn_s_p50", ".1f"), ("TTFT p50", "ttft_s_p50", ".2f"),
                    ("found GPU", "found_on_gpu", ".0%"), ("CPU", "found_on_cpu", ".0%"),
                ),
                "[bold]SIMULATED[/]: agents of models with linear attention, 4-bit weights, output tokens per second\n"
                "/ gpu: over vllm's with a cache on the GPU; turn, TTFT: median seconds to the last and first token",
                lines=lambda rows: [{**row, "variant": f"{row['system']}, {row['cache']}"} for row in rows],
            )
        ],
    ),
    "torch": Study(
        f"{NAME}-measured",
        points=measured_points,
        run_point=run_sharing_point,
        describe=describe,
        tables=[
            Table(
                (
                    ("system", "system", "s"), ("turn 1 (s)", "ttft_s_turn_1", ".3f"),
                    ("turn 2 (s)", "ttft_s_turn_2", ".3f"), ("turn 2 / 1", "turn_2_over_1", ".2f"),
                    ("found tokens", "found_tokens", ".0f"), ("computed tokens", "computed_tokens", "d"),
                    ("/ fewest", "computed_over_fewest", ".3f"), ("no hits on / off", "no_hits_on_over_off", ".3f"),
                ),
                "MEASURED: seconds to the first token in two turns; prompt tokens computed for the sharers",
            )
        ],
    ),
}  # fmt: skip
main = command(Options, PARTS)
