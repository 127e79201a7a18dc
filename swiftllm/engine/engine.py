"""The engine's step loop over requests. Scheduler, state, executor and backend are injected."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request, RequestOutput, SamplingParams, ServiceClass, Tier
from swiftllm.engine.backend import Backend, HostDied
from swiftllm.engine.executor import Executor
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.scheduling.scheduler import Scheduler
from swiftllm.scheduling.state import SchedulerState
from swiftllm.scheduling.validation import RequestLimits, as_token_ids

if TYPE_CHECKING:
    from swiftllm.model.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_EMPTY_PLANS = 1000


class EngineStalled(RuntimeError):
    """Requests are unfinished but the scheduler plans nothing: a defect. The message has the engine's state."""


class HostWatch(Protocol):
    """Tells which other hosts, each with a pool of the CPU tier, have died and returned."""

    def take_died(self) -> list[int]:
        """Hosts that have died since the last call."""
        ...

    def take_returned(self) -> list[int]:
        """Hosts that had died and are back, or replaced."""
        ...

    @property
    def num_connected(self) -> int:
        """Other hosts that are in use."""
        ...


@dataclass
class EngineStats:
    """Sums over all iterations. Times are seconds of the engine's clock.

    ``prompt_tokens`` are those computed; recomputed ones count again. ``prefix_queries`` counts the tokens of prompts
    that were started with a prefix cache, and ``prefix_hits`` those of them that were found there, by tier: once a
    request, when it has its first token. ``duration_s`` is the time of all iterations together.
    """

    iterations: int = 0
    output_tokens: int = 0
    best_effort_output_tokens: int = 0
    prompt_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: dict[str, int] = field(default_factory=Counter)
    duration_s: float = 0.0
    gpu_batch_busy_s: float = 0.0
    cpu_busy_s: float = 0.0
    predicted_s: float = 0.0
    preemptions: int = 0
    swapped_blocks: int = 0
    worker_restarts: int = 0
    hosts_connected: int = 0
    host_deaths: int = 0
    recomputed_after_host_deaths: int = 0
    strategy_iterations: dict[str, int] = field(default_factory=Counter)

    def record_iteration(self, plan: IterationPlan, result: StepResult) -> None:
        self.iterations += 1
        self.output_tokens += len(result.tokens)
        self.prompt_tokens += sum(item.num_tokens for item in plan.prefills)
        self.duration_s += result.duration_s
        self.gpu_batch_busy_s += result.gpu_batch_busy_s
        self.cpu_busy_s += result.cpu_busy_s
        self.predicted_s += plan.predicted.get("iteration_s", 0.0)
        self.swapped_blocks += sum(len(swap.source_blocks) for swap in plan.swaps)
        self.strategy_iterations[plan.strategy.value] += 1
        for item in plan.prefills:
            request = item.request
            if request.block_hashes is not None and request.output_len == 1 and item.context_len == request.prompt_len:
                self.prefix_queries += request.prompt_len
                for tier, tokens in (request.cached_tokens or {}).items():
                    self.prefix_hits[tier.value] += tokens


