"""The engine's service: streams, aborts, deadlines, limits, draining, and engines that do not move."""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace

import pytest

from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import RequestRefused, SamplingParams
from swiftllm.engine.engine import Engine
from swiftllm.scheduling.state import SchedulerState
from swiftllm.server.client import QueueFull, ServiceStopping
from swiftllm.server.engine_loop import EngineLoop, watch_engine
from swiftllm.server.engine_process import EngineService
from swiftllm.server.messages import NewRequest, ServiceLimits
from tests.reference.fake_engine import fake_engine
from tests.reference.faulty_backend import FaultyBackend
from tests.swiftllm.server.serving import (
    TIMEOUT_S,
    Clock,
    LocalClient,
    check_empty,
    deltas_of,
    expected,
    make_requests,
    read,
    read_all,
    run_client,
    serve,
    with_service,
)

SYSTEMS = ("swiftllm", "vllm", "neo", "fastdecode", "apex")
LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def make_engine(system: str = "apex", *, num_gpu_blocks: int = 16, num_cpu_blocks: int = 60, seed: int = 0) -> Engine:
    return fake_engine(system, num_gpu_blocks=num_gpu_blocks, num_cpu_blocks=num_cpu_blocks, seed=seed)


class Gate:
    """Holds the engine's thread at its next stage until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()
        FaultyBackend(engine, self)

    def __call__(self, operation: str, request_ids: frozenset[str]) -> None:
        if operation == "run_stage":
            self.reached.set()
            assert self.opened.wait(60.0)


class AtStep:
    """An observer that acts after a given number of steps, on the engine's thread."""

    def __init__(self, number: int, act) -> None:
        self.left = number
        self.act = act

    def on_step(self, plan, result, outputs) -> None:
        self.left -= 1
        if self.left == 0:
            self.act()

    def on_finish(self, request, reason) -> None:
        pass


@pytest.mark.parametrize("system", SYSTEMS)
def test_streams_give_the_offline_tokens(system: str) -> None:
    requests = make_requests(30, seed=1)
    outcomes, service = serve(make_engine(system), requests)
    for new in requests:
        assert outcomes[new.request_id].token_ids == expected(new)
    snapshot = service.snapshot()
    assert sum(snapshot.finished.values()) == 30 and set(snapshot.finished) == {"stop", "length"}
    assert snapshot.output_tokens == sum(len(expected(new)) for new in requests)
    assert (snapshot.waiting, snapshot.running_gpu, snapshot.running_cpu) == (0, 0, 0)


def test_logprobs_come_with_their_tokens() -> None:
    requests = [*make_requests(10, seed=2, logprobs=3), NewRequest("plain", (2, 3), LONG)]
    outcomes, _ = serve(make_engine(), requests)
    assert outcomes["plain"].logprobs == []
    for new in requests[:-1]:
        outcome = outcomes[new.request_id]
        assert [logprob.token_id for logprob in outcome.logprobs] == outcome.token_ids == expected(new)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_request_can_be_aborted_in_any_state(system: str) -> None:
    for number in range(1, 60, 4):
        requests = [NewRequest(f"r{i}", (2, 3, i), LONG) for i in range(8)]
        outcomes = {}

        async def client(service: LocalClient, number=number, requests=requests, outcomes=outcomes) -> None:
            service.add_observer(AtStep(number, lambda: service.abort_now(["r2", "r5", "r2", "nobody"])))
            outcomes.update(await read_all(service.submit(requests)))

        with_service(make_engine(system), client)
        for new in requests:
            outcome, tokens = outcomes[new.request_id], expected(new)
            if outcome.finish_reason == "abort":
                assert new.request_id in ("r2", "r5")
                assert outcome.token_ids == tokens[: len(outcome.token_ids)]
            else:
                assert outcome.token_ids == tokens
        assert number > 1 or outcomes["r5"].finish_reason == "abort"


def test_a_client_that_stops_listening_disturbs_nobody() -> None:
    requests = make_requests(8, seed=1)
    outcomes = {}

    async def client(service: LocalClient) -> None:
        streams = service.submit(requests)
        listener = asyncio.create_task(read(streams[0]))
        await asyncio.sleep(0)
        listener.cancel()
        service.abort_requests([streams[0].request_id])
        outcomes.update(await read_all(streams[1:]))

    with_service(make_engine(), client)
    assert [outcomes[new.request_id].token_ids for new in requests[1:]] == [expected(new) for new in requests[1:]]


def test_requests_of_a_front_end_that_is_gone_end_and_leave_nothing() -> None:
    engine = make_engine()
    gate = Gate(engine)
    service = EngineService(engine)

    async def leave(client: LocalClient) -> None:
        client.submit([NewRequest("left", (2, 3), LONG)])
        await asyncio.to_thread(gate.reached.wait)

    opener = threading.Timer(0.05, gate.opened.set)
    opener.start()
    run_client(service, leave, drains=False)
    check_empty(engine)
    assert service.snapshot().finished == {"shutdown": 1}


