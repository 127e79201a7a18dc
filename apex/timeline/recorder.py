"""Records the timeline of a run: runs of the engine's executor, over a recording backend.

Without a recorder nothing is wrapped and nothing costs time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from apex.timeline.recording_backend import Notes, RecordingBackend, attach, detach
from apex.timeline.spans import Timeline
from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.engine.engine import Engine


class TimelineRecorder:
    """Keeps a window of ``num_iterations`` consecutive iterations.

    The window begins at iteration ``start``, counted from 0 when recording began. Without ``start`` it is the window
    with the most iterations that use the CPU and neither prefill nor swap. Ties go to the window with fewer strategies,
    then to the one nearest the middle of the run; ``progress`` returns how far the run is, 0 to 1.
    """

    def __init__(
        self,
        backend: RecordingBackend,
        run: Callable[[IterationPlan], StepResult],
        num_iterations: int,
        start: int | None,
        progress: Callable[[], float],
    ) -> None:
        """``run`` carries out a plan on ``backend``."""
        self._backend = backend
        self._run = run
        self._start = start
        self._progress = progress
        self._recent: deque[Notes] = deque(maxlen=num_iterations)
        self._chosen: tuple[Notes, ...] = ()
        self._chosen_worth: tuple[float, ...] = ()
        self._count = 0

    def run(self, plan: IterationPlan) -> StepResult:
        """Carry out the plan, and record what happened."""
        notes = self._backend.begin_notes(self._count)
        result = self._run(plan)
        notes.outcome = plan, result
        # An attention task that outlasts the iteration counts; one that was only collected does not.
        notes.uses_cpu = bool(notes.futures) or any(t.index in self._backend.outstanding for t in notes.carried)
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
            -len({notes.plan.strategy for notes in window}),
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
        spans = self._backend.spans_of(window)
        there = {span.index for span in spans}
        spans = [replace(span, after=tuple(i for i in span.after if i in there)) for span in spans]
        return Timeline(
            system,
            setting,
            simulated,
            self._backend.num_layers,
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
    executor, run = engine.executor, engine.executor.run
    backend = attach(executor, engine.state.requests)
    recorder = TimelineRecorder(backend, run, num_iterations, start, progress)
    executor.run = recorder.run
    try:
        yield recorder
    finally:
        executor.run = run
        detach(executor, backend)
