"""Replays a workload against a running OpenAI-compatible server. Every token is timed at the client.

Open loop: a request is sent at its arrival, however busy the server is, over its own connection. A turn of a
conversation is sent when the one before has been answered, after its pause; its prompt has other tokens than the answer
where that was, so that a server's cache finds what the turn before asked. Closed loop: a fixed number of requests is in
flight, and a request arrives when it is sent. Output lengths are forced (end-of-sequence
ignored) and decoding is greedy, so every server does the same work. Everything runs on one event loop in one thread.
Each request becomes a record, with all its tokens or with the reason of its failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import resource
import ssl
import time
from collections.abc import Callable
from typing import Any

import httpx
from httpx_sse import EventSource, SSEError, aconnect_sse

from apex.replay.records import REFUSED, Replay, ReplayRequest, RequestRecord
from apex.workloads.requests import Workload
from evaluation.measure.server import PROBE_TIMEOUT_S, SHOWN_CHARS, Server, error_message, refusal, still_running
from evaluation.results.progress import TokenProgress
from swiftllm.core.request import ServiceClass

LOOK_EVERY_S = 0.1
SPARE_FILES = 256
BEST_EFFORT_PRIORITY = 1
"""vLLM's field `priority`, in which lower is earlier; vLLM needs `--scheduling-policy priority` for it."""


class BadAnswer(Exception):
    """The answer to a request is not a valid completion; the message describes it."""


# -- one request ------------------------------------------------------------------------------------------------------


class SentRequest:
    """A request in flight and its answer so far. Times are seconds from the start of the replay.

    The server's running count gives the number of tokens in a chunk (``continuous_usage_stats`` of vLLM and SGLang);
    the tokens of one chunk share its time. If the server counts only at the end, the tokens are spread evenly over the
    chunks, with the first token on the first chunk and the last token on the last.
    """

    def __init__(self, request: ReplayRequest) -> None:
        self.request = request
        self.arrival_s = request.arrival_s  # replaced where it depends on the end of another request
        self.is_over = asyncio.Event()
        self.sent_s: float | None = None
        self.finish_s: float | None = None
        self.finish_reason: str | None = None
        self.failure: str | None = None
        self.num_tokens: int | None = None  # latest count of the server
        self.counts_chunks: bool | None = None  # whether chunks carry counts; None before the first chunk
        self.chunk_times_s: list[float] = []
        self.counted_times_s: list[float] = []

    def body(self, model: str) -> dict[str, Any]:
        is_best_effort = self.request.service_class is ServiceClass.BEST_EFFORT
        return {
            "model": model,
            "prompt": self.request.prompt_token_ids,
            "max_tokens": self.request.output_len,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **({"priority": BEST_EFFORT_PRIORITY} if is_best_effort else {}),
        }

    def receive(self, data: str, now_s: float) -> None:
        """Record an event.

        Raises:
            BadAnswer: the event is an error or no completion chunk, or the server counts more tokens than requested.
        """
        try:
            chunk = json.loads(data)
            if chunk.get("error"):
                raise BadAnswer(f"the server failed in the middle of the stream: {error_message(chunk)}")
            choices, usage = chunk["choices"], chunk.get("usage")
            count = int(usage["completion_tokens"]) if usage else None
            if choices:
                text, reason = choices[0]["text"], choices[0].get("finish_reason")
                self.finish_reason = reason or self.finish_reason
                if self.counts_chunks is None and (text or count):
                    self.counts_chunks = count is not None
                if text or reason is None:  # otherwise the event only closes the stream
                    self.chunk_times_s.append(now_s)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise BadAnswer(f"malformed event {data[:SHOWN_CHARS]!r}") from error
        if count is not None:
            self.num_tokens = count
            if count > self.request.output_len:
                raise BadAnswer(f"{count} tokens where {self.request.output_len} were asked for")
            self.counted_times_s += [now_s] * (count - len(self.counted_times_s))

    def end(self) -> None:
        """Check the server's count at the end of the stream.

        Raises:
            BadAnswer: the server gave no count, or not the requested one.
        """
        wanted = self.request.output_len
        if self.num_tokens is None:
            raise BadAnswer(
                f"no usage in the stream of {len(self.chunk_times_s)} chunks: it may not have {wanted} tokens"
            )
        if self.num_tokens != wanted:
            raise BadAnswer(f"{self.num_tokens} of {wanted} tokens (finish reason: {self.finish_reason or 'none'})")

    @property
    def tokens_so_far(self) -> int:
        return len(self.counted_times_s if self.counts_chunks else self.chunk_times_s)

    def token_times_s(self) -> tuple[float, ...]:
        if self.counts_chunks:
            return tuple(self.counted_times_s)
        if self.num_tokens is None:
            return tuple(self.chunk_times_s)
        return spread_over(self.chunk_times_s or self.counted_times_s, self.num_tokens)

    def record(self) -> RequestRecord:
        times = self.token_times_s()
        told = {name: getattr(self, name) for name in ("arrival_s", "finish_s", "finish_reason", "failure")}
        return RequestRecord(
            request_id=self.request.request_id,
            prompt_len=len(self.request.prompt_token_ids),
            wanted_output_len=self.request.output_len,
            token_times_s=times,
            first_token_s=times[0] if times else None,
            service_class=self.request.service_class.value,
            **told,
        )


