"""What makes the vLLM scheduler vLLM's: its budget, its blocks, its preemption, its admission."""

from __future__ import annotations

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import Request, RequestStatus, SamplingParams, Tier
from swiftllm.engine.engine import Engine
from tests.reference.fake_engine import fake_engine


def make_engine(num_gpu_blocks: int, max_tokens: int = 32) -> tuple[Engine, list[IterationPlan]]:
    """Blocks of 4 tokens; the plans are kept."""
    engine = fake_engine("vllm", num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=100, max_tokens=max_tokens)
    plans: list[IterationPlan] = []
    run = engine.executor.run
    engine.executor.run = lambda plan: plans.append(plan) or run(plan)
    return engine, plans


def add(engine: Engine, name: str, prompt_len: int, max_tokens: int = 40) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return engine.add(engine.make_request(name, [2] * prompt_len, sampling))


def gpu_batch(plan: IterationPlan) -> list[tuple[str, int]]:
    return [(item.request.request_id, item.num_tokens) for item in plan.gpu_batch]


def test_decodes_take_from_the_budget_first_and_prompts_are_cut_to_the_rest() -> None:
    engine, plans = make_engine(num_gpu_blocks=50, max_tokens=8)
    add(engine, "a", 5)
    engine.step()
    add(engine, "b", 10)
    add(engine, "c", 3)
    for _ in range(3):
        engine.step()
    assert [gpu_batch(plan) for plan in plans] == [
        [("a", 5)],
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 3), ("c", 3)],
        [("a", 1), ("b", 1), ("c", 1)],
    ]


def test_a_chunk_takes_blocks_for_its_own_tokens_only() -> None:
    engine, _ = make_engine(num_gpu_blocks=50, max_tokens=8)
    request = add(engine, "long", 30)
    held = []
    for _ in range(4):
        engine.step()
        held.append(engine.kv.num_held(request))
    assert held == [2, 4, 6, 8]


def test_no_block_is_kept_back_for_those_who_run() -> None:
    engine, _ = make_engine(num_gpu_blocks=4)
    requests = [add(engine, str(i), 4, max_tokens=9) for i in range(4)]
    engine.step()
    assert all(request.status is RequestStatus.RUNNING for request in requests)
    assert engine.kv.num_free(Tier.GPU) == 0


def test_the_last_come_is_computed_again_and_nobody_is_admitted_meanwhile() -> None:
    engine, plans = make_engine(num_gpu_blocks=4)
    first, second, third = (add(engine, name, 7, max_tokens=9) for name in ("first", "second", "third"))
    engine.step()
    assert third.status is RequestStatus.WAITING
    while not engine.state.num_preemptions:
        engine.step()
    assert (first.tier, second.tier) == (Tier.GPU, None)
    assert second.num_preemptions == 1 and second.num_computed_tokens == 0
    assert gpu_batch(plans[-1]) == [("first", 1)]
    tokens_before = second.output_len
    engine.step()  # one block is free now, and the second's turn comes before the third's
    assert gpu_batch(plans[-1])[0] == ("first", 1) and third.tier is None
    while engine.has_unfinished():
        engine.step()
    assert 0 < tokens_before < second.output_len == 9
    assert engine.stats().swapped_blocks == 0  # the CPU tier's hundred blocks are none of its business
