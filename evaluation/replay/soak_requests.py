"""What a soak sends: requests that a server must serve or refuse, or whose client hangs up, and how each may end."""

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
"""The deadline of a request that is to miss it."""

TWO_PROMPTS = ["one of them", "and the other"]

SERVED = "served"
HUNG_UP = "hung up"
QUEUE_FULL = "429 queue_full"


class Unexpected(Exception):
    """The server did what it must not; the message says what."""


@dataclass(frozen=True)
class Asked:
    """One request. ``ends`` are the ways in which it may end, apart from a full queue.

    ``hang_up_after`` events of a stream, or ``hang_up_s`` seconds, the client goes away.
    """

    kind: str
    body: bytes
    ends: frozenset[str]
    path: str = "/v1/completions"
    tokens: int | None = None
    """What the usage must say, where the output's length is forced."""
    hang_up_after: int | None = None
    hang_up_s: float | None = None


@dataclass
class Draw:
    """Draws requests for a server with such a vocabulary and longest request."""

    model: str
    vocab_size: int
    max_model_len: int
    rng: random.Random = field(default_factory=random.Random)

    def next(self) -> Asked:
        """A request of a kind drawn by its weight in KINDS."""
        kinds, weights = zip(*KINDS.items(), strict=True)
        kind = self.rng.choices(kinds, weights)[0]
        return kind(self)

    def prompt(self, length: int | None = None) -> list[int]:
        return self.rng.choices(range(self.vocab_size), k=length or self.rng.randint(1, MAX_PROMPT_TOKENS))

    def fields(self, **others: Any) -> dict[str, Any]:
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": self.rng.randrange(1000)}
        how = self.rng.choice([{"temperature": 0.0}, sampled, {**sampled, "logprobs": 2}])
        wanted = {"max_tokens": self.rng.randint(1, MAX_OUTPUT_TOKENS), "ignore_eos": True}
        return {"model": self.model, "prompt": self.prompt(), **wanted, **how, **others}


def packed(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()


def plain(draw: Draw) -> Asked:
    fields = draw.fields(prompt=draw.rng.choice([draw.prompt(), "tell me why", TWO_PROMPTS]))
    outputs = 2 if fields["prompt"] == TWO_PROMPTS else 1
    return Asked("plain", packed(fields), frozenset({SERVED}), tokens=outputs * fields["max_tokens"])


def several(draw: Draw) -> Asked:
    fields = draw.fields(n=3)
    return Asked("several outputs", packed(fields), frozenset({SERVED}), tokens=3 * fields["max_tokens"])


def stream(draw: Draw) -> Asked:
    fields = draw.fields(stream=True, stream_options={"include_usage": True})
    return Asked("stream", packed(fields), frozenset({SERVED}), tokens=fields["max_tokens"])


def stream_left(draw: Draw) -> Asked:
    after = draw.rng.randint(1, 4)
    return Asked("stream, hung up", packed(draw.fields(stream=True)), frozenset({HUNG_UP, SERVED}), hang_up_after=after)


def plain_left(draw: Draw) -> Asked:
    seconds = draw.rng.uniform(0.0, 0.1)
    return Asked("plain, hung up", packed(draw.fields()), frozenset({HUNG_UP, SERVED}), hang_up_s=seconds)


def hurried(draw: Draw) -> Asked:
    fields = draw.fields(timeout=HURRY_S, stream=draw.rng.random() < 0.5)
    return Asked("deadline", packed(fields), frozenset({SERVED, "504 deadline", "stream: deadline"}))


def too_long(draw: Draw) -> Asked:
    fields = draw.fields(prompt=draw.prompt(draw.max_model_len + draw.rng.randint(0, 50)))
    return Asked("too long", packed(fields), frozenset({"400 context_length_exceeded"}))


def wrong_model(draw: Draw) -> Asked:
    return Asked("wrong model", packed(draw.fields(model="another")), frozenset({"404 model_not_found"}))


def outside_vocabulary(draw: Draw) -> Asked:
    fields = draw.fields(prompt=[draw.vocab_size + draw.rng.randrange(1000)])
    return Asked("unknown token", packed(fields), frozenset({"400 request_refused"}))


def malformed(draw: Draw) -> Asked:
    whole = packed(draw.fields())
    wrong = draw.rng.choice(
        [
            b"",
            whole[: draw.rng.randrange(len(whole))],
            b"[1, 2",
            b"\xff\xfe",
            packed({"model": draw.model}),
            packed(draw.fields(prompt=[])),
            packed(draw.fields(prompt={"a": 1})),
            packed(draw.fields(max_tokens="ten")),
            packed(draw.fields(max_tokens=0)),
            packed(draw.fields(temperature=-1.0)),
            packed(draw.fields(n=0)),
        ]
    )
    return Asked("malformed", wrong, frozenset({"400 invalid_value"}))


def wrong_path(draw: Draw) -> Asked:
    return Asked("wrong path", b"{}", frozenset({"404 None"}), path="/v1/nothing")


KINDS: dict[Callable[[Draw], Asked], float] = {
    plain: 28,
    stream: 28,
    several: 4,
    stream_left: 12,
    plain_left: 8,
    hurried: 4,
    too_long: 4,
    wrong_model: 3,
    outside_vocabulary: 2,
    malformed: 6,
    wrong_path: 1,
}


async def exchange(client: httpx.AsyncClient, asked: Asked) -> str:
    """Send a request, see it to its end, and return how it ended.

    Raises:
        Unexpected: it ended in no way it may, or its answer is not whole.
        httpx.HTTPError: the connection failed.
    """
    try:
        async with asyncio.timeout(asked.hang_up_s):
            end = await answer(client, asked)
    except TimeoutError:
        end = HUNG_UP
    if end not in asked.ends and end != QUEUE_FULL:
        raise Unexpected(f"{asked.kind}: {end}; body {asked.body[:200]!r}")
    return end


async def answer(client: httpx.AsyncClient, asked: Asked) -> str:
    async with client.stream("POST", asked.path, content=asked.body) as response:
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return await events(response, asked)
        body = json.loads(await response.aread())
    if not response.is_success:
        return f"{response.status_code} {body['error']['code']}"
    check_tokens(asked, body["usage"])
    return SERVED


async def events(response: httpx.Response, asked: Asked) -> str:
    usage, count = None, 0
    async for line in response.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            check_tokens(asked, usage)
            return SERVED
        event = json.loads(line.removeprefix("data: "))
        if "error" in event:
            return f"stream: {event['error']['code']}"
        usage = event.get("usage") or usage
        count += 1
        if count == asked.hang_up_after:
            return HUNG_UP
    raise Unexpected(f"{asked.kind}: the stream ended after {count} events without [DONE]")


def check_tokens(asked: Asked, usage: Mapping[str, int] | None) -> None:
    if asked.tokens is not None and (usage is None or usage["completion_tokens"] != asked.tokens):
        raise Unexpected(f"{asked.kind}: usage {usage} where {asked.tokens} tokens were asked for")
