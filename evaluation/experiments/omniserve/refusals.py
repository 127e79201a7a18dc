"""Asks a server for what it must refuse: fields that contradict each other, and a burst that cannot be in time."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from evaluation.measure.server import Server

BURST = 64
TIMEOUT_S = 120.0
LONGEST_PROMPT = 512


def refusals(server: Server, pool_tokens: int) -> dict[str, Any]:
    """Fields of a row: the status of contradictory fields, and how a burst of prompts was answered.

    Each prompt takes half of the pool's ``pool_tokens`` at most, so that it can be served.
    """
    return asyncio.run(_refusals(server, min(LONGEST_PROMPT, pool_tokens // 2)))


async def _refusals(server: Server, prompt_len: int) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, trust_env=False) as client:

        async def answer(tokens: int, **fields: Any) -> httpx.Response:
            body = {"model": server.model, "prompt": [1] * tokens, "max_tokens": 1, **fields}
            return await client.post("/v1/completions", json=body)

        contradiction = await answer(1, service_tier="flex", priority=-1)
        answers = await asyncio.gather(*(answer(prompt_len) for _ in range(BURST)))
    refused = [each for each in answers if each.status_code == httpx.codes.TOO_MANY_REQUESTS]
    waits_s = [int(each.headers.get("retry-after", 0)) for each in refused]
    return {
        "contradiction_status": contradiction.status_code,
        "burst": BURST,
        "burst_served": sum(each.is_success for each in answers),
        "burst_refused": len(refused),
        "burst_least_retry_after_s": min(waits_s, default=None),
    }
