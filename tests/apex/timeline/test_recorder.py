"""Recorded timelines: spans are in order, every wait has its cause, sums equal the engine's accounts; their files."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from apex.cli import main
from apex.simulator.backend import SimulatedBatch
from apex.simulator.links import Interconnect
from apex.strategy import StrategyConfig
from apex.timeline.recorder import RecordingBackend, recording, write_timeline
from apex.timeline.spans import CpuBatchTag, Kind, Timeline, trace_json
from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import SamplingParams
from swiftllm.server.engine_status import dump_state
from tests.apex.timeline.recorded import EVERYTHING, LINK, OVERLAP, record, simulated_engine
from tests.reference.tiny_model import make_tiny_llama

GPU_KINDS = (Kind.LINEAR, Kind.ATTENTION, Kind.STEP)


def sum_s(timeline: Timeline, *kinds: Kind, iteration: int | None = None) -> float:
    spans = [span for span in timeline.spans if span.kind in kinds and iteration in (None, span.iteration)]
    return sum(span.duration_s for span in spans)


def check_order(timeline: Timeline) -> None:
    """Each resource does one thing at a time, and nothing begins before what it needs has ended."""
    gpu_batch = [span for span in timeline.spans if span.kind.is_gpu_batch]
    for resource in (gpu_batch, *([s for s in timeline.spans if s.kind is kind] for kind in Kind)):
        for before, after in pairwise(sorted(resource, key=lambda span: (span.start_s, span.end_s))):
            assert before.end_s <= after.start_s + 1e-12, (before, after)
    by_index = {span.index: span for span in timeline.spans}
    assert len(by_index) == len(timeline.spans)
    returned = {span.after[0]: span for span in timeline.spans if span.kind is Kind.TO_GPU}
    for span in timeline.spans:
        for needed in (by_index[index] for index in span.after):
            # A joined CPU batch needs the output back on the GPU, where it has to join.
            ready_s = returned.get(needed.index, needed).end_s if span.kind in GPU_KINDS else needed.end_s
            assert ready_s <= span.start_s + 1e-12, (needed, span)


def check_futures(timeline: Timeline) -> None:
    """Every attention task comes out of a stage of its CPU batch one layer before, and goes into the stage of its
    layer.

    A CPU batch whose requests have all been recalled to the GPU ends with an attention task that goes nowhere.
    """
    by_index = {span.index: span for span in timeline.spans}
    futures = {span.index: span for span in timeline.spans if span.kind is Kind.CPU_ATTENTION}
    for future in futures.values():
        (stage,) = (by_index[index] for index in future.after)
        assert stage.layer == future.layer - 1 and set(future.cpu_batches) <= set(stage.cpu_batches)
    collected: list[int] = []
    last_stage: dict[CpuBatchTag, int] = {}
    for span in timeline.spans:
        if span.kind in (Kind.LINEAR, Kind.STEP):
            last_stage.update(dict.fromkeys(span.cpu_batches, span.index))
            assert [futures[index].layer for index in span.after] == [span.layer] * len(span.after)
            assert span.layer == -1 or len(span.after) == len(span.cpu_batches)
            collected += span.after
    assert len(set(collected)) == len(collected)
    for index in futures.keys() - set(collected):
        (cpu_batch,) = futures[index].cpu_batches
        assert futures[index].after == (last_stage[cpu_batch],)


@pytest.mark.parametrize("link", [None, LINK], ids=["no link", "link"])
@pytest.mark.parametrize(
    ("system", "strategy"),
    [("swiftllm", None), ("neo", None), ("fastdecode", None), ("apex", None), ("apex", OVERLAP), ("adaptive", None)],
)
def test_simulated_timelines_are_in_order_and_add_up(
    system: str, strategy: StrategyConfig | None, link: Interconnect | None
) -> None:
    engine = simulated_engine(system, strategy, link)
    results, contexts_s, waits_s = [], [], []
    run, backend = engine.executor.run, engine.backend
    open_gpu_batch, gpu_attention = backend.open_gpu_batch, backend.gpu_attention

    def opened(items: Sequence[GpuBatchItem]) -> SimulatedBatch:
        batch = open_gpu_batch(items)
        contexts_s.append(batch.context_s * backend.num_layers)
        return batch

    def attended(layer: int, gpu_batch: SimulatedBatch) -> None:
        start_s, busy_s = backend.now(), backend.busy.gpu_s
        gpu_attention(layer, gpu_batch)
        if gpu_batch.context_s:
            waits_s.append(backend.now() - start_s - (backend.busy.gpu_s - busy_s))

    backend.open_gpu_batch, backend.gpu_attention = opened, attended
    engine.executor.run = lambda plan: results.append(run(plan)) or results[-1]
    timeline = record(engine)
    check_order(timeline)
    check_futures(timeline)
    assert len(timeline.iterations) == len(results)
    gpu_batch_kinds = [kind for kind in Kind if kind.is_gpu_batch and kind is not Kind.WAIT]
    for iteration, result in zip(timeline.iterations, results, strict=True):
        assert sum_s(timeline, *gpu_batch_kinds, iteration=iteration.index) == pytest.approx(result.gpu_batch_busy_s)
        waited_s = result.duration_s - result.gpu_batch_busy_s
        assert sum_s(timeline, Kind.WAIT, iteration=iteration.index) == pytest.approx(waited_s, abs=1e-12)
        assert iteration.end_s - iteration.start_s == pytest.approx(result.duration_s)
    busy = engine.backend.busy
    # The GPU's spans include its waits for what chunks attend to in the CPU tier. These copies have no spans.
    assert sum_s(timeline, *GPU_KINDS) == pytest.approx(busy.gpu_s + sum(waits_s))
    assert sum_s(timeline, Kind.CPU_ATTENTION) == pytest.approx(busy.cpu_s)
    swapped_s = busy.to_host_s + busy.to_gpu_s - sum_s(timeline, Kind.TO_HOST, Kind.TO_GPU) - sum(contexts_s)
    assert -1e-12 <= swapped_s <= sum_s(timeline, Kind.SWAP) + 1e-12
    has_cpu_work = system != "swiftllm"
    assert (busy.cpu_s > 0) == has_cpu_work
    assert any(span.kind is Kind.TO_GPU for span in timeline.spans) == (has_cpu_work and link is not None)


@pytest.mark.parametrize("system", ["neo", "apex"])
def test_simulated_swaps_stand_beside_the_first_layers(system: str) -> None:
    timeline = record(simulated_engine(system))
    swaps = [span for span in timeline.spans if span.kind is Kind.SWAP]
    beside = [
        span.layer
        for span in timeline.spans
        for swap in swaps
        if span.kind is Kind.LINEAR and span.iteration == swap.iteration and span.start_s < swap.end_s
    ]
    assert swaps and -1 in beside


@pytest.mark.parametrize("system", ["swiftllm", "apex"])
def test_recording_changes_nothing_and_leaves_nothing_behind(system: str) -> None:
    times = []
    for traced in (False, True):
        engine = simulated_engine(system)
        executor, backend, requests = engine.executor, engine.backend, list(engine.state.requests.values())
        if traced:
            record(engine)
        while engine.has_unfinished():
            engine.step()
        times.append([request.token_times_s for request in requests])
        assert engine.executor is executor and executor.backend is backend
    assert times[0] == times[1]


def test_aborts_in_cpu_batches_keep_the_accounts() -> None:
    engine = simulated_engine("apex", OVERLAP)
    draw_number = random.Random(2)
    with recording(engine, num_iterations=EVERYTHING) as recorder:
        while engine.has_unfinished():
            engine.step()
            if draw_number.random() < 0.2 and engine.state.requests:
                engine.abort(draw_number.choice(sorted(engine.state.requests)))
    timeline = recorder.timeline("apex", "here", simulated=True)
    check_order(timeline)
    assert sum_s(timeline, Kind.CPU_ATTENTION) == pytest.approx(engine.backend.busy.cpu_s)
    shrunk = {}
    for span in timeline.spans:
        if span.kind is Kind.CPU_ATTENTION:
            shrunk.setdefault(span.cpu_batches[0].number, set()).add(span.work.requests)
    assert any(len(sizes) > 1 for sizes in shrunk.values()), "no CPU batch lost a request: this test tests nothing"


# -- which iterations -------------------------------------------------------------------------------------------------


def test_while_recording_an_engine_tells_its_state() -> None:
    """The server's report shows CPU batches with the recorded attention tasks."""
    engine = simulated_engine("apex", OVERLAP)
    with recording(engine):
        while not engine.executor.cpu_batches:
            engine.step()
        assert "CPU batch before stage" in dump_state(engine) and engine.executor.cpu_batches


