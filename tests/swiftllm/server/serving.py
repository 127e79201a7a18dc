"""Runs an engine's service on an event loop, for tests: what each request got, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from swiftllm.core.request import SamplingParams, TokenLogprob
from swiftllm.engine.engine import Engine
from swiftllm.server.client import EngineClient
from swiftllm.server.engine_loop import Observer
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import (
    Delta,
    FrontEndLink,
    NewRequest,
    RequestFailed,
    ServiceLimits,
    TokenStream,
    make_ends,
)
from tests.reference.fake_backend import VOCABULARY, expected_output

TIMEOUT_S = 60.0  # of a test that would hang


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Outcome:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    error: RequestFailed | None = None


async def deltas_of(stream: TokenStream) -> AsyncIterator[Delta]:
    """Up to the last one; raises the error that a delta brings."""
    deltas: asyncio.Queue[Delta] = asyncio.Queue()
    stream.set_listener(deltas.put_nowait)
    is_over = False
    while not is_over:
        delta = await deltas.get()
        yield delta
        if delta.failure is not None:
            raise RequestFailed(*delta.failure)
        is_over = delta.finish_reason is not None
    await asyncio.sleep(0)
    assert deltas.empty(), "a delta after the last"


async def read(stream: TokenStream) -> Outcome:
    outcome = Outcome(prompt_logprobs=stream.prompt_logprobs)
    try:
        async for delta in deltas_of(stream):
            outcome.token_ids += delta.token_ids
            outcome.logprobs += delta.logprobs
            outcome.finish_reason = delta.finish_reason
    except RequestFailed as error:
        outcome.error = error
    else:
        assert outcome.finish_reason is not None
    return outcome


async def read_all(streams: Sequence[TokenStream]) -> dict[str, Outcome]:
    outcomes = await asyncio.gather(*map(read, streams))
    return {stream.request_id: outcome for stream, outcome in zip(streams, outcomes, strict=True)}


class LocalClient(EngineClient):
    """A client of a service in this process, which runs in threads. The messages between them are the real ones."""

    def __init__(self, service: EngineService) -> None:
        own, other = make_ends()
        self.link = FrontEndLink(other)
        service.start(self.link)
        super().__init__(own, clock=service._clock)
        self.engine_side = service

    def add_observer(self, observer: Observer) -> None:
        self.engine_side.add_observer(observer)

    def abort_now(self, request_ids: Sequence[str]) -> None:
        """Order these requests aborted from any thread, without a message."""
        self.engine_side._open_requests.abort_requests(request_ids)

    async def run(self, client: Callable[[LocalClient], Awaitable[None]], drains: bool = True) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            await self.connect()
            try:
                await client(self)
                if drains:
                    await self.drain()
            finally:
                self.close()


def with_service(
    engine: Engine,
    client: Callable[[LocalClient], Awaitable[None]],
    limits: ServiceLimits | None = None,
    *,
    clock: Callable[[], float] | None = None,
) -> EngineService:
    """Run a client against the service, close it, and check that the engine is empty."""
    service = EngineService(engine, limits or ServiceLimits(), **({"clock": clock} if clock else {}))
    run_client(service, client)
    check_empty(engine)
    return service


def run_client(service: EngineService, client: Callable[[LocalClient], Awaitable[None]], drains: bool = True) -> None:
    """Run a client against a service, and close it."""
    local = LocalClient(service)
    try:
        asyncio.run(local.run(client, drains))
    finally:
        local.close()
        service.wait_until_left()
        service.close()
        local.link.close()


def serve(
    engine: Engine, requests: Sequence[NewRequest], limits: ServiceLimits | None = None
) -> tuple[dict[str, Outcome], EngineService]:
    """Submit all requests at once and read them to their ends."""
    outcomes: dict[str, Outcome] = {}

    async def client(service: LocalClient) -> None:
        outcomes.update(await read_all(service.submit(requests)))

    return outcomes, with_service(engine, client, limits)


def check_empty(engine: Engine) -> None:
    engine.kv.check_blocks()
    assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values())
    assert not engine.state.requests
    assert not engine.executor.cpu_batches


def make_requests(
    num_requests: int, seed: int = 0, *, longest: int = 30, logprobs: int | None = None
) -> list[NewRequest]:
    rng = random.Random(seed)
    return [
        NewRequest(
            f"r{i}",
            tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))),
            SamplingParams(max_tokens=rng.randint(1, longest), ignore_eos=rng.random() < 0.5, logprobs=logprobs),
        )
        for i in range(num_requests)
    ]


def expected(new: NewRequest) -> list[int]:
    """What the fake backend answers."""
    sampling = new.sampling
    return expected_output(new.prompt_token_ids, sampling.max_tokens, ignore_eos=sampling.ignore_eos)
