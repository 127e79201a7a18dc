"""What is known of a running engine: its state, its histograms, and a dump after a failure."""

from __future__ import annotations

import sys
import threading
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request, RequestOutput, RequestStatus, ServiceClass, Slo, Tier
from swiftllm.engine.engine import Engine, EngineStats

# -- histograms --------------------------------------------------------------------------------------------------------
# What an engine's requests and iterations were like, as histograms.

WAITING = RequestStatus.WAITING.value
LATENCY_SENSITIVE = ServiceClass.LATENCY_SENSITIVE

# Upper bounds of the buckets, equal to vLLM's, so that one dashboard serves both.
TOKEN_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
           40.0, 80.0)  # fmt: skip
REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
             960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
RATIOS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)


class Histogram(msgspec.Struct):
    """Counts of observations by bucket; ``bounds`` are the buckets' upper bounds.

    With ``by_class`` there are counts for each service class that has been observed, and always for the default one.
    ``counts`` and ``sums`` are by class.
    """

    name: str
    documentation: str
    bounds: tuple[float, ...]
    by_class: bool = False
    counts: dict[ServiceClass, list[int]] = {}
    sums: dict[ServiceClass, float] = {}

    def __post_init__(self) -> None:
        for service_class in ServiceClass:
            self.counts.setdefault(service_class, [0] * (len(self.bounds) + 1))
            self.sums.setdefault(service_class, 0.0)

    def observe(self, value: float, service_class: ServiceClass = LATENCY_SENSITIVE) -> None:
        self.counts[service_class][bisect_left(self.bounds, value)] += 1
        self.sums[service_class] += value


