"""Carries out plans: takes a GPU batch and CPU batches through the layers, in one loop for every strategy.

Stage ``i`` is the linear layers between attention ``i`` and attention ``i + 1``; stage -1 is the embedding and the
first Q, K and V. The GPU computes all stages. The attention of the GPU batch is the GPU's too, that of a CPU batch the
CPU's, as an asynchronous task. A CPU batch joins a stage of the GPU batch, in the same matrix products, or runs it
alone: on the GPU, in products of its own.

A plan gives each CPU batch a mode, and the modes make its strategy (APEX section 3). In ``JOINED`` and ``ALONE``, NEO's
batch-0 and batch-1, the GPU batch waits for the attention task. In ``OVERLAPPED`` and ``FREE_RUNNING`` it does not: a
CPU batch whose task is late runs the stage later. ``OVERLAPPED`` joins one stage an iteration at most. A plan without
CPU batches is GPU-only.

A CPU batch is *under way* from the first stage of a token (-1) until it has the token: in one plan where it is waited
for, else in many. An attention task is *ready* once the host can launch the stage after it without waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from swiftllm.core.plan import JOINED, CpuBatchMode, CpuBatchPlan, IterationPlan, StepResult
from swiftllm.engine.backend import AttentionFuture, Batch, ExecutorBackend, HostDied


@dataclass(eq=False)
class CpuBatchRun:
    """A CPU batch under way. ``stage`` is the one it runs next, ``future`` the attention task that precedes it.

    ``submission`` numbers the attention tasks of all CPU batches: the CPU worker serves them in this order. ``mode``
    and ``stages_left`` are those of the iteration that last named it.
    """

    batch: Batch
    request_ids: tuple[str, ...]
    stage: int = -1
    future: AttentionFuture | None = None
    submission: int = 0
    mode: CpuBatchMode = JOINED
    stages_left: float = math.inf

    @property
    def attention_is_ready(self) -> bool:
        """Whether the stage can be run without waiting for the attention task that precedes it; never blocks."""
        return self.future is None or self.future.ready()


@dataclass
class _ResultSoFar:
    """The :class:`StepResult` of the iteration being run, as far as it is known."""

    tokens: dict[str, int] = field(default_factory=dict)
    detached: set[str] = field(default_factory=set)  # ids of requests that have left their CPU batch
    waited_s: float = 0.0  # for attention tasks
    cpu_busy_s: float = 0.0  # of the CPU worker


class _AtWork:
    """A context that notes which requests are worked on. After an exception the note stays: these are the suspects."""

    def __init__(self) -> None:
        self.gpu_batch, self.groups = False, ()

    def on(self, *groups: Sequence[str], gpu_batch: bool = False) -> _AtWork:
        """The context of work on groups of request ids, or on the ``gpu_batch`` beside them."""
        self.gpu_batch, self.groups = gpu_batch, groups
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.on()


class Executor:
    """Moves the GPU batch through all layers, and each CPU batch by its mode.

    A CPU batch lives from the plan that first names it until its token is done, which may take many plans.
    """

    def __init__(self, backend: ExecutorBackend, may_run_alone: Callable[[int], bool] = lambda stage: True) -> None:
        """``may_run_alone``: whether a CPU batch that is not waited for may run this stage without the GPU batch now.

        It may not where the weights of the stage would be copied to the GPU for it alone.
        """
        self.backend = backend
        self.may_run_alone = may_run_alone
        self._cpu_batches: dict[int, CpuBatchRun] = {}
        self._plan = IterationPlan()
        self._submissions = itertools.count(1)
        self._at_work = _AtWork()

    @property
    def cpu_batches(self) -> tuple[CpuBatchRun, ...]:
        """Those under way between iterations, the oldest first."""
        return tuple(self._cpu_batches.values())

    def run(self, plan: IterationPlan) -> StepResult:
        """Carry out one plan. The GPU batch has gone through all layers when this returns; CPU batches may be under
        way.

        CPU batches of earlier plans that this plan does not name stay at their stage.
        """
        backend, result, at_work = self.backend, _ResultSoFar(), self._at_work
        self._plan = plan
        start_s = backend.now()
        # This reaches CPU batches that the plan does not name, too. The loop below comes only to those it names.
        try:
            self._detach_leaving(plan, result)
        except HostDied as death:
            death.swaps_incomplete = True  # the scheduler has moved requests, but no block has been copied yet
            raise
        # Before the batches: the plan reuses blocks as if its swaps were done.
        with at_work.on([request.request_id for request in plan.moving()]):
            backend.swap(plan.swaps)
            if plan.state_copies:
                backend.copy_states(plan.state_copies)
        with at_work.on(gpu_batch=True):
            gpu_batch = backend.open_gpu_batch(plan.gpu_batch) if plan.gpu_batch else None
        cpu_batches = [self._cpu_batch(cpu_batch_plan, gpu_batch) for cpu_batch_plan in plan.cpu_batches]
        last = backend.num_layers - 1
        stages = range(-1, backend.num_layers)
        if gpu_batch is not None and not cpu_batches:
            # CPU batches that this plan does not name need no stage, so the layers may be one captured graph.
            with at_work.on(gpu_batch=True):
                tokens = backend.run_full_graph(gpu_batch)
            if tokens is not None:
                result.tokens.update(tokens)
                stages = range(0)
        elif gpu_batch is None and plan.time_limit_s is not None:
            # Waiting for attention tasks delays no decode, but it does delay whoever arrives meanwhile.
            self._advance(cpu_batches, start_s + plan.time_limit_s, result)
            stages = range(0)
        for stage in stages:
            # A CPU batch joins only where the GPU batch is at its very stage: that is what saves reading the weights
            # a second time. One that overlaps (APEX section 3.3) and is missed here comes again in the next iteration.
            joining = [c for c in cpu_batches if c.stage == stage and c.mode.joins and self._joins_now(c, result)]
            self._run_stage(stage, gpu_batch, joining, result)
            if gpu_batch is not None and stage < last:
                with at_work.on(gpu_batch=True):
                    backend.gpu_attention(stage + 1, gpu_batch)
            # This comes after the launch of the GPU batch's attention. The GPU has work while the host waits here. The
            # CPU meanwhile attends for the CPU batches that have just joined (NEO section 3.2).
            for cpu_batch in cpu_batches:
                if cpu_batch.stage <= last and cpu_batch.mode.runs_alone and self._runs_alone_now(cpu_batch, stage + 1):
                    self._run_alone(cpu_batch, result)
        self._cpu_batches = {i: c for i, c in self._cpu_batches.items() if c.stage <= last}
        duration_s = backend.now() - start_s
        under_way = {cpu_batch_id: cpu_batch.stage for cpu_batch_id, cpu_batch in self._cpu_batches.items()}
        # Waits for the CPU are left out: predictions of the GPU batch's time are compared with what it was busy.
        detached, busy_s = frozenset(result.detached), duration_s - result.waited_s
        return StepResult(result.tokens, under_way, detached, duration_s, busy_s, result.cpu_busy_s)

    def at_work(self) -> frozenset[str]:
        """Ids of the requests that :meth:`run` works on, or last worked on before it raised: the suspects."""
        gpu_batch = [request.request_id for request in self._plan.in_gpu_batch()] if self._at_work.gpu_batch else []
        return frozenset(itertools.chain(gpu_batch, *self._at_work.groups))

    def abandon(self) -> None:
        """Drop all CPU batches. No CPU attention touches any block once this returns."""
        for cpu_batch in self._cpu_batches.values():
            if cpu_batch.future is not None:
                with contextlib.suppress(Exception):  # a failed task touches no block either
                    cpu_batch.future.wait()
        self._cpu_batches.clear()

    def _cpu_batch(self, plan: CpuBatchPlan, gpu_batch: Batch | None) -> CpuBatchRun:
        """The CPU batch under way, or a new one, with its mode for this iteration."""
        cpu_batch = self._cpu_batches.get(plan.cpu_batch_id)
        if cpu_batch is None:
            request_ids = tuple(request.request_id for request in plan.requests)
            with self._at_work.on(request_ids):
                cpu_batch = self._cpu_batches[plan.cpu_batch_id] = CpuBatchRun(
                    self.backend.open_cpu_batch(plan.requests), request_ids
                )
        # Where there is no GPU batch, a wait delays nobody. So the CPU batch goes on until it has its token.
        cpu_batch.mode = JOINED if gpu_batch is None and plan.mode.joins else plan.mode
        cpu_batch.stages_left = cpu_batch.mode.max_stages
        return cpu_batch

    def _joins_now(self, cpu_batch: CpuBatchRun, result: _ResultSoFar) -> bool:
        """Whether a CPU batch at the GPU batch's stage runs it with the GPU batch; its attention task is waited for
        if need be."""
        if cpu_batch.stages_left <= 0 or not (cpu_batch.mode.waits or cpu_batch.attention_is_ready):
            return False
        self._wait(cpu_batch, result)  # even if it is ready: this raises its error, and takes out who leaves
        return True

    def _runs_alone_now(self, cpu_batch: CpuBatchRun, next_of_gpu_batch: int) -> bool:
        """Whether a CPU batch runs its stage on its own before the GPU batch goes on to the stage
        ``next_of_gpu_batch``."""
        if cpu_batch.mode.waits:  # a stage for each of the GPU batch's, so that it has its token in the end
            return True
        if cpu_batch.stages_left <= 0 or cpu_batch.stage == next_of_gpu_batch:  # there it joins: joining costs less
            return False
        return self.may_run_alone(cpu_batch.stage) and cpu_batch.attention_is_ready

    def _run_alone(self, cpu_batch: CpuBatchRun, result: _ResultSoFar) -> None:
        """Let the CPU batch run its stage without the GPU batch, once its attention task is ready."""
        self._wait(cpu_batch, result)
        self._run_stage(cpu_batch.stage, None, [cpu_batch], result)

    def _advance(self, cpu_batches: Sequence[CpuBatchRun], end_s: float, result: _ResultSoFar) -> None:
        """Without a GPU batch: let CPU batches run their stages until ``end_s``, or until all have their tokens.

        The time is looked at after each stage, so it ends late by one attention task at most. Attention tasks are
        waited for in the order in which the worker serves them, so that no CPU batch stays behind.
        """
        queue = sorted(cpu_batches, key=attrgetter("submission"))
        while queue:
            # One whose attention task is ready costs no wait, and its next task keeps the worker busy.
            cpu_batch = next((cpu_batch for cpu_batch in queue if cpu_batch.attention_is_ready), queue[0])
            queue.remove(cpu_batch)
            self._run_alone(cpu_batch, result)
            if cpu_batch.stage < self.backend.num_layers:
                queue.append(cpu_batch)
            if self.backend.now() >= end_s:
                break

    def _wait(self, cpu_batch: CpuBatchRun, result: _ResultSoFar) -> None:
        """Wait for the CPU batch's attention task, and take out requests that leave: now nothing uses their blocks.

        The seconds count as waiting, not as work of the GPU batch.
        """
        if cpu_batch.future is not None:
            with self._at_work.on(cpu_batch.request_ids):
                before_s = self.backend.now()
                result.cpu_busy_s += cpu_batch.future.wait()
                result.waited_s += self.backend.now() - before_s
            cpu_batch.future = None
        # Only here rows may be dropped: one attention task has ended, and the next is submitted after the next stage.
        if self._plan.leaving and (leaving := self._plan.leaving.intersection(cpu_batch.request_ids)):
            result.detached |= leaving
            cpu_batch.request_ids = tuple(i for i in cpu_batch.request_ids if i not in leaving)
            if cpu_batch.request_ids:
                cpu_batch.batch = self.backend.drop_rows(cpu_batch.batch, leaving)

    def _run_stage(
        self, stage: int, gpu_batch: Batch | None, cpu_batches: Sequence[CpuBatchRun], result: _ResultSoFar
    ) -> None:
        """Let GPU batch and CPU batches run a stage together, and submit the next attention tasks of the CPU
        batches."""
        batches = ([gpu_batch] if gpu_batch is not None else []) + [cpu_batch.batch for cpu_batch in cpu_batches]
        if not batches:
            return
        with self._at_work.on(*(cpu_batch.request_ids for cpu_batch in cpu_batches), gpu_batch=gpu_batch is not None):
            result.tokens.update(self.backend.run_stage(stage, batches))
            for cpu_batch in cpu_batches:
                cpu_batch.stages_left -= 1
                cpu_batch.stage += 1
                if cpu_batch.stage < self.backend.num_layers:
                    cpu_batch.future = self.backend.submit_cpu_attention(cpu_batch.stage, cpu_batch.batch)
                    cpu_batch.submission = next(self._submissions)

    def _detach_leaving(self, plan: IterationPlan, result: _ResultSoFar) -> None:
        """Remove leaving requests from CPU batches whose attention is done; wait for it only in an otherwise empty
        plan.

        From other CPU batches they are removed as soon as it is done: see :meth:`_wait`.
        """
        # In a plan with other work a wait would delay that. In an empty one nothing would ever be waited for, and the
        # engine would make empty plans until the task is done.
        nothing_else = not plan.gpu_batch and not plan.cpu_batches
        for cpu_batch_id, cpu_batch in list(self._cpu_batches.items()):
            if plan.leaving.isdisjoint(cpu_batch.request_ids) or not (nothing_else or cpu_batch.attention_is_ready):
                continue
            self._wait(cpu_batch, result)
            if not cpu_batch.request_ids:
                del self._cpu_batches[cpu_batch_id]