def test_the_window_is_where_cpu_batches_are_under_way_near_the_middle() -> None:
    whole = record(simulated_engine("apex", OVERLAP))
    with_cpu_batches = {span.iteration for span in whole.spans if span.kind is Kind.CPU_ATTENTION}
    assert len(with_cpu_batches) < len(whole.iterations)
    window = record(simulated_engine("apex", OVERLAP), num_iterations=3)
    indexes = [iteration.index for iteration in window.iterations]
    assert indexes == list(range(indexes[0], indexes[0] + 3)) and set(indexes) <= with_cpu_batches
    assert 0.1 < indexes[0] / len(whole.iterations) < 0.9
    expected = [span for span in whole.spans if span.iteration in indexes and span.kind is Kind.LINEAR]
    assert [span.start_s for span in window.spans if span.kind is Kind.LINEAR] == [span.start_s for span in expected]


def test_a_window_can_be_asked_for() -> None:
    window = record(simulated_engine("swiftllm"), num_iterations=2, start=5)
    assert [iteration.index for iteration in window.iterations] == [5, 6]
    with pytest.raises(ValueError, match="start earlier"):
        record(simulated_engine("swiftllm"), num_iterations=2, start=5000)


def test_attention_tasks_under_way_at_the_beginning_are_there() -> None:
    whole = record(simulated_engine("apex", OVERLAP, cpu_gb_s=0.5))
    bounds = {iteration.index: (iteration.start_s, iteration.end_s) for iteration in whole.iterations}
    futures = [span for span in whole.spans if span.kind is Kind.CPU_ATTENTION]
    start = next(span.iteration + 1 for span in futures if span.end_s > bounds[span.iteration][1] + 1e-6)
    window = record(simulated_engine("apex", OVERLAP, cpu_gb_s=0.5), num_iterations=1, start=start)
    assert any(span.kind is Kind.CPU_ATTENTION and span.iteration < start for span in window.spans)
    check_order(window)


