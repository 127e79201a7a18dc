"""Generates and sends the requests of a soak: valid ones, invalid ones, and ones whose client hangs up."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS = 60, 24
HURRY_S = 0.002
"""Deadline in seconds of requests that should miss it."""

TWO_PROMPTS = ["one of them", "and the other"]

SERVED = "served"
HUNG_UP = "hung up"
QUEUE_FULL = "429 queue_full"
OUT_OF_REACH = "429 slo_unattainable"


class Unexpected(Exception):
    """The server behaved wrongly; the message says how."""


@dataclass(frozen=True)
class SoakRequest:
    """One request. ``ends`` are the ways in which it may end; a refusal for now (429) is always allowed.

    The client disconnects after ``hang_up_after`` events of a stream, or after ``hang_up_s`` seconds.
    """

    kind: str
    body: bytes
    ends: frozenset[str]
    path: str = "/v1/completions"
    tokens: int | None = None
    """Output tokens that the usage must report, if the output length is forced."""
    hang_up_after: int | None = None
    hang_up_s: float | None = None


@dataclass
class RequestSource:
    """Draws random requests for a server with this vocabulary size and maximum length (tokens)."""

    model: str
    vocab_size: int
    max_model_len: int
    rng: random.Random = field(default_factory=random.Random)

    def next_request(self) -> SoakRequest:
        """A request of a random kind, drawn by the weights in KINDS."""
        kinds, weights = zip(*KINDS.items(), strict=True)
        kind = self.rng.choices(kinds, weights)[0]
        return kind(self)

    def prompt(self, length: int | None = None) -> list[int]:
        return self.rng.choices(range(self.vocab_size), k=length or self.rng.randint(1, MAX_PROMPT_TOKENS))

    def fields(self, **others: Any) -> dict[str, Any]:
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": self.rng.randrange(1000)}
        how = self.rng.choice([{"temperature": 0.0}, sampled, {**sampled, "logprobs": 2}])
        of_class = self.rng.choice([{}, {"service_tier": "auto"}, {"service_tier": "flex"}, {"priority": 3}])
        wanted = {"max_tokens": self.rng.randint(1, MAX_OUTPUT_TOKENS), "ignore_eos": True}
        return {"model": self.model, "prompt": self.prompt(), **wanted, **how, **of_class, **others}


def packed(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def plain_request(source: RequestSource) -> SoakRequest:
    fields = source.fields(prompt=source.rng.choice([source.prompt(), "tell me why", TWO_PROMPTS]))
    outputs = 2 if fields["prompt"] == TWO_PROMPTS else 1
    return SoakRequest("plain", packed(fields), frozenset({SERVED}), tokens=outputs * fields["max_tokens"])


def several_outputs_request(source: RequestSource) -> SoakRequest:
    fields = source.fields(n=3)
    return SoakRequest("several outputs", packed(fields), frozenset({SERVED}), tokens=3 * fields["max_tokens"])


def stream_request(source: RequestSource) -> SoakRequest:
    fields = source.fields(stream=True, stream_options={"include_usage": True})
    return SoakRequest("stream", packed(fields), frozenset({SERVED}), tokens=fields["max_tokens"])


def left_stream_request(source: RequestSource) -> SoakRequest:
    after = source.rng.randint(1, 4)
    return SoakRequest(
        "stream, hung up", packed(source.fields(stream=True)), frozenset({HUNG_UP, SERVED}), hang_up_after=after
    )


def left_plain_request(source: RequestSource) -> SoakRequest:
    seconds = source.rng.uniform(0.0, 0.1)
    return SoakRequest("plain, hung up", packed(source.fields()), frozenset({HUNG_UP, SERVED}), hang_up_s=seconds)


def hurried_request(source: RequestSource) -> SoakRequest:
    fields = source.fields(timeout=HURRY_S, stream=source.rng.random() < 0.5)
    return SoakRequest("deadline", packed(fields), frozenset({SERVED, "504 deadline", "stream: deadline"}))


def too_long_request(source: RequestSource) -> SoakRequest:
    fields = source.fields(prompt=source.prompt(source.max_model_len + source.rng.randint(0, 50)))
    return SoakRequest("too long", packed(fields), frozenset({"400 context_length_exceeded"}))


def wrong_model_request(source: RequestSource) -> SoakRequest:
    return SoakRequest("wrong model", packed(source.fields(model="another")), frozenset({"404 model_not_found"}))


def outside_vocabulary_request(source: RequestSource) -> SoakRequest:
    fields = source.fields(prompt=[source.vocab_size + source.rng.randrange(1000)])
    return SoakRequest("unknown token", packed(fields), frozenset({"400 request_refused"}))


def malformed_request(source: RequestSource) -> SoakRequest:
    whole = packed(source.fields())
    wrong = source.rng.choice(
        [
            b"",
            whole[: source.rng.randrange(len(whole))],
            b"[1, 2",
            b"\xff\xfe",
            packed({"model": source.model}),
            packed(source.fields(prompt=[])),
            packed(source.fields(prompt={"a": 1})),
            packed(source.fields(max_tokens="ten")),
            packed(source.fields(max_tokens=0)),
            packed(source.fields(temperature=-1.0)),
            packed(source.fields(n=0)),
            packed(source.fields(service_tier="gold")),
            packed(source.fields(service_tier="priority", priority=1)),
        ]
    )
    return SoakRequest("malformed", wrong, frozenset({"400 invalid_value"}))


def wrong_path_request(source: RequestSource) -> SoakRequest:
    return SoakRequest("wrong path", b"{}", frozenset({"404 None"}), path="/v1/nothing")


KINDS: dict[Callable[[RequestSource], SoakRequest], float] = {
    plain_request: 28,
    stream_request: 28,
    several_outputs_request: 4,
    left_stream_request: 12,
    left_plain_request: 8,
    hurried_request: 4,
    too_long_request: 4,
    wrong_model_request: 3,
    outside_vocabulary_request: 2,
    malformed_request: 6,
    wrong_path_request: 1,
}


async def send_request(client: httpx.AsyncClient, request: SoakRequest) -> str:
    """Send a request, wait for its end, and return how it ended.

    Raises:
        Unexpected: it ended in a way that is not allowed, or its answer is incomplete.
        httpx.HTTPError: the connection failed.
    """
    try:
        async with asyncio.timeout(request.hang_up_s):
            end = await read_answer(client, request)
    except TimeoutError:
        end = HUNG_UP
    if end not in request.ends and end not in (QUEUE_FULL, OUT_OF_REACH):
        raise Unexpected(f"{request.kind}: {end}; body {request.body[:200]!r}")
    return end


async def read_answer(client: httpx.AsyncClient, request: SoakRequest) -> str:
    headers = {"Content-Type": "application/json"}
    async with client.stream("POST", request.path, content=request.body, headers=headers) as response:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return await read_events(response, request)
        body = json.loads(await response.aread())
    if not response.is_success:
        return f"{response.status_code} {body['error']['code']}"
    check_tokens(request, body["usage"])
    return SERVED


async def read_events(response: httpx.Response, request: SoakRequest) -> str:
    usage, count = None, 0
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            check_tokens(request, usage)
            return SERVED
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return f"stream: {event['error']['code']}"
        usage = event.get("usage") or usage
        count += 1
        if count == request.hang_up_after:
            return HUNG_UP
    raise Unexpected(f"{request.kind}: the stream ended after {count} events without [DONE]")


def check_tokens(request: SoakRequest, usage: Mapping[str, int] | None) -> None:
    if request.tokens is not None and (usage is None or usage["completion_tokens"] != request.tokens):
        raise Unexpected(f"{request.kind}: usage {usage} where {request.tokens} tokens were asked for")
