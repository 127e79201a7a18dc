"""A slow host does not slow the GPU batch down: overlapped CPU batches wait for their attention tasks, the GPU batch
does not."""

from __future__ import annotations

import statistics

import pytest

from swiftllm.core.request import SamplingParams
from swiftllm.engine.engine import Engine
from tests.reference.tiny_model import make_tiny_llama
from tests.swiftllm.remote.hosts import SECRET, host_in_thread
from tests.swiftllm.remote.test_tokens import open_engine

DELAY_S = 0.02
LAYERS = 3


def iterations(engine: Engine, delay_s: float, host) -> list[float]:
    """Seconds of the iterations in which the GPU batch decodes beside a CPU batch of the host."""
    host.delay_s = delay_s
    sampling = SamplingParams(60, ignore_eos=True)
    for number in range(8):
        engine.add(engine.make_request(f"{delay_s}-{number}", [5 + number] * 10, sampling))
    found = []
    while engine.has_unfinished():
        engine.step()
        plan, result = engine.last_iteration
        if plan.cpu_batches and plan.decodes and not plan.prefills and not plan.swaps:
            found.append(result.duration_s)
    return found


def test_the_gpu_batch_does_not_wait_for_a_slow_host(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    model_dir = make_tiny_llama(tmp_path, num_hidden_layers=LAYERS)
    with host_in_thread() as host:
        engine = open_engine(model_dir, "apex-overlap", [host.address], num_gpu_blocks=60, num_cpu_blocks=18)
        fast, slow = (iterations(engine, delay_s, host) for delay_s in (0.0, DELAY_S))
        assert engine.backend.attention_hosts.hosts[0].channel.bytes_received > 0
        engine.close()
    assert len(fast) > 20 and len(slow) > 20
    # A GPU batch that waited would take LAYERS x DELAY_S. The benchmark measures by how little the median moves.
    assert statistics.median(slow) < statistics.median(fast) + DELAY_S / 2
