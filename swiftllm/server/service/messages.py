"""What the front end and the engine's process say to each other, over a socket within the machine.

A message is a length of four bytes and a MessagePack array, whose first value names it. A request is one message, and
so are the new tokens of a step. Nothing is unpickled.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
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
    prompt: bytes
    """Token ids, 32 bits each."""
    sampling: dict[str, Any]
    """The sampling parameters that differ from their defaults."""
    grammar: tuple[str, str] | None
    """Kind and text of the grammar, as :meth:`GrammarCompiler.compile` takes them."""
    timeout_s: float | None
    service_class: ServiceClass
    cache_salt: str | None

    @classmethod
    def of(cls, number: int, new: NewRequest, timeout_s: float | None) -> Submitted:
        """``new`` has its token ids in an array."""
        how = new.sampling
        changed = {name: value for name, default in DEFAULTS.items() if (value := getattr(how, name)) != default}
        return cls(
            number,
            new.request_id,
            new.prompt_token_ids.tobytes(),
            changed,
            None if how.grammar is None else how.grammar.source,
            timeout_s,
            new.service_class,
            new.cache_salt,
        )


class Submit(Message):
    """Queue these requests before the next step: the outputs of one HTTP request, which begin together."""

    requests: list[Submitted]


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


def frame(message: Message) -> bytes:
    """A message as it is sent."""
    data = _encoder.encode(message)
    return len(data).to_bytes(NUM_LENGTH_BYTES, "little") + data


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[memoryview]:
        """The messages that ``data`` completes, not decoded."""
        if self._rest:
            self._rest += data
            data = bytes(self._rest)
            self._rest.clear()
        start, end = 0, len(data)
        view, found = memoryview(data), []
        while end - start >= NUM_LENGTH_BYTES:
            stop = start + NUM_LENGTH_BYTES + int.from_bytes(data[start : start + NUM_LENGTH_BYTES], "little")
            if stop > end:
                break
            found.append(view[start + NUM_LENGTH_BYTES : stop])
            start = stop
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
