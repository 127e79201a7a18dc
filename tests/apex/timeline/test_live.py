"""Single iterations recorded while an engine serves: right, only when asked for, and without a trace afterwards."""

from __future__ import annotations

import json

import pytest

from apex.strategy import StrategyConfig
from apex.timeline.recorder import LiveTimeline, RecordedBatch, RecordedFuture, RecordingBackend
from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.engine.engine import Engine
from tests.apex.timeline.test_recorder import OVERLAP, simulated_engine


class Steps:
    """Steps an engine as its service does, and tells the timeline of each iteration."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.timeline = engine, LiveTimeline(engine)
        self.done: list[tuple[IterationPlan, StepResult]] = []
        run = engine.executor.run
        engine.executor.run = lambda plan: self.done.append((plan, run(plan))) or self.done[-1][1]

    def step(self) -> None:
        outputs = self.engine.step()
        self.timeline.on_step(*self.done[-1], outputs)


@pytest.mark.parametrize(
    ("system", "strategy"),
    [("swiftllm", None), ("neo", None), ("apex", OVERLAP)],
    ids=["gpu_batch", "pipelining", "overlap"],
)
def test_a_recording_is_the_account_of_its_iteration(system: str, strategy: StrategyConfig | None) -> None:
    steps = Steps(simulated_engine(system, strategy))
    assert steps.timeline.latest() is None  # which asks for one
    drawings = []
    while steps.engine.has_unfinished():
        steps.step()
        latest = steps.timeline.latest()
        if latest and (not drawings or drawings[-1]["iteration"] != latest["iteration"]):
            drawings.append(latest)
    assert len(drawings) > 10
    for drawing in drawings:
        plan, result = steps.done[drawing["iteration"]]
        assert drawing["strategy"] == plan.strategy.value and drawing["gpu_batch_decodes"] == len(plan.decodes)
        assert drawing["duration_ms"] == pytest.approx(result.duration_s * 1e3, abs=1e-3)
        beside = ("CPU worker: attention", "Swaps between the tiers")
        spans = {row["title"]: row["spans"] for row in drawing["rows"]}
        gpu_batch = [span for title, row in spans.items() if title not in beside for span in row]
        working = sum(span[1] for span in gpu_batch if span[2] != "wait")
        assert working == pytest.approx(result.gpu_batch_busy_s * 1e3, abs=1e-3 * len(gpu_batch))
        assert all(span[0] + span[1] <= drawing["duration_ms"] + 0.01 for span in gpu_batch)
        assert json.loads(json.dumps(drawing)) == drawing
    of_cpu = [drawing for drawing in drawings if any(row["title"].startswith("CPU worker") for row in drawing["rows"])]
    assert bool(of_cpu) == (system != "swiftllm")
    if strategy is OVERLAP:  # attention that goes on from one iteration into the next is in both
        starts = [
            span[0] for d in of_cpu for row in d["rows"] if row["title"].startswith("CPU") for span in row["spans"]
        ]
        assert min(starts) < 0.0


def test_nothing_is_recorded_unless_somebody_asks() -> None:
    steps = Steps(simulated_engine("apex", OVERLAP))
    backend = steps.engine.executor.backend
    for asks in (False, True, False):
        latest = steps.timeline.latest() if asks else None
        for _ in range(30):
            steps.step()
            assert asks or steps.engine.executor.backend is backend
        if asks:
            assert steps.timeline.latest() is not latest  # which asks for another one
            for _ in range(30):
                steps.step()
    for cpu_batch in steps.engine.executor.cpu_batches:
        assert not isinstance(cpu_batch.batch, RecordedBatch) and not isinstance(cpu_batch.future, RecordedFuture)


def test_recording_changes_neither_tokens_nor_times() -> None:
    watched, alone = Steps(simulated_engine("apex", OVERLAP)), simulated_engine("apex", OVERLAP)
    requests = {id(engine): dict(engine.state.requests) for engine in (watched.engine, alone)}
    while watched.engine.has_unfinished():
        watched.timeline.latest()
        watched.step()
        alone.step()
    for ours, theirs in zip(*(of_engine.values() for of_engine in requests.values()), strict=True):
        assert ours.output_token_ids == theirs.output_token_ids and ours.token_times_s == theirs.token_times_s


def test_an_iteration_that_failed_is_not_drawn(monkeypatch) -> None:
    """What it left in the notes would stand before the iteration that came after."""
    steps = Steps(simulated_engine("apex", OVERLAP))
    for _ in range(20):
        steps.step()
    steps.timeline.latest()
    steps.step()  # from here on it records

    def fails(layer: int, gpu_batch: object) -> None:
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr(steps.engine.backend, "gpu_attention", fails)
        with pytest.raises(RuntimeError):
            steps.engine.step()
    for request in steps.engine.recover():
        steps.engine.add(request)
    steps.step()
    assert not isinstance(steps.engine.executor.backend, RecordingBackend)
    assert steps.timeline.latest() is None
    while steps.engine.has_unfinished():
        steps.step()
    assert steps.timeline.latest() is not None
