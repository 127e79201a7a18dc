"""A log line every ten seconds in which the engine has worked."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swiftllm.server.service.client import EngineClient
    from swiftllm.server.service.snapshot import Snapshot

INTERVAL_S = 10.0

logger = logging.getLogger("uvicorn.error")  # uvicorn's logger for all but access lines


async def log_activity(service: EngineClient) -> None:
    """Log lines until it is cancelled: each compares a snapshot with the one before."""
    before = await service.snapshot()
    while True:
        await asyncio.sleep(INTERVAL_S)
        after = await service.snapshot()
        if after.iterations > before.iterations or after.waiting:
            logger.info(activity_line(before, after))
        before = after


def activity_line(before: Snapshot, after: Snapshot) -> str:
    """What the engine did between two snapshots, and its requests and KV cache at the second."""
    seconds = after.uptime_s - before.uptime_s
    iterations = after.iterations - before.iterations
    parts = [
        f"prompts {(after.prompt_tokens - before.prompt_tokens) / seconds:.0f} tokens/s, "
        f"outputs {(after.output_tokens - before.output_tokens) / seconds:.0f} tokens/s",
        f"requests: {after.running_gpu} in the GPU tier, {after.running_cpu} in the CPU tier, {after.waiting} waiting",
        f"KV cache: GPU {share(after.gpu_blocks_used, after.gpu_blocks_total)}, "
        f"CPU {share(after.cpu_blocks_used, after.cpu_blocks_total)}",
    ]
    done = {name: n - before.strategy_iterations.get(name, 0) for name, n in after.strategy_iterations.items()}
    if iterations and any(n for name, n in done.items() if name != "gpu-only"):
        parts.append(", ".join(f"{name} {share(n, iterations)}" for name, n in done.items() if n))
    return "; ".join(parts)


def share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "none"
