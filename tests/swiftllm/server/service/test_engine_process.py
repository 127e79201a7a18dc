"""The engine's process, as its builder finds it."""

from __future__ import annotations

import pytest

from swiftllm.config import EngineConfig
from swiftllm.runtime import execution_context
from swiftllm.server.client import EngineNotBuilt
from swiftllm.server.engine_process import EngineProcess

GRACE_S = 60.0


def tell_threads() -> None:
    """Runs in the engine's process, and tells what CPU attention would get beside a GPU of a machine with 8 threads."""
    execution_context.usable_cores, execution_context.physical_cores = lambda: 8, lambda: 4
    divisions = execution_context.core_divisions(EngineConfig("folder"), without_gpu=False)
    raise ValueError(f"threads: {[division.cpu_threads for division in divisions]}")


def test_cpu_attention_of_a_server_leaves_threads_to_the_front_end() -> None:
    process = EngineProcess(tell_threads)
    try:
        with pytest.raises(EngineNotBuilt, match=r"threads: \[6, 3, 4\]"):
            process.connect()
    finally:
        process.close(GRACE_S)