def test_the_door_names_the_limit_and_takes_all_or_none() -> None:
    engine = make_engine("apex", num_gpu_blocks=4, num_cpu_blocks=6)

    async def client(service: LocalClient) -> None:
        good = NewRequest("good", (2, 3), SamplingParams(max_tokens=2))
        for bad, message in (
            (NewRequest("bad", (), LONG), "empty"),
            (NewRequest("bad", (999,), LONG), "vocabulary of 50"),
            (NewRequest("bad", (1,) * 20, LONG), "6 blocks of 4"),
            (good, "'good' is already in use"),
        ):
            with pytest.raises(RequestRefused, match=message):
                service.submit([good, bad])
        outcomes = await read_all(service.submit([good]))
        assert outcomes["good"].token_ids == expected(good)
        assert (await service.snapshot()).refused == 8

    with_service(engine, client)


def test_a_full_queue_says_when_to_come_again() -> None:
    engine = make_engine()
    gate = Gate(engine)
    clock = Clock()

    async def client(service: LocalClient) -> None:
        requests = make_requests(6, seed=1)
        streams = service.submit(requests[:3])
        for late in (requests[3:4], requests[3:]):
            with pytest.raises(QueueFull, match="3 requests") as refusal:
                service.submit(late)
            assert (refusal.value.limit, refusal.value.retry_after_s) == (3, 1)
        gate.opened.set()
        await read_all(streams)
        streams = service.submit(requests[:3])  # there is room again, and the ids are free
        clock.now_s = 30.0  # for the three that have ended
        with pytest.raises(QueueFull) as refusal:
            service.submit(requests[3:5])
        assert refusal.value.retry_after_s == 20
        await read_all(streams)

    with_service(engine, client, ServiceLimits(max_queued_requests=3), clock=clock)


@pytest.mark.parametrize("system", ["swiftllm", "neo", "apex"])
def test_deadlines(system: str) -> None:
    for number in range(1, 40, 5):
        clock = Clock()
        requests = [NewRequest(f"r{i}", (2, 3, i), LONG, timeout_s=(None, 5.0, 50.0)[i % 3]) for i in range(9)]
        outcomes = {}

        async def client(
            service: LocalClient, number=number, clock=clock, requests=requests, outcomes=outcomes
        ) -> None:
            service.add_observer(AtStep(number, lambda: setattr(clock, "now_s", 20.0)))
            outcomes.update(await read_all(service.submit(requests)))

        service = with_service(make_engine(system), client, ServiceLimits(request_timeout_s=30.0), clock=clock)
        for new in requests:
            outcome, tokens = outcomes[new.request_id], expected(new)
            if outcome.error is None:
                assert outcome.token_ids == tokens
            else:
                assert outcome.error.reason == "deadline" and new.timeout_s == 5.0
                assert outcome.token_ids == tokens[: len(outcome.token_ids)]
        assert number > 20 or service.snapshot().finished["deadline"]


def test_draining_serves_what_was_taken_and_takes_nothing_new() -> None:
    requests = make_requests(8, seed=1)

    async def client(service: LocalClient) -> None:
        reading = asyncio.create_task(read_all(service.submit(requests)))
        draining = asyncio.create_task(service.drain())
        await asyncio.sleep(0)
        assert service.health.status == "stopping"
        with pytest.raises(ServiceStopping, match="shutting down"):
            service.submit(make_requests(9)[8:])  # an id that is free
        await draining
        assert {i: outcome.token_ids for i, outcome in (await reading).items()} == {
            new.request_id: expected(new) for new in requests
        }

    with_service(make_engine(), client)


def test_what_cannot_be_drained_in_time_is_told_so() -> None:
    engine = make_engine()
    gate = Gate(engine)

    async def client(service: LocalClient) -> None:
        streams = service.submit(make_requests(3, seed=1))
        await service.drain()
        gate.opened.set()
        assert {outcome.error.reason for outcome in (await read_all(streams)).values()} == {"shutdown"}

    with_service(engine, client, ServiceLimits(drain_timeout_s=0.01))


def test_an_engine_that_closes_ends_every_stream() -> None:
    engine = make_engine()
    gate = Gate(engine)
    service = EngineService(engine)

    async def client(local: LocalClient) -> None:
        streams = local.submit(make_requests(3, seed=1))
        await asyncio.to_thread(gate.reached.wait)
        gate.opened.set()
        await asyncio.to_thread(service.close)
        assert all(outcome.error or outcome.finish_reason for outcome in (await read_all(streams)).values())
        (late,) = local.submit([NewRequest("late", (2, 3), LONG)])
        local.link.hang_up()
        assert "gone" in str((await read(late)).error)
        with pytest.raises(ServiceStopping, match="gone"):
            local.submit(make_requests(1))

    run_client(service, client)
    assert engine.backend.closed


