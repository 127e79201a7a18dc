"""The prefix cache under all schedulers: random conversations in tiny pools, and what is computed of shared prompts."""

from __future__ import annotations

import random

import pytest

from swiftllm.core.request import SamplingParams, ServiceClass, Tier
from swiftllm.scheduling.state import SchedulerState
from tests.apex.schedulers.test_schedulers import TABLES, check_queues, drive, make_request
from tests.reference.fake_backend import VOCABULARY, expected_output
from tests.reference.fake_engine import fake_engine

SYSTEMS = ("vllm", "swiftllm", "neo", "fastdecode", "apex", "adaptive", "omniserve", "omniserve-stepping", "llumnix")
BOTH = tuple(Tier)


class Conversations:
    """Draws requests of which most begin as an earlier one did: turns of conversations, and the same prompt again."""

    def __init__(self) -> None:
        self.texts: list[tuple[list[int], str | None]] = []

    def __call__(self, rng: random.Random, longest_prompt: int, longest_output: int):
        prompt, sampling = make_request(rng, longest_prompt, longest_output)
        salt = rng.choice((None, "a"))
        if self.texts and rng.random() < 0.8:
            text, salt = rng.choice(self.texts)
            if rng.random() < 0.7:
                prompt = text[: rng.randint(1, len(text))] + prompt
                prompt = prompt[: rng.randint(1, longest_prompt)]
            else:  # exactly as before
                prompt = text[:longest_prompt]
            if rng.random() < 0.1:
                salt = "b" if salt is None else None  # what others may not find
        self.texts.append((prompt + expected_output(prompt, sampling.max_tokens, ignore_eos=True), salt))
        if rng.random() < 0.05:
            sampling = SamplingParams(max_tokens=sampling.max_tokens, prompt_logprobs=0)
        return prompt, sampling, salt


def check(state: SchedulerState) -> None:
    check_queues(state)
    kv = state.kv
    kv.check_blocks()
    for running in state.running.values():
        for request in running:
            names = request.block_hashes or ()
            assert request.num_hashed <= request.num_computed_tokens // kv.block_size
            for block, name in zip(kv.block_tables[request.request_id], names, strict=False):
                allocator = kv.pool_of(request)
                found = allocator._hashes[block - allocator.first] if allocator.caches else None
                assert found in (None, name), "a block has another name than its request's tokens"


def saving_at_most(most: int):
    """``copying_pays`` of plans that may save so many blocks each; online correction ends it."""
    return lambda source, num_blocks: source is Tier.CPU or num_blocks <= most


def hits(engine) -> int:
    return sum(engine.stats().prefix_hits.values())


@pytest.mark.parametrize(
    ("table", "tiers"),
    [("slow-cpu", BOTH), ("even", (Tier.GPU,)), ("fast-cpu", BOTH)],
    ids=["slow", "gpu-only", "fast"],
)
@pytest.mark.parametrize("system", SYSTEMS)
def test_random_conversations(system: str, table: str, tiers: tuple[Tier, ...]) -> None:
    found = 0
    for seed in range(3):
        rng = random.Random(seed)
        engine = fake_engine(
            system,
            num_gpu_blocks=rng.randint(10, 40),
            num_cpu_blocks=rng.randint(20, 60),
            table=TABLES[table],
            max_tokens=rng.choice((16, 64)),
            seed=seed,
            cached_tiers=tiers,
        )
        engine.kv.copying_pays = saving_at_most(rng.choice((0, 2, 100)))
        share = 0.3 if seed == 2 else 0.0
        drive(engine, rng, 60, abort_share=0.02, best_effort_share=share, check=check, draw=Conversations())
        found += hits(engine)
    assert (found > 0) == (system != "fastdecode" or Tier.CPU in tiers)


