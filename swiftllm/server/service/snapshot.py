"""The state of a service as one immutable value that any thread may read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from swiftllm.core.request import Request, ServiceClass, Tier
from swiftllm.engine.engine import Engine


@dataclass(frozen=True)
class Health:
    """Whether the service accepts new requests (only with status ``ok``), and why not.

    ``stopping``: open requests finish. ``stalled``: a step hangs. ``restarting``: the engine has died and is started
    again. ``failed``: it is not, or every step fails.
    """

    status: Literal["ok", "stopping", "stalled", "restarting", "failed"] = "ok"
    reason: str = ""
    """One line; empty while the status is ``ok``."""


@dataclass(frozen=True)
class Counts:
    """Current requests by where their KV cache is, and the tokens sampled since the start."""

    waiting: int = 0
    running_gpu: int = 0
    running_cpu: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Snapshot(Counts):
    """The service after its last step. Times are in seconds; counts are since the start unless stated otherwise."""

    time_s: float = 0.0
    """Time of the engine's clock."""
    uptime_s: float = 0.0
    health: Health = Health()

    classes: Mapping[str, Counts] = field(default_factory=dict)
    """The counts by service class; empty until the first best-effort request."""
    held: int = 0
    """Of those waiting: outside the engine, until a step that failed has been examined."""
    gpu_blocks_used: int = 0
    gpu_blocks_total: int = 0
    cpu_blocks_used: int = 0
    cpu_blocks_total: int = 0
    gpu_blocks_cached: int = 0
    """Blocks that no request holds, with K and V that later ones may find; they count as free."""
    cpu_blocks_cached: int = 0

    iterations: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed; recomputed ones count again."""
    prefix_queries: int = 0
    """Tokens of prompts that were started with a prefix cache."""
    prefix_hits: Mapping[str, int] = field(default_factory=dict)
    """Those of them that were found in it, by tier."""
    finished: Mapping[str, int] = field(default_factory=dict)
    """By reason: stop, length, abort, and those of :class:`swiftllm.server.service.token_streams.RequestFailed`."""
    refused: int = 0
    """Requests refused before queueing, for any reason."""
    preemptions: int = 0
    swapped_blocks: int = 0
    step_failures: int = 0
    """Steps that raised; their requests continued, except those in ``finished["engine_error"]``."""
    worker_restarts: int = 0
    hosts_connected: int = 0
    host_deaths: int = 0
    recomputed_after_host_deaths: int = 0

    gpu_batch_busy_s: float = 0.0
    cpu_busy_s: float = 0.0
    duration_s: float = 0.0
    """Time of all iterations together."""
    predicted_s: float = 0.0
    strategy_iterations: Mapping[str, int] = field(default_factory=dict)
    prediction_factors: Mapping[str, float] = field(default_factory=dict)
    """By operation, see :attr:`swiftllm.scheduling.scheduler.Scheduler.prediction_factors`."""


def take_snapshot(engine: Engine, held: Collection[Request], step_failures: int) -> Snapshot:
    """Reads the engine, so only on its thread. ``held`` requests wait outside the engine."""
    state, pools = engine.state, engine.kv.allocators
    counters = dict(vars(engine.stats()))
    del counters["best_effort_output_tokens"]  # it is among the classes
    return Snapshot(
        time_s=engine.now(),
        waiting=len(state.waiting) + len(held),
        held=len(held),
        running_gpu=len(state.running[Tier.GPU]),
        running_cpu=len(state.running[Tier.CPU]),
        classes=count_classes(engine, held) if engine.has_best_effort else {},
        gpu_blocks_used=pools[Tier.GPU].num_used,
        gpu_blocks_total=pools[Tier.GPU].num_blocks,
        cpu_blocks_used=pools[Tier.CPU].num_used,
        cpu_blocks_total=pools[Tier.CPU].num_blocks,
        gpu_blocks_cached=pools[Tier.GPU].num_cached,
        cpu_blocks_cached=pools[Tier.CPU].num_cached,
        prompt_tokens=counters.pop("prefill_tokens"),
        prefix_hits=dict(counters.pop("prefix_hits")),
        step_failures=step_failures,
        strategy_iterations=dict(counters.pop("strategy_iterations")),
        prediction_factors=engine.scheduler.prediction_factors,
        **counters,
    )


def count_classes(engine: Engine, held: Collection[Request]) -> dict[str, Counts]:
    """The requests and tokens of each class, by its name."""
    state, stats = engine.state, engine.stats()
    tokens = {ServiceClass.BEST_EFFORT: stats.best_effort_output_tokens}
    tokens[ServiceClass.LATENCY_SENSITIVE] = stats.output_tokens - stats.best_effort_output_tokens
    return {
        service_class.value: Counts(
            waiting=state.waiting.num_of_class(service_class)
            + sum(request.service_class is service_class for request in held),
            running_gpu=state.running[Tier.GPU].num_of_class(service_class),
            running_cpu=state.running[Tier.CPU].num_of_class(service_class),
            output_tokens=tokens[service_class],
        )
        for service_class in ServiceClass
    }