def test_recording_may_begin_and_end_with_cpu_batches_under_way() -> None:
    """They are taken in with the attention that is under way, and given back as they were."""
    engine = simulated_engine("apex", OVERLAP, cpu_gb_s=0.5)
    while not engine.executor.cpu_batches or any(cpu_batch.future.ready() for cpu_batch in engine.executor.cpu_batches):
        engine.step()
    with recording(engine, num_iterations=1) as recorder:
        engine.step()
    assert not isinstance(engine.executor.backend, RecordingBackend)
    while engine.has_unfinished():
        engine.step()
    assert not engine.executor.cpu_batches
    timeline = recorder.timeline("apex", "here", simulated=True)
    check_order(timeline)
    (iteration,) = timeline.iterations
    assert any(span.start_s < iteration.start_s < span.end_s for span in timeline.spans if not span.kind.is_gpu_batch)


# -- real hardware ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("synchronous", [False, True], ids=["thread", "inline"])
def test_measured_timelines_are_in_order_and_add_up(tiny_model, tmp_path, monkeypatch, synchronous: bool) -> None:
    from apex.build import build_system

    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    config = EngineConfig(
        tiny_model, dtype="float32", num_gpu_blocks=8, num_cpu_blocks=64, max_model_len=128, synchronous=synchronous
    )
    engine = build_system("apex", config, OVERLAP)
    try:
        for index in range(6):
            engine.add(engine.make_request(str(index), [3 + index] * 40, SamplingParams(max_tokens=8, ignore_eos=True)))
        timeline = record(engine)
    finally:
        engine.close()
    check_order(timeline)
    check_futures(timeline)
    stats = engine.stats()
    assert stats.cpu_busy_s > 0
    assert sum_s(timeline, Kind.CPU_ATTENTION) == pytest.approx(stats.cpu_busy_s)
    gpu_batch_s = sum_s(timeline, *(kind for kind in Kind if kind.is_gpu_batch and kind is not Kind.WAIT))
    assert 0 < gpu_batch_s <= stats.gpu_batch_busy_s
    tokens = [span.work.tokens for span in timeline.spans if span.kind is Kind.LINEAR and span.layer == -1]
    assert sum(tokens) >= 6 * (40 + 7)  # each prompt and each output token but the last enters once


