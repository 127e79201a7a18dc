"""The prefix cache of models with linear attention: where states are saved, and what is found with them."""

from __future__ import annotations

import random

import pytest

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.engine.engine import Engine
from swiftllm.scheduling.state import SchedulerState
from tests.apex.schedulers.test_prefix_cache import SYSTEMS, Conversations, check, hits, run, saving_at_most
from tests.apex.schedulers.test_schedulers import TABLES, drive
from tests.reference.fake_backend import expected_output
from tests.reference.fake_engine import fake_engine

GPU, CPU = Tier
BOTH = tuple(Tier)


def check_slots(state: SchedulerState) -> None:
    """Beside the blocks: each slot of states and of snapshots is free or of one, and nothing is kept of who is gone."""
    check(state)
    kv = state.kv
    assert kv.snapshots.num_used + kv.snapshots.num_free == kv.snapshots.num_slots
    assert {*kv._saved_at, *kv._saved_last} <= kv.state_slots.of_request.keys()


@pytest.mark.parametrize("num_snapshots", [2, 30])
@pytest.mark.parametrize("system", SYSTEMS)
def test_random_conversations(system: str, num_snapshots: int) -> None:
    """A state that is another's, of another text or of too many tokens is noticed where it is read."""
    found, tables = 0, list(TABLES.values())
    for seed in range(3):
        rng = random.Random(seed)
        engine = fake_engine(
            system,
            num_gpu_blocks=rng.randint(10, 40),
            num_cpu_blocks=rng.randint(20, 60),
            table=tables[seed],
            max_num_seqs=rng.choice((3, 64)),
            max_tokens=rng.choice((16, 64)),
            seed=seed,
            cached_tiers=BOTH,
            num_snapshots=num_snapshots,
        )
        engine.kv.copying_pays = saving_at_most(rng.choice((0, 2, 100)))
        share = 0.3 if seed == 2 else 0.0
        drive(engine, rng, 60, abort_share=0.02, best_effort_share=share, check=check_slots, draw=Conversations())
        found += hits(engine)
    assert found > 0


@pytest.mark.parametrize("system", ("neo", "adaptive"))
def test_random_conversations_over_hosts_that_die(system: str) -> None:
    """Also in the middle of copies: then a snapshot may hold anything, and a slot too."""
    deaths = found = 0
    for seed in range(6):
        rng = random.Random(seed)
        engine = fake_engine(
            system,
            num_gpu_blocks=rng.choice((12, 30)),
            num_cpu_blocks=(local := rng.choice((20, 40))),
            host_blocks=(local + rng.randrange(10), local + rng.randrange(10)),
            max_num_seqs=rng.choice((3, 8, 64)),
            seed=seed,
            cached_tiers=BOTH,
            num_snapshots=20,
        )
        hosts, step = engine.backend.hosts, engine.step

        def step_among_deaths(hosts=hosts, step=step, rng=rng):
            if rng.random() < 0.1:
                hosts.plan_death(rng.choice((1, 2)), rng.randrange(1, 10))
            if rng.random() < 0.1:
                hosts.revive(rng.choice((1, 2)))
            return step()

        engine.step = step_among_deaths
        drive(engine, rng, 60, abort_share=0.02, check=check_slots, draw=Conversations())
        deaths += engine.stats().host_deaths
        found += hits(engine)
    assert deaths > 0 and found > 0


def test_resets_and_failures_in_between() -> None:
    for seed in range(3):
        rng = random.Random(seed)
        engine = fake_engine(
            "adaptive", num_gpu_blocks=30, num_cpu_blocks=40, seed=seed, cached_tiers=BOTH, num_snapshots=20
        )
        step = engine.step

        def step_among_failures(engine=engine, step=step, rng=rng):
            outputs, kind = step(), rng.random()
            if kind < 0.02:
                engine.reset_prefix_cache()
            elif kind < 0.04:
                for request in engine.recover():
                    engine.add(request, check_targets=False)
                engine.backend.slots.clear()
                engine.backend.states.clear()
                engine.backend.snapshots.clear()
            return outputs

        engine.step = step_among_failures
        drive(engine, rng, 60, abort_share=0.02, check=check_slots, draw=Conversations())
        assert hits(engine) > 0


