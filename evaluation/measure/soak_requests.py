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
SERVED, HUNG_UP = "served", "hung up"
QUEUE_FULL, OUT_OF_REACH = "429 queue_full", "429 slo_unattainable"


class Unexpected(Exception):
    """The server behaved wrongly; the message says how."""


@dataclass(frozen=True)
class SoakRequest:
    """One request. ``ends`` are the ways in which it may end; a refusal for now (429) is always allowed.

    The client disconnects after ``hang_up_after`` events of a stream, or after ``hang_up_s`` seconds. ``tokens`` are
    output tokens that the usage must report, if the output length is forced.
    """

    kind: str
    body: bytes
    ends: tuple[str, ...] = (SERVED,)
    path: str = "/v1/completions"
    tokens: int | None = None
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
        (kind,) = self.rng.choices(list(KINDS), [kind.weight for kind in KINDS.values()])
        return self.request(kind)

    def request(self, kind: str) -> SoakRequest:
        return SoakRequest(kind, ends=KINDS[kind].ends, **KINDS[kind].draw(self))

    def prompt(self, length: int | None = None) -> list[int]:
        return self.rng.choices(range(self.vocab_size), k=length or self.rng.randint(1, MAX_PROMPT_TOKENS))

    def fields(self, **others: Any) -> dict[str, Any]:
        sampled = {"temperature": 0.8, "top_p": 0.9, "seed": self.rng.randrange(1000)}
        how = self.rng.choice([{"temperature": 0.0}, sampled, {**sampled, "logprobs": 2}])
        of_class = self.rng.choice([{}, {"service_tier": "auto"}, {"service_tier": "flex"}, {"priority": 3}])
        wanted = {"max_tokens": self.rng.randint(1, MAX_OUTPUT_TOKENS), "ignore_eos": True}
        return {"model": self.model, "prompt": self.prompt(), **wanted, **how, **of_class, **others}

    def asked(self, **fields: Any) -> dict[str, Any]:
        """A request whose number of tokens is not checked, as fields of a SoakRequest."""
        return {"body": packed(self.fields(**fields))}

    def served(self, outputs: int = 1, **fields: Any) -> dict[str, Any]:
        """A request that must get ``outputs`` times its tokens, as fields of a SoakRequest."""
        drawn = self.fields(**fields)
        return {"body": packed(drawn), "tokens": outputs * drawn["max_tokens"]}

    def plain(self) -> dict[str, Any]:
        prompt = self.rng.choice([self.prompt(), "tell me why", TWO_PROMPTS])
        return self.served(2 if prompt is TWO_PROMPTS else 1, prompt=prompt)

    def structured(self) -> dict[str, Any]:
        number = self.rng.randint(1, 9)
        grammar: dict[str, Any] = self.rng.choice(
            [
                {"structured_outputs": {"regex": f"[a-z]{{1,{number}}}"}},
                {"structured_outputs": {"choice": ["yes", "no", str(number)]}},
                {"response_format": {"type": "json_object"}},
            ]
        )
        return self.asked(stream=self.rng.random() < 0.5, ignore_eos=False, **grammar)

    def with_tools(self) -> dict[str, Any]:
        """A chat whose answer must call a tool; the call may be cut."""
        parameters = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        drawn = self.fields(tools=[tool], tool_choice="required", stream=self.rng.random() < 0.5, ignore_eos=False)
        del drawn["prompt"]
        drawn["logprobs"] = False
        drawn["messages"] = [{"role": "user", "content": "tell me why"}]
        return {"body": packed(drawn), "path": "/v1/chat/completions"}

    def malformed(self) -> dict[str, Any]:
        whole = packed(self.fields())
        broken = [b"", whole[: self.rng.randrange(len(whole))], b"[1, 2", b"\xff\xfe", packed({"model": self.model})]
        return {"body": self.rng.choice([*broken, *(packed(self.fields(**fields)) for fields in WRONG_FIELDS)])}


def packed(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields).encode()


WRONG_FIELDS: tuple[dict[str, Any], ...] = (
    {"prompt": []}, {"prompt": {"a": 1}}, {"max_tokens": "ten"}, {"max_tokens": 0}, {"temperature": -1.0}, {"n": 0},
    {"service_tier": "gold"}, {"service_tier": "priority", "priority": 1},
)  # fmt: skip


@dataclass(frozen=True)
class RequestKind:
    """A kind of request: how often it comes, its fields, and how it may end."""

    weight: float
    draw: Callable[[RequestSource], dict[str, Any]]
    ends: tuple[str, ...] = (SERVED,)


LEFT = (HUNG_UP, SERVED)
KINDS = {
    "plain": RequestKind(28, RequestSource.plain),
    "stream": RequestKind(28, lambda s: s.served(stream=True, stream_options={"include_usage": True})),
    "several outputs": RequestKind(4, lambda s: s.served(3, n=3)),
    "structured": RequestKind(4, RequestSource.structured),
    "tools": RequestKind(4, RequestSource.with_tools),
    "stream, hung up": RequestKind(12, lambda s: s.asked(stream=True) | {"hang_up_after": s.rng.randint(1, 4)}, LEFT),
    "plain, hung up": RequestKind(8, lambda s: s.asked() | {"hang_up_s": s.rng.uniform(0.0, 0.1)}, LEFT),
    "deadline": RequestKind(
        4,
        lambda s: s.asked(timeout=HURRY_S, stream=s.rng.random() < 0.5),
        (SERVED, "504 deadline", "stream: deadline"),
    ),
    "too long": RequestKind(
        4,
        lambda s: s.asked(prompt=s.prompt(s.max_model_len + s.rng.randint(0, 50))),
        ("400 context_length_exceeded",),
    ),
    "wrong model": RequestKind(3, lambda s: s.asked(model="another"), ("404 model_not_found",)),
    "unknown token": RequestKind(
        2, lambda s: s.asked(prompt=[s.vocab_size + s.rng.randrange(1000)]), ("400 request_refused",)
    ),
    "malformed": RequestKind(6, RequestSource.malformed, ("400 invalid_value",)),
    "wrong path": RequestKind(1, lambda s: {"body": b"{}", "path": "/v1/nothing"}, ("404 None",)),
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
    if end not in (*request.ends, QUEUE_FULL, OUT_OF_REACH):
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
