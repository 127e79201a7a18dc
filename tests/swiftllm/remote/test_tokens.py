"""Greedy tokens with the CPU tier spread over other hosts are those of the local tier, and of transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from apex.build import build_system
from swiftllm.config import EngineConfig
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.engine.engine import Engine
from tests.apex.test_end_to_end import MADE_UP_PROFILE, VARIANTS, judge
from tests.reference.int8_tier import poison_of
from tests.reference.tiny_model import make_tiny_llama
from tests.swiftllm.remote.hosts import SECRET, host_in_thread

MAX_TOKENS = 16
BLOCK_BYTES = 3 * 2 * 2 * 4 * 16 * 4  # of the tiny model's blocks of 4 tokens in float32
LOCKSTEP = ("neo", "neo-synchronous")
"""The variants whose swaps do not depend on how fast the hosts and the GPU batch are on this machine."""
POOLS = {"block_size": 4, "num_gpu_blocks": 25, "num_cpu_blocks": 26}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    model_dir = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    rng = random.Random(6)
    prompts = [[rng.randrange(3, 128) for _ in range(rng.randint(1, 60))] for _ in range(16)]
    return model_dir, prompts, judge(model_dir, prompts, MAX_TOKENS)


def open_engine(model_dir: Path, variant: str, addresses: Sequence[tuple[str, int]], **options) -> Engine:
    system, strategy, synchronous = VARIANTS[variant]
    config = EngineConfig(
        str(model_dir),
        device="cpu",
        dtype="float32",
        max_num_batched_tokens=48,
        synchronous=synchronous,
        attention_hosts=",".join(f"{host}:{port}" for host, port in addresses) or None,
        **{**POOLS, **options},
    )
    engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
    for pool in engine.backend.kv_pools.tensors.values():
        pool.fill_(poison_of(pool))  # whoever reads a slot that nobody wrote gets no tokens
    return engine


def add_all(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[Request]:
    return [
        engine.add(engine.make_request(str(i), prompt, SamplingParams(MAX_TOKENS))) for i, prompt in enumerate(prompts)
    ]


def run_to_end(engine: Engine, most_steps: int = 20_000) -> None:
    for _ in range(most_steps):
        if not engine.has_unfinished():
            break
        engine.step()
    assert not engine.has_unfinished(), engine.status()
    engine.kv.check_blocks()
    assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values())


def tokens_beside_a_host(
    model_dir: Path, prompts: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch, **options
) -> list[tuple[int, ...]]:
    """Under `apex-overlap`, where the CPU tier attends."""
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    with host_in_thread(1 << 20) as host:
        engine = open_engine(model_dir, "apex-overlap", [host.address], **options)
        requests = add_all(engine, prompts)
        run_to_end(engine)
        assert engine.stats().cpu_busy_s > 0
        engine.close()
    return [tuple(request.output_token_ids) for request in requests]


@pytest.mark.parametrize("num_hosts", [1, 2])
@pytest.mark.parametrize("variant", [*LOCKSTEP, "fastdecode", "apex", "apex-overlap", "adaptive"])
def test_hosts_do_not_change_tokens(tiny, variant: str, num_hosts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools are so small that requests are swapped both ways and computed again."""
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    model_dir, prompts, expected = tiny
    with ExitStack() as stack:
        hosts = [stack.enter_context(host_in_thread(30 * BLOCK_BYTES)) for _ in range(num_hosts)]
        engine = open_engine(model_dir, variant, [host.address for host in hosts])
        stack.callback(engine.close)
        moved = set()
        swap = engine.backend.swap
        pools = engine.kv.host_pools.pools

        def noted(swaps) -> None:
            for swap_ in swaps:
                blocks = swap_.source_blocks if swap_.source is Tier.CPU else swap_.target_blocks
                moved.add((swap_.source, pools.index(engine.kv.host_pools.pool_of(blocks[0]))))
            swap(swaps)

        monkeypatch.setattr(engine.backend, "swap", noted)
        requests = add_all(engine, prompts)
        run_to_end(engine)
        assert [tuple(request.output_token_ids) for request in requests] == expected
        assert all(pool.num_blocks == 30 for pool in pools[1:])
        assert all(host.channel.bytes_received > 0 for host in engine.backend.attention_hosts.hosts)
        if variant in LOCKSTEP:
            assert {source for source, host in moved if host > 0} == set(Tier)


def test_hosts_in_int8_give_the_tokens_of_a_local_tier_in_int8(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    model_dir, prompts, exact = tiny
    pools = {"block_size": 16, "num_gpu_blocks": 60, "cpu_kv_dtype": "int8"}
    outputs = []
    for num_local_blocks, num_hosts in ((200, 0), (9, 1)):
        with ExitStack() as stack:
            hosts = [stack.enter_context(host_in_thread(200 * 16 * BLOCK_BYTES)) for _ in range(num_hosts)]
            addresses = [host.address for host in hosts]
            engine = open_engine(model_dir, "fastdecode", addresses, num_cpu_blocks=num_local_blocks, **pools)
            stack.callback(engine.close)
            requests = add_all(engine, prompts)
            run_to_end(engine)
            outputs.append([tuple(request.output_token_ids) for request in requests])
            for host in engine.backend.attention_hosts.hosts if num_hosts else ():
                assert host.channel.bytes_received > 0
    assert outputs[0] == outputs[1] != exact
