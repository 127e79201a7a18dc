"""Records timelines: an executor around the engine's executor, over a recording backend.

Without a recorder nothing is wrapped and nothing costs time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from apex.timeline.recording_backend import Notes, RecordingBackend, attach, detach
from apex.timeline.spans import Iteration, Timeline
from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.engine.engine import Engine
from swiftllm.engine.executor import Cohort, Executor


class TimelineRecorder:
    """An executor that keeps a window of ``num_iterations`` consecutive iterations of the one it wraps.

    The window begins at iteration ``start``, counted from 0 when recording began. Without ``start`` it is the window
    with the most iterations that use the CPU and neither prefill nor swap. Ties go to the window with fewer strategies,
    then to the one nearest the middle of the run; ``progress`` returns how far the run is, 0 to 1.
    """

    def __init__(
        self,
        executor: Executor,
        backend: RecordingBackend,
        num_iterations: int,
        start: int | None,
        progress: Callable[[], float],
    ) -> None:
        self.executor = executor
        self.backend = backend
        self._start = start
        self._progress = progress
        self._recent: deque[Notes] = deque(maxlen=num_iterations)
        self._chosen: tuple[Notes, ...] = ()
        self._chosen_worth: tuple[float, ...] = ()
        self._count = 0

    @property
    def cohorts(self) -> tuple[Cohort, ...]:
        return self.executor.cohorts

    def at_work(self) -> frozenset[str]:
        return self.executor.at_work()

    def abandon(self) -> None:
        self.executor.abandon()

    def run(self, plan: IterationPlan) -> StepResult:
        """Carry out the plan with the wrapped executor, and record what it did."""
        backend = self.backend
        notes = backend.notes = Notes(self._count, tuple(backend.outstanding.values()))
        start_s = backend.now()
        result = self.executor.run(plan)
        busy = result.lane_busy_s, result.cpu_busy_s
        strategy, predicted_s = plan.strategy.value, plan.predicted.get("iteration_s")
        free = any(cohort.rule.steps and not cohort.rule.waits for cohort in plan.cohorts)
        times = start_s, start_s + result.duration_s, *busy, predicted_s
        notes.summary = Iteration(self._count, strategy, *times, free)
        notes.is_steady = not plan.swaps and not plan.prefills
        # A ticket that outlasts the iteration counts; one that was only collected does not.
        notes.uses_cpu = bool(notes.tickets) or any(ticket.index in backend.outstanding for ticket in notes.carried)
        self._count += 1
        self._recent.append(notes)
        if len(self._recent) == self._recent.maxlen:
            self._consider()
        return result

    def _consider(self) -> None:
        if self._start is not None:
            if self._recent[0].iteration == self._start:
                self._chosen = tuple(self._recent)
            return
        window = self._recent
        worth = (
            sum(notes.uses_cpu and notes.is_steady for notes in window),
            sum(notes.uses_cpu for notes in window),
            -len({notes.summary.strategy for notes in window}),
            -abs(self._progress() - 0.5),
        )
        if not self._chosen or worth > self._chosen_worth:
            self._chosen, self._chosen_worth = tuple(window), worth

    def timeline(self, system: str, setting: str, *, simulated: bool) -> Timeline:
        """What was recorded; call once the run is over. A run shorter than the window is recorded whole.

        Raises:
            ValueError: the run ended before the window that was asked for.
        """
        if self._start is not None and not self._chosen:
            raise ValueError(
                f"the run had {self._count} iterations: {self._recent.maxlen} from iteration {self._start} on are not "
                "among them; start earlier"
            )
        window = self._chosen or tuple(self._recent)
        indexes = self.backend.indexes
        tickets = [*(window[0].carried if window else ()), *(ticket for notes in window for ticket in notes.tickets)]
        spans = [span for notes in window for span in notes.spans]
        spans += [span for ticket in tickets for span in ticket.spans(indexes)]
        there = {span.index for span in spans}
        spans = [replace(span, after=tuple(i for i in span.after if i in there)) for span in spans]
        return Timeline(
            system,
            setting,
            simulated,
            self.backend.num_layers,
            tuple(notes.summary for notes in window),
            tuple(sorted(spans, key=lambda span: (span.start_s, span.index))),
            tuple(poll for notes in window for poll in notes.polls),
        )


@contextmanager
def recording(
    engine: Engine,
    *,
    num_iterations: int = 3,
    start: int | None = None,
    progress: Callable[[], float] = lambda: 0.5,
) -> Iterator[TimelineRecorder]:
    """Record what the engine does inside the block, see :class:`TimelineRecorder`."""
    executor = engine.executor
    backend = attach(executor, engine.residents.requests)
    engine.executor = recorder = TimelineRecorder(executor, backend, num_iterations, start, progress)
    try:
        yield recorder
    finally:
        engine.executor = executor
        detach(executor, backend)