def test_observers_hear_everything_and_their_errors_do_no_harm() -> None:
    class Careful:
        tokens, finished = 0, {}

        def on_step(self, plan, result, outputs) -> None:
            self.tokens += sum(len(output.new_token_ids) for output in outputs)
            raise ValueError("not my day")

        def on_finish(self, request, reason) -> None:
            self.finished[request.request_id] = (reason, request.output_len)

    requests, observer = make_requests(8, seed=1), Careful()

    async def client(service: LocalClient) -> None:
        service.add_observer(observer)
        await read_all(service.submit(requests))

    with_service(make_engine(), client)
    assert observer.tokens == sum(len(expected(new)) for new in requests)
    assert {i: length for i, (_, length) in observer.finished.items()} == {
        new.request_id: len(expected(new)) for new in requests
    }
    assert {reason for reason, _ in observer.finished.values()} <= {"stop", "length"}


def test_the_one_in_the_way_of_the_others_is_given_up(monkeypatch) -> None:
    """A scheduler that plans nothing as long as a certain request is there."""
    engine = make_engine()
    honest = engine.scheduler.plan
    monkeypatch.setattr(
        engine.scheduler, "plan", lambda state: IterationPlan() if "r0" in state.requests else honest(state)
    )
    requests = make_requests(8, seed=1)
    outcomes, _ = serve(engine, requests)
    assert outcomes["r0"].error.reason == "stalled"
    assert [outcomes[new.request_id].token_ids for new in requests[1:]] == [expected(new) for new in requests[1:]]


def test_steps_of_which_nothing_comes_end_after_the_stall_timeout(monkeypatch) -> None:
    engine, clock = make_engine(), Clock()
    honest = engine.scheduler.plan

    def barren(state: SchedulerState) -> IterationPlan:
        clock.now_s += 1.0
        return IterationPlan(leaving=frozenset(["ghost"])) if "r0" in state.requests else honest(state)

    monkeypatch.setattr(engine.scheduler, "plan", barren)
    requests, outcomes = make_requests(8, seed=1), {}

    async def client(service: LocalClient) -> None:
        outcomes.update(await read_all(service.submit(requests)))

    with_service(engine, client, ServiceLimits(stall_timeout_s=10.0), clock=clock)
    assert outcomes["r0"].error.reason == "stalled"
    assert [outcomes[new.request_id].token_ids for new in requests[1:]] == [expected(new) for new in requests[1:]]


def test_a_step_that_hangs_is_reported_and_waited_for_with_limits(caplog, monkeypatch) -> None:
    monkeypatch.setattr("swiftllm.server.engine_loop.MAX_INTERVAL_S", 0.001)
    engine, clock = make_engine(), Clock()
    gate = Gate(engine)

    async def client(service: LocalClient) -> None:
        hurried = NewRequest("hurried", (2, 3), LONG, timeout_s=5.0)
        patient = NewRequest("patient", (2, 3), LONG, timeout_s=500.0)
        streams = service.submit([hurried, NewRequest("whenever", (2, 3), LONG), patient])
        await asyncio.to_thread(gate.reached.wait)
        clock.now_s = 9.0
        await asyncio.sleep(0.05)  # the watchdog looks many times
        assert service.health.status == "ok" and not caplog.text
        clock.now_s = 11.0
        async with asyncio.timeout(TIMEOUT_S):
            while service.health.status != "stalled":
                await asyncio.sleep(0.001)
        assert "thread engine" in caplog.text and "hurried (0/2 tokens)" in caplog.text
        assert (await read(streams[0])).error.reason == "deadline"
        with pytest.raises(ServiceStopping, match="has not come back"):
            service.submit(make_requests(1))
        clock.now_s = 21.0
        assert (await read(streams[1])).error.reason == "stalled"
        gate.opened.set()
        assert (await read(streams[2])).token_ids == expected(patient)
        assert caplog.text.count("a step has not come back") == 1

    service = with_service(engine, client, ServiceLimits(stall_timeout_s=10.0), clock=clock)
    assert service.snapshot().finished == {"deadline": 1, "stalled": 1, "length": 1}


