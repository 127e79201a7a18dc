"""Where golden values are kept, and what they read of an engine and of its plans: a renamed field is renamed here."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from swiftllm.core.plan import JOINED, OVERLAPPED, CpuBatchMode, IterationPlan, Strategy
from swiftllm.core.request import Request
from swiftllm.engine.engine import Engine
from swiftllm.scheduling.state import SchedulerState

FOLDER = Path(__file__).parent


def read(name: str) -> dict[str, Any]:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write(name: str, values: dict[str, Any]) -> None:
    (FOLDER / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")


def digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def described(plan: IterationPlan, numbered_blocks: bool = True) -> tuple:
    """A plan in plain values and in this project's lasting words, so that the digest outlives the names of classes."""
    blocks = tuple if numbered_blocks else len
    return (
        plan.strategy.value,
        [request.request_id for request in plan.decodes],
        [(item.request.request_id, item.start, item.num_tokens, item.tier.value) for item in plan.prefills],
        [
            (cpu_batch.cpu_batch_id, *_rule(cpu_batch.mode), [r.request_id for r in cpu_batch.requests])
            for cpu_batch in plan.cpu_batches
        ],
        [
            (
                swap.request.request_id if swap.request is not None else None,
                swap.source.value,
                blocks(swap.source_blocks),
                blocks(swap.target_blocks),
            )
            for swap in plan.swaps
        ],
        sorted(plan.leaving),
        sorted(plan.predicted.items()),
        plan.time_limit_s,
    )


def _rule(mode: CpuBatchMode) -> tuple[str, float]:
    if mode == OVERLAPPED:
        return "ride-if-ready", math.inf
    if mode.waits:
        return "ride-and-wait" if mode == JOINED else "step-and-wait", mode.max_stages
    return "free-running", mode.max_stages


def watch_plans(engine: Engine, see: Callable[[IterationPlan], None]) -> None:
    """Have ``see`` given every plan as it was made."""
    make_plan = engine.scheduler.plan

    def seen(state: SchedulerState) -> IterationPlan:
        plan = make_plan(state)
        see(plan)
        return plan

    engine.scheduler.plan = seen


def unfinished(engine: Engine) -> list[Request]:
    return [request for request in engine.state.requests.values() if not request.is_finished]


def used_blocks(engine: Engine) -> int:
    """KV blocks of both tiers that requests hold."""
    return sum(pool.num_used for pool in engine.kv.block_pools.values())


def all_used_blocks_are_freed(engine: Engine) -> None:
    """Assert that every block of both tiers is free, and counted once."""
    engine.kv.check_blocks()
    assert used_blocks(engine) == 0


def offloading_iterations(engine: Engine) -> int:
    iterations = engine.stats().strategy_iterations
    return sum(iterations[strategy.value] for strategy in Strategy if strategy is not Strategy.GPU_ONLY)