def spread_over(chunk_times_s: list[float], num_tokens: int) -> tuple[float, ...]:
    """A time for each of ``num_tokens`` tokens, if it is unknown which chunk carried which token."""
    last = len(chunk_times_s) - 1
    gaps = max(1, num_tokens - 1)
    return tuple(chunk_times_s[round(token * last / gaps)] for token in range(num_tokens))


# -- all requests -----------------------------------------------------------------------------------------------------


def replay_workload(
    server: Server,
    workload: Workload,
    progress: TokenProgress | None = None,
    stall_timeout_s: float = 120.0,
    request_timeout_s: float = 1800.0,
    ended: Callable[[], str | None] = still_running,
    duration_s: float | None = None,
) -> Replay:
    """Send all requests of ``workload`` at their arrivals, or in a closed loop, and read their answers to the end.

    A request becomes a failed record if the server refuses it, breaks it off, answers wrongly or takes longer than
    ``request_timeout_s``. If no request in flight gets a token or ends for ``stall_timeout_s``, all unfinished requests
    fail; so they do at once when ``ended`` returns a reason why the server will answer no more. After ``duration_s``
    the unfinished requests are broken off; their records have the tokens so far.
    ``stats["max_send_lag_s"]`` is this client's largest delay in sending a latency-sensitive request. Measured
    latencies contain that delay although the server did not cause it. ``stats["max_best_effort_send_lag_s"]`` is the
    same of best-effort requests, if there are any.
    """
    replay = HttpReplay(server, workload, request_timeout_s, ended)
    return asyncio.run(replay.run(progress, stall_timeout_s, math.inf if duration_s is None else duration_s))