def test_requests_that_the_engine_does_not_take_are_noticed(caplog, monkeypatch) -> None:
    engine, is_let, outcomes = make_engine(), threading.Event(), {}
    accept = EngineService._accept

    def held(self, *arguments) -> None:
        assert is_let.wait(TIMEOUT_S)
        accept(self, *arguments)

    monkeypatch.setattr(EngineService, "_accept", held)

    async def client(service: LocalClient) -> None:
        (stream,) = service.submit([NewRequest("stuck", (2, 3), LONG)])
        while service.health.status != "stalled":
            await asyncio.sleep(0.01)
        assert "has taken none of what was sent to it" in service.health.reason
        with pytest.raises(ServiceStopping, match="has taken none"):
            service.submit(make_requests(1))
        outcomes["stuck"] = await read(stream)
        is_let.set()
        while service.health.status != "ok":
            await asyncio.sleep(0.01)
        (stream,) = service.submit([NewRequest("next", (2, 3), LONG)])
        outcomes["next"] = await read(stream)

    with_service(engine, client, ServiceLimits(stall_timeout_s=0.1))
    assert outcomes["stuck"].error.reason == "stalled" and outcomes["next"].finish_reason == "length"
    assert "has taken none of what was sent to it" in caplog.text


def test_silence_counts_before_what_was_not_taken_and_ends_requests_with_tokens_too(monkeypatch) -> None:
    """An engine's process that is stopped just after a message has taken none for longer than it is silent."""
    engine = make_engine()
    gate = Gate(engine)

    async def client(service: LocalClient) -> None:
        (stream,) = service.submit([NewRequest("running", (2, 3), LONG)])
        await asyncio.to_thread(gate.reached.wait)
        stream.is_new = False
        with monkeypatch.context() as patch:
            patch.setattr(service, "data_received", lambda data: None)
            service._num_sent, service._num_untaken = service._num_taken + 1, 2
            outcome = await read(stream)
            assert outcome.error.reason == "stalled" and "has said nothing for" in str(outcome.error)
        gate.opened.set()

    with_service(engine, client, ServiceLimits(stall_timeout_s=0.1))


def test_orders_that_do_not_reach_the_engines_thread_are_noticed() -> None:
    clock = Clock()
    loop = EngineLoop(make_engine(), clock, stall_timeout_s=10.0)  # its thread does not run
    loop.link = SimpleNamespace(send=lambda message: None)

    def look(now_s: float) -> str:
        clock.now_s, looks = now_s, [False, True]
        watch_engine(loop, SimpleNamespace(wait=lambda _: looks.pop(0)))
        return loop.open_requests.health.status

    loop.open_requests.abort_requests([])  # is no order
    assert look(20.0) == "ok"
    loop.open_requests.reset_prefix_cache()
    assert look(29.0) == "ok" and look(31.0) == "stalled"
    assert "do not reach the engine's thread" in loop.open_requests.health.reason
    assert len(loop.open_requests.wait_for_orders(lambda: False)) == 1 and loop.open_requests.ordered_s is None


@pytest.mark.parametrize("system", SYSTEMS)
def test_anything_at_any_time(system: str) -> None:
    """Clients that come, leave and give up at random, deadlines, faults and a tiny cache: every stream ends, every
    token is right, and nothing is left behind."""
    for seed in range(6):
        rng = random.Random(seed)
        engine = make_engine(system, num_gpu_blocks=rng.choice((8, 16)), num_cpu_blocks=rng.choice((16, 40)), seed=seed)
        clock = Clock()
        weights = {
            name: rng.choice((0, 0, 300)) for name in ("swap", "open_gpu_batch", "run_stage", "submit", "attention")
        }

        def fault(operation: str, ids: frozenset[str], rng=rng, weights=weights, clock=clock) -> None:
            clock.now_s += 0.001
            if weights.get(operation) and rng.random() < 1 / weights[operation]:
                raise OSError(operation)

        FaultyBackend(engine, fault)
        requests = make_requests(30, seed=seed, longest=16)

        async def one(service: LocalClient, new: NewRequest, patience: int) -> None:
            try:
                (stream,) = service.submit([new])
            except (QueueFull, RequestRefused, ServiceStopping):
                return
            tokens = []
            async for delta in deltas_of(stream):
                tokens += delta.token_ids
                patience -= 1
                if patience == 0:
                    service.abort_requests([new.request_id])
            assert delta.finish_reason == "abort" or tokens == expected(new)
            assert tokens == expected(new)[: len(tokens)]

        async def client(service: LocalClient, seed=seed, requests=requests) -> None:
            rng = random.Random(seed)  # not the faults', which are drawn on another thread
            tasks = []
            for new in requests:
                new = NewRequest(new.request_id, new.prompt_token_ids, new.sampling, rng.choice((None, None, 0.5)))
                tasks.append(asyncio.create_task(one(service, new, rng.choice((1, 5, 100)))))
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            assert {getattr(outcome, "reason", outcome) for outcome in outcomes} <= {None, "deadline", "engine_error"}

        with_service(engine, client, ServiceLimits(max_queued_requests=20), clock=clock)
