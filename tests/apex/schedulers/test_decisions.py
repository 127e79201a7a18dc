"""What NEO and APEX decide for one iteration, against the papers' rules worked out by hand.

In :func:`flat_table` times are proportional to context: 1000 tokens take 1 ms at 1e-6 s per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from apex.perf.model import Curve, ProfileTable
from apex.schedulers.hybrid import CpuDecodes
from apex.strategy import StrategyConfig
from swiftllm.core.plan import ALONE, JOINED, OVERLAPPED, CpuBatchMode, IterationPlan, Strategy
from swiftllm.core.request import Request, RequestStatus, SamplingParams, Tier
from swiftllm.engine.engine import Engine
from swiftllm.scheduling.scheduler import PlanBuilder
from tests.reference.fake_engine import fake_engine, flat_table

LAYERS = 3
ENDS_S = 1e-5  # of flat_table: what an iteration costs beside its layers
MS = 1e-3


def requests(count: int, num_tokens: int, tier: Tier, name: str = "r") -> list[Request]:
    """Decoding requests."""
    made = [Request(f"{name}{i}", (2,) * num_tokens, SamplingParams(max_tokens=9), tier=tier) for i in range(count)]
    for request in made:
        request.status, request.num_uncomputed = RequestStatus.RUNNING, 1
    return made


def gpu(count: int, num_tokens: int) -> list[Request]:
    return requests(count, num_tokens, Tier.GPU, "gpu")


def cpu(count: int, num_tokens: int) -> list[Request]:
    return requests(count, num_tokens, Tier.CPU, "cpu")


def prompt(name: str, num_tokens: int, tier: Tier) -> Request:
    return Request(name, (2,) * num_tokens, SamplingParams(max_tokens=9), tier=tier)


def engine_of(system: str, table: ProfileTable, **strategy: object) -> Engine:
    pools, config = {"num_gpu_blocks": 99, "num_cpu_blocks": 99}, StrategyConfig(**strategy)
    return fake_engine(system, **pools, max_tokens=4096, num_layers=LAYERS, table=table, strategy=config)


def decide(
    engine: Engine,
    decodes: Sequence[Request] = (),
    ready: Sequence[Request] = (),
    prompts: Sequence[Request] = (),
    overdue: Request | None = None,
) -> IterationPlan:
    builder = PlanBuilder(engine.state)
    builder.add_decodes(decodes)
    for request in prompts:
        builder.add_prefill(request)
    return engine.scheduler.decide(builder, CpuDecodes(list(ready), overdue))


def batch_sizes(plan: IterationPlan) -> dict[CpuBatchMode, int]:
    return {cpu_batch.mode: len(cpu_batch.requests) for cpu_batch in plan.cpu_batches}


# -- NEO --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slower", [1, 1000])
@pytest.mark.parametrize(("num_cpu", "strategy"), [(16, Strategy.GPU_ONLY), (17, Strategy.PIPELINING)])
def test_neo_pipelines_only_if_more_requests_a_second_come_of_it(
    num_cpu: int, strategy: Strategy, slower: float
) -> None:
    """NEO step 6 (Greedy): the CPU is hidden in both cases, but the second pass over the weights has to pay.

    GPU-only: 20 requests in 1.2 ms a layer. Pipelined: 20 + n in 2.2 ms. They break even at n = 16.7, and so they do
    on a machine on which everything takes a thousand times as long.
    """
    table = flat_table(linear_s=slower * MS, gpu_token_s=slower * 1e-6, cpu_token_s=slower * 1e-6)
    engine = engine_of("neo", table)
    plan = decide(engine, gpu(20, 10), cpu(num_cpu, 10))
    assert plan.strategy is strategy
    assert sum(batch_sizes(plan).values()) == (num_cpu if strategy is Strategy.PIPELINING else 0)


def test_neo_stays_on_the_gpu_where_pipelining_is_just_as_fast() -> None:
    """A token takes 2^-20 s in either batch, attention and the ends take nothing: the rates are equal to the bit."""
    table = flat_table(gpu_token_s=0.0, cpu_token_s=0.0)
    table = replace(table, linear=Curve((1, 1025), (2**-20, 1025 * 2**-20)), ends=Curve((1, 2), (0.0, 0.0)))
    for forced, strategy in ({}, Strategy.GPU_ONLY), ({"strategy": "asymmetric-pipelining"}, Strategy.PIPELINING):
        plan = decide(engine_of("neo", table, **forced), gpu(4, 10), cpu(4, 10))
        assert plan.strategy is strategy
        assert plan.predicted["iteration_s"] == LAYERS * (8 if forced else 4) * 2**-20


def test_neo_forced_to_pipeline_does_so_at_a_loss() -> None:
    engine = engine_of("neo", flat_table(cpu_token_s=1e-6), strategy="asymmetric-pipelining")
    assert decide(engine, gpu(20, 10), cpu(1, 10)).strategy is Strategy.PIPELINING


def test_neo_predicts_the_pipelined_iteration_by_its_formula() -> None:
    """T = L (max(T_l0, T_ca1) + max(T_l1 + T_ga0, T_ca0)), and the ends of the GPU batch and of batch-1."""
    engine = engine_of("neo", flat_table(cpu_token_s=1e-6))
    plan = decide(engine, gpu(20, 10), cpu(17, 10))
    layer_s = max(1 * MS, 0.17 * MS) + max(1 * MS + 0.2 * MS, 0)
    assert plan.predicted["iteration_s"] == pytest.approx(LAYERS * layer_s + 2 * ENDS_S)


def test_the_hosts_fixed_work_is_counted_once_for_both_batches() -> None:
    """The GPU batch and batch-1 have ends of their own, but what the host does in any iteration it does once."""
    host = Curve((0, 100), (1e-4, 2e-4))
    engine = engine_of("neo", replace(flat_table(cpu_token_s=1e-6), iteration=host))
    plan = decide(engine, gpu(20, 10), cpu(17, 10))
    layer_s = 1 * MS + 1.2 * MS
    ends_s = 2 * ENDS_S + host(20) + host(17) - 1e-4
    assert plan.predicted["iteration_s"] == pytest.approx(LAYERS * layer_s + ends_s)


def test_neo_fills_batch_0_while_it_hides_behind_the_other_linear_time_and_the_gpus_attention() -> None:
    """NEO step 4: T_ca1 <= T_l0 = 1 ms holds two requests of 0.49 ms, T_ca0 <= T_l1 + T_ga0 = 1 + 4 ms ten."""
    engine = engine_of("neo", flat_table(cpu_token_s=1e-6))
    plan = decide(engine, gpu(2, 2000), cpu(20, 490))
    assert batch_sizes(plan) == {JOINED: 10, ALONE: 2}


def test_neo_skips_a_request_that_shows_and_takes_a_shorter_one_behind_it() -> None:
    engine = engine_of("neo", flat_table(cpu_token_s=1e-6), strategy="asymmetric-pipelining")
    long, short = requests(1, 1500, Tier.CPU, "long"), requests(3, 400, Tier.CPU, "short")
    (cpu_batch,) = decide(engine, gpu(1, 10), [*long, *short[:2]]).cpu_batches
    assert list(cpu_batch.requests) == short[:2]


RISING = flat_table(cpu_token_s=1e-6, linear_token_s=1e-6)  # T_l is 1 ms, and 0.1 ms more for 100 tokens


@pytest.mark.parametrize("system", ["neo", "apex"])
@pytest.mark.parametrize(("disabled", "stay"), [(False, 1), (True, 3)])
def test_prefills_for_the_cpu_are_put_off_but_the_oldest_while_the_cpu_stays_hidden(
    system: str, disabled: bool, stay: int
) -> None:
    """NEO step 5, in APEX's pipelining too: what goes to the CPU tier adds to the GPU batch's time and is not needed to
    hide
    0.2 ms."""
    prompts = [prompt(name, 100, Tier.CPU) for name in ("oldest", "middle", "youngest")]
    engine = engine_of(system, RISING, disable_postponed_cpu_prompts=disabled)
    plan = decide(engine, gpu(1, 10), cpu(2, 100), prompts)
    assert plan.strategy is Strategy.PIPELINING or system == "neo"
    assert [item.request for item in plan.prefills] == prompts[:stay]


def test_apex_puts_off_no_prefills_where_it_does_not_pipeline() -> None:
    prompts = [prompt(name, 100, Tier.CPU) for name in ("oldest", "middle", "youngest")]
    plan = decide(engine_of("apex", RISING, strategy="asynchronous-overlap"), gpu(1, 10), cpu(2, 100), prompts)
    assert plan.strategy is Strategy.OVERLAP
    assert [item.request for item in plan.prefills] == prompts


def test_the_overdue_request_is_served_beside_prefills_that_are_put_off() -> None:
    """It alone is hidden, and the prefills are not needed for that."""
    prompts, ready = [prompt(name, 100, Tier.CPU) for name in ("oldest", "youngest")], cpu(1, 100)
    plan = decide(engine_of("apex", RISING), gpu(1, 10), ready, prompts, overdue=ready[0])
    assert [item.request for item in plan.prefills] == prompts[:1]
    assert [list(cpu_batch.requests) for cpu_batch in plan.cpu_batches] == [ready]


@pytest.mark.parametrize("system", ["neo", "apex"])
def test_now_and_then_no_prefill_is_put_off_for_a_younger_one(system: str) -> None:
    """Else a long prompt would wait as long as shorter ones keep finding room on the GPU."""
    names = ("before", Tier.GPU), ("long", Tier.CPU), ("short", Tier.GPU), ("late", Tier.CPU)
    prompts = [prompt(name, 100, tier) for name, tier in names]
    for order, request in enumerate(prompts):
        request.arrival_order = (0, order)
    engine = engine_of(system, RISING, max_wait_iterations=3)
    plans = [decide(engine, gpu(1, 10), cpu(2, 100), prompts) for _ in range(6)]
    chosen = [[item.request.request_id for item in plan.prefills] for plan in plans]
    assert chosen == 2 * [["before", "short"], ["before", "short"], ["before", "long", "short"]]


@pytest.mark.parametrize("system", ["neo", "apex"])
def test_without_its_limit_the_batches_take_every_ready_decode_in_even_parts(system: str) -> None:
    """NEO step 4: of 30 ms of CPU attention, 1 ms hides behind T_l0 and 1.01 ms behind T_l1 + T_ga0."""
    for disabled, sizes in ((False, {JOINED: 10, ALONE: 10}), (True, {JOINED: 150, ALONE: 150})):
        engine = engine_of(
            system, flat_table(cpu_token_s=1e-6), strategy="asymmetric-pipelining", disable_cpu_decode_limit=disabled
        )
        assert batch_sizes(decide(engine, gpu(1, 10), cpu(300, 100))) == sizes


def test_without_its_limit_cpu_batches_under_way_step_though_the_gpu_batch_waits_for_them() -> None:
    for disabled, strategy in ((False, Strategy.OVERLAP), (True, Strategy.PIPELINING)):
        engine = engine_of("apex", flat_table(cpu_token_s=1e-6), disable_cpu_decode_limit=disabled)
        engine.state.cpu_batches.start(requests(20, 100, Tier.CPU, "partial"))
        assert decide(engine, gpu(1, 10)).strategy is strategy


@pytest.mark.parametrize("system", ["neo", "apex"])
def test_prompts_that_are_put_off_wait_again_and_hold_no_blocks(system: str) -> None:
    engine = fake_engine(
        system, num_gpu_blocks=6, num_cpu_blocks=400, max_tokens=4096, num_layers=LAYERS, table=RISING,
        strategy=StrategyConfig(),
    )  # fmt: skip
    for name, num_tokens in (("gpu", 10), ("cpu0", 100), ("cpu1", 100)):
        engine.add(engine.make_request(name, (2,) * num_tokens, SamplingParams(max_tokens=10, ignore_eos=True)))
    while len(engine.state.decoding[Tier.CPU]) < 2:
        engine.step()
    late = [engine.add(engine.make_request(f"late{i}", (2,) * 100, SamplingParams(max_tokens=9))) for i in range(3)]
    engine.step()
    plan, _ = engine.last_iteration
    assert [item.request for item in plan.prefills] == late[:1]
    assert list(engine.state.waiting) == late[1:] and not any(map(engine.kv.num_held, late[1:]))


def test_neo_never_puts_off_prefills_for_the_gpu() -> None:
    prompts = [prompt(name, 100, Tier.GPU) for name in ("oldest", "middle", "youngest")]
    plan = decide(engine_of("neo", RISING), gpu(1, 10), cpu(2, 100), prompts)
    assert [item.request for item in plan.prefills] == prompts


def test_neo_keeps_all_prefills_once_the_youngest_is_needed_to_hide_the_cpu() -> None:
    """T_ca1 = 1.6 ms hides behind 611 tokens: without the youngest's 500 it shows, without the other's 10 not yet."""
    prompts = [prompt("oldest", 100, Tier.CPU), prompt("small", 10, Tier.CPU), prompt("youngest", 500, Tier.CPU)]
    plan = decide(engine_of("neo", RISING), gpu(1, 10), cpu(16, 100), prompts)
    assert [item.request for item in plan.prefills] == prompts


def test_neo_counts_batch_0s_decodes_among_the_gpu_batches_tokens_when_it_puts_off_prefills() -> None:
    """Without the youngest the GPU batch has 102 tokens. Linear time is flat up to 108: batch-0's 10 decodes exceed
    it."""
    flat_then_rising = Curve((1, 108, 1108), (1 * MS, 1 * MS, 2 * MS))
    engine = engine_of("neo", replace(flat_table(cpu_token_s=1e-6), linear=flat_then_rising))
    prompts = [prompt("oldest", 100, Tier.CPU), prompt("youngest", 50, Tier.CPU)]
    plan = decide(engine, gpu(2, 2000), cpu(20, 490), prompts)
    assert batch_sizes(plan) == {JOINED: 10, ALONE: 2}
    assert [item.request.request_id for item in plan.prefills] == ["oldest"]


def test_neo_keeps_prefills_that_cost_the_gpu_batch_nothing() -> None:
    """Linear time is flat up to the knee: there a prefill only adds requests."""
    prompts = [prompt(name, 100, Tier.CPU) for name in ("oldest", "middle", "youngest")]
    plan = decide(engine_of("neo", flat_table(cpu_token_s=1e-6)), gpu(1, 10), cpu(2, 100), prompts)
    assert [item.request for item in plan.prefills] == prompts


# -- FastDecode+ ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy",
    [{"strategy": "asynchronous-overlap"}, {"strategy": "gpu-only"}, {"disable_asymmetric_pipelining": True}],
)
def test_fastdecode_is_asymmetric_pipelining_and_nothing_else(strategy: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="fastdecode"):
        engine_of("fastdecode", flat_table(), **strategy)


# -- APEX -------------------------------------------------------------------------------------------------------------

# With 1000 tokens of context T_l = T_g = 1 ms: inequality (6) asks for a CPU of a sixth of the GPU's rate at least,
# and this one has a tenth. Its requests of 10 tokens take 0.1 ms each and would hide all the same.
TENTH = flat_table(gpu_token_s=1e-6, cpu_token_s=1e-5)


def test_apex_overlaps_where_the_inequality_fails_though_the_cpu_would_hide() -> None:
    plan = decide(engine_of("apex", TENTH), gpu(1, 1000), cpu(8, 10))
    assert plan.strategy is Strategy.OVERLAP
    assert batch_sizes(plan) == {OVERLAPPED: 8}


def test_apex_without_overlap_leaves_the_cpu_idle_where_the_inequality_fails() -> None:
    engine = engine_of("apex", TENTH, disable_asynchronous_overlap=True)
    plan = decide(engine, gpu(1, 1000), cpu(8, 10))
    assert plan.strategy is Strategy.GPU_ONLY and not plan.cpu_batches


def test_apex_without_overlap_pipelines_for_a_request_that_waited_too_long() -> None:
    engine, ready = engine_of("apex", TENTH, disable_asynchronous_overlap=True), cpu(8, 10)
    plan = decide(engine, gpu(1, 1000), ready, overdue=ready[3])
    assert plan.strategy is Strategy.PIPELINING
    assert ready[3] in [request for cpu_batch in plan.cpu_batches for request in cpu_batch.requests]


@pytest.mark.parametrize(("disabled", "taken"), [(False, 6), (True, 10)])
def test_apex_starts_no_more_requests_than_the_cpu_attends_to_in_an_iteration(disabled: bool, taken: int) -> None:
    """Three layers of 2 ms and the ends are 6.01 ms; each request takes 1 ms. Who waited longest comes first."""
    ready = cpu(10, 100)
    for place, request in enumerate(ready):
        request.last_served = -place
    plan = decide(engine_of("apex", TENTH, disable_cpu_request_limit=disabled), gpu(1, 1000), ready)
    assert plan.strategy is Strategy.OVERLAP and batch_sizes(plan) == {OVERLAPPED: taken}
    (cpu_batch,) = plan.cpu_batches
    assert set(cpu_batch.requests) == set(ready[-taken:])


@pytest.mark.parametrize(("most", "cpu_batches"), [(1, 1), (2, 2), (3, 2)])
def test_a_cpu_batch_starts_beside_one_under_way_where_two_are_allowed(most: int, cpu_batches: int) -> None:
    engine = engine_of("apex", TENTH, strategy="asynchronous-overlap", max_cpu_batches=most)
    engine.state.cpu_batches.start(requests(1, 10, Tier.CPU, "partial"))
    assert len(decide(engine, gpu(1, 1000), cpu(2, 10)).cpu_batches) == cpu_batches


def test_a_request_that_alone_is_late_starts_all_the_same() -> None:
    plan = decide(engine_of("apex", TENTH), gpu(1, 1000), cpu(8, 700))
    assert batch_sizes(plan) == {OVERLAPPED: 1}


def started(plan: IterationPlan) -> list[Request]:
    """Of the CPU batch that starts; those under way come before it."""
    assert plan.strategy is Strategy.OVERLAP
    return list(plan.cpu_batches[-1].requests)


def test_the_cpu_has_the_time_of_an_iteration_less_that_of_requests_under_way() -> None:
    """Of 6.01 ms three requests of 100 tokens take 3 ms, and one of 300; three more of 100 fit."""
    for under_way in ((3, 100), (1, 300)):
        engine, ready = engine_of("apex", TENTH), cpu(10, 100)
        engine.state.cpu_batches.start(requests(*under_way, Tier.CPU, "partial"))
        assert started(decide(engine, gpu(1, 1000), ready)) == ready[:3]
    engine, partial = engine_of("apex", TENTH), requests(6, 100, Tier.CPU, "partial")
    engine.state.cpu_batches.start(partial)
    assert started(decide(engine, gpu(1, 1000), cpu(10, 100))) == partial, "none fits, so no other CPU batch starts"


def test_prompts_give_the_cpu_no_more_time() -> None:
    """They make this iteration longer, and not those in which the CPU batch goes on: 3 (1.001 + 1) ms and the ends."""
    dear = replace(TENTH, linear=Curve((1, 1001), (1 * MS, 9 * MS)))
    for prompts in ((), [prompt("p", 900, Tier.GPU)]):
        engine, ready = engine_of("apex", dear, strategy="asynchronous-overlap"), cpu(10, 100)
        assert started(decide(engine, gpu(1, 1000), ready, prompts)) == ready[:6]
        engine = engine_of("apex", dear, strategy="asynchronous-overlap")
        assert started(decide(engine, gpu(3, 1000), ready, prompts)) == ready, "3 (1.016 + 3) ms"


def test_without_decodes_in_the_gpu_batch_there_is_no_window_to_keep() -> None:
    engine, ready = engine_of("apex", TENTH, strategy="asynchronous-overlap"), cpu(10, 100)
    assert started(decide(engine, (), ready, [prompt("p", 10, Tier.GPU)])) == ready


def test_one_that_waited_too_long_starts_though_those_under_way_take_all_of_the_cpus_time() -> None:
    for is_overdue in (True, False):
        engine, partial, ready = engine_of("apex", TENTH), requests(1, 700, Tier.CPU, "partial"), cpu(10, 100)
        ready[7].last_served = -1
        engine.state.cpu_batches.start(partial)
        plan = decide(engine, gpu(1, 1000), ready, overdue=ready[7] if is_overdue else None)
        assert started(plan) == ([ready[7]] if is_overdue else partial)


@pytest.mark.parametrize(
    ("num_tokens", "compares", "strategy"),
    [(125, True, Strategy.OVERLAP), (12, True, Strategy.PIPELINING), (125, False, Strategy.PIPELINING)],
)
def test_apex_may_compare_pipelining_with_overlap_too(num_tokens: int, compares: bool, strategy: Strategy) -> None:
    """Pipelining attends to 533 tokens a ms, GPU-only to 500, overlap to 667 with 1,000 tokens and to 516 with 96."""
    fifth = flat_table(gpu_token_s=1e-6, cpu_token_s=5e-6)
    plan = decide(engine_of("apex", fifth, compare_overlap=compares), gpu(1, 1000), cpu(8, num_tokens))
    assert plan.strategy is strategy
    assert plan.predicted["inequality_left"] > plan.predicted["inequality_right"]
    assert plan.predicted.get("overlap_rate") == (
        pytest.approx(5e5 + 8 * num_tokens / 6e-3) if compares else None
    )  # the CPU could attend to 200 a ms, and has one layer of each request in 6 ms


@pytest.mark.parametrize("num_tokens", [0, 100])
def test_algorithm_1_compares_these_rates(num_tokens: int) -> None:
    """Inequality (5); with prefills the CPU's window becomes T_glinear_pref + T_glinear + T_gatt_pref."""
    prompts = [prompt("p", num_tokens, Tier.GPU)] if num_tokens else []
    plan = decide(engine_of("apex", RISING), gpu(4, 250), cpu(40, 10), prompts)
    linear_s, attention_s = 1.003 * MS, 1 * MS
    window_s = 2 * linear_s + attention_s
    if prompts:
        linear_with_prefill_s, attention_with_prefill_s = 1.103 * MS, 1 * MS + 100e-6
        window_s = linear_with_prefill_s + linear_s + attention_with_prefill_s
    gpu_rate = cpu_rate = 1e6
    left = (gpu_rate * attention_s + cpu_rate * window_s) / (2 * linear_s + attention_s)
    assert plan.predicted["inequality_left"] == pytest.approx(left)
    assert plan.predicted["inequality_right"] == pytest.approx(gpu_rate * attention_s / (linear_s + attention_s))


