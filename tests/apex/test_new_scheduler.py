"""A GPU-only scheduler that nothing here knows: one short file and one line make it a system, real and simulated."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import tests.apex.shortest_first
from apex.build import build_system
from apex.simulator.build import build_simulated
from apex.simulator.links import RemoteHosts
from swiftllm.config import EngineConfig
from swiftllm.core.request import Request, SamplingParams, ServiceClass
from swiftllm.engine.engine import Engine
from swiftllm.systems import System, register_system, systems
from tests.apex.schedulers.test_schedulers import drive
from tests.apex.shortest_first import ShortestFirst
from tests.reference.fake_engine import fake_engine
from tests.reference.fake_gpu import fake_gpu
from tests.reference.linear_profile import LAYERS, flat_ends_table
from tests.reference.tiny_model import make_tiny_llama

LS, BE = ServiceClass
NAME = "shortest-first"
SAMPLING = SamplingParams(max_tokens=10, ignore_eos=True)
LENGTHS = (30, 5, 17, 9, 24, 3, 12, 28)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_system(System(NAME, "GPU only, the shortest prompt first", ShortestFirst))
    yield
    systems().pop(NAME)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"), num_hidden_layers=2)


def serve(engine: Engine, classes: Sequence[ServiceClass] = (LS,)) -> list[Request]:
    """All requests, in order of arrival, once they are done and both pools are empty."""
    requests = [
        engine.add(engine.make_request(str(i), range(5, 5 + length), SAMPLING, service_class=classes[i % len(classes)]))
        for i, length in enumerate(LENGTHS)
    ]
    while engine.has_unfinished():
        engine.step()
    assert all(request.output_len == 10 for request in requests)
    assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values())
    return requests


def test_it_is_one_file_of_at_most_forty_lines() -> None:
    assert len(Path(tests.apex.shortest_first.__file__).read_text().splitlines()) <= 40


@pytest.mark.parametrize("on_gpu", [False, True], ids=["cpu", "fake gpu"])
def test_its_tokens_are_those_of_swiftllm(model_dir: Path, on_gpu: bool) -> None:
    """With a GPU tier in which requests preempt each other."""
    device = {} if on_gpu else {"device": "cpu"}
    config = EngineConfig(
        str(model_dir), dtype="float32", block_size=4, num_gpu_blocks=11, num_cpu_blocks=4,
        max_num_batched_tokens=24, max_num_seqs=4, max_model_len=64, **device,
    )  # fmt: skip
    tokens, preempted = {}, {}
    for system in ("swiftllm", NAME):
        if on_gpu:
            with fake_gpu(1):
                engine = build_system(system, config)
                requests = serve(engine)
                engine.close()
        else:
            engine = build_system(system, config)
            requests = serve(engine)
            engine.close()
        tokens[system] = [request.output_token_ids for request in requests]
        preempted[system] = engine.stats().preemptions
    assert tokens[NAME] == tokens["swiftllm"] and preempted[NAME] > 0


@pytest.mark.parametrize("cpu_hosts", [1, 2])
def test_the_shortest_of_a_class_starts_first(cpu_hosts: int) -> None:
    """Simulated, with the CPU tier on one host or on two, which it does not use."""
    hosts = RemoteHosts(cpu_hosts - 1, 1e9, 1e-5, 1000) if cpu_hosts > 1 else None
    engine = build_simulated(
        NAME, flat_ends_table(1e-7, 1e-6), LAYERS, num_gpu_blocks=40, num_cpu_blocks=40, max_num_batched_tokens=16,
        remote_hosts=hosts,
    )  # fmt: skip
    requests = serve(engine, (LS, BE))
    for service_class in ServiceClass:
        of_class = [request for request in requests if request.service_class is service_class]
        shortest_first = sorted(of_class, key=lambda request: request.prompt_len)
        times_s = [request.token_times_s[0] for request in shortest_first]
        assert times_s == sorted(times_s) and len(set(times_s)) > 2
    first_tokens = {c: [r.token_times_s[0] for r in requests if r.service_class is c] for c in ServiceClass}
    assert max(first_tokens[LS]) < min(first_tokens[BE])
    assert engine.stats().cpu_busy_s == 0


def test_nothing_is_lost_under_random_load() -> None:
    """Of both classes, with aborts and tiny pools; the CPU tier has a pool on another host."""
    for seed in range(5):
        rng = random.Random(seed)
        engine = fake_engine(
            NAME, num_gpu_blocks=rng.choice((12, 30)), num_cpu_blocks=20, host_blocks=(20,) if seed % 2 else (),
            max_tokens=rng.choice((4, 16, 64)), max_num_seqs=rng.choice((2, 8)), seed=seed,
        )  # fmt: skip
        drive(engine, rng, 25, abort_share=0.1, best_effort_share=0.5)
