"""All schedulers under random load, tiny pools and aborts: every token right, nothing lost, nothing hangs."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from apex.strategy import StrategyConfig
from swiftllm.core.plan import Strategy
from swiftllm.core.request import RequestRefused, SamplingParams, ServiceClass, Tier
from swiftllm.scheduling.state import SchedulerState, arrival_order
from swiftllm.systems import find_system
from tests.reference.fake_backend import VOCABULARY, expected_output
from tests.reference.fake_engine import fake_engine, flat_table

LS, BE = ServiceClass
SYSTEMS = ("vllm", "swiftllm", "neo", "fastdecode", "apex", "adaptive")
# How fast the CPU is against the GPU batch decides which strategy the rules take: hopeless, comparable, ample.
TABLES = {
    "slow-cpu": flat_table(cpu_token_s=1e-3),
    "even": flat_table(cpu_token_s=1e-5),
    "fast-cpu": flat_table(cpu_token_s=1e-7, linear_token_s=1e-6),
}
STRATEGIES = {
    "auto": StrategyConfig(disable_admission_control=True),  # or few requests would be left
    "forced-overlap": StrategyConfig(strategy="asynchronous-overlap"),
    "one-cpu-batch": StrategyConfig(strategy="asynchronous-overlap", max_cpu_batches=1),
    "no-overlap": StrategyConfig(disable_asynchronous_overlap=True),
    "no-pipelining": StrategyConfig(disable_asymmetric_pipelining=True, min_cpu_request_ratio=0),
    "forced-pipelining": StrategyConfig(strategy="asymmetric-pipelining"),
    "forced-gpu-only": StrategyConfig(strategy="gpu-only"),
    "no-prompt-chunks": StrategyConfig(disable_prompt_chunks=True),
    "impatient": StrategyConfig(max_wait_iterations=1, disable_partial_progress_priority=True),
}


def make_request(rng: random.Random, longest_prompt: int, longest_output: int):
    prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest_prompt))]
    return prompt, SamplingParams(max_tokens=rng.randint(1, longest_output), ignore_eos=rng.random() < 0.5)


def check_queues(state: SchedulerState) -> None:
    """What is kept incrementally is what it stands for."""
    assert all(request.is_prefilling for request in state.prefilling)
    for tier, running in state.running.items():
        decoding = state.decoding[tier]
        assert not any(request.is_prefilling for request in decoding)
        prefilling = [request for request in state.prefilling if request.tier is tier]
        assert sorted([*decoding, *prefilling], key=arrival_order) == running
        assert all(request.tier is tier for request in running)
        slots = {request: state.kv.num_held(request) * state.kv.block_size for request in running}
        assert all(request.num_kv_slots == held for request, held in slots.items())
    recalled = [request for request in state.cpu_batches.leaving.values() if not request.is_finished]
    assert all(request.cpu_batch_id in state.cpu_batches.stages() for request in recalled)
    assert all(request in state.decoding[Tier.CPU] for request in recalled)


def drive(
    engine,
    rng: random.Random,
    num_requests: int,
    *,
    abort_share: float,
    longest: int = 40,
    best_effort_share: float = 0.0,
    check: Callable[[SchedulerState], None] = check_queues,
    draw: Callable[..., tuple] = make_request,
) -> dict:
    """Random arrivals and aborts until all is done; checks each output and that both pools end empty."""
    wanted, aborted, finished = {}, set(), {}
    refused = steps = 0
    while len(finished) + refused < num_requests:
        steps += 1
        assert steps < 400 * num_requests, f"no end in sight: {engine.status()}"
        if len(wanted) + refused < num_requests and rng.random() < 0.3:
            prompt, sampling, *salt = draw(rng, longest, longest)
            request_id = f"r{len(wanted) + refused}"
            try:
                service_class = LS
                if best_effort_share and rng.random() < best_effort_share:
                    service_class = BE
                engine.add(engine.make_request(request_id, prompt, sampling, None, service_class, *salt))
                wanted[request_id] = expected_output(prompt, sampling.max_tokens, ignore_eos=sampling.ignore_eos)
            except RequestRefused as error:
                assert "tier" in str(error)
                refused += 1
        alive = [request_id for request_id in wanted if request_id not in finished and request_id not in aborted]
        if alive and rng.random() < abort_share:
            victim = rng.choice(alive)
            assert engine.abort(victim)
            assert not engine.abort(victim)
            aborted.add(victim)
        for output in engine.step():
            if output.finished:
                assert output.request_id not in finished
                finished[output.request_id] = output
        check(engine.state)
    for _ in range(100):  # blocks of aborted requests come back as soon as no CPU attention needs them
        if not engine.has_unfinished():
            break
        engine.step()
    assert not engine.has_unfinished()
    engine.kv.check_blocks()
    assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values())
    assert not engine.executor.cpu_batches
    for request_id, expected in wanted.items():
        output = list(finished[request_id].token_ids)
        if request_id in aborted:
            assert output == expected[: len(output)]
        else:
            assert output == expected, request_id
    return finished


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("system", SYSTEMS)
def test_random_load(system: str, table: str) -> None:
    for seed in range(5):
        rng = random.Random(seed)
        engine = fake_engine(
            system,
            num_gpu_blocks=rng.choice((4, 12, 30)),
            num_cpu_blocks=rng.choice((20, 60)),
            max_tokens=rng.choice((4, 16, 64)),
            max_num_seqs=rng.choice((2, 8, 64)),
            table=TABLES[table],
            seed=seed,
        )
        drive(engine, rng, 25, abort_share=0.1 if seed % 2 else 0.0)


@pytest.mark.parametrize("system", ["apex", "adaptive"])
@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("table", TABLES)
def test_strategies(name: str, table: str, system: str) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        gpu_sizes = (1, 6, 12, 30) if name == "forced-gpu-only" else (0, 6, 12, 30)
        engine = fake_engine(
            system,
            num_gpu_blocks=rng.choice(gpu_sizes),
            num_cpu_blocks=rng.choice((20, 40, 80)),
            max_tokens=rng.choice((8, 64)),
            strategy=STRATEGIES[name],
            table=TABLES[table],
            seed=seed,
        )
        drive(engine, rng, 25, abort_share=0.15 if seed % 2 else 0.0)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(("gpu", "cpu"), [(0, 40), (40, 0), (40, 3), (3, 40), (1, 1), (0, 0)])
def test_odd_pools(system: str, gpu: int, cpu: int) -> None:
    pools = {Tier.GPU: gpu, Tier.CPU: cpu}
    if not any(pools[tier] for tier in find_system(system).scheduler.rules.tiers):
        with pytest.raises(ValueError, match="no KV blocks"):
            fake_engine(system, num_gpu_blocks=gpu, num_cpu_blocks=cpu)
        return
    for seed in range(3):
        rng = random.Random(seed)
        drive(fake_engine(system, num_gpu_blocks=gpu, num_cpu_blocks=cpu, seed=seed), rng, 15, abort_share=0.1)


def run(engine) -> dict[str, tuple[int, ...]]:
    outputs = {}
    for _ in range(5000):
        if not engine.has_unfinished():
            return outputs
        outputs.update({o.request_id: o.token_ids for o in engine.step() if o.finished})
    raise AssertionError(f"still running: {engine.status()}")


@pytest.mark.parametrize("system", SYSTEMS)
def test_refusals_name_the_limit(system: str) -> None:
    engine = fake_engine(system, num_gpu_blocks=5, num_cpu_blocks=5, max_model_len=100)
    cases = [
        ([], SamplingParams(), "empty"),
        ([2] * 99, SamplingParams(max_tokens=2), "max_model_len=100"),
        ([2] * 21, SamplingParams(max_tokens=1), "5 blocks of 4"),
        ([VOCABULARY], SamplingParams(), f"vocabulary of {VOCABULARY}"),
    ]
    for prompt, sampling, message in cases:
        with pytest.raises(RequestRefused, match=message):
            engine.add(engine.make_request("x", prompt, sampling))
    engine.add(engine.make_request("x", [2, 3], SamplingParams()))
    with pytest.raises(RequestRefused, match="already in use"):
        engine.add(engine.make_request("x", [2, 3], SamplingParams()))
    assert run(engine)["x"] == tuple(expected_output([2, 3], 16))
    engine.add(engine.make_request("x", [2, 3], SamplingParams()))  # the id is free again
    assert len(run(engine)) == 1


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("max_tokens", [1, 4])
def test_prompt_that_exactly_fills_a_pool(system: str, max_tokens: int) -> None:
    engine = fake_engine(system, num_gpu_blocks=5, num_cpu_blocks=5)
    prompt = list(range(2, 23 - max_tokens))  # prompt + outputs fed back = 20 tokens = 5 blocks
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    engine.add(engine.make_request("full", prompt, sampling))
    engine.add(engine.make_request("next", prompt, sampling))
    expected = tuple(expected_output(prompt, max_tokens, ignore_eos=True))
    assert run(engine) == {"full": expected, "next": expected}


@pytest.mark.parametrize("system", ["neo", "apex", "adaptive"])
def test_a_lone_request_outgrows_the_gpu(system: str) -> None:
    engine = fake_engine(system, num_gpu_blocks=3, num_cpu_blocks=20)
    request = engine.add(engine.make_request("long", [2] * 5, SamplingParams(max_tokens=40, ignore_eos=True)))
    assert run(engine)["long"] == tuple(expected_output([2] * 5, 40, ignore_eos=True))
    assert [tier for _, tier in request.tier_history] == ["waiting", "gpu", "cpu"]


def test_gpu_first() -> None:
    """With room for all on the GPU nothing goes to the CPU (APEX section 3.4)."""
    engine = fake_engine("apex", num_gpu_blocks=500, num_cpu_blocks=500)
    requests = [engine.add(engine.make_request(str(i), [2, 3, i], SamplingParams(max_tokens=20))) for i in range(20)]
    run(engine)
    assert all(request.tier is Tier.GPU for request in requests)
    assert set(engine.stats().strategy_iterations) == {Strategy.GPU_ONLY.value}


@pytest.mark.parametrize(
    ("table", "strategy"),
    [("fast-cpu", Strategy.PIPELINING), ("slow-cpu", Strategy.OVERLAP)],
)
def test_algorithm_1_picks_by_the_inequality(table: str, strategy: Strategy) -> None:
    engine = fake_engine("apex", num_gpu_blocks=8, num_cpu_blocks=800, table=TABLES[table], max_tokens=64)
    for i in range(40):
        engine.add(engine.make_request(str(i), [2, 3, i], SamplingParams(max_tokens=20, ignore_eos=True)))
    taken = []
    while engine.has_unfinished():
        engine.step()
        plan, _ = engine.last_iteration
        if plan.decodes and plan.cpu_batches:  # an empty GPU batch has nothing to choose
            taken.append(plan.strategy)
    assert len(taken) > 10
    assert taken.count(strategy) == len(taken)


def test_threshold_of_cpu_requests() -> None:
    """Overlap starts only with enough CPU requests for each GPU request (APEX section 4.2)."""
    strategy = StrategyConfig(disable_asymmetric_pipelining=True, min_cpu_request_ratio=8, max_wait_iterations=10**6)
    engine = fake_engine("apex", num_gpu_blocks=40, num_cpu_blocks=800, strategy=strategy, max_tokens=64)
    for i in range(12):  # about half fit the GPU: never eight CPU requests for one GPU request while those run
        engine.add(engine.make_request(str(i), [2, 3, i] * 4, SamplingParams(max_tokens=10, ignore_eos=True)))
    for _ in range(8):
        engine.step()
    assert engine.state.running[Tier.CPU] and engine.state.running[Tier.GPU]
    assert Strategy.OVERLAP.value not in engine.stats().strategy_iterations
    assert len(run(engine)) == 12


def test_forcing_and_disabling_at_once_is_refused() -> None:
    with pytest.raises(ValueError, match="forced and disabled"):
        StrategyConfig(strategy="asynchronous-overlap", disable_asynchronous_overlap=True)
    with pytest.raises(ValueError, match="--system apex"):
        fake_engine("neo", num_gpu_blocks=1, num_cpu_blocks=1, strategy=STRATEGIES["one-cpu-batch"])


def test_an_older_request_takes_the_place_of_one_pushed_out_in_the_same_plan() -> None:
    engine = fake_engine("neo", num_gpu_blocks=8, num_cpu_blocks=3)
    older, younger = (
        engine.add(engine.make_request(i, [2] * 9, SamplingParams(max_tokens=2))) for i in ("older", "younger")
    )
    engine.step()
    state = engine.state
    state.begin_plan()
    state.push_out(younger)
    assert [swap.request for swap in state.kv.swaps] == [younger]
    state.push_out(older)  # the CPU tier holds one of the two
    assert [swap.request for swap in state.kv.swaps] == [older]
    assert older.tier is Tier.CPU and younger in state.waiting
    engine.kv.check_blocks()


def test_tiny_cpu_tier() -> None:
    for seed in range(50, 75):
        rng = random.Random(seed)
        system = rng.choice(SYSTEMS)
        gpu, cpu = rng.choice((8, 12, 16)), rng.choice((4, 6, 10, 20))
        engine = fake_engine(system, num_gpu_blocks=gpu, num_cpu_blocks=cpu, max_tokens=64, seed=seed)
        drive(engine, rng, 25, abort_share=0.0, longest=rng.choice((8, 12, 16)))
