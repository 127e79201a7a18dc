"""A token is applied to a state of linear attention once: what is under way ends its token, or begins from nothing."""

from __future__ import annotations

import pytest

from swiftllm.core.plan import IterationPlan, StateCopy, StepResult
from swiftllm.core.request import Request, RequestStatus, Tier
from swiftllm.engine.engine import Engine
from swiftllm.kv.block_pool import StateSlots
from swiftllm.scheduling.state import CpuBatch
from tests.reference.fake_engine import fake_engine
from tests.swiftllm.scheduling.test_swap_in import pushed_out


def with_states(num_slots: int = 4) -> Engine:
    engine = fake_engine("swiftllm", num_gpu_blocks=20, num_cpu_blocks=20)
    engine.kv.state_slots = StateSlots(num_slots)
    return engine


def under_way(engine: Engine, *requests: Request) -> CpuBatch:
    """A CPU batch that has run stage -1."""
    cpu_batch = engine.state.cpu_batches.start(list(requests))
    cpu_batch.stage = 0
    engine.state.begin_plan()
    return cpu_batch


def is_computed_again(engine: Engine, request: Request) -> bool:
    is_waiting = request.status is RequestStatus.WAITING and request in engine.state.waiting
    has_nothing = request.request_id not in {*engine.kv.state_slots.of_request, *engine.kv.block_tables}
    return is_waiting and has_nothing and request.num_uncomputed == request.num_tokens


def test_a_request_that_is_recalled_ends_its_token_first() -> None:
    engine = with_states()
    (request,) = pushed_out(engine, 7)
    cpu_batch = under_way(engine, request)
    assert not engine.state.recall_to_gpu(request, 2)
    assert not engine.state.cpu_batches.leaving and request.cpu_batch_id == cpu_batch.cpu_batch_id
    engine.state.apply(IterationPlan(), StepResult({}, {}, frozenset(), 0.0, 0.0, 0.0))  # its last stage
    assert engine.state.recall_to_gpu(request, 2) and request.tier is Tier.CPU


def test_a_request_that_is_taken_out_of_its_cpu_batch_is_computed_again() -> None:
    """And not the other one of the CPU batch, whose state stays where it is."""
    engine = with_states()
    leaves, stays = pushed_out(engine, 7, 5)
    slot, cpu_batch = engine.kv.state_slots.of_request[stays.request_id], under_way(engine, leaves, stays)
    engine.state.cpu_batches.detach(leaves)
    result = StepResult({}, {cpu_batch.cpu_batch_id: 1}, frozenset({leaves.request_id}), 0.0, 0.0, 0.0)
    engine.state.apply(IterationPlan(leaving=frozenset({leaves.request_id})), result)
    assert is_computed_again(engine, leaves) and leaves.num_preemptions == 1
    assert not is_computed_again(engine, stays) and engine.kv.state_slots.of_request == {stays.request_id: slot}
    assert stays.cpu_batch_id == cpu_batch.cpu_batch_id


@pytest.mark.parametrize("has_states", [True, False])
def test_after_a_lost_host_all_that_were_under_way_are_computed_again(has_states: bool) -> None:
    """Members of CPU batches, and the requests of the iteration that the loss has ended; without states nobody."""
    engine = with_states()
    member, in_gpu_batch, idle = pushed_out(engine, 7, 5, 3)
    if not has_states:
        engine.kv.state_slots = None
    under_way(engine, member)
    lost = engine.state.forget_hosts([], (), (in_gpu_batch,))
    assert lost == ([member, in_gpu_batch] if has_states else [])
    assert member.cpu_batch_id is None and idle.tier is Tier.CPU
    if has_states:
        assert is_computed_again(engine, member) and is_computed_again(engine, in_gpu_batch)
        assert list(engine.kv.state_slots.of_request) == [idle.request_id]


def test_after_a_lost_host_whose_state_may_not_have_come_is_computed_again() -> None:
    """Of one that was given a slot, and no chunk yet; a state that was to be saved is where it was."""
    engine = with_states()
    restored, saved = pushed_out(engine, 7, 5)
    slots = engine.kv.state_slots.of_request
    copies = [StateCopy(slots[restored.request_id], 0, saves=False), StateCopy(slots[saved.request_id], 1, saves=True)]
    assert engine.state.forget_hosts([], (), (), copies) == [restored]
    assert is_computed_again(engine, restored) and list(slots) == [saved.request_id]


def test_an_aborted_member_of_a_cpu_batch_is_not_computed_again_after_a_lost_host() -> None:
    engine = with_states()
    aborted, member = pushed_out(engine, 7, 5)
    under_way(engine, aborted, member)
    engine.abort(aborted.request_id)
    assert engine.state.forget_hosts([], (), (aborted,)) == [member]
    assert not engine.kv.state_slots.of_request and not engine.kv.block_tables


def test_nobody_starts_before_an_aborted_request_has_given_its_slot_back() -> None:
    engine = with_states(num_slots=1)
    (aborted,) = pushed_out(engine, 7)
    under_way(engine, aborted)
    (new,) = (engine.add(engine.make_request("new", [2] * 3, aborted.sampling)),)
    engine.abort(aborted.request_id)
    assert not any(engine.state.running.values()) and engine.state.find_tier(new, 1) is None
    engine.state.apply(IterationPlan(), StepResult({}, {}, frozenset({aborted.request_id}), 0.0, 0.0, 0.0))
    assert engine.state.find_tier(new, 1) is Tier.GPU
