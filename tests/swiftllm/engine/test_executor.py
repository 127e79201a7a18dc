"""The executor: rules, one by one, on a backend that checks the order of everything."""

from __future__ import annotations

import itertools

import pytest

from swiftllm.core.plan import ALONE, FREE_RUNNING, JOINED, OVERLAPPED, CpuBatchMode, CpuBatchPlan, IterationPlan
from swiftllm.core.request import Request, RequestStatus, SamplingParams, Tier
from swiftllm.engine.executor import Executor
from tests.reference.fake_backend import FakeBackend, FakeFuture, next_token

LAYERS = 4


class NeverReady(FakeFuture):
    def ready(self) -> bool:
        return False


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(num_layers=LAYERS, block_size=4)


def place(backend: FakeBackend, request_id: str, tier: Tier, block: int) -> Request:
    """A decoding request of three tokens whose first two are in the cache."""
    request = Request(request_id, (2, 3, 4), SamplingParams(max_tokens=5), tier=tier)
    request.status, request.num_uncomputed = RequestStatus.RUNNING, 1
    backend.block_tables = {**backend.block_tables, request_id: [block]}
    for layer in range(LAYERS):
        for position in range(2):
            backend.store(request, tier, layer, [block], position)
    return request


def plan(decodes=(), cpu_batches=(), leaving=()) -> IterationPlan:
    return IterationPlan(decodes, (), tuple(cpu_batches), (), frozenset(leaving))


def test_without_cpu_batches_the_gpu_batch_goes_from_stage_to_attention() -> None:
    backend = FakeBackend(LAYERS)
    result = Executor(backend).run(plan((place(backend, "a", Tier.GPU, 0), place(backend, "b", Tier.GPU, 1))))
    layers = [call for layer in range(LAYERS) for call in (("gpu_attention", layer), ("run_stage", layer, 1))]
    assert backend.calls == [("run_stage", -1, 1), *layers]
    assert set(result.tokens) == {"a", "b"} and not result.stages


def test_a_gpu_batch_alone_crosses_in_one_go_where_it_can() -> None:
    results = []
    for in_one_go in (False, True):
        backend = FakeBackend(LAYERS)
        backend.crosses_in_one_go = in_one_go
        gpu_batch = (place(backend, "a", Tier.GPU, 0), place(backend, "b", Tier.GPU, 1))
        results.append(Executor(backend).run(plan(gpu_batch)).tokens)
        assert (backend.calls == [("run_full_graph",)]) == in_one_go
    assert results[0] == results[1] and set(results[0]) == {"a", "b"}


@pytest.mark.parametrize("mode", [JOINED, ALONE, OVERLAPPED, FREE_RUNNING])
def test_a_gpu_batch_with_cpu_batches_goes_layer_by_layer(backend: FakeBackend, mode: CpuBatchMode) -> None:
    backend.crosses_in_one_go = True
    cpu_batch = CpuBatchPlan(0, (place(backend, "c", Tier.CPU, 0),), mode)
    executor = Executor(backend)
    executor.run(plan((place(backend, "a", Tier.GPU, 0),), [cpu_batch]))
    assert ("run_full_graph",) not in backend.calls
    executor.abandon()


@pytest.mark.parametrize("mode", [JOINED, ALONE])
def test_waiting_rules_finish_in_one_iteration(backend: FakeBackend, mode: CpuBatchMode) -> None:
    gpu_batch = (place(backend, "g", Tier.GPU, 0),)
    executor = Executor(backend)
    result = executor.run(plan(gpu_batch, [CpuBatchPlan(0, (place(backend, "c", Tier.CPU, 0),), mode)]))
    assert set(result.tokens) == {"g", "c"}
    assert result.stages == {} and not executor.cpu_batches
    shared = [call for call in backend.calls if call[0] == "run_stage" and call[2] == 2]
    assert len(shared) == (LAYERS + 1 if mode.joins else 0)


def test_overlap_joins_one_stage_an_iteration(backend: FakeBackend) -> None:
    gpu_batch = (place(backend, "g", Tier.GPU, 0),)
    cpu_batch = CpuBatchPlan(7, (place(backend, "c", Tier.CPU, 0),), OVERLAPPED)
    executor = Executor(backend)
    layers = []
    for _ in range(1000):
        result = executor.run(plan(gpu_batch, [cpu_batch]))
        assert "g" in result.tokens
        if "c" in result.tokens:
            break
        layers.append(result.stages[7])
    assert sorted(set(layers)) == list(range(LAYERS))
    assert all(0 <= after - before <= 1 for before, after in itertools.pairwise(layers))
    assert not executor.cpu_batches


class ReadyAfter(FakeFuture):
    """Ready once it has been asked ``polls`` times."""

    polls = 1

    def __init__(self, *what: object) -> None:
        super().__init__(*what)
        self.polls_left = self.polls


