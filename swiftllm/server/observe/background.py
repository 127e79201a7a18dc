"""A background task for as long as the server runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any


def lifespan_of(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[Any], AbstractAsyncContextManager[None]]:
    """The lifespan of a router: ``work`` runs as a task on the server's event loop, and is cancelled at its end."""

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        task = asyncio.create_task(work())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    return lifespan