class HttpReplay:
    """The state of a replay while it runs."""

    def __init__(
        self, server: Server, workload: Workload, request_timeout_s: float, ended: Callable[[], str | None]
    ) -> None:
        self.server = server
        self.ended = ended
        self.request_timeout_s = request_timeout_s
        self.streams = [SentRequest(request) for request in workload.requests]
        self.concurrency = workload.lengths.spec.concurrency
        self.free = asyncio.Semaphore(self.concurrency or len(self.streams))
        self.in_flight = 0
        self.last_progress_s = 0.0
        self.ssl_context = ssl.create_default_context()  # one for all clients: reading certificates takes 20 ms

    def now(self) -> float:
        return time.perf_counter() - self.start_s

    async def run(self, progress: TokenProgress | None, stall_timeout_s: float, duration_s: float) -> Replay:
        allow_open_files(len(self.streams) + SPARE_FILES)
        self.start_s = time.perf_counter()
        sender = asyncio.create_task(self.send_all())
        end = None
        try:
            while not sender.done() and end is None:
                left_s = max(0.0, duration_s - self.now())
                await asyncio.wait((sender,), timeout=min(LOOK_EVERY_S, stall_timeout_s / 4, left_s))
                if progress is not None:
                    progress.update(sum(stream.tokens_so_far for stream in self.streams))
                end = self.ended()
                if end is None and self.now() >= duration_s:
                    end = f"broken off after {duration_s:g} s"
                if end is None and self.in_flight and self.now() - self.last_progress_s > stall_timeout_s:
                    end = await self.describe_stall(stall_timeout_s)
        finally:
            sender.cancel()
            await asyncio.wait((sender,))
        if end is None:
            sender.result()  # raises an unexpected error of a request, if there was one
        for stream in self.streams:
            if stream.finish_s is None:
                stream.failure = end
        stats = {"max_send_lag_s": self.max_send_lag_s(ServiceClass.LATENCY_SENSITIVE)}
        if self.of_class(ServiceClass.BEST_EFFORT):
            stats["max_best_effort_send_lag_s"] = self.max_send_lag_s(ServiceClass.BEST_EFFORT)
        return Replay(tuple(stream.record() for stream in self.streams), self.now(), stats)

    def of_class(self, service_class: ServiceClass) -> list[SentRequest]:
        return [stream for stream in self.streams if stream.request.service_class is service_class]

    def max_send_lag_s(self, service_class: ServiceClass) -> float:
        streams = self.of_class(service_class)
        return max((stream.sent_s - stream.arrival_s for stream in streams if stream.sent_s is not None), default=0.0)

    async def send_all(self) -> None:
        """Send each class by a task of its own, so that thousands of one class that arrive at once delay no other."""
        async with asyncio.TaskGroup() as group:
            for service_class in ServiceClass:
                firsts = [stream for stream in self.of_class(service_class) if stream.request.after is None]
                group.create_task(self.send_in_order(firsts, group))
            by_id = {stream.request.request_id: stream for stream in self.streams}
            for stream in self.streams:
                if stream.request.after is not None:
                    group.create_task(self.send_after(by_id[stream.request.after], stream))

    async def send_in_order(self, streams: list[SentRequest], group: asyncio.TaskGroup) -> None:
        """Begin at most one request in a pass of the event loop, which also serves the others in flight."""
        for stream in sorted(streams, key=lambda stream: stream.request.arrival_s):
            await asyncio.sleep(max(0.0, stream.request.arrival_s - self.now()))
            await self.free.acquire()
            task = group.create_task(self.complete(stream))
            task.add_done_callback(lambda _: self.free.release())

    async def send_after(self, before: SentRequest, stream: SentRequest) -> None:
        """Send a turn when the one before has been answered, or has failed, after its pause."""
        await before.is_over.wait()
        stream.arrival_s = self.now() + stream.request.arrival_s
        await asyncio.sleep(stream.request.arrival_s)
        await self.complete(stream)

    async def complete(self, stream: SentRequest) -> None:
        """Send a request and read its answer; any error becomes the failure of its record."""
        stream.sent_s = self.now()
        if self.concurrency is not None:
            stream.arrival_s = stream.sent_s
        if not self.in_flight:  # an idle server makes no progress, and that is no stall
            self.last_progress_s = stream.sent_s
        self.in_flight += 1
        try:
            async with asyncio.timeout(self.request_timeout_s):
                await self.exchange(stream)
        except TimeoutError:
            stream.failure = f"no end within {self.request_timeout_s:g} s, after {stream.tokens_so_far} tokens"
        except (BadAnswer, SSEError) as error:
            stream.failure = str(error)
        except httpx.HTTPError as error:
            broken = f" after {stream.tokens_so_far} tokens" if stream.tokens_so_far else ""
            stream.failure = f"connection failed{broken}: {str(error) or type(error).__name__}"
        finally:
            self.in_flight -= 1
        stream.finish_s = self.last_progress_s = self.now()
        stream.is_over.set()

    async def exchange(self, stream: SentRequest) -> None:
        # One client, so one connection, per request. A shared pool takes time that grows with the square of its
        # connections, and the server may close a kept connection just when the next request goes out.
        url, context = self.server.url, self.ssl_context
        client = httpx.AsyncClient(base_url=url, timeout=None, verify=context, trust_env=False)
        body = stream.body(self.server.model)
        async with client, aconnect_sse(client, "POST", "/v1/completions", json=body) as source:
            if not source.response.is_success:
                await source.response.aread()
                is_refused = source.response.status_code == httpx.codes.TOO_MANY_REQUESTS
                raise BadAnswer((REFUSED if is_refused else "") + refusal(source.response))
            await self.read_events(stream, source)

    async def read_events(self, stream: SentRequest, source: EventSource) -> None:
        async with contextlib.aclosing(source.aiter_sse()) as events:
            async for event in events:
                now_s = self.now()
                if event.data == "[DONE]":
                    stream.end()
                    return
                before = stream.tokens_so_far
                stream.receive(event.data, now_s)
                if stream.tokens_so_far > before:
                    self.last_progress_s = now_s
        raise BadAnswer(f"the stream ended after {stream.tokens_so_far} tokens without [DONE]")

    async def describe_stall(self, stall_timeout_s: float) -> str:
        finished = sum(stream.finish_s is not None for stream in self.streams)
        unsent = sum(stream.sent_s is None for stream in self.streams)
        begun = sum(stream.finish_s is None and stream.tokens_so_far > 0 for stream in self.streams)
        try:
            async with httpx.AsyncClient(timeout=PROBE_TIMEOUT_S, verify=self.ssl_context, trust_env=False) as client:
                health = f"answers {(await client.get(f'{self.server.url}/health')).status_code}"
        except httpx.HTTPError as error:
            health = f"fails ({str(error) or type(error).__name__})"
        return (
            f"stalled: no token for {stall_timeout_s:g} s; {finished} requests finished, {begun} in the "
            f"middle of their answer, {self.in_flight - begun} without a first token, {unsent} not sent; "
            f"GET /health {health}"
        )


def allow_open_files(count: int) -> None:
    """Raise the limit of open files: each request in flight is one, and many systems allow 1,024 by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        allowed = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, allowed), hard))