def shared_layers(backend: FakeBackend) -> list[int]:
    """Layers of the stages that two batches ran together."""
    return [call[1] for call in backend.calls if call[0] == "run_stage" and call[2] == 2]


@pytest.mark.parametrize(("polls", "layer", "shared"), [(0, LAYERS, [-1, 0, 1, 2, 3]), (1, LAYERS, [-1]), (2, 1, [-1])])
def test_free_running_crosses_many_layers_in_a_pass(
    backend: FakeBackend, polls: int, layer: int, shared: list[int]
) -> None:
    """Ready at once, it joins every stage. If it was asked once in vain, the GPU batch goes first and it runs alone
    behind it.

    Asked twice in vain, at stage 0 and after the GPU batch's layer 0, it runs alone after layer 1. Then it is asked
    after layers 2 and 3, in vain.
    """
    kind = type("Delayed", (ReadyAfter,), {"polls": polls})
    backend.submit_cpu_attention = lambda layer, batch: kind(backend, batch, layer)
    cpu_batch = CpuBatchPlan(7, (place(backend, "c", Tier.CPU, 0),), FREE_RUNNING)
    executor = Executor(backend)
    result = executor.run(plan((place(backend, "g", Tier.GPU, 0),), [cpu_batch]))
    assert ("c" in result.tokens) == (layer == LAYERS)
    assert result.stages.get(7, LAYERS) == layer
    assert shared_layers(backend) == shared


def test_free_running_stays_where_its_weights_would_be_streamed_for_it_alone(backend: FakeBackend) -> None:
    """Asked once in vain it would run alone behind the GPU batch to the end, as above; stages 1 and 2 are refused to
    it."""
    kind = type("Delayed", (ReadyAfter,), {"polls": 1})
    backend.submit_cpu_attention = lambda layer, batch: kind(backend, batch, layer)
    cpu_batch = CpuBatchPlan(7, (place(backend, "c", Tier.CPU, 0),), FREE_RUNNING)
    asked: list[int] = []

    def may_run_alone(layer: int) -> bool:
        asked.append(layer)
        return layer not in (1, 2)

    result = Executor(backend, may_run_alone).run(plan((place(backend, "g", Tier.GPU, 0),), [cpu_batch]))
    assert result.stages == {7: 1} and "c" not in result.tokens
    assert 1 in asked and 2 not in asked


@pytest.mark.parametrize("mode", [OVERLAPPED, FREE_RUNNING])
def test_overlap_never_waits(backend: FakeBackend, mode: CpuBatchMode) -> None:
    backend.submit_cpu_attention = lambda layer, batch: NeverReady(backend, batch, layer)
    gpu_batch = (place(backend, "g", Tier.GPU, 0),)
    cpu_batch = CpuBatchPlan(7, (place(backend, "c", Tier.CPU, 0),), mode)
    executor = Executor(backend)
    for _ in range(20):
        result = executor.run(plan(gpu_batch, [cpu_batch]))
        assert result.stages == {7: 0}
        assert result.gpu_batch_busy_s == result.duration_s
        assert result.cpu_busy_s == 0


@pytest.mark.parametrize("mode", [OVERLAPPED, FREE_RUNNING])
def test_overlap_with_an_empty_gpu_batch_waits_instead_of_spinning(backend: FakeBackend, mode: CpuBatchMode) -> None:
    backend.submit_cpu_attention = lambda layer, batch: NeverReady(backend, batch, layer)
    cpu_batch = CpuBatchPlan(7, (place(backend, "c", Tier.CPU, 0),), mode)
    result = Executor(backend).run(plan((), [cpu_batch]))
    assert set(result.tokens) == {"c"}


def test_strategy_may_change_while_a_cpu_batch_is_under_way(backend: FakeBackend) -> None:
    gpu_batch = (place(backend, "g", Tier.GPU, 0),)
    request = place(backend, "c", Tier.CPU, 0)
    executor = Executor(backend)
    executor.run(plan(gpu_batch, [CpuBatchPlan(7, (request,), OVERLAPPED)]))
    parked = executor.run(plan(gpu_batch))
    assert 7 in parked.stages and "c" not in parked.tokens
    result = executor.run(plan(gpu_batch, [CpuBatchPlan(7, (request,), ALONE)]))
    assert set(result.tokens) == {"g", "c"}