def test_algorithm_1_without_decodes_takes_the_gpu_batches_own_linear_time() -> None:
    plan = decide(engine_of("apex", RISING), (), cpu(40, 10), [prompt("p", 100, Tier.GPU)])
    linear_s, attention_s = 1.099 * MS, 100e-6
    assert plan.predicted["inequality_left"] == pytest.approx(1e6 * (linear_s + attention_s) / (2 * linear_s))
    assert plan.predicted["inequality_right"] == 0


@pytest.mark.parametrize(("disabled", "taken"), [(False, 5), (True, 10)])
def test_requests_part_of_the_way_have_the_first_claim_on_batch_1(disabled: bool, taken: int) -> None:
    """APEX section 3.4: half of the window of 1 ms is theirs, unless the priority is switched off."""
    engine = engine_of("apex", flat_table(cpu_token_s=1e-6), disable_partial_progress_priority=disabled)
    partial = requests(5, 99, Tier.CPU, "partial")
    engine.state.cpu_batches.start(partial)
    plan = decide(engine, gpu(1, 1), cpu(12, 99))
    assert [(c.mode, len(c.requests)) for c in plan.cpu_batches] == [(ALONE, 5), (JOINED, 12 - taken), (ALONE, taken)]


def test_the_most_advanced_cpu_batch_comes_first() -> None:
    engine = engine_of("apex", TENTH, strategy="asynchronous-overlap")
    behind, ahead = (engine.state.cpu_batches.start(requests(2, 10, Tier.CPU, name)) for name in ("b", "a"))
    behind.stage, ahead.stage = 1, 2
    plan = decide(engine, gpu(1, 1000))
    assert [cpu_batch.cpu_batch_id for cpu_batch in plan.cpu_batches] == [ahead.cpu_batch_id, behind.cpu_batch_id]