class Engine:
    """One model, its scheduler state, one scheduler, one executor. Not thread-safe, except :meth:`make_request`."""

    def __init__(
        self,
        state: SchedulerState,
        scheduler: Scheduler,
        executor: Executor,
        backend: Backend,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        description: Mapping[str, Any] | None = None,
        hosts: HostWatch | None = None,
    ) -> None:
        self.state = state
        self.scheduler = scheduler
        self.executor = executor
        self.backend = backend
        self.tokenizer = tokenizer
        scheduler.manage_copies(state.kv)
        self._hosts = hosts
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._description = dict(description or {})
        self._stats = EngineStats()
        self._arrivals = itertools.count()
        self._num_empty_plans = 0
        self.has_best_effort = False  # whether there has been a best-effort request
        self._ended: list[RequestOutput] = []  # outputs of aborted requests, for the next step to return
        self._running_plan: IterationPlan | None = None
        self.last_iteration: tuple[IterationPlan, StepResult] | None = None  # of the last step; None if it had no work

    @property
    def kv(self) -> KVCacheManager:
        return self.state.kv

    @property
    def request_limits(self) -> RequestLimits:
        """All by which :meth:`make_request` refuses requests. Constant."""
        state, kv = self.state, self.kv
        num_blocks = {tier: kv.capacity(tier) for tier in Tier}
        tiers = {service_class: state.rules.tiers_of(service_class) for service_class in ServiceClass}
        return RequestLimits(self.vocab_size, state.limits.max_model_len, kv.groups, num_blocks, tiers)

    def make_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        arrival_s: float | None = None,
        service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE,
        cache_salt: str | None = None,
        is_checked: bool = False,
    ) -> Request:
        """A checked request for :meth:`add`. Reads only what never changes, so any thread may call this.

        ``arrival_s`` is a time of the engine's clock, by default :meth:`now`. Only requests with one ``cache_salt``
        share cached prefixes. ``is_checked``: :attr:`request_limits` has let it pass, maybe elsewhere; its prompt is
        kept as it is.

        Raises:
            RequestRefused: it can never be served; the message names the limit it hits.
        """
        prompt = prompt_token_ids if is_checked else as_token_ids(prompt_token_ids)
        arrival_s = self.now() if arrival_s is None else arrival_s
        request = Request(
            request_id,
            prompt,
            sampling,
            self.eos_token_ids,
            arrival_s,
            next(self._arrivals),
            service_class=service_class,
            cache_salt=cache_salt,
        )
        if not is_checked:
            self.request_limits.check(request)
        self.kv.hash_prompt(request)
        return request

    def add(self, request: Request, *, check_targets: bool = True) -> Request:
        """Queue a request from :meth:`make_request`, or one from :meth:`recover`, and return it.

        ``check_targets=False`` queues it whatever its targets: one that was queued before, or whose caller cannot try
        again later.

        Raises:
            RequestRefused: its id is in use, or it cannot keep its targets now (:class:`RequestRefusedForNow`).
        """
        if check_targets:
            self.scheduler.check_targets(request, self.state)
        self.state.add(request)
        self.scheduler.added(request)
        self.has_best_effort |= request.service_class is ServiceClass.BEST_EFFORT
        return request

    def abort(self, request_id: str) -> bool:
        """End a request, whatever its state. The next step returns its output so far. False: no such request."""
        request = self.state.abort(request_id)
        if request is not None:
            self.scheduler.ended(request)
            self._ended.append(self._output(request, num_new=0))
        return request is not None

    def has_unfinished(self) -> bool:
        return bool(self.state.requests or self._ended)

    def step(self) -> list[RequestOutput]:
        """Run one iteration and return its outputs. After any exception, call :meth:`recover`.

        An iteration in which another host of the CPU tier died has no outputs; it is planned anew.

        Raises:
            EngineStalled: many plans in a row were empty although requests are unfinished (never expected).
        """
        self.last_iteration = None
        touched: list[Request] = []
        if self.state.requests:
            try:
                self._watch_hosts()
                touched = self._iterate()
            except HostDied as death:
                self._forget_died(death)
        outputs, self._ended = self._ended, []
        outputs += [self._output(request, num_new=1) for request in touched]
        if not self.has_unfinished():
            self.kv.check_blocks()
        return outputs

    def _iterate(self) -> list[Request]:
        self._running_plan = None
        plan = self.scheduler.plan(self.state)
        self._num_empty_plans = self._num_empty_plans + 1 if plan.is_empty else 0
        if self._num_empty_plans > MAX_EMPTY_PLANS:
            raise EngineStalled(f"{MAX_EMPTY_PLANS} empty plans in a row with {self.status()}")
        self._running_plan = plan
        result = self.executor.run(plan)
        self._running_plan = None
        for request_id, logprob in self.backend.take_logprobs().items():
            request = self.state.requests.get(request_id)
            if request is not None:
                request.logprobs.append(logprob)
        # Predictions are compared with what ran: before tokens are added, and before CPU batches move.
        self.scheduler.observe(plan, result, self.state.cpu_batches.stages())
        touched, ended = self.state.apply(plan, result)
        for request in ended:
            self.scheduler.ended(request)
        self._stats.record_iteration(plan, result)
        if self.has_best_effort:
            of_class = [request for request in touched if request.service_class is ServiceClass.BEST_EFFORT]
            self._stats.best_effort_output_tokens += len(of_class)
        self.last_iteration = (plan, result)
        return touched

    # -- other hosts of the CPU tier --------------------------------------------------------------------------------

    def _watch_hosts(self) -> None:
        """Between two iterations: give up what died, take up what came back."""
        if self._hosts is not None:
            self._running_plan = None
            self._forget_died()
            for host in self._hosts.take_returned():
                self.kv.host_pools.restore(host)
                logger.warning("host %d of the CPU tier is back", host)

    def _forget_died(self, death: HostDied | None = None) -> None:
        """Compute again what was on hosts that are gone, and nothing else. ``death`` ended the iteration, if given."""
        hosts = self._hosts.take_died() if self._hosts is not None else []
        if not hosts:
            if death is not None:
                raise death
            return
        self.executor.abandon()
        self.backend.take_logprobs()
        ended = None if death is None else self._running_plan  # the iteration that the death ended
        self._running_plan = None
        is_unfinished = death is not None and death.swaps_incomplete
        unfinished, copies = (ended.swaps, ended.state_copies) if ended is not None and is_unfinished else ((), ())
        begun = () if ended is None else ended.requests()
        lost = self.state.forget_hosts(hosts, unfinished, begun, copies)
        self._stats.host_deaths += len(hosts)
        self._stats.recomputed_after_host_deaths += len(lost)
        logger.warning("host %s of the CPU tier is gone: %d requests are computed again", hosts, len(lost))

    # -- after a step that raised -----------------------------------------------------------------------------------

    def at_work(self) -> list[Request]:
        """The unfinished requests that the running step, or the step that raised, was last working on. If that is not
        known, all unfinished requests."""
        unfinished = [request for request in self.state.requests.values() if not request.is_finished]
        if self._running_plan is None:
            return unfinished
        at_work = self.executor.at_work()
        return [request for request in unfinished if request.request_id in at_work] or unfinished

    def recover(self) -> list[Request]:
        """Drop all work under way after a failed iteration, and free all blocks of both tiers.

        Waits for CPU attention that may still use blocks. Returns the unfinished requests, oldest first. They keep
        their tokens; :meth:`add` puts each back in order of arrival, and its K and V are computed again.

        Raises:
            DeviceHung: the GPU does not end the work under way; later it may.
        """
        self.executor.abandon()
        self.backend.recover()
        self._running_plan, self._num_empty_plans = None, 0
        self.scheduler.emptied()
        return self.state.remove_all()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes. Requests that hold blocks go on, and have no part in the cache any more."""
        for request in self.state.requests.values():
            if request.tier is not None:
                request.block_hashes = None
        self.kv.reset_cache()

    # -- outputs and state ------------------------------------------------------------------------------------------

    def _output(self, request: Request, num_new: int) -> RequestOutput:
        start = request.output_len - num_new
        new_tokens = tuple(request.output_token_ids[start:])
        logprobs = tuple(request.logprobs[start:]) if request.logprobs else ()
        if request.finish_reason is None:
            return RequestOutput(request.request_id, request.prompt_token_ids, new_tokens, None, (), logprobs)
        reason, tokens = request.finish_reason.value, tuple(request.output_token_ids)
        of_prompt = tuple(request.prompt_logprobs)
        return RequestOutput(
            request.request_id, request.prompt_token_ids, new_tokens, reason, tokens, logprobs, of_prompt
        )

    def now(self) -> float:
        """Seconds of the engine's clock (virtual in a simulation)."""
        return self.backend.now()

    def stats(self) -> EngineStats:
        self._stats.preemptions = self.state.num_preemptions
        self._stats.worker_restarts = self.backend.worker_restarts
        self._stats.hosts_connected = 0 if self._hosts is None else self._hosts.num_connected
        return self._stats

    def status(self) -> dict[str, Any]:
        """Current sizes of queues and pools, for logs and error messages."""
        return {
            "waiting": len(self.state.waiting),
            "running": {tier.value: len(queue) for tier, queue in self.state.running.items()},
            "blocks_used": {tier.value: pool.num_used for tier, pool in self.kv.block_pools.items()},
            "blocks_free": {tier.value: pool.num_free for tier, pool in self.kv.block_pools.items()},
        }

    def describe(self) -> dict[str, Any]:
        """The engine's configuration as JSON values, for provenance files and the start-up message."""
        return {**self._description, "limits": asdict(self.state.limits)}

    def close(self) -> None:
        self.backend.close()