def engine_of(num_snapshots: int = 20, every: int = 512, **how: int) -> Engine:
    sizes = {"num_gpu_blocks": 60, "num_cpu_blocks": 60, "max_tokens": 200, **how}
    return fake_engine("vllm", **sizes, cached_tiers=(GPU,), num_snapshots=num_snapshots, snapshot_every=every)


def chunks_of(engine: Engine, request_id: str, prompt: list[int], max_tokens: int = 2) -> list[tuple[int, int]]:
    """The chunks in which a prompt is computed: first token, and the one behind the last."""
    engine.add(engine.make_request(request_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    chunks = []
    while engine.has_unfinished():
        engine.step()
        plan: IterationPlan = engine.last_iteration[0]
        chunks += [(item.start, item.context_len) for item in plan.prefills]
    return chunks


def test_a_prompt_is_cut_at_the_last_block_that_others_can_find() -> None:
    """Blocks of 4. At least two tokens of a prompt are computed, so only blocks that end before them are found."""
    for length, cut in ((30, 28), (31, 28), (33, 28), (34, 32), (6, 4)):
        engine, prompt = engine_of(), list(range(length))
        assert chunks_of(engine, "first", prompt) == [(0, cut), (cut, length)]
        assert chunks_of(engine, "again", prompt) == [(cut, length)]
    for length in range(1, 6):
        engine = engine_of()
        assert chunks_of(engine, "first", list(range(length))) == [(0, length)] and not engine.kv.snapshots._slots


def test_a_hit_ends_with_the_deepest_snapshot_and_what_is_cached_behind_is_computed_again() -> None:
    """The next turn begins with the prompt's snapshot, though blocks of the answer are cached; it makes one where they
    end, and one for the turn after it."""
    engine, prompt = engine_of(), list(range(18))
    first = run(engine, "first", prompt, 15)  # 18 + 15 tokens, of which the last was never computed: 8 full blocks
    turn = [*prompt, *first.output_token_ids, *range(9)]  # 42
    assert chunks_of(engine, "turn", turn) == [(16, 32), (32, 40), (40, 42)]
    branch = [*turn[:33], *range(20, 29)]  # it ends in the middle of a block
    assert chunks_of(engine, "branch", branch) == [(32, 40), (40, 42)]
    assert engine.stats().prefix_hits["gpu"] == 16 + 32


def test_where_prompts_part_a_snapshot_is_made_for_the_third() -> None:
    engine, head = engine_of(), list(range(22))
    prompts = [[*head, *[token] * 20] for token in (30, 31, 32)]
    assert chunks_of(engine, "0", prompts[0]) == [(0, 40), (40, 42)]
    assert chunks_of(engine, "1", prompts[1]) == [(0, 20), (20, 40), (40, 42)], "K and V are found, but no state"
    assert chunks_of(engine, "2", prompts[2]) == [(20, 40), (40, 42)]


def test_an_output_keeps_its_last_snapshot_alone() -> None:
    """Every 12 tokens, at the ends of whole blocks; one that a prompt has made stays."""
    engine, prompt = engine_of(every=11), list(range(10))
    first = run(engine, "first", prompt, 40)
    names = first.block_hashes
    assert list(engine.kv.snapshots._slots) == [names[8 // 4 - 1], names[48 // 4 - 1]]
    again = [*prompt, *first.output_token_ids[:30]]
    assert chunks_of(engine, "again", again)[0] == (8, 36), "of the middle none is left"
    assert chunks_of(engine, "longer", [*prompt, *first.output_token_ids])[0] == (48, 50)


def test_a_preempted_request_resumes_from_its_newest_snapshot() -> None:
    engine, prompt = engine_of(every=8), list(range(10))
    request = engine.add(engine.make_request("r", prompt, SamplingParams(max_tokens=40, ignore_eos=True)))
    while request.num_tokens < 30:
        engine.step()
    computed = engine.stats().prompt_tokens
    engine.state.begin_plan()
    engine.state.recompute(request)
    while engine.has_unfinished():
        engine.step()
    assert request.output_token_ids == expected_output(prompt, 40, ignore_eos=True)
    assert engine.stats().prompt_tokens - computed == 30 - 24


def test_the_least_recently_used_snapshot_goes_first() -> None:
    engine = engine_of(num_snapshots=2)
    a, b, c = ([token] * 10 for token in (1, 2, 3))
    for number, prompt in enumerate((a, b, a, c)):
        run(engine, str(number), prompt, 2)
    cached = [run(engine, f"again-{number}", prompt, 2).num_cached_tokens for number, prompt in enumerate((a, c, b))]
    assert cached == [8, 8, 0]


def test_without_k_and_v_a_snapshot_is_worth_nothing_and_the_reverse() -> None:
    engine, prompt = engine_of(), list(range(30))
    run(engine, "first", prompt, 2)
    engine.kv.block_pools[GPU].forget_all()
    assert chunks_of(engine, "no blocks", prompt) == [(0, 28), (28, 30)]
    engine.kv.snapshots.free_all()
    assert chunks_of(engine, "no state", prompt) == [(0, 28), (28, 30)]
    assert chunks_of(engine, "both", prompt) == [(28, 30)]


def test_where_k_and_v_are_not_cached_no_state_is_saved() -> None:
    """In a tier without a cache nobody could find them."""
    options = {"num_gpu_blocks": 4, "num_cpu_blocks": 60, "cached_tiers": (GPU,), "num_snapshots": 5}
    engine = fake_engine("fastdecode", **options)
    run(engine, "r", list(range(30)), 30)
    assert not engine.kv.snapshots._slots


def test_prompts_that_arrive_together_wait_only_for_a_state_that_is_made() -> None:
    """The same prompt thrice is computed once. Prompts that only begin alike do not wait for a state in the middle."""
    engine, prompt = engine_of(), list(range(30))
    for number in range(3):
        engine.add(engine.make_request(str(number), prompt, SamplingParams(max_tokens=2)))
    engine.add(engine.make_request("other", [*prompt[:20], 40, 41], SamplingParams(max_tokens=2)))
    while engine.has_unfinished():
        engine.step()
    assert engine.stats().prompt_tokens == 30 + 2 + 2 + 22


def test_a_plan_saves_before_it_restores() -> None:
    """The copies of an iteration's end come first, and nothing is copied twice."""
    engine = engine_of()
    engine.add(engine.make_request("r", list(range(30)), SamplingParams(max_tokens=20)))
    engine.step()
    engine.add(engine.make_request("again", list(range(30)), SamplingParams(max_tokens=20)))
    engine.step()
    copies = engine.last_iteration[0].state_copies
    assert [copy.saves for copy in copies] == [True, False] and copies[0].snapshot == copies[1].snapshot
    engine.step()
    assert not engine.last_iteration[0].state_copies


@pytest.mark.parametrize("system", ["vllm", "llumnix"])
def test_a_younger_decode_makes_way_for_a_prompt_that_was_cut(system: str) -> None:
    """It has room and tokens to start beside the first chunk, and is preempted for the blocks of the second."""
    pools = {"num_gpu_blocks": 5, "num_cpu_blocks": 0, "max_tokens": 16}
    engine = fake_engine(system, **pools, cached_tiers=(GPU,), num_snapshots=4)
    older, younger = (
        engine.add(engine.make_request(name, list(range(3, 3 + length)), SamplingParams(max_tokens=2, ignore_eos=True)))
        for name, length in (("older", 17), ("younger", 3))
    )
    decoded = []
    while engine.has_unfinished():
        engine.step()
        check_slots(engine.state)
        plan, _ = engine.last_iteration
        decoded.append([request.request_id for request in plan.decodes])
        assert sum(item.num_tokens for item in plan.gpu_batch) <= 16
    assert decoded[1] == [] and younger.num_preemptions == 1 and not older.num_preemptions
    for request in (older, younger):
        assert request.output_token_ids == expected_output(request.prompt_token_ids, 2, ignore_eos=True)
