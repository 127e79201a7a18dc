"""The executor: rules, one by one, on a backend that checks the order of everything."""

from __future__ import annotations

import itertools

import pytest

from swiftllm.core.plan import FREE, HOP, RIDE, STEP, CohortPlan, IterationPlan, Rule
from swiftllm.core.request import Request, RequestStatus, SamplingParams, Tier
from swiftllm.engine.executor import Executor
from tests.reference.fake_backend import FakeBackend, FakeTicket, next_token

LAYERS = 4


class NeverReady(FakeTicket):
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


def plan(decodes=(), cohorts=(), leaving=()) -> IterationPlan:
    return IterationPlan(decodes, (), tuple(cohorts), (), frozenset(leaving))


def test_without_cohorts_the_lane_goes_from_boundary_to_attention() -> None:
    backend = FakeBackend(LAYERS)
    result = Executor(backend).run(plan((place(backend, "a", Tier.GPU, 0), place(backend, "b", Tier.GPU, 1))))
    layers = [call for layer in range(LAYERS) for call in (("gpu_attention", layer), ("boundary", layer, 1))]
    assert backend.calls == [("boundary", -1, 1), *layers]
    assert set(result.tokens) == {"a", "b"} and not result.boundaries


def test_a_lane_alone_crosses_in_one_go_where_it_can() -> None:
    results = []
    for in_one_go in (False, True):
        backend = FakeBackend(LAYERS)
        backend.crosses_in_one_go = in_one_go
        lane = (place(backend, "a", Tier.GPU, 0), place(backend, "b", Tier.GPU, 1))
        results.append(Executor(backend).run(plan(lane)).tokens)
        assert (backend.calls == [("whole_iteration",)]) == in_one_go
    assert results[0] == results[1] and set(results[0]) == {"a", "b"}


@pytest.mark.parametrize("rule", [RIDE, STEP, HOP, FREE])
def test_a_lane_with_cohorts_goes_layer_by_layer(backend: FakeBackend, rule: Rule) -> None:
    backend.crosses_in_one_go = True
    cohort = CohortPlan(0, (place(backend, "c", Tier.CPU, 0),), rule)
    executor = Executor(backend)
    executor.run(plan((place(backend, "a", Tier.GPU, 0),), [cohort]))
    assert ("whole_iteration",) not in backend.calls
    executor.abandon()


@pytest.mark.parametrize("rule", [RIDE, STEP])
def test_waiting_rules_finish_in_one_iteration(backend: FakeBackend, rule: Rule) -> None:
    lane = (place(backend, "g", Tier.GPU, 0),)
    executor = Executor(backend)
    result = executor.run(plan(lane, [CohortPlan(0, (place(backend, "c", Tier.CPU, 0),), rule)]))
    assert set(result.tokens) == {"g", "c"}
    assert result.boundaries == {} and not executor.cohorts
    shared = [call for call in backend.calls if call[0] == "boundary" and call[2] == 2]
    assert len(shared) == (LAYERS + 1 if rule.rides else 0)


def test_overlap_rides_one_boundary_an_iteration(backend: FakeBackend) -> None:
    lane = (place(backend, "g", Tier.GPU, 0),)
    cohort = CohortPlan(7, (place(backend, "c", Tier.CPU, 0),), HOP)
    executor = Executor(backend)
    layers = []
    for _ in range(1000):
        result = executor.run(plan(lane, [cohort]))
        assert "g" in result.tokens
        if "c" in result.tokens:
            break
        layers.append(result.boundaries[7])
    assert sorted(set(layers)) == list(range(LAYERS))
    assert all(0 <= after - before <= 1 for before, after in itertools.pairwise(layers))
    assert not executor.cohorts


class ReadyAfter(FakeTicket):
    """Ready once it has been asked ``polls`` times."""

    polls = 1

    def __init__(self, *what: object) -> None:
        super().__init__(*what)
        self.polls_left = self.polls


def shared_layers(backend: FakeBackend) -> list[int]:
    """Layers of the boundaries that two batches crossed together."""
    return [call[1] for call in backend.calls if call[0] == "boundary" and call[2] == 2]


