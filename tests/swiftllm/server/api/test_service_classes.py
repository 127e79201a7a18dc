"""The service class of a request: the fields that set it, the tier that the answer names, and room in the queue."""

import asyncio
import json
import socket
import threading
import time
from contextlib import ExitStack

import pytest

from apex.strategy import StrategyConfig
from swiftllm import SamplingParams
from swiftllm.core.request import ServiceClass
from swiftllm.scheduling.state import ArrivalQueue
from swiftllm.server.client import QueueFull
from swiftllm.server.engine_status import take_snapshot
from swiftllm.server.messages import NewRequest, ServiceLimits
from swiftllm.server.metrics import Metrics
from swiftllm.server.parsing import as_api_error
from swiftllm.server.protocol import CompletionRequest
from tests.reference.fake_engine import fake_engine, flat_table
from tests.swiftllm.server.api.test_lifecycle import COMPLETIONS, LONG, gated, request_bytes, wait_for
from tests.swiftllm.server.http_server import Gate
from tests.swiftllm.server.serving import TIMEOUT_S, read_all, with_service

CHAT = "/v1/chat/completions"
LS, BE = ServiceClass


@pytest.mark.parametrize(
    ("fields", "service_class", "tier"),
    [
        ({}, LS, None),
        ({"service_tier": None, "priority": None}, LS, None),
        ({"priority": 0}, LS, None),
        ({"priority": -3}, LS, None),
        ({"priority": 1}, BE, None),
        ({"service_tier": "auto"}, LS, "default"),
        ({"service_tier": "default"}, LS, "default"),
        ({"service_tier": "priority"}, LS, "priority"),
        ({"service_tier": "priority", "priority": -1}, LS, "priority"),
        ({"service_tier": "scale"}, LS, "default"),
        ({"service_tier": "fast"}, LS, "priority"),  # OpenAI's answer
        ({"service_tier": "ultrafast"}, LS, "priority"),
        ({"service_tier": "flex"}, BE, "flex"),
        ({"service_tier": "flex", "priority": 0}, BE, "flex"),
        ({"service_tier": "flex", "priority": 5}, BE, "flex"),
        ({"service_tier": "auto", "priority": 5}, BE, "flex"),
    ],
)
def test_fields_and_the_class_they_set(fields, service_class, tier):
    body = CompletionRequest.model_validate({"prompt": "a", **fields})
    body.check_fields()
    assert (body.service_class, body.tier_served) == (service_class, tier)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_the_answer_names_the_tier(server, path):
    body = {"max_tokens": 3, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": "Hello"}]} if path == CHAT else {"prompt": "Hello"}
    assert "service_tier" not in server.post(path, body).json()
    assert server.post(path, {**body, "service_tier": "flex"}).json()["service_tier"] == "flex"
    with server.http.stream("POST", path, json={**body, "service_tier": "auto", "stream": True}) as answer:
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert len(events) > 2
    assert {json.loads(event)["service_tier"] for event in events[:-1]} == {"default"}


def test_the_openai_client_sets_the_class(server):
    answer = server.client().chat.completions.create(
        model="tiny-chat", messages=[{"role": "user", "content": "Hello"}], max_tokens=3, service_tier="flex"
    )
    assert answer.service_tier == "flex"
    deadline_s = time.monotonic() + TIMEOUT_S
    while not (counts := server.service.snapshot().classes) and time.monotonic() < deadline_s:  # it follows the answer
        time.sleep(0.01)
    assert counts["best-effort"].output_tokens > 0


def test_best_effort_requests_take_no_place_in_the_queue_of_the_others():
    with gated(max_queued_requests=1, max_queued_best_effort=2) as (server, gate, watched):
        answers = []
        bodies = [{**LONG, "service_tier": "flex"}, {**LONG, "priority": 1}, LONG]
        threads = [
            threading.Thread(target=lambda b=body: answers.append(server.post(COMPLETIONS, b))) for body in bodies
        ]
        for thread in threads:
            thread.start()
            wait_for(watched.submitted)
        for body, words in ((LONG, "1 requests are"), (bodies[0], "2 best-effort requests are")):
            refusal = server.post(COMPLETIONS, body)
            assert refusal.status_code == 429 and int(refusal.headers["Retry-After"]) >= 1
            assert words in refusal.json()["error"]["message"]
        assert server.post(COMPLETIONS, {**bodies[0], "n": 3}).json()["error"]["code"] == "too_many_choices"
        gate.open()
        for thread in threads:
            thread.join()
        assert [answer.status_code for answer in answers] == [200, 200, 200]


def test_five_thousand_best_effort_requests_refuse_no_other():
    """The others are admitted at once, and end before the backlog."""
    engine = fake_engine("vllm", num_gpu_blocks=40, num_cpu_blocks=0, max_tokens=64)
    gate = Gate(engine)
    short = SamplingParams(max_tokens=2, ignore_eos=True)

    async def client(service):
        backlog = service.submit([NewRequest(f"b{i}", (2, 3), short, service_class=BE) for i in range(5000)])
        urgent = service.submit(
            [NewRequest(f"u{i}", (4, 5), short) for i in range(ServiceLimits().max_queued_requests)]
        )
        with pytest.raises(QueueFull):
            service.submit([NewRequest("late", (4, 5), short)])
        gate.open()
        await read_all(urgent)
        assert (await service.snapshot()).classes["best-effort"].waiting > 4000
        await read_all(backlog)

    with_service(engine, client)


def test_a_request_that_cannot_keep_its_target_is_told_when_to_come_again():
    """The first token is due in a second. A pass takes 0.09 s and two of the prompts, so 200 are too many."""
    strategy, table = StrategyConfig(ttft_slo_s=1.0, tpot_slo_s=0.2), flat_table(linear_s=0.03)
    engine = fake_engine(
        "omniserve", num_gpu_blocks=4000, num_cpu_blocks=10, max_tokens=64, strategy=strategy, table=table
    )
    short = SamplingParams(max_tokens=2, ignore_eos=True)

    async def client(service):
        metrics = Metrics(service, "tiny")
        prompt = (4, 5) * 16
        outcomes = await read_all(service.submit([NewRequest(f"u{i}", prompt, short) for i in range(200)]))
        refusals = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
        assert 0 < len(refusals) < 200
        for refusal in map(as_api_error, refusals):
            assert (refusal.status, refusal.code) == (429, "slo_unattainable")
            assert int(refusal.headers["retry-after"]) >= 1
        rest = await read_all(service.submit([NewRequest("rest", prompt, short, service_class=BE)]))
        assert rest["rest"].error is None
        counts = {}
        while sum(counts.values()) < 200 + 200 - len(refusals):  # those not refused are judged by both targets
            await asyncio.sleep(0.01)
            counts = {
                (sample.labels["slo"], sample.labels["outcome"]): sample.value
                for family in metrics.families(await service.report())
                for sample in family.samples
                if sample.name == "apex:slo_requests_total"
            }
        assert counts["ttft", "refused"] == len(refusals)

    with_service(engine, client)


def test_a_request_that_comes_after_many_best_effort_ones_is_served_before_them():
    """All have arrived before the second step, whose plan has room for one of the prompts. The first step may be under
    way before the last one arrives."""

    class Plans:
        def __init__(self):
            self.classes = []

        def on_step(self, plan, result, outputs):
            self.classes.append({request.service_class for request in plan.requests()})

        def on_finish(self, request, reason):
            pass

    def body(number, **fields):
        return request_bytes({"prompt": [5 + number % 20] * 30, "max_tokens": 1, **fields})

    plans = Plans()
    with gated("vllm", max_queued_best_effort=60, num_gpu_blocks=64) as (server, gate, watched), ExitStack() as stack:
        server.service.add_observer(plans)
        messages = [*(body(number, priority=1) for number in range(40)), body(40)]
        connections = []
        for message in messages:
            connections.append(stack.enter_context(socket.create_connection(("127.0.0.1", server.port))))
            connections[-1].sendall(message)
            wait_for(watched.submitted)
        gate.open()
        for connection in connections:
            assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert LS in plans.classes[0] | plans.classes[1]
    assert sum(classes == {BE} for classes in plans.classes) > 30


def test_the_class_of_a_body_that_began_before_it_was_complete_is_known_once_it_is_parsed():
    large = {"prompt": [5], "max_tokens": 1, "user": "x" * 100_000, "service_tier": "flex"}
    with gated() as (server, gate, _):
        gate.open()
        assert server.post(COMPLETIONS, large).json()["service_tier"] == "flex"
        assert server.post(COMPLETIONS, {"user": {"priority": 1}, "prompt": [5]}).status_code == 400


def test_an_iteration_looks_at_few_of_five_thousand_waiting_requests():
    """Counted are the requests that are read from queues, of one step and the snapshot after it."""
    looked_at = 0

    class Counting(ArrivalQueue):
        def __getitem__(self, index):
            nonlocal looked_at
            item = super().__getitem__(index)
            looked_at += len(item) if isinstance(index, slice) else 1
            return item

        def __iter__(self):
            nonlocal looked_at
            looked_at += len(self)
            return super().__iter__()

    engine = fake_engine("omniserve", num_gpu_blocks=16, num_cpu_blocks=16, max_tokens=64)
    engine.state.waiting = Counting()
    short = SamplingParams(max_tokens=8, ignore_eos=True)
    for number in range(5000):
        engine.add(engine.make_request(f"b{number}", (2, 3), short, service_class=BE))
    engine.add(engine.make_request("u", (2, 3), short))
    for _ in range(20):
        looked_at = 0
        engine.step()
        assert take_snapshot(engine, (), 0).classes[BE.value].waiting > 4900
        assert looked_at < 500
