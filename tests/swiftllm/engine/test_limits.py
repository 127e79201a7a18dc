"""The executor's two limits: seconds of an iteration without a GPU batch, and stages that a CPU batch may run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from swiftllm.core.plan import FREE_RUNNING, OVERLAPPED, CpuBatchMode, CpuBatchPlan, IterationPlan
from swiftllm.core.request import Request, RequestStatus, SamplingParams, Tier
from swiftllm.engine.executor import Executor
from tests.reference.fake_backend import FakeBackend, FakeFuture, next_token

LAYERS = 4
FUTURE_S = 0.1
PROMPT = (2, 3, 4)


class SlowFuture(FakeFuture):
    """Ready once a worker that serves attention tasks one by one has taken so many seconds for it."""

    def __init__(self, backend: FakeBackend, batch: object, layer: int, seconds: float = FUTURE_S) -> None:
        super().__init__(backend, batch, layer)
        self.ready_s = backend.worker_free_s = max(backend.clock_s, backend.worker_free_s) + seconds

    def ready(self) -> bool:
        return self.backend.clock_s >= self.ready_s

    def wait(self) -> float:
        self.polls_left = -1
        self.backend.clock_s = max(self.backend.clock_s, self.ready_s)
        return super().wait()


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend(num_layers=LAYERS, block_size=4)
    backend.worker_free_s = 0.0
    backend.submit_cpu_attention = lambda layer, batch: SlowFuture(backend, batch, layer)
    return backend


def place(backend: FakeBackend, request_id: str, tier: Tier, block: int) -> Request:
    request = Request(request_id, PROMPT, SamplingParams(max_tokens=50), tier=tier)
    request.status, request.num_uncomputed = RequestStatus.RUNNING, 1
    backend.block_tables = {**backend.block_tables, request_id: [block]}
    for layer in range(LAYERS):
        for position in range(2):
            backend.store(request, tier, layer, [block], position)
    return request


def cpu_batches(backend: FakeBackend, count: int, mode: CpuBatchMode = OVERLAPPED) -> list[CpuBatchPlan]:
    return [CpuBatchPlan(i, (place(backend, f"c{i}", Tier.CPU, i),), mode) for i in range(count)]


def plan(plans: list[CpuBatchPlan], limit_s: float | None, gpu_batch=(), leaving=()) -> IterationPlan:
    return IterationPlan(tuple(gpu_batch), (), tuple(plans), (), frozenset(leaving), time_limit_s=limit_s)


def run_to_the_end(executor: Executor, plans: list[CpuBatchPlan], limit_s: float) -> tuple[dict, list[float]]:
    tokens: dict[str, int] = {}
    durations = []
    for _ in range(1000):
        if not plans:
            break
        result = executor.run(plan(plans, limit_s))
        durations.append(result.duration_s)
        tokens.update(result.tokens)
        plans = [cpu_batch for cpu_batch in plans if cpu_batch.cpu_batch_id in result.stages]
    assert not plans and not executor.cpu_batches
    return tokens, durations


@pytest.mark.parametrize("mode", [OVERLAPPED, FREE_RUNNING])
@pytest.mark.parametrize("limit_s", [0.0, 0.05, 0.25, 100.0])
@pytest.mark.parametrize("count", [1, 3])
def test_an_iteration_without_a_gpu_batch_ends_late_by_one_attention_task_at_most(
    backend: FakeBackend, mode: CpuBatchMode, limit_s: float, count: int
) -> None:
    plans = cpu_batches(backend, count, mode)
    tokens, durations = run_to_the_end(Executor(backend), plans, limit_s)
    assert tokens == {f"c{i}": next_token(PROMPT) for i in range(count)}
    assert max(durations) <= limit_s + FUTURE_S + 1e-3
    if limit_s == 100.0:
        assert len(durations) == 1
    else:  # none ends early, except the last
        assert min(durations[:-1]) >= limit_s


def test_without_a_limit_it_lasts_until_all_have_their_tokens(backend: FakeBackend) -> None:
    result = Executor(backend).run(plan(cpu_batches(backend, 3), None))
    assert len(result.tokens) == 3 and result.duration_s >= LAYERS * FUTURE_S


def test_a_gpu_batch_knows_no_limit(backend: FakeBackend) -> None:
    result = Executor(backend).run(plan(cpu_batches(backend, 1), 0.0, [place(backend, "g", Tier.GPU, 9)]))
    assert set(result.tokens) == {"g"} and result.stages == {0: 0}


def test_nobody_starves_beside_faster_cpu_batches(backend: FakeBackend) -> None:
    """One CPU batch's attention tasks take forty times as long. Whatever others join meanwhile, it has its token
    soon."""
    first = cpu_batches(backend, 1)[0]
    backend.submit_cpu_attention = lambda layer, batch: SlowFuture(
        backend, batch, layer, 4.0 if batch.requests[0].request_id == "c0" else 0.1
    )
    executor, plans, tokens = Executor(backend), [first], {}
    for number in range(1, 2000):
        if len(plans) < 3:
            plans.append(CpuBatchPlan(number, (place(backend, f"c{number}", Tier.CPU, number),), first.mode))
        result = executor.run(plan(plans, 0.15))
        tokens.update(result.tokens)
        assert result.duration_s <= 0.15 + 4.0 + 1e-3
        plans = [cpu_batch for cpu_batch in plans if cpu_batch.cpu_batch_id in result.stages]
        if "c0" in tokens:
            break
    assert tokens["c0"] == next_token(PROMPT) and number < 20


def test_all_cpu_batches_go_on_side_by_side(backend: FakeBackend) -> None:
    """Whatever their order in the plan, the one whose attention task is served next is the next to go on."""
    executor, plans = Executor(backend), cpu_batches(backend, 3)
    layers = dict.fromkeys(range(3), -1)
    for round_ in range(200):
        result = executor.run(plan(plans if round_ % 2 else plans[::-1], 0.12))
        assert result.duration_s <= 0.12 + FUTURE_S + 1e-3
        layers = {i: result.stages.get(i, LAYERS) for i in layers}
        assert max(layers.values()) - min(layers.values()) <= 1
        plans = [cpu_batch for cpu_batch in plans if cpu_batch.cpu_batch_id in result.stages]
        if not plans:
            break
    assert set(layers.values()) == {LAYERS}


@pytest.mark.parametrize("seed", range(20))
def test_aborts_while_iterations_end_early(backend: FakeBackend, seed: int) -> None:
    rng = random.Random(seed)
    backend.submit_cpu_attention = lambda layer, batch: SlowFuture(backend, batch, layer, rng.uniform(0, 0.1))
    requests = [place(backend, f"c{i}", Tier.CPU, i) for i in range(6)]
    members = {0: requests[:3], 1: requests[3:5], 2: requests[5:]}
    executor, tokens, leaving, left = Executor(backend), {}, set(), set()
    for round_ in range(200):
        alive = [r.request_id for group in members.values() for r in group if r.request_id not in leaving]
        if round_ and alive and rng.random() < 0.2:
            leaving.add(rng.choice(alive))
        named = [i for i, group in members.items() if any(r.request_id not in leaving for r in group)]
        plans = [CpuBatchPlan(i, tuple(members[i]), OVERLAPPED) for i in named]
        result = executor.run(plan(plans, rng.choice((0.0, 0.1, 0.5)), leaving=leaving))
        left |= result.detached
        leaving -= result.detached
        tokens.update(result.tokens)
        members = {i: [r for r in group if r.request_id not in left] for i, group in members.items()}
        members = {i: group for i, group in members.items() if i in result.stages}
        leaving &= {r.request_id for group in members.values() for r in group}
        if not members:
            break
    assert not executor.cpu_batches and left.isdisjoint(tokens)
    assert all(token == next_token(PROMPT) for token in tokens.values())
    assert len(tokens) + len(left) == 6


# -- most crossings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("most", [1, 2, 3, LAYERS, LAYERS + 1, 50])
def test_a_cpu_batch_crosses_as_many_stages_as_allowed(backend: FakeBackend, most: int) -> None:
    """Every attention task is ready at once, so nothing else holds the CPU batch up."""
    backend.submit_cpu_attention = lambda layer, batch: SlowFuture(backend, batch, layer, 0.0)
    request = place(backend, "c", Tier.CPU, 0)
    cpu_batch = CpuBatchPlan(7, (request,), replace(FREE_RUNNING, max_stages=most))
    executor, gpu_batch, layer = Executor(backend), (place(backend, "g", Tier.GPU, 9),), -1
    while layer < LAYERS:
        result = executor.run(plan([cpu_batch], None, gpu_batch))
        before, layer = layer, result.stages.get(7, LAYERS)
        assert layer - before == min(most, LAYERS - before)
    assert result.tokens["c"] == next_token(PROMPT)


def test_no_cpu_batch_crosses_more_stages_than_allowed(backend: FakeBackend) -> None:
    """Attention tasks are ready at any time, so CPU batches join and run alone in all orders."""
    crossed = set()
    for seed in range(200):
        rng = random.Random(seed)
        backend.submit_cpu_attention = lambda layer, batch, rng=rng: SlowFuture(
            backend, batch, layer, rng.choice((0.0, 1e-4, 3e-4, 2e-3))
        )
        plans = cpu_batches(backend, 2)
        executor, gpu_batch, tokens = Executor(backend), (place(backend, "g", Tier.GPU, 9),), {}
        layers = {0: -1, 1: -1}
        while layers:
            most = {i: rng.choice((1, 2, 3)) for i in layers}
            named = [
                CpuBatchPlan(i, plans[i].requests, replace(FREE_RUNNING, max_stages=most[i]))
                for i in layers
                if rng.random() < 0.8
            ]
            result = executor.run(plan(named, None, gpu_batch))
            for cpu_batch in named:
                count = result.stages.get(cpu_batch.cpu_batch_id, LAYERS) - layers[cpu_batch.cpu_batch_id]
                assert 0 <= count <= most[cpu_batch.cpu_batch_id]
                crossed.add(count)
            tokens.update(result.tokens)
            layers = result.stages if result.stages or len(tokens) == 3 else layers
            layers = {i: layers.get(i, -1) for i in (0, 1) if f"c{i}" not in tokens}
        assert tokens["c0"] == tokens["c1"] == next_token(PROMPT)
    assert crossed == {0, 1, 2, 3}