@pytest.mark.parametrize(("polls", "layer", "shared"), [(0, LAYERS, [-1, 0, 1, 2, 3]), (1, LAYERS, [-1]), (2, 1, [-1])])
def test_free_running_crosses_many_layers_in_a_pass(
    backend: FakeBackend, polls: int, layer: int, shared: list[int]
) -> None:
    """Ready at once, it rides every boundary. If it was asked once in vain, the lane goes first and it steps behind it.

    Asked twice in vain, at boundary 0 and after the lane's layer 0, it steps after layer 1. Then it is asked after
    layers 2 and 3, in vain.
    """
    kind = type("Delayed", (ReadyAfter,), {"polls": polls})
    backend.submit_cpu_attention = lambda layer, batch: kind(backend, batch, layer)
    cohort = CohortPlan(7, (place(backend, "c", Tier.CPU, 0),), FREE)
    executor = Executor(backend)
    result = executor.run(plan((place(backend, "g", Tier.GPU, 0),), [cohort]))
    assert ("c" in result.tokens) == (layer == LAYERS)
    assert result.boundaries.get(7, LAYERS) == layer
    assert shared_layers(backend) == shared


def test_free_running_stays_where_its_weights_would_be_streamed_for_it_alone(backend: FakeBackend) -> None:
    """Asked once in vain it would step behind the lane to the end, as above; boundaries 1 and 2 are refused to it."""
    kind = type("Delayed", (ReadyAfter,), {"polls": 1})
    backend.submit_cpu_attention = lambda layer, batch: kind(backend, batch, layer)
    cohort = CohortPlan(7, (place(backend, "c", Tier.CPU, 0),), FREE)
    asked: list[int] = []

    def may_step(layer: int) -> bool:
        asked.append(layer)
        return layer not in (1, 2)

    result = Executor(backend, may_step).run(plan((place(backend, "g", Tier.GPU, 0),), [cohort]))
    assert result.boundaries == {7: 1} and "c" not in result.tokens
    assert 1 in asked and 2 not in asked


@pytest.mark.parametrize("rule", [HOP, FREE])
def test_overlap_never_waits(backend: FakeBackend, rule: Rule) -> None:
    backend.submit_cpu_attention = lambda layer, batch: NeverReady(backend, batch, layer)
    lane = (place(backend, "g", Tier.GPU, 0),)
    cohort = CohortPlan(7, (place(backend, "c", Tier.CPU, 0),), rule)
    executor = Executor(backend)
    for _ in range(20):
        result = executor.run(plan(lane, [cohort]))
        assert result.boundaries == {7: 0}
        assert result.lane_busy_s == result.duration_s
        assert result.cpu_busy_s == 0


@pytest.mark.parametrize("rule", [HOP, FREE])
def test_overlap_with_an_empty_lane_waits_instead_of_spinning(backend: FakeBackend, rule: Rule) -> None:
    backend.submit_cpu_attention = lambda layer, batch: NeverReady(backend, batch, layer)
    cohort = CohortPlan(7, (place(backend, "c", Tier.CPU, 0),), rule)
    result = Executor(backend).run(plan((), [cohort]))
    assert set(result.tokens) == {"c"}


def test_strategy_may_change_while_a_cohort_is_under_way(backend: FakeBackend) -> None:
    lane = (place(backend, "g", Tier.GPU, 0),)
    request = place(backend, "c", Tier.CPU, 0)
    executor = Executor(backend)
    executor.run(plan(lane, [CohortPlan(7, (request,), HOP)]))
    parked = executor.run(plan(lane))
    assert 7 in parked.boundaries and "c" not in parked.tokens
    result = executor.run(plan(lane, [CohortPlan(7, (request,), STEP)]))
    assert set(result.tokens) == {"g", "c"}


