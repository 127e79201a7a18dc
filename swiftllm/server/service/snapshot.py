"""What an engine's service is doing, as one immutable value that any thread may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from swiftllm.core.request import Tier
from swiftllm.engine.engine import Engine


@dataclass(frozen=True)
class Health:
    """``ok``: requests are taken and served. ``stopping``: those under way are served to their end.

    ``stalled``: a step does not come back. ``failed``: every step fails. Neither takes new requests.
    """

    status: Literal["ok", "stopping", "stalled", "failed"] = "ok"
    reason: str = ""
    """One line, empty while all is well."""


@dataclass(frozen=True)
class Snapshot:
    """The service after its last step. Times are in seconds, counts since the start unless they say otherwise."""

    time_s: float = 0.0
    """Of the engine's clock."""
    uptime_s: float = 0.0
    health: Health = Health()

    waiting: int = 0
    """Requests at this moment, as the next two."""
    running_gpu: int = 0
    running_cpu: int = 0
    gpu_blocks_used: int = 0
    gpu_blocks_total: int = 0
    cpu_blocks_used: int = 0
    cpu_blocks_total: int = 0

    iterations: int = 0
    prompt_tokens: int = 0
    """Computed, so a prompt computed again counts again."""
    output_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
    """By reason: stop, length, abort, and those of :class:`swiftllm.server.service.token_streams.RequestFailed`."""
    refused: int = 0
    """At the door, for whatever reason."""
    preemptions: int = 0
    swapped_blocks: int = 0
    step_failures: int = 0
    """Steps that raised; their requests went on all the same, but for those in ``finished["engine_error"]``."""
    worker_restarts: int = 0

    lane_busy_s: float = 0.0
    cpu_busy_s: float = 0.0
    duration_s: float = 0.0
    """Of all iterations together."""
    predicted_s: float = 0.0
    strategy_iterations: Mapping[str, int] = field(default_factory=dict)


def take_snapshot(engine: Engine, num_held: int, step_failures: int) -> Snapshot:
    """What its own thread can tell of an engine, and of ``num_held`` requests that wait outside."""
    scheduler, stats, pools = engine.scheduler, engine.stats(), engine.kv.allocators
    return Snapshot(
        time_s=engine.now(),
        waiting=len(scheduler.waiting) + num_held,
        running_gpu=len(scheduler.running[Tier.GPU]),
        running_cpu=len(scheduler.running[Tier.CPU]),
        gpu_blocks_used=pools[Tier.GPU].num_used,
        gpu_blocks_total=pools[Tier.GPU].num_blocks,
        cpu_blocks_used=pools[Tier.CPU].num_used,
        cpu_blocks_total=pools[Tier.CPU].num_blocks,
        iterations=stats.iterations,
        prompt_tokens=stats.prefill_tokens,
        output_tokens=stats.output_tokens,
        preemptions=stats.preemptions,
        swapped_blocks=stats.swapped_blocks,
        step_failures=step_failures,
        worker_restarts=stats.worker_restarts,
        lane_busy_s=stats.lane_busy_s,
        cpu_busy_s=stats.cpu_busy_s,
        duration_s=stats.duration_s,
        predicted_s=stats.predicted_s,
        strategy_iterations=dict(stats.strategy_iterations),
    )
