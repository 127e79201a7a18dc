"""Hosts that die, freeze and return: only their requests are computed again, and the tokens stay the same."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from swiftllm.core.request import SamplingParams, Tier
from swiftllm.engine.backend import HostDied
from swiftllm.engine.engine import Engine
from swiftllm.remote.tier import RemoteCpuTier
from swiftllm.runtime.cpu_tier import AttentionTask, BlocksRead, BlocksWrite, ContextRead, RowsWrite
from swiftllm.server.engine_loop import FaultIsolation
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import NewRequest, ServiceLimits
from tests.swiftllm.remote.hosts import SECRET, host_in_thread, start_host_process
from tests.swiftllm.remote.test_tokens import BLOCK_BYTES, MAX_TOKENS, add_all, open_engine, run_to_end, tiny  # noqa: F401
from tests.swiftllm.server.serving import LocalClient, read_all, run_client

ROOM = {"num_gpu_blocks": 12, "num_cpu_blocks": 60, "max_model_len": 90}
SILENT = "nothing was received"


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    process, address = start_host_process(80 * BLOCK_BYTES)
    yield process, address
    process.kill()
    process.wait()


def remote(engine: Engine, host: int = 1) -> RemoteCpuTier:
    return engine.backend.attention_hosts.hosts[host - 1]


def on_host(engine: Engine, host: int) -> set[str]:
    pool = engine.kv.host_pools.pools[host]
    running = engine.state.running[Tier.CPU]
    return {request.request_id for request in running if engine.kv.pool_of(request) is pool}


def step_until(engine: Engine, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s and engine.has_unfinished(), engine.status()
        engine.step()


def count_recomputed(engine: Engine) -> list[set[str]]:
    """The ids of the requests that each death of a host sends back to the queue."""
    counted, forget = [], engine.state.forget_hosts

    def noted(*how):
        lost = forget(*how)
        counted.append({request.request_id for request in lost})
        return lost

    engine.state.forget_hosts = noted
    return counted


def check_only_its_own_are_lost(engine: Engine, end_host: Callable[[], None], prompts, expected) -> None:
    """End host 1 while all hosts are in use. Its requests, and no others, are computed again."""
    requests, recomputed = add_all(engine, prompts), count_recomputed(engine)
    step_until(engine, lambda: len(on_host(engine, 1)) >= 2 and on_host(engine, 2) and on_host(engine, 0))
    end_host()
    channel = remote(engine).channel
    assert channel.wait_dead(120.0) and SILENT not in channel.error
    there = on_host(engine, 1)
    engine.step()
    assert recomputed == [there]
    assert engine.stats().recomputed_after_host_deaths == len(there)
    assert engine.kv.host_pools.pools[1].num_blocks == 0
    run_to_end(engine)
    engine.close()
    assert [tuple(request.output_token_ids) for request in requests] == expected
    assert all(r.num_preemptions >= 1 for r in requests if r.request_id in there)
    assert engine.stats().host_deaths == 1


@pytest.mark.parametrize("variant", ["neo", "fastdecode", "adaptive"])
def test_a_closed_host_costs_only_its_own_requests(tiny, variant: str, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    model_dir, prompts, expected = tiny
    with host_in_thread(80 * BLOCK_BYTES) as closed, host_in_thread(80 * BLOCK_BYTES) as other:
        engine = open_engine(model_dir, variant, [closed.address, other.address], **ROOM)
        check_only_its_own_are_lost(engine, closed.close, prompts, expected)


def test_a_killed_host_costs_only_its_own_requests(tiny, process) -> None:  # noqa: F811
    model_dir, prompts, expected = tiny
    killed, address = process
    with host_in_thread(80 * BLOCK_BYTES) as other:
        engine = open_engine(model_dir, "apex-overlap", [address, other.address], **ROOM)
        check_only_its_own_are_lost(engine, killed.kill, prompts, expected)


def test_a_frozen_host_is_noticed_and_one_in_its_place_is_used(tiny, process) -> None:  # noqa: F811
    model_dir, prompts, expected = tiny
    frozen, address = process
    engine = open_engine(model_dir, "apex-overlap", [address], **ROOM)
    requests, recomputed = add_all(engine, prompts), count_recomputed(engine)
    step_until(engine, lambda: bool(on_host(engine, 1)))
    os.kill(frozen.pid, signal.SIGSTOP)
    step_until(engine, lambda: bool(recomputed))
    assert SILENT in remote(engine).channel.error
    frozen.kill()
    frozen.wait()
    run_to_end(engine)
    assert [tuple(request.output_token_ids) for request in requests] == expected
    with host_in_thread(80 * BLOCK_BYTES, port=address[1]):
        step = 0
        while not engine.kv.host_pools.pools[1].num_blocks:  # taken up by the first step after it was found
            step += 1
            assert step < 200
            time.sleep(0.05)
            engine.add(engine.make_request(f"wakes-{step}", prompts[0], requests[0].sampling))
            run_to_end(engine)
        requests = [
            engine.add(engine.make_request(f"again-{i}", p, requests[0].sampling)) for i, p in enumerate(prompts)
        ]
        step_until(engine, lambda: bool(on_host(engine, 1)))
        run_to_end(engine)
        assert [tuple(request.output_token_ids) for request in requests] == expected
        assert engine.stats().host_deaths == 1
        engine.close()


@pytest.mark.parametrize(
    ("operation", "task"),
    [
        ("write", BlocksWrite),
        ("read", BlocksRead),
        ("attend", AttentionTask),
        ("write", RowsWrite),
        ("read", ContextRead),
        ("open", torch.Tensor),
    ],
)
def test_a_host_that_dies_in_any_operation(
    tiny,  # noqa: F811
    operation: str,
    task: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the engine asks of the host when it dies. Swaps of that plan are not known to be done, so they count."""
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    model_dir, prompts, expected = tiny
    with host_in_thread(30 * BLOCK_BYTES) as host:
        engine = open_engine(model_dir, "neo", [host.address], num_cpu_blocks=26, num_gpu_blocks=25)
        tier = remote(engine)
        inner, calls = getattr(tier, operation), []

        def dies(asked, *arguments):
            calls.extend([asked] if isinstance(asked, task) else [])
            if isinstance(asked, task) and len(calls) == (1 if task in (BlocksRead, BlocksWrite) else 3):
                host.close()
                assert tier.channel.wait_dead(5.0)
            return inner(asked, *arguments)

        monkeypatch.setattr(tier, operation, dies)
        recomputed, requests = count_recomputed(engine), add_all(engine, prompts)
        run_to_end(engine)
        engine.close()
    assert len(recomputed) == 1
    assert [tuple(request.output_token_ids) for request in requests] == expected