def test_bench_writes_a_timeline_of_what_it_measures(tiny_model, tmp_path, capsys) -> None:
    sizes = ["--num-requests", "4", "--input-len", "20", "--output-len", "6", "--num-gpu-blocks", "16"]
    target = ["--trace-timeline", str(tmp_path / "a.png"), "--timeline-iterations", "2"]
    assert main(["bench", tiny_model, "--system", "swiftllm", *sizes, "--num-cpu-blocks", "8", *target]) == 0
    assert str(tmp_path / "a.json") in capsys.readouterr().out and (tmp_path / "a.png").stat().st_size > 20_000
    trace = json.loads((tmp_path / "a.json").read_text())
    assert trace["otherData"]["simulated"] is False and "SIMULATED" not in trace["otherData"]["setting"]
    iterations = [event for event in trace["traceEvents"] if event.get("cat") == "iteration"]
    assert [event["name"].split(": ")[1] for event in iterations] == ["gpu-only"] * 2
    warm_up_left_out = {event["name"].split(": ")[0] for event in iterations}
    assert warm_up_left_out <= {str(i) for i in range(8)}


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["overlap", "pipelining", "free_running"])
def test_the_trace_is_in_the_trace_event_format(name: str, request, tmp_path) -> None:
    timeline: Timeline = request.getfixturevalue(name)
    trace_path, picture_path = write_timeline(timeline, tmp_path / "new" / "a.json")
    assert picture_path.read_bytes().startswith(b"\x89PNG") and picture_path.stat().st_size > 20_000
    trace = json.loads(trace_path.read_text())
    assert trace["otherData"]["simulated"] is True
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"X", "M", "i", "s", "f"}
    slices: dict[tuple[int, int], list[dict]] = {}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        if event["ph"] != "M":
            assert isinstance(event["tid"], int) and isinstance(event["ts"], float)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
        if event["ph"] == "i":
            assert event["s"] == "t"
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(slices) <= named
    for row in slices.values():  # a viewer drops slices of one thread that overlap without nesting
        for before, after in pairwise(sorted(row, key=lambda event: event["ts"])):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.002
    arrows: dict[int, dict[str, dict]] = {}
    for event in events:
        if event["ph"] in "sf":
            arrows.setdefault(event["id"], {})[event["ph"]] = event
    assert arrows and all(set(ends) == {"s", "f"} for ends in arrows.values())
    for ends in arrows.values():
        assert ends["s"]["ts"] <= ends["f"]["ts"] and ends["f"]["bp"] == "e"
        for end in ends.values():  # an arrow ties the slices it lies in
            row = slices[end["pid"], end["tid"]]
            assert any(event["ts"] <= end["ts"] <= event["ts"] + event["dur"] for event in row)
    spans = [event for row in slices.values() for event in row if event["cat"] != "iteration"]
    assert len(spans) == len(timeline.spans)
    keys = {"iteration", "strategy", "layer", "tokens", "requests", "context_tokens", "cpu_batches"}
    assert all(keys <= set(event["args"]) for event in spans)
    known = {iteration.index: iteration.strategy for iteration in timeline.iterations}
    assert all(
        event["args"]["strategy"] == known.get(event["args"]["iteration"], "before this window") for event in spans
    )


def test_times_in_the_trace_are_microseconds_of_the_window(pipelining: Timeline) -> None:
    slices = [event for event in trace_json(pipelining)["traceEvents"] if event["ph"] == "X"]
    first = next(event for event in slices if event["cat"] == "iteration")
    assert first["ts"] == 0.0
    iteration = pipelining.iterations[0]
    assert first["dur"] == pytest.approx((iteration.end_s - iteration.start_s) * 1e6, abs=0.01)


def test_a_free_running_cpu_batch_joins_at_the_gpu_batch_s_layer_and_steps_elsewhere(free_running: Timeline) -> None:
    assert all(i.free_running for i in free_running.iterations[:2]) and len(free_running.iterations) == 3
    gpu_batch = [span for span in free_running.spans if span.kind is Kind.LINEAR]
    joins = [span for span in gpu_batch if span.cpu_batches]
    steps = [span for span in free_running.spans if span.kind is Kind.STEP]
    assert len(joins) == free_running.crossings(0, Kind.LINEAR) > 0
    assert len(steps) == free_running.crossings(0, Kind.STEP) > len(joins)
    for step in steps:  # the GPU batch's next layer is the one after the last that it ran
        before = [span for span in gpu_batch if span.iteration == step.iteration and span.start_s < step.start_s]
        assert step.layer != before[-1].layer + 1
    several = [sum(span.iteration == i.index for span in steps) for i in free_running.iterations]
    assert max(several) > 1, "no CPU batch ran several layers while the GPU batch passed once"
