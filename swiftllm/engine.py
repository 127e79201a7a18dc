"""The step loop: requests in, one iteration at a time, outputs out. Takes its scheduler and executor by injection."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from swiftllm.backend import Backend
from swiftllm.executor import Executor
from swiftllm.kv_cache import KVCacheManager
from swiftllm.plan import IterationPlan, StepResult
from swiftllm.request import Request, RequestOutput, RequestRefused, SamplingParams, whole_number
from swiftllm.scheduler import Scheduler

if TYPE_CHECKING:
    from swiftllm.tokenizer import Tokenizer

MAX_EMPTY_PLANS = 1000


class EngineStalled(RuntimeError):
    """Requests are unfinished and the scheduler finds nothing to do: a defect, reported with the state it stands in."""


@dataclass
class EngineStats:
    """Sums over all iterations so far. Times in seconds of the engine's clock."""

    iterations: int = 0
    output_tokens: int = 0
    prefill_tokens: int = 0
    duration_s: float = 0.0
    lane_busy_s: float = 0.0
    cpu_busy_s: float = 0.0
    predicted_s: float = 0.0
    preemptions: int = 0
    swapped_blocks: int = 0
    strategy_iterations: dict[str, int] = field(default_factory=Counter)

    def note(self, plan: IterationPlan, result: StepResult) -> None:
        self.iterations += 1
        self.output_tokens += len(result.tokens)
        self.prefill_tokens += sum(item.num_tokens for item in plan.prefills)
        self.duration_s += result.duration_s
        self.lane_busy_s += result.lane_busy_s
        self.cpu_busy_s += result.cpu_busy_s
        self.predicted_s += plan.predicted.get("iteration_s", 0.0)
        self.swapped_blocks += sum(len(swap.source_blocks) for swap in plan.swaps)
        self.strategy_iterations[plan.strategy.value] += 1


class Engine:
    """One model, one scheduler, one executor. Not thread-safe: one thread adds, aborts and steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        backend: Backend,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        tokenizer: Tokenizer | None = None,
        description: Mapping[str, Any] | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.backend = backend
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._description = dict(description or {})
        self._stats = EngineStats()
        self._num_arrived = 0
        self._num_empty_plans = 0
        self._aborted: list[Request] = []

    @property
    def kv(self) -> KVCacheManager:
        return self.scheduler.kv

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        arrival_s: float | None = None,
    ) -> Request:
        """Queue a request. ``arrival_s`` is a time of :meth:`now`; default: this moment.

        Raises:
            RequestRefused: it can never be served; the message names the limit it hits.
        """
        try:
            prompt = tuple(whole_number("token id", token) for token in prompt_token_ids)
        except ValueError as error:
            raise RequestRefused(str(error)) from None
        unknown = next((t for t in prompt if not 0 <= t < self._vocab_size), None)
        if unknown is not None:
            raise RequestRefused(f"token id {unknown} is outside the vocabulary of {self._vocab_size} tokens")
        arrival_s = self.now() if arrival_s is None else arrival_s
        request = Request(request_id, prompt, sampling, self._eos_token_ids, arrival_s, self._num_arrived)
        self.scheduler.add(request)
        self._num_arrived += 1
        return request

    def abort(self, request_id: str) -> bool:
        """End a request wherever it stands; its output so far comes with the next step. False if it is not there."""
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._aborted.append(request)
        return request is not None

    def has_unfinished(self) -> bool:
        return self.scheduler.has_work or bool(self._aborted)

    def step(self) -> list[RequestOutput]:
        """Run one iteration and return what it gave.

        Raises:
            EngineStalled: nothing could be planned for many steps although requests wait (never expected).
        """
        aborted, self._aborted = self._aborted, []
        outputs = [self._output(request, num_new=0) for request in aborted]
        self._forget(aborted)  # before anything runs: a new request may have taken the id of one aborted
        if self.scheduler.has_work:
            touched = self._iterate()
            outputs += [self._output(request, num_new=1) for request in touched]
            self._forget([request for request in touched if request.is_finished])
        if not self.has_unfinished():
            self.kv.check()
        return outputs

    def _forget(self, requests: Sequence[Request]) -> None:
        if requests:
            self.backend.forget([request.request_id for request in requests])

    def _iterate(self) -> list[Request]:
        plan = self.scheduler.schedule()
        self._num_empty_plans = self._num_empty_plans + 1 if plan.is_empty else 0
        if self._num_empty_plans > MAX_EMPTY_PLANS:
            raise EngineStalled(f"{MAX_EMPTY_PLANS} empty plans in a row with {self.state()}")
        result = self.executor.run(plan)
        touched = self.scheduler.update(plan, result)
        self._stats.note(plan, result)
        return touched

    def _output(self, request: Request, num_new: int) -> RequestOutput:
        reason = request.finish_reason.value if request.finish_reason else None
        new_tokens = tuple(request.output_token_ids[request.output_len - num_new :])
        tokens = tuple(request.output_token_ids) if reason else ()
        return RequestOutput(request.request_id, request.prompt_token_ids, new_tokens, reason, tokens)

    def now(self) -> float:
        """Seconds of the engine's clock (virtual in a simulation)."""
        return self.backend.now()

    def stats(self) -> EngineStats:
        self._stats.preemptions = self.scheduler.num_preemptions
        return self._stats

    def state(self) -> dict[str, Any]:
        """Queues and pools right now, for logs and error messages."""
        scheduler = self.scheduler
        return {
            "waiting": len(scheduler.waiting),
            "running": {tier.value: len(queue) for tier, queue in scheduler.running.items()},
            "blocks_used": {tier.value: pool.num_used for tier, pool in self.kv.allocators.items()},
            "blocks_free": {tier.value: pool.num_free for tier, pool in self.kv.allocators.items()},
        }

    def describe(self) -> dict[str, Any]:
        """What this engine is, JSON-able: goes into provenance files and the start-up message."""
        return {**self._description, "limits": asdict(self.scheduler.limits)}

    def close(self) -> None:
        self.backend.close()
