"""Background work of the server, from its start to its end."""

import asyncio

import pytest
from fastapi import FastAPI

from swiftllm.server.app import lifespan_of


def test_background_work_that_fails_is_logged_at_once_and_other_work_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    passes: list[int] = []

    async def fails() -> None:
        raise RuntimeError("no more snapshots")

    async def goes_on() -> None:
        while True:
            passes.append(1)
            await asyncio.sleep(0)

    async def serve() -> None:
        async with lifespan_of(fails, goes_on)(FastAPI()):
            while not caplog.records:
                await asyncio.sleep(0)
            before = len(passes)
            await asyncio.sleep(0.01)
            assert len(passes) > before

    asyncio.run(serve())
    (record,) = caplog.records  # work that ends with the server is no failure
    assert "serving goes on without it" in record.message and "no more snapshots" in str(record.exc_info[1])