def test_aborted_rows_leave_when_no_ticket_needs_them(backend: FakeBackend) -> None:
    submit = backend.submit_cpu_attention
    backend.submit_cpu_attention = lambda layer, batch: NeverReady(backend, batch, layer)
    lane = (place(backend, "g", Tier.GPU, 0),)
    members = (place(backend, "c", Tier.CPU, 0), place(backend, "d", Tier.CPU, 1))
    cohort = CohortPlan(7, members, HOP)
    executor = Executor(backend)
    executor.run(plan(lane, [cohort]))
    assert executor.run(plan(lane, [cohort], ["c"])).left == frozenset()  # its ticket is still out
    alone = executor.run(plan((), (), ["c"]))  # nothing else to do: waits
    assert alone.left == {"c"} and alone.boundaries == {7: 0}
    backend.submit_cpu_attention = submit
    result = executor.run(plan(lane, [CohortPlan(7, members[1:], STEP)]))
    assert set(result.tokens) == {"g", "d"}


@pytest.mark.parametrize("rule", [RIDE, STEP, HOP, FREE])
def test_aborted_rows_leave_when_their_ticket_is_done(backend: FakeBackend, rule: Rule) -> None:
    """A cohort that goes on in the middle of an iteration never has a ticket that is done where one begins."""
    kind = type("Delayed", (ReadyAfter,), {"polls": 1})
    backend.submit_cpu_attention = lambda layer, batch: kind(backend, batch, layer)
    lane = (place(backend, "g", Tier.GPU, 0),)
    members = (place(backend, "c", Tier.CPU, 0), place(backend, "d", Tier.CPU, 1))
    executor = Executor(backend)
    executor.run(plan(lane, [CohortPlan(7, members, HOP)]))  # its ticket is of layer 0 now
    lane[0].output_token_ids.append(9)
    backend.block_tables["g"].append(2)
    result = executor.run(plan(lane, [CohortPlan(7, members, rule)], ["c"]))
    assert result.left == {"c"} and "c" not in result.tokens
    assert result.boundaries.get(7, LAYERS) > 0
    stored = [layer for layer in range(LAYERS) if backend.slots[Tier.CPU, 0, layer][2] is not None]
    assert stored == [0]  # no later attention touches its blocks
    rest = executor.run(plan((), [CohortPlan(7, members[1:], rule)])) if result.boundaries else result
    assert rest.tokens["d"] == next_token(members[1].token_ids(0, 3)) and not executor.cohorts


def test_a_lane_does_not_wait_for_requests_that_leave(backend: FakeBackend) -> None:
    backend.submit_cpu_attention = lambda layer, batch: NeverReady(backend, batch, layer)
    lane = (place(backend, "g", Tier.GPU, 0),)
    executor = Executor(backend)
    executor.run(plan(lane, [CohortPlan(7, (place(backend, "c", Tier.CPU, 0),), HOP)]))
    result = executor.run(plan(lane, (), ["c"]))  # nobody else steps, but the lane has its layers to cross
    assert result.left == frozenset() and result.lane_busy_s == result.duration_s
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

    lane = (place(backend, "g", Tier.GPU, 0), place(backend, "h", Tier.GPU, 1))
    rider = CohortPlan(0, (place(backend, "r", Tier.CPU, 0),), RIDE)
    stepper = CohortPlan(1, (place(backend, "s", Tier.CPU, 1),), STEP)
    for name in ("swap", "open_lane", "open_cohort", "boundary", "gpu_attention"):
        watch(name)
    executor.run(plan(lane, [rider, stepper]))
    assert blamed[:4] == [("swap", ""), ("open_lane", "gh"), ("open_cohort", "r"), ("open_cohort", "s")]
    layer = [("boundary", "ghr"), ("gpu_attention", "gh"), ("boundary", "s")]
    assert blamed[4:] == [*layer * LAYERS, ("boundary", "ghr"), ("boundary", "s")]


def test_a_failing_worker_is_heard(backend: FakeBackend) -> None:
    class Broken(FakeTicket):
        def wait(self) -> float:
            raise RuntimeError("kernel failed")

    backend.submit_cpu_attention = lambda layer, batch: Broken(backend, batch, layer)
    cohort = CohortPlan(7, (place(backend, "c", Tier.CPU, 0),), STEP)
    with pytest.raises(RuntimeError, match="kernel failed"):
        Executor(backend).run(plan((), [cohort]))