def one_two_five(largest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, ... up to ``largest``."""
    numbers = (step * 10**power for power in range(len(str(largest))) for step in (1, 2, 5))
    return tuple(number for number in numbers if number <= largest)


class EngineHistograms:
    """An observer of a service. ``slo_outcomes`` counts requests by target and outcome."""

    def __init__(self, max_model_len: int, slo: Slo | None) -> None:
        self.lock = threading.Lock()  # the engine's thread writes; others read
        self.slo_outcomes: Counter[tuple[str, str]] = Counter()
        self._slo = slo
        lengths = one_two_five(max_model_len)
        rows = (
            (
                "vllm:request_time_per_output_token_seconds",
                TOKEN_S,
                "Mean gap between tokens of a request that ended.",
            ),
            (
                "vllm:e2e_request_latency_seconds",
                REQUEST_S,
                "From arrival of a request to its end, for any reason.",
            ),
            ("vllm:request_queue_time_seconds", REQUEST_S, "From a request's arrival to its first KV blocks."),
            ("vllm:request_prefill_time_seconds", REQUEST_S, "From a request's first KV blocks to its first token."),
            ("vllm:request_decode_time_seconds", REQUEST_S, "From a request's first token to its last."),
            ("vllm:request_inference_time_seconds", REQUEST_S, "From a request's first KV blocks to its last token."),
            ("vllm:request_num_preemptions", PREEMPTIONS, "Preemptions of each request that ended."),
            ("vllm:request_params_max_tokens", lengths, "The parameter max_tokens of requests that ended."),
            ("vllm:request_prompt_tokens", lengths, "Prompt tokens of requests that ended."),
            ("vllm:request_generation_tokens", lengths, "Output tokens of requests that ended."),
            ("vllm:iteration_tokens_total", ITERATION_TOKENS, "Tokens prefilled and sampled in an iteration."),
            ("apex:iteration_over_predicted", RATIOS, "Measured time of an iteration divided by its predicted time."),
        )
        self.all = [Histogram(name, documentation, bounds) for name, bounds, documentation in rows]
        self._named = {histogram.name.partition(":")[2]: histogram for histogram in self.all}

    def _observe(self, name: str, value: float) -> None:
        self._named[name].observe(value)

    def on_step(self, plan: IterationPlan, result: StepResult, outputs: Sequence[RequestOutput]) -> None:
        """Record an iteration."""
        predicted_s = plan.predicted.get("iteration_s", 0.0)
        num_tokens = len(result.tokens) + sum(item.num_tokens for item in plan.prefills)
        with self.lock:
            if num_tokens:
                self._observe("iteration_tokens_total", num_tokens)
            if predicted_s > 0.0:
                self._observe("iteration_over_predicted", result.duration_s / predicted_s)

    def on_finish(self, request: Request, reason: str) -> None:
        """Record a request that has ended, for any ``reason``."""
        times_s = request.token_times_s
        with self.lock:
            self._observe("request_prompt_tokens", request.prompt_len)
            self._observe("request_generation_tokens", request.output_len)
            self._observe("request_params_max_tokens", request.sampling.max_tokens)
            self._observe("request_num_preemptions", request.num_preemptions)
            # A stop string or an error of the service ends a request before the engine does.
            end_s = request.finish_s if request.finish_s is not None else times_s[-1] if times_s else None
            if end_s is not None:
                self._observe("e2e_request_latency_seconds", end_s - request.arrival_s)
            if admissions_s := [time_s for time_s, tier in request.tier_history if tier != WAITING]:
                self._observe("request_queue_time_seconds", admissions_s[0] - request.arrival_s)
                if times_s:
                    self._observe("request_prefill_time_seconds", times_s[0] - admissions_s[0])
                    self._observe("request_decode_time_seconds", times_s[-1] - times_s[0])
                    self._observe("request_inference_time_seconds", times_s[-1] - admissions_s[0])
            if len(times_s) > 1:
                mean_s = (times_s[-1] - times_s[0]) / (len(times_s) - 1)
                self._observe("request_time_per_output_token_seconds", mean_s)
            if self._slo is None or request.service_class is not LATENCY_SENSITIVE:
                return
            if reason == "slo_unattainable":
                self.slo_outcomes["ttft", "refused"] += 1
            for target, is_met in self._slo.met_by(request).items():
                self.slo_outcomes[target, "met" if is_met else "missed"] += 1


# -- the state of a service --------------------------------------------------------------------------------------------
# The state of a service as one immutable value that any thread may read.


@dataclass(frozen=True)
class Health:
    """Whether the service accepts new requests (only with status ``ok``), and why not.

    ``stopping``: open requests finish. ``stalled``: a step hangs. ``restarting``: the engine has died and is started
    again. ``failed``: it is not, or every step fails.
    """

    status: Literal["ok", "stopping", "stalled", "restarting", "failed"] = "ok"
    reason: str = ""
    """One line; empty while the status is ``ok``."""


@dataclass
class Counts:
    """Current requests by where their KV cache is, and the tokens sampled since the start."""

    waiting: int = 0
    running_gpu: int = 0
    running_cpu: int = 0
    output_tokens: int = 0


@dataclass
class Snapshot(EngineStats, Counts):
    """The service after its last step: the engine's sums since its start, and its state now. It never changes."""

    time_s: float = 0.0
    """Seconds of the engine's clock."""
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
    states_cached: int = 0
    """States of linear attention, in host memory, with which prefixes are found."""

    finished: Mapping[str, int] = field(default_factory=dict)
    """By reason: stop, length, abort, and those of :class:`swiftllm.server.messages.RequestFailed`."""
    refused: int = 0
    """Requests refused before queueing, for any reason."""
    step_failures: int = 0
    """Steps that raised; their requests continued, except those in ``finished["engine_error"]``."""
    prediction_factors: Mapping[str, float] = field(default_factory=dict)
    """By operation, see :attr:`swiftllm.scheduling.scheduler.Scheduler.prediction_factors`."""


def take_snapshot(engine: Engine, held: Collection[Request], step_failures: int) -> Snapshot:
    """Reads the engine, so only on its thread. ``held`` requests wait outside the engine."""
    state, pools = engine.state, engine.kv.block_pools
    sums = dict(vars(engine.stats()))
    # The engine goes on counting in its own dictionaries.
    sums |= {name: dict(sums[name]) for name in ("prefix_hits", "strategy_iterations")}
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
        states_cached=0 if engine.kv.snapshots is None else engine.kv.snapshots.num_used,
        step_failures=step_failures,
        prediction_factors=engine.scheduler.prediction_factors,
        **sums,
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


# -- the state as text -------------------------------------------------------------------------------------------------
# The state of an engine as text, for the log after a failure or a stall.

MAX_REQUESTS = 50


def dump_state(engine: Engine) -> str:
    """Queues, CPU batches and the stack of every thread. From any thread; never raises."""
    try:
        return "\n".join([*_engine_lines(engine), *_thread_lines()])
    except Exception as error:  # the engine's thread may be changing what is read here
        return f"no report could be made of the engine's state: {error!r}"


def _engine_lines(engine: Engine) -> Iterator[str]:
    yield f"engine: {engine.status()}"
    state = engine.state
    yield f"waiting: {_requests(state.waiting)}"
    for tier, queue in state.running.items():
        yield f"running in the {tier.value.upper()} tier: {_requests(queue)}"
    yield f"leaving: {_requests([request for request in state.requests.values() if request.is_finished])}"
    for cpu_batch in engine.executor.cpu_batches:
        future = cpu_batch.future
        attention = "no" if future is None else "finished" if future.ready() else "unfinished"
        members = ", ".join(cpu_batch.request_ids)
        yield f"CPU batch before stage {cpu_batch.stage}, {attention} attention: {members}"
    yield f"at work: {_requests(engine.at_work())}"


def _requests(requests: Sequence[Request]) -> str:
    shown = [f"{r.request_id} ({r.num_computed_tokens}/{r.num_tokens} tokens)" for r in requests[:MAX_REQUESTS]]
    more = [f"and {len(requests) - MAX_REQUESTS} more"] if len(requests) > MAX_REQUESTS else []
    return ", ".join(shown + more) or "none"


def _thread_lines() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, ident)}:"
        yield "".join(traceback.format_stack(frame)).rstrip()