@pytest.mark.parametrize("system", ("neo", "fastdecode", "apex", "adaptive", "omniserve"))
def test_random_conversations_over_hosts_that_die(system: str) -> None:
    """What was on a host that died is found by nobody, nor what its death kept from being copied."""
    deaths = found = 0
    for seed in range(4):
        rng = random.Random(seed)
        engine = fake_engine(
            system,
            num_gpu_blocks=rng.choice((12, 30)),
            num_cpu_blocks=(local := rng.choice((20, 40))),
            host_blocks=(local + rng.randrange(10), local + rng.randrange(10)),
            max_num_seqs=rng.choice((3, 8, 64)),
            seed=seed,
            cached_tiers=BOTH,
        )
        engine.kv.copying_pays = saving_at_most(rng.choice((2, 100)))
        hosts, step = engine.backend.hosts, engine.step

        def step_among_deaths(hosts=hosts, step=step, rng=rng):
            if rng.random() < 0.05:
                hosts.plan_death(rng.choice((1, 2)), rng.randrange(1, 30))
            if rng.random() < 0.05:
                hosts.revive(rng.choice((1, 2)))
            return step()

        engine.step = step_among_deaths
        share = 0.3 if seed % 2 else 0.0
        drive(engine, rng, 60, abort_share=0.02, best_effort_share=share, check=check, draw=Conversations())
        deaths += engine.stats().host_deaths
        found += hits(engine)
    assert deaths > 0 and found > 0


@pytest.mark.parametrize("system", ("vllm", "adaptive"))
def test_resets_and_failures_in_between(system: str) -> None:
    """After a failure or a reset nothing is found that was cached before. After a reset requests keep their blocks."""
    for seed in range(3):
        rng = random.Random(seed)
        engine = fake_engine(system, num_gpu_blocks=30, num_cpu_blocks=40, seed=seed, cached_tiers=BOTH)
        step = engine.step

        def step_among_failures(engine=engine, step=step, rng=rng):
            outputs, kind = step(), rng.random()
            if kind < 0.02:
                engine.reset_prefix_cache()
            elif kind < 0.04:
                for request in engine.recover():
                    engine.add(request, check_targets=False)
                engine.backend.slots.clear()
            if kind < 0.04:
                assert sum(engine.kv.num_cached.values()) == 0
            return outputs

        engine.step = step_among_failures
        drive(engine, rng, 60, abort_share=0.02, check=check, draw=Conversations())
        assert hits(engine) > 0


@pytest.mark.parametrize("budget", [512, 8192])
@pytest.mark.parametrize(
    ("system", "pool"),
    [("vllm", "gpu"), ("apex", "gpu"), ("adaptive", "gpu"), ("apex", "cpu"), ("adaptive", "cpu")],
)
def test_requests_that_arrive_together_compute_a_shared_prompt_once(system: str, pool: str, budget: int) -> None:
    """64 requests share 1,000 of 1,100 tokens, or are the same ``n`` times; each computes what is left of it."""
    blocks = {"num_gpu_blocks": 6000, "num_cpu_blocks": 0} if pool == "gpu" else {"num_gpu_blocks": 75}
    tiers = (Tier.GPU,) if system == "vllm" else BOTH
    rng = random.Random(0)
    for shared in (1000, 1100):
        options = {"num_cpu_blocks": 6000, **blocks, "block_size": 16, "max_tokens": budget, "num_layers": 1}
        engine = fake_engine(system, **options, cached_tiers=tiers)
        head = [rng.randrange(VOCABULARY) for _ in range(shared)]
        for i in range(64):
            prompt = head + [rng.randrange(VOCABULARY) for _ in range(1100 - shared)]
            engine.add(engine.make_request(str(i), prompt, SamplingParams(max_tokens=2, ignore_eos=True)))
        while engine.has_unfinished():
            engine.step()
        stats, own = engine.stats(), 1100 - min(shared, 1098) // 16 * 16
        assert stats.preemptions == 0
        assert stats.prompt_tokens == 1100 + 63 * own
        assert stats.prefix_queries == 64 * 1100 and sum(stats.prefix_hits.values()) == 63 * (1100 - own)


