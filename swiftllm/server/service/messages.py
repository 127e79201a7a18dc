"""What the front end and the engine's process say to each other, over a socket within the machine.

A message is a length of four bytes and a MessagePack array, whose first value names it. The requests of one HTTP body
are one message, and so are the new tokens of a step. Nothing is unpickled.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from swiftllm.core.request import ServiceClass
from swiftllm.core.sampling_params import SamplingParams
from swiftllm.core.slo import Slo
from swiftllm.scheduling.admission import Admission
from swiftllm.server.service.histograms import Histogram
from swiftllm.server.service.limits import NewRequest, ServiceLimits
from swiftllm.server.service.snapshot import Health, Snapshot
from swiftllm.server.service.token_streams import Delta

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
    admission: Admission
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
