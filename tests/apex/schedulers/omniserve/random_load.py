"""Simulated engines under random load of both classes, with aborts, and what is to hold after every iteration."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

from apex.perf.model import Curve, ProfileTable
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import RequestRefused, SamplingParams, ServiceClass
from swiftllm.engine.engine import Engine
from tests.reference.linear_profile import LAYERS, flat_ends_table

LS, BE = ServiceClass
TABLE = replace(
    flat_ends_table(gpu_token_s=2e-8, cpu_token_s=1.5e-7, cpu_start_s=1e-5),
    hand_over=Curve((1, 1001), (2e-5, 1.2e-4)),
    iteration=Curve((0, 1000), (3e-4, 2.3e-3)),
)
GPU_BATCH_S = LAYERS * 1e-3
"""Seconds that an iteration takes at least, roughly: reading all weights."""


def simulated_engine(
    system: str,
    *,
    num_gpu_blocks: int = 400,
    num_cpu_blocks: int = 4000,
    table: ProfileTable = TABLE,
    believed: ProfileTable | None = None,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 256,
    **strategy: object,
) -> Engine:
    return build_simulated(
        system,
        table,
        LAYERS,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=num_cpu_blocks,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        strategy=StrategyConfig(**strategy) if system not in ("vllm", "swiftllm", "llumnix") else None,
        scheduler_table=believed,
    )


def add(engine: Engine, request_id: str, prompt: int, output: int, service_class: ServiceClass = LS):
    sampling = SamplingParams(max_tokens=output, ignore_eos=True)
    return engine.add(engine.make_request(request_id, (0,) * prompt, sampling, service_class=service_class))


def random_load(
    engine: Engine,
    rng: random.Random,
    iterations: int,
    *,
    best_effort_share: float = 0.6,
    abort_share: float = 0.05,
    arrival_share: float = 0.15,
    longest: int = 400,
    check: Callable[[IterationPlan], None] = lambda plan: None,
) -> None:
    """Random arrivals and aborts for some iterations, then to the end; ``check`` sees every plan after it has run."""
    number, steps = 0, itertools.count()

    def step() -> None:
        engine.step()
        if engine.last_iteration is not None:
            check(engine.last_iteration[0])
        if next(steps) % 4 == 0:  # it takes as long as a plan
            engine.kv.check_blocks()

    for _ in range(iterations):
        # Always the same draws, so that the load is the same whatever the system refuses.
        arrives, aborts, which = rng.random() < arrival_share, rng.random() < abort_share, rng.random()
        prompt, output = rng.randint(1, longest), rng.randint(1, longest // 4)
        service_class = BE if rng.random() < best_effort_share else LS
        if arrives:
            number += 1
            try:
                add(engine, f"{service_class.value}-{number}", prompt, output, service_class)
            except RequestRefused:
                continue
        requests = [request for request in engine.state.requests.values() if not request.is_finished]
        if aborts and requests:
            engine.abort(requests[int(which * len(requests))].request_id)
        step()
    for _ in range(200_000):
        if not engine.has_unfinished():
            break
        step()
    assert not engine.has_unfinished(), engine.status()
    engine.kv.check_blocks()
    assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values()) and not engine.executor.cpu_batches


def best_effort_rows(plan: IterationPlan) -> int:
    """Best-effort requests that the plan computes."""
    return sum(request.service_class is BE for request in plan.requests())


def signature(plan: IterationPlan) -> tuple:
    """A plan in plain values, to compare plans of different engines."""
    return (
        plan.strategy.value,
        [request.request_id for request in plan.decodes],
        [(item.request.request_id, item.start, item.num_tokens, item.tier) for item in plan.prefills],
        [(cpu_batch.mode, [request.request_id for request in cpu_batch.requests]) for cpu_batch in plan.cpu_batches],
        [(swap.request.request_id, swap.source, swap.source_blocks, swap.target_blocks) for swap in plan.swaps],
        plan.leaving,
        dict(plan.predicted),
        plan.time_limit_s,
    )