def test_aborted_rows_leave_when_no_attention_task_needs_them(backend: FakeBackend) -> None:
    submit = backend.submit_cpu_attention
    backend.submit_cpu_attention = lambda layer, batch: NeverReady(backend, batch, layer)
    gpu_batch = (place(backend, "g", Tier.GPU, 0),)
    members = (place(backend, "c", Tier.CPU, 0), place(backend, "d", Tier.CPU, 1))
    cpu_batch = CpuBatchPlan(7, members, OVERLAPPED)
    executor = Executor(backend)
    executor.run(plan(gpu_batch, [cpu_batch]))
    assert executor.run(plan(gpu_batch, [cpu_batch], ["c"])).detached == frozenset()  # its attention task is still out
    alone = executor.run(plan((), (), ["c"]))  # nothing else to do: waits
    assert alone.detached == {"c"} and alone.stages == {7: 0}
    backend.submit_cpu_attention = submit
    result = executor.run(plan(gpu_batch, [CpuBatchPlan(7, members[1:], ALONE)]))
    assert set(result.tokens) == {"g", "d"}


@pytest.mark.parametrize("mode", [JOINED, ALONE, OVERLAPPED, FREE_RUNNING])
def test_aborted_rows_leave_when_their_attention_task_is_done(backend: FakeBackend, mode: CpuBatchMode) -> None:
    """A CPU batch that goes on in the middle of an iteration never has an attention task that is done where one
    begins."""
    kind = type("Delayed", (ReadyAfter,), {"polls": 1})
    backend.submit_cpu_attention = lambda layer, batch: kind(backend, batch, layer)
    gpu_batch = (place(backend, "g", Tier.GPU, 0),)
    members = (place(backend, "c", Tier.CPU, 0), place(backend, "d", Tier.CPU, 1))
    executor = Executor(backend)
    executor.run(plan(gpu_batch, [CpuBatchPlan(7, members, OVERLAPPED)]))  # its attention task is of layer 0 now
    gpu_batch[0].output_token_ids.append(9)
    backend.block_tables["g"].append(2)
    result = executor.run(plan(gpu_batch, [CpuBatchPlan(7, members, mode)], ["c"]))
    assert result.detached == {"c"} and "c" not in result.tokens
    assert result.stages.get(7, LAYERS) > 0
    stored = [layer for layer in range(LAYERS) if backend.slots[Tier.CPU, 0, layer][2] is not None]
    assert stored == [0]  # no later attention touches its blocks
    rest = executor.run(plan((), [CpuBatchPlan(7, members[1:], mode)])) if result.stages else result
    assert rest.tokens["d"] == next_token(members[1].token_ids(0, 3)) and not executor.cpu_batches


def test_a_gpu_batch_does_not_wait_for_requests_that_leave(backend: FakeBackend) -> None:
    backend.submit_cpu_attention = lambda layer, batch: NeverReady(backend, batch, layer)
    gpu_batch = (place(backend, "g", Tier.GPU, 0),)
    executor = Executor(backend)
    executor.run(plan(gpu_batch, [CpuBatchPlan(7, (place(backend, "c", Tier.CPU, 0),), OVERLAPPED)]))
    result = executor.run(plan(gpu_batch, (), ["c"]))  # nobody else runs, but the GPU batch has its layers to run
    assert result.detached == frozenset() and result.gpu_batch_busy_s == result.duration_s
    executor.abandon()


def test_whoever_an_operation_is_about_is_at_work(backend: FakeBackend) -> None:
    """Where one of them fails or hangs, these requests are blamed, and no others."""
    executor = Executor(backend)
    blamed: list[tuple[str, str]] = []

    def watch(name: str) -> None:
        operation = getattr(backend, name)

        def watched(*args: object) -> object:
            blamed.append((name, "".join(sorted(executor.at_work()))))
            return operation(*args)

        setattr(backend, name, watched)

    gpu_batch = (place(backend, "g", Tier.GPU, 0), place(backend, "h", Tier.GPU, 1))
    joined_batch = CpuBatchPlan(0, (place(backend, "r", Tier.CPU, 0),), JOINED)
    stepper = CpuBatchPlan(1, (place(backend, "s", Tier.CPU, 1),), ALONE)
    for name in ("swap", "open_gpu_batch", "open_cpu_batch", "run_stage", "gpu_attention"):
        watch(name)
    executor.run(plan(gpu_batch, [joined_batch, stepper]))
    assert blamed[:4] == [("swap", ""), ("open_gpu_batch", "gh"), ("open_cpu_batch", "r"), ("open_cpu_batch", "s")]
    layer = [("run_stage", "ghr"), ("gpu_attention", "gh"), ("run_stage", "s")]
    assert blamed[4:] == [*layer * LAYERS, ("run_stage", "ghr"), ("run_stage", "s")]


def test_a_failing_worker_is_heard(backend: FakeBackend) -> None:
    class Broken(FakeFuture):
        def wait(self) -> float:
            raise RuntimeError("kernel failed")

    backend.submit_cpu_attention = lambda layer, batch: Broken(backend, batch, layer)
    cpu_batch = CpuBatchPlan(7, (place(backend, "c", Tier.CPU, 0),), ALONE)
    with pytest.raises(RuntimeError, match="kernel failed"):
        Executor(backend).run(plan((), [cpu_batch]))