def test_a_request_with_as_many_tokens_as_blocks_hold_computes_some_of_them() -> None:
    """The last block of a prompt that ends with it is computed again, and is the request's own."""
    for length in (1, 3, 4, 5, 6, 7, 8, 9, 16, 17, 18):
        engine = fake_engine("vllm", num_gpu_blocks=20, num_cpu_blocks=0, cached_tiers=(Tier.GPU,))
        prompt, seen = list(range(length)), []
        for i in range(2):
            request = engine.add(engine.make_request(str(i), prompt, SamplingParams(max_tokens=9, ignore_eos=True)))
            while engine.has_unfinished():
                engine.step()
            assert request.output_token_ids == expected_output(prompt, 9, ignore_eos=True)
            seen.append(request.num_cached_tokens)
        assert seen == [0, max(0, length - 2) // 4 * 4]


def run(engine, request_id: str, prompt: list[int], max_tokens: int, salt: str | None = None, **sampling):
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    request = engine.add(engine.make_request(request_id, prompt, params, cache_salt=salt))
    while engine.has_unfinished():
        engine.step()
    return request


def test_the_next_turn_finds_the_blocks_that_decodes_filled() -> None:
    engine = fake_engine("vllm", num_gpu_blocks=40, num_cpu_blocks=0, cached_tiers=(Tier.GPU,))
    first = run(engine, "first", list(range(6)), 15)  # 6 + 15 tokens, of which the last was never computed
    again = run(engine, "again", [*range(6), *first.output_token_ids, 7], 3)
    assert again.num_cached_tokens == 20


def test_other_salts_and_scored_prompts_find_nothing() -> None:
    engine = fake_engine("vllm", num_gpu_blocks=80, num_cpu_blocks=0, cached_tiers=(Tier.GPU,))
    prompt = list(range(30))
    cached = [
        run(engine, str(i), prompt, 2, salt, **sampling).num_cached_tokens
        for i, (salt, sampling) in enumerate(
            [(None, {}), ("a", {}), ("", {}), ("a", {"prompt_logprobs": 0}), (None, {}), ("a", {}), ("", {})]
        )
    ]
    assert cached == [0, 0, 0, 0, 28, 28, 28]


def test_a_preempted_request_finds_its_own_blocks() -> None:
    """Also those of its output; names go on from the right parent afterwards."""
    engine = fake_engine("vllm", num_gpu_blocks=40, num_cpu_blocks=0, cached_tiers=(Tier.GPU,))
    prompt = list(range(10))
    request = engine.add(engine.make_request("r", prompt, SamplingParams(max_tokens=30, ignore_eos=True)))
    for _ in range(12):
        engine.step()
    computed = engine.stats().prompt_tokens
    engine.state.begin_plan()
    engine.state.recompute(request)
    num_tokens = request.num_tokens
    while engine.has_unfinished():
        engine.step()
    assert request.output_token_ids == expected_output(prompt, 30, ignore_eos=True)
    assert engine.stats().prompt_tokens - computed == num_tokens - (num_tokens - 2) // 4 * 4
    assert engine.stats().prefix_hits == {}, "the prompt was computed once, and nothing was found for it"
    again = run(engine, "again", [*prompt, *request.output_token_ids], 1)
    assert again.num_cached_tokens == 36, "all blocks that were full with K and V"


def test_an_aborted_request_leaves_what_it_computed_and_no_more() -> None:
    engine = fake_engine("vllm", num_gpu_blocks=40, num_cpu_blocks=0, cached_tiers=(Tier.GPU,), max_tokens=10)
    prompt = list(range(40))
    engine.add(engine.make_request("r", prompt, SamplingParams(max_tokens=5)))
    engine.step()  # 10 tokens: two full blocks and a half
    engine.abort("r")
    engine.step()
    assert engine.kv.num_cached[Tier.GPU] == 2
    assert run(engine, "again", prompt, 3).num_cached_tokens == 8


@pytest.mark.parametrize("num_snapshots", [None, 20])
def test_a_prompt_goes_on_from_the_text_of_who_is_preempted_for_it(num_snapshots: int | None) -> None:
    """What its decodes filled is found only once it has given its blocks back, after room was looked for."""
    for budget in (8, 64):
        pools = {"num_gpu_blocks": 30, "num_cpu_blocks": 0, "max_tokens": budget}
        engine = fake_engine("vllm", **pools, cached_tiers=(Tier.GPU,), num_snapshots=num_snapshots)
        sampling = SamplingParams(max_tokens=90, ignore_eos=True)
        how = {"service_class": ServiceClass.BEST_EFFORT}
        yielding = engine.add(engine.make_request("yielding", list(range(3, 19)), sampling, **how), check_targets=False)
        while yielding.num_tokens < 80:
            engine.step()
        text = [*yielding.prompt_token_ids, *yielding.output_token_ids[:60], 5, 6, 7, 8, 9]
        sampling = SamplingParams(max_tokens=20, ignore_eos=True)
        urgent = engine.add(engine.make_request("urgent", text, sampling))
        while engine.has_unfinished():
            engine.step()
            check(engine.state)
        assert yielding.num_preemptions and urgent.num_cached_tokens > 60
        for request in (yielding, urgent):
            own = request.prompt_token_ids, request.sampling.max_tokens
            assert request.output_token_ids == expected_output(*own, ignore_eos=True)
