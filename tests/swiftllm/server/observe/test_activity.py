"""The line about what the engine does."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from functools import partial

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from swiftllm.server import metrics as module
from swiftllm.server.app import lifespan_of
from swiftllm.server.engine_status import Snapshot
from swiftllm.server.metrics import activity_line, log_activity

BEFORE = Snapshot(uptime_s=10.0, iterations=5, prompt_tokens=100, output_tokens=50, strategy_iterations={"gpu-only": 5})
AFTER = Snapshot(
    uptime_s=20.0,
    iterations=25,
    prompt_tokens=300,
    output_tokens=1050,
    running_gpu=3,
    running_cpu=12,
    waiting=2,
    gpu_blocks_used=49,
    gpu_blocks_total=50,
    cpu_blocks_used=10,
    cpu_blocks_total=1000,
    strategy_iterations={"gpu-only": 10, "asynchronous-overlap": 15},
)


def test_the_line_is_about_what_has_happened_since_the_one_before() -> None:
    assert activity_line(BEFORE, AFTER) == (
        "prompts 20 tokens/s, outputs 100 tokens/s; requests: 3 in the GPU tier, 12 in the CPU tier, 2 waiting; "
        "KV cache: GPU 98%, CPU 1%; gpu-only 25%, asynchronous-overlap 75%"
    )


def test_a_system_without_a_cpu_tier_says_nothing_of_strategies() -> None:
    after = Snapshot(uptime_s=20.0, iterations=6, gpu_blocks_total=50, strategy_iterations={"gpu-only": 6})
    assert activity_line(BEFORE, after).endswith("KV cache: GPU 0%, CPU none")


@pytest.mark.parametrize("works", [True, False])
def test_a_server_at_rest_says_nothing(monkeypatch, caplog, works) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)
    seen_all = threading.Event()
    last = replace(AFTER, waiting=0) if works else BEFORE

    class Service:
        snapshots = iter([BEFORE, last])

        async def snapshot(self) -> Snapshot:
            following = next(self.snapshots, None)
            if following is None:
                seen_all.set()
            return following or last

    app = FastAPI(lifespan=lifespan_of(partial(log_activity, Service())))
    with caplog.at_level(logging.INFO, logger="uvicorn.error"), TestClient(app):
        assert seen_all.wait(30.0)
    lines = [record.message for record in caplog.records if "tokens/s" in record.message]
    assert len(lines) == (1 if works else 0) and all("100 tokens/s" in line for line in lines)
