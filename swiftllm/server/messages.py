"""What the front end and the engine's process say to each other."""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import msgspec

from swiftllm.core.request import SamplingParams, ServiceClass, Slo, TokenLogprob
from swiftllm.scheduling.validation import RequestLimits, as_token_array
from swiftllm.server.engine_status import Health, Histogram, Snapshot

# -- what a service accepts --------------------------------------------------------------------------------------------
# What a service accepts: its limits, and requests.


@dataclass(frozen=True)
class ServiceLimits:
    """Limits of the service.

    Raises:
        ValueError: a field lies outside its range; the message names the field and the value.
    """

    max_queued_requests: int = 1024
    """Maximum number of latency-sensitive requests waiting or running; further ones are refused."""
    max_queued_best_effort: int = 10_000
    """Maximum number of best-effort requests waiting or running, counted apart from the others."""
    request_timeout_s: float | None = None
    """Seconds after which an unfinished request fails, unless it sets its own timeout; by default never."""
    stall_timeout_s: float = 60.0
    """Seconds without progress after which the watchdog logs the engine's state and acts."""
    drain_timeout_s: float = 30.0
    """Seconds that running requests get to finish when the service stops."""
    restart_engine: int = 0
    """Times that an engine that has died or failed is started again; then, or by default, the server ends with it."""

    def __post_init__(self) -> None:
        for name in ("max_queued_requests", "max_queued_best_effort"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1")
        if self.restart_engine < 0:
            raise ValueError(f"restart_engine={self.restart_engine!r} must be at least 0")
        for name in ("request_timeout_s", "stall_timeout_s", "drain_timeout_s"):
            seconds = getattr(self, name)
            if seconds is not None and not seconds > 0.0:
                raise ValueError(f"{name}={seconds!r} must be above 0")

    def most_open(self, service_class: ServiceClass) -> int:
        """Maximum number of requests of a class waiting or running."""
        is_best_effort = service_class is ServiceClass.BEST_EFFORT
        return self.max_queued_best_effort if is_best_effort else self.max_queued_requests


@dataclass(frozen=True)
class NewRequest:
    """A request to submit to the service."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    timeout_s: float | None = None
    """Seconds until its deadline; None takes the service's ``request_timeout_s``."""
    service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE
    cache_salt: str | None = None
    """Only requests with the same one share cached prefixes."""


def checked(requests: Sequence[NewRequest], request_limits: RequestLimits) -> list[NewRequest]:
    """These requests with their prompts in arrays. What several share is looked at once, and is shared later on."""
    prompts: dict[int, Sequence[int]] = {}
    samplings: set[tuple[int, ...]] = set()
    found = []
    for new in requests:
        name, how = id(new.prompt_token_ids), new.sampling
        if name not in prompts:
            prompts[name] = as_token_array(new.prompt_token_ids)
        request_limits.check_prompt(prompts[name], how.max_tokens, new.service_class)
        found.append(replace(new, prompt_token_ids=prompts[name]))
        tokens = tuple(map(id, (how.logit_bias, how.stop_token_ids, how.bad_words, how.allowed_token_ids)))
        if tokens not in samplings:
            samplings.add(tokens)
            request_limits.check_sampling(how)
    return found


# -- streams of tokens -------------------------------------------------------------------------------------------------
# The tokens of a request, as they arrive.


class RequestFailed(RuntimeError):
    """The engine failed a request that the service had accepted.

    ``reason`` is one of ``deadline``, ``engine_error``, ``invalid_grammar``, ``slo_unattainable``, ``stalled`` and
    ``shutdown``; the message has the details. ``retry_after_s`` says when the request could be served, where that
    is known.
    """

    def __init__(self, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_s = retry_after_s


class Failure(NamedTuple):
    """The fields of a :class:`RequestFailed`."""

    reason: str
    message: str
    retry_after_s: float | None = None


class Delta(msgspec.Struct, array_like=True, gc=False):
    """Output of one request from one or more engine steps. It is a part of a message.

    ``logprobs`` has one entry a token if the request asked for them, else none. ``finish_reason`` is stop,
    length or abort; None while the request runs. ``failure``: the engine has failed the request, after these tokens.
    ``number`` names the request. Only its first delta has ``prompt_logprobs``.
    """

    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob] = ()
    finish_reason: str | None = None
    failure: Failure | None = None
    number: int = 0
    num_cached_tokens: int = 0
    prompt_logprobs: Sequence[TokenLogprob] = ()

    @property
    def is_last(self) -> bool:
        return self.finish_reason is not None or self.failure is not None

    def append(self, later: Delta) -> None:
        """Add the delta that came after this one."""
        self.token_ids = [*self.token_ids, *later.token_ids]
        self.logprobs = [*self.logprobs, *later.logprobs]
        self.finish_reason, self.failure = later.finish_reason, later.failure


class TokenStream:
    """The output of one request. A ``finish_reason`` or an error ends it.

    ``number`` names the request in messages. ``prompt_logprobs`` is complete when its first token arrives. So is
    ``num_cached_tokens``, the tokens of its prompt that were found in the prefix cache. ``new_s`` is when the request
    was submitted, then when its last tokens arrived, by the client's clock; it has no tokens yet if ``is_new``.
    """

    def __init__(self, new: NewRequest, number: int, now_s: float, deadline_s: float | None = None) -> None:
        self.request_id = new.request_id
        self.service_class = new.service_class
        self.number = number
        self.deadline_s = deadline_s
        self.new_s, self.is_new = now_s, True
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        self.num_cached_tokens = 0
        self._listener: Callable[[Delta], None] | None = None
        self._kept: Delta | None = None  # deltas that arrived while there was no listener

    def set_listener(self, listener: Callable[[Delta], None] | None) -> None:
        """Call ``listener`` with the deltas that have arrived and with every later one; None removes the listener."""
        self._listener = listener
        if listener is not None and self._kept is not None:
            kept, self._kept = self._kept, None
            listener(kept)

    def push_delta(self, delta: Delta) -> None:
        """Pass a delta to the listener, or keep it for the next one."""
        if self._listener is not None:
            self._listener(delta)
        elif self._kept is None:
            self._kept = delta
        else:
            self._kept.append(delta)


# -- messages ----------------------------------------------------------------------------------------------------------
# What the front end and the engine's process say to each other, over a socket within the machine.
#
# A message is a length of four bytes and a MessagePack array, whose first value names it. The requests of one HTTP body
# are one message, and so are the new tokens of a step. Nothing is unpickled.

NUM_LENGTH_BYTES = 4
READ_BYTES = 1 << 18
DEFAULTS = {field.name: field.default for field in fields(SamplingParams) if field.name != "grammar"}


class Message(msgspec.Struct, array_like=True, tag=True, gc=False):
    """A message; its fields are in the order in which they are sent."""


# -- to the engine ----------------------------------------------------------------------------------------------------


class Submitted(Message):
    """A request, checked. ``number`` names it in all later messages."""

    number: int
    request_id: str
    prompt: int
    """Its place among the prompts of the message."""
    changes: dict[str, Any]
    """The sampling parameters that differ from those of the message."""
    timeout_s: float | None
    service_class: ServiceClass
    cache_salt: str | None


class Submit(Message):
    """Queue these requests before the next step: the outputs of one HTTP request, which begin together. What they share
    is there once."""

    requests: list[Submitted]
    prompts: list[bytes]
    """Token ids, 32 bits each."""
    sampling: dict[str, Any]
    """The sampling parameters of the first request that differ from their defaults."""
    grammar: tuple[str, str] | None
    """Kind and text of the grammar of all, as :meth:`GrammarCompiler.compile` takes them."""

    @classmethod
    def of(cls, news: Sequence[NewRequest], numbers: Sequence[int], timeouts_s: Sequence[float | None]) -> Submit:
        """``news`` have their token ids in arrays, which several may share."""
        prompts = {id(new.prompt_token_ids): new.prompt_token_ids for new in news}
        places = {of_prompt: place for place, of_prompt in enumerate(prompts)}
        first = news[0].sampling
        shared = {name: getattr(first, name) for name in DEFAULTS}
        requests = [
            Submitted(
                number,
                new.request_id,
                places[id(new.prompt_token_ids)],
                changed(new.sampling, shared),
                timeout_s,
                new.service_class,
                new.cache_salt,
            )
            for number, new, timeout_s in zip(numbers, news, timeouts_s, strict=True)
        ]
        grammar = None if first.grammar is None else first.grammar.source
        return cls(requests, [prompt.tobytes() for prompt in prompts.values()], changed(first, DEFAULTS), grammar)


class End(Message):
    """Abort these requests. ``reason``: why the front end has ended them; None: report their ends, as aborts."""

    numbers: list[int]
    reason: str | None = None


class ResetPrefixCache(Message):
    """Forget all cached prefixes, before the requests that are submitted later."""


class Ask(Message):
    """Answer with a report. ``wants_timeline``: with the last recorded iteration."""

    wants_timeline: bool


# -- to the front end -------------------------------------------------------------------------------------------------


class Ready(Message):
    """What never changes about an engine that is ready."""

    description: dict[str, Any]
    limits: ServiceLimits
    request_limits: RequestLimits
    max_num_seqs: int
    eos_token_ids: list[int]
    tokenizer_folder: str | None
    """The folder of the model's tokenizer; None: it has none."""
    caches_prefixes: bool
    slo: Slo | None
    records: bool
    """Whether reports may have a timeline."""


class NotBuilt(Message):
    """The engine could not be built, for a reason that the user can do something about."""

    reason: str


class Step(Message):
    """What a step has brought."""

    deltas: list[Delta]


class Alive(Message):
    """The engine's process runs; sent regularly, and when its health changes."""

    health: Health
    num_taken: int = 0
    """Messages of the front end that the engine's process has taken so far."""


class Report(Message):
    """The engine after its last step."""

    snapshot: Snapshot
    histograms: list[Histogram]
    slo_outcomes: list[tuple[str, str, int]]
    """Target, outcome, and number of requests."""
    timeline: dict[str, Any] | None


ToEngine = Submit | End | ResetPrefixCache | Ask
ToFrontEnd = Ready | NotBuilt | Step | Alive | Report

_encoder = msgspec.msgpack.Encoder()
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front_end = msgspec.msgpack.Decoder(ToFrontEnd).decode


def changed(sampling: SamplingParams, others: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that differ from these."""
    return {
        name: value
        for name, other in others.items()
        if (value := getattr(sampling, name)) is not other and value != other
    }


def frame(message: Message) -> bytes:
    """A message as it is sent."""
    data = _encoder.encode(message)
    return len(data).to_bytes(NUM_LENGTH_BYTES, "little") + data


class Frames:
    """Cuts a stream of bytes into messages. A message that comes in parts is collected, and looked at once it is whole:
    the work is linear in its bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of a message that is not whole
        self._wanted = NUM_LENGTH_BYTES  # bytes until it is, or until its length is known

    def feed(self, data: bytes) -> list[memoryview]:
        """The messages that ``data`` completes, not decoded."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return []
            data, self._rest = self._rest, bytearray()
        start, end = 0, len(data)
        view, found = memoryview(data), []
        while True:
            self._wanted = NUM_LENGTH_BYTES
            if end - start >= NUM_LENGTH_BYTES:
                self._wanted += int.from_bytes(view[start : start + NUM_LENGTH_BYTES], "little")
            if end - start < self._wanted:
                break
            found.append(view[start + NUM_LENGTH_BYTES : start + self._wanted])
            start += self._wanted
        self._rest += view[start:]
        return found


@dataclass(frozen=True)
class Ends:
    """The sockets of one end: ``messages`` both ways; ``served``, by which the front end says what it has served."""

    messages: socket.socket
    served: socket.socket

    def close(self) -> None:
        self.messages.close()
        self.served.close()


def make_ends() -> tuple[Ends, Ends]:
    """Two connected ends. They are socket pairs, so no other process can connect."""
    pairs = socket.socketpair(), socket.socketpair()
    return Ends(pairs[0][0], pairs[1][0]), Ends(pairs[0][1], pairs[1][1])


def receive(messages: socket.socket) -> Iterator[memoryview]:
    """All messages until the other end closes, not decoded. Waits for each."""
    frames = Frames()
    while data := _read(messages, READ_BYTES):
        yield from frames.feed(data)


def receive_one(messages: socket.socket) -> bytes | None:
    """The next message, not decoded, and no byte beyond it. None: the other end has closed."""
    length = _read(messages, NUM_LENGTH_BYTES, socket.MSG_WAITALL)
    return _read(messages, int.from_bytes(length, "little"), socket.MSG_WAITALL) if length else None


def _read(messages: socket.socket, num_bytes: int, flags: int = 0) -> bytes:
    try:
        return messages.recv(num_bytes, flags)
    except OSError:  # this end has been closed, or the other one with messages unread
        return b""


# -- the engine's end --------------------------------------------------------------------------------------------------
# The engine's end of the connection to its front end.

MAX_LAG_S = 0.05
SERVED = struct.Struct("<Qd")
"""Steps that the front end has served so far, and how long the last ones took it (s)."""
MAX_SERVED_BYTES = 256 * SERVED.size


class FrontEndLink:
    """Sends messages from any thread. If the front end has gone, they are dropped."""

    def __init__(self, ends: Ends) -> None:
        self._ends = ends
        self._lock = threading.Lock()
        self._num_posted = self._num_served = 0
        self._serving_s = 0.0
        self._post_s = self._go_on_s = 0.0
        self._news = select.poll()
        self._news.register(ends.served, select.POLLIN)
        self._hang_up = select.poll()
        self._hang_up.register(ends.messages, select.POLLHUP)

    def send(self, message: Message) -> None:
        """Waits only while the front end has a hundred kilobytes unread."""
        with self._lock:
            self._send(message)

    def post_step(self, step: Step) -> None:
        """Send new tokens."""
        with self._lock:
            self._num_posted += 1
            self._post_s = time.perf_counter()
            self._send(step)

    def _send(self, message: Message) -> None:
        with suppress(OSError):  # who receives will see it
            self._ends.messages.sendall(frame(message))

    def apply_backpressure(self) -> None:
        """Wait for the front end if the engine is faster; the engine's thread calls this after each of its posts.

        The engine is faster if two posts are not served, or if its part of a step was shorter than serving one.
        Without the wait tokens would queue in the socket. The wait ends after ``MAX_LAG_S``.
        """
        self._note_served(0.0)
        is_faster = self._post_s - self._go_on_s < self._serving_s
        lag_end_s = time.perf_counter() + MAX_LAG_S
        if is_faster or self._num_posted - self._num_served > 1:
            while self._num_posted > self._num_served and (left_s := lag_end_s - time.perf_counter()) > 0:
                if not self._note_served(left_s):
                    break
        self._go_on_s = time.perf_counter()

    def _note_served(self, timeout_s: float) -> bool:
        """Read what the front end has served; False if nothing came within ``timeout_s``."""
        if not self._news.poll(1000 * timeout_s):
            return False
        said = self._ends.served.recv(MAX_SERVED_BYTES)
        if len(said) < SERVED.size:
            return False  # the front end has gone
        self._num_served, self._serving_s = SERVED.unpack_from(said, len(said) - SERVED.size)
        return True

    def messages(self) -> Iterator[ToEngine]:
        """The front end's messages, until it closes or has ended. One thread may receive them."""
        return map(decode_to_engine, receive(self._ends.messages))

    def has_hung_up(self, timeout_s: float) -> bool:
        """Whether the front end has gone, or goes within ``timeout_s``."""
        return bool(self._hang_up.poll(1000 * timeout_s))

    def hang_up(self) -> None:
        """End the connection: the front end sees that the engine is gone."""
        with suppress(OSError):
            self._ends.messages.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._ends.close()
