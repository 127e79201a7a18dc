"""CPU attention on several simulated hosts: local memory first, hosts in parallel, and a network that only costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex.perf.model import PerfModel
from apex.simulator.build import build_simulated
from apex.simulator.hardware_files import load_gpu, load_host, load_model_config
from apex.simulator.links import RemoteHosts, SeveralHostsModel, host_shares, network_s
from apex.simulator.predicted_profile import hardware_profile, remote_hosts
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.kv.kv_cache_manager import KVCacheManager

HOST, MODEL = load_host("g5-4xlarge"), load_model_config("llama-3.1-8b")
TABLE = hardware_profile(load_gpu("a10"), HOST, MODEL)
ROW_BYTES = (32 + 2 * 8 + 32) * 128 * 2  # Q, K, V and output of Llama-3.1-8B in float16
BLOCKS_EACH = 1000


def hosts(count: int, network_gbps: float = 100.0) -> RemoteHosts | None:
    return remote_hosts(HOST, MODEL, "float16", count, network_gbps)


def model(count: int, used_blocks: int, network: RemoteHosts | None = None) -> SeveralHostsModel:
    """Of ``count`` hosts whose CPU tier holds ``used_blocks``."""
    kv = KVCacheManager(0, count * BLOCKS_EACH, 16)
    request = Request("held", (0,), SamplingParams())
    request.tier = Tier.CPU
    assert kv.allocate_slots(request, 16 * used_blocks)
    return SeveralHostsModel(TABLE, 32, network or hosts(count), kv)


def test_the_network_is_what_was_asked_for() -> None:
    assert hosts(1) is None
    network = hosts(5, 10.0)
    assert (network.count, network.bytes_per_s, network.bytes_per_row) == (4, 1.25e9, ROW_BYTES)
    assert network.latency_s == pytest.approx(200e-6)
    assert network_s(network, 64) == pytest.approx(200e-6 + 64 * ROW_BYTES / 1.25e9)
    for count, gbps, message in ((0, 100.0, "cpu_hosts=0 must be at least 1"), (2, 0.0, "network_gbps=0 must be")):
        with pytest.raises(ValueError, match=message):
            hosts(count, gbps)


@given(used=st.integers(1, 10_000), local=st.integers(1, 5000), count=st.integers(1, 8))
def test_local_memory_first_then_evenly(used: int, local: int, count: int) -> None:
    own, each = host_shares(used, local, count)
    assert own + count * each == pytest.approx(1.0)
    assert own * used == pytest.approx(min(used, local))
    if used == local * (count + 1):
        assert own == pytest.approx(each)


def test_while_local_memory_has_room_remote_hosts_change_nothing() -> None:
    alone, several = PerfModel(TABLE, 32), model(5, BLOCKS_EACH)
    assert several.cpu_attention_s(40, 50_000) == alone.cpu_attention_s(40, 50_000)
    assert several.cpu_attention_s(0, 0) == 0.0


def test_a_full_tier_is_divided_evenly_and_the_slowest_host_counts() -> None:
    alone, several = PerfModel(TABLE, 32), model(4, 4 * BLOCKS_EACH)
    expected_s = alone.cpu_attention_s(10, 12_500) + network_s(hosts(4), 30)
    assert several.cpu_attention_s(40, 50_000) == pytest.approx(expected_s)
    # One request stays whole, and may be at a remote host.
    assert several.cpu_attention_s(1, 3000) == pytest.approx(alone.cpu_attention_s(1, 3000) + network_s(hosts(4), 1))
    assert not several.extrapolated
    # Slightly more than the local memory: the local host has nearly everything, and is the slowest.
    barely = model(4, BLOCKS_EACH + 10)
    share = BLOCKS_EACH / (BLOCKS_EACH + 10)
    assert barely.cpu_attention_s(40, 50_000) == pytest.approx(alone.cpu_attention_s(40 * share, 50_000 * share))


@given(
    requests=st.integers(1, 500),
    context=st.integers(1, 3000),
    used=st.integers(1, 3 * BLOCKS_EACH),
    factor=st.floats(1.0, 10.0),
)
def test_a_slower_network_never_makes_a_attention_task_faster(
    requests: int, context: int, used: int, factor: float
) -> None:
    fast = hosts(3)
    slow = replace(fast, latency_s=fast.latency_s * factor, bytes_per_s=fast.bytes_per_s / factor)
    fast_s, slow_s = (model(3, used, network).cpu_attention_s(requests, requests * context) for network in (fast, slow))
    assert fast_s <= slow_s


def test_a_corrected_model_still_knows_its_hosts() -> None:
    several = model(4, 4 * BLOCKS_EACH)
    again = several.with_table(TABLE)
    assert again.cpu_attention_s(40, 50_000) == several.cpu_attention_s(40, 50_000)
    assert again.extrapolated is several.extrapolated


def tokens_per_s(system: str, count: int, network: RemoteHosts | None = None) -> float:
    """Of requests whose KV cache no single host holds."""
    engine = build_simulated(
        system,
        TABLE,
        32,
        num_gpu_blocks=800,
        num_cpu_blocks=400 * count,
        max_num_batched_tokens=2048,
        remote_hosts=network or hosts(count),
    )
    for i in range(80):
        engine.add(engine.make_request(str(i), (0,) * (600 + 5 * i), SamplingParams(max_tokens=60 + i)))
    while engine.has_unfinished():
        engine.step()
    return engine.stats().output_tokens / engine.now()


@pytest.mark.parametrize("system", ["neo", "apex"])
def test_more_hosts_never_slow_a_run(system: str) -> None:
    rates = [tokens_per_s(system, count) for count in range(1, 6)]
    assert rates[-1] > 1.02 * rates[0]
    assert all(more > 0.99 * rates[0] for more in rates)


def test_a_slower_network_never_speeds_a_run_up() -> None:
    """With ``neo``. ``apex`` may gain: it pipelines where its rule says so, and a slow network takes it out of that."""
    fast = hosts(3)
    rates = [tokens_per_s("neo", 3, replace(fast, latency_s=fast.latency_s * n)) for n in (1, 2, 4, 8, 16)]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < rates[0]