def test_a_dead_host_blames_no_request(tiny, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Behind a service all are answered, and its fault isolation never begins a trial."""
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    model_dir, prompts, expected = tiny
    with host_in_thread(80 * BLOCK_BYTES) as host:
        engine = open_engine(model_dir, "neo", [host.address], **ROOM)
        monkeypatch.setattr(FaultIsolation, "step_failed", lambda *_: pytest.fail("a step failed"))
        service = EngineService(engine, ServiceLimits())

        async def client(local: LocalClient) -> None:
            sampling = SamplingParams(MAX_TOKENS)
            streams = local.submit([NewRequest(str(i), p, sampling) for i, p in enumerate(prompts)])
            reading = asyncio.create_task(read_all(streams))
            while not engine.kv.host_pools.pools[1].num_used:
                await asyncio.sleep(0.001)
            host.close()
            outcomes = await reading
            assert [tuple(outcomes[str(i)].token_ids) for i in range(len(prompts))] == expected

        run_client(service, client)
        assert engine.stats().recomputed_after_host_deaths > 0


def test_a_death_that_no_host_reports_is_an_error(tiny) -> None:  # noqa: F811
    model_dir, prompts, _ = tiny
    engine = open_engine(model_dir, "neo", [], **ROOM)
    add_all(engine, prompts[:1])
    engine.executor.run = lambda plan: (_ for _ in ()).throw(HostDied("as if"))
    with pytest.raises(HostDied, match="as if"):
        engine.step()
    engine.recover()
    engine.close()
