"""What a prefix cache saves on this machine in second turns and shared beginnings, and costs where it finds nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from apex.workloads.requests import load_prompt_tokens
from evaluation.experiments.identity import identity
from evaluation.experiments.runner import Point, PointResult
from evaluation.experiments.torch_point import ENGINE_FIELDS, build_engine
from evaluation.results.other_work import OtherWork
from evaluation.results.paths import model_folder
from evaluation.results.provenance import model_identity
from swiftllm.config import EngineConfig
from swiftllm.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from swiftllm.core.request import Request
    from swiftllm.engine.engine import Engine

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


def measured_points(section: Mapping[str, Any], model: Path | None) -> list[Point]:
    """A point for each system of an experiment file's section.

    Raises:
        ValueError: there is no model; the message says what to do.
    """
    sizes = {name: section[name] for name in SharingTask.__dataclass_fields__ if name in section}
    engine = EngineConfig(str(model_folder(model)), **section["engine"])
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
    before = engine.stats().prefill_tokens
    ask(engine, [[*head, *tail] for tail in tails], task.answer)
    computed = engine.stats().prefill_tokens - before
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
