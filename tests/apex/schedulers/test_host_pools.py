"""Random loads over a CPU tier of several hosts, which die and return at any moment."""

from __future__ import annotations

import random

import pytest

from swiftllm.core.request import Tier
from tests.apex.schedulers.test_schedulers import drive
from tests.reference.fake_engine import fake_engine

SYSTEMS = ("neo", "fastdecode", "apex", "adaptive", "omniserve", "omniserve-stepping")


def engine_of_hosts(system: str, rng: random.Random, seed: int):
    return fake_engine(
        system,
        num_gpu_blocks=rng.choice((4, 12, 30)),
        num_cpu_blocks=(local := rng.choice((20, 40))),
        host_blocks=(local + rng.randrange(10), local + rng.randrange(10)),
        max_num_seqs=rng.choice((3, 8, 64)),
        seed=seed,
    )


@pytest.mark.parametrize("system", SYSTEMS)
def test_random_load(system: str) -> None:
    for seed in range(3):
        rng = random.Random(seed)
        engine = engine_of_hosts(system, rng, seed)
        drive(engine, rng, 40, abort_share=0.02, best_effort_share=0.3 if seed == 2 else 0.0)
        assert engine.stats().host_deaths == 0


@pytest.mark.parametrize("system", SYSTEMS)
def test_random_deaths(system: str) -> None:
    """The outputs are right whenever a host dies, and the requests of the other hosts are not computed again."""
    deaths = recomputed = 0
    for seed in range(4):
        rng = random.Random(seed)
        engine = engine_of_hosts(system, rng, seed)
        hosts, step, state = engine.backend.hosts, engine.step, engine.state
        forget = state.forget_hosts

        def forget_hosts(hosts, *rest, engine=engine, forget=forget, state=state):
            pools = [engine.kv.host_pools.pools[host] for host in hosts]
            running = [r for r in state.running[Tier.CPU] if engine.kv.pool_of(r) in pools]
            lost, (unfinished, *_) = forget(hosts, *rest), rest
            assert set(map(id, lost)) <= set(map(id, [*running, *(swap.request for swap in unfinished)]))
            assert not any(pool.num_blocks for pool in pools)
            engine.kv.check_blocks()
            return lost

        def step_among_deaths(hosts=hosts, step=step, rng=rng):
            if rng.random() < 0.05:
                hosts.plan_death(rng.choice((1, 2)), rng.randrange(1, 30))
            if rng.random() < 0.05:
                hosts.revive(rng.choice((1, 2)))
            return step()

        state.forget_hosts, engine.step = forget_hosts, step_among_deaths
        drive(engine, rng, 40, abort_share=0.02, best_effort_share=0.3 if seed % 2 else 0.0)
        deaths += engine.stats().host_deaths
        recomputed += engine.stats().recomputed_after_host_deaths
    assert deaths > 0 and recomputed > 0
