"""The protocol between an engine and an attention host: frames of a fixed header and raw bytes over one TCP connection.

Nothing in a frame is executed or unpickled. The host greets with random bytes, and the engine answers with their HMAC
under the shared secret before anything else is read. Numbers are in native byte order: both ends must be little-endian.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import math
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from swiftllm.config import CpuKVDtype
from swiftllm.kv.tensors import KVFormat, cpu_format

PROTOCOL = 4
SECRET_VARIABLE = "APEX_HOST_SECRET"
NONCE_BYTES = 16
HEARTBEAT_S = 1.0
SILENCE_S = 3.0  # after which a host counts as dead
HANDSHAKE_S = 10.0
MAX_JSON_BYTES = 1 << 16
MAX_BUFFERS = 512  # of one sendmsg; the system's limit is 1,024


class FrameKind(enum.IntEnum):
    """What a frame is, and what the header's ``a`` and ``b`` mean. Frames with a sequence number are answered."""

    GREETING = 1  # host: nonce
    HELLO = 2  # engine: JSON
    WELCOME = 3  # host: JSON
    BEAT = 4  # host, every HEARTBEAT_S
    OPEN = 5  # a rows, b id; the window or 0, seq_lens and block_tables
    DROP = 6  # b id
    ATTEND = 7  # a layer, b id; qkv, the sinks of the layer if it has any
    STORE = 8  # a layer, b rows; blocks, offsets, kv
    PUT = 9  # a first layer, b blocks; blocks, content of as many layers as there are bytes for
    GET = 10  # a first layer, b blocks; blocks, the layer after the last
    LOAD = 11  # a layer, b tokens; blocks
    ECHO = 12  # b bytes of the answer; anything
    MEASURE = 13  # answered with JSON: what the host's memory can do
    RESULT = 14  # host: the answer; seconds of computing
    FAILED = 15  # host: text; sequence 0 ends the connection


HEADER = struct.Struct("<IIQQQd")  # kind, a, b, sequence, bytes that follow, seconds


class Header(NamedTuple):
    kind: int
    a: int = 0
    b: int = 0
    sequence: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class ProtocolError(ConnectionError):
    """The peer does not speak this protocol, or does not accept this end."""


Buffer = bytes | bytearray | memoryview


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor as writable bytes."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def send_frame(connection: socket.socket, header: Header, buffers: Sequence[Buffer] = ()) -> int:
    """Send a frame, with ``num_bytes`` of the header filled in. Returns the bytes sent. One caller at a time."""
    length = sum(len(buffer) for buffer in buffers)
    left = [memoryview(HEADER.pack(*header._replace(num_bytes=length))), *map(memoryview, filter(len, buffers))]
    while left:
        sent = connection.sendmsg(left[:MAX_BUFFERS])
        while left and sent >= len(left[0]):
            sent -= len(left.pop(0))
        if sent:
            left[0] = left[0][sent:]
    return HEADER.size + length


def receive_into(connection: socket.socket, buffer: memoryview) -> None:
    """Fill the buffer.

    Raises:
        ConnectionError: the peer has closed the connection.
        TimeoutError: nothing came for the time set by :func:`set_silence_limit`.
    """
    while len(buffer):
        try:
            count = connection.recv_into(buffer)
        except BlockingIOError:
            raise TimeoutError(f"nothing was received for {SILENCE_S:g} s") from None
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        buffer = buffer[count:]


def receive_header(connection: socket.socket) -> Header:
    buffer = bytearray(HEADER.size)
    receive_into(connection, memoryview(buffer))
    return Header(*HEADER.unpack(buffer))


def receive_bytes(connection: socket.socket, num_bytes: int) -> bytearray:
    buffer = bytearray(num_bytes)
    receive_into(connection, memoryview(buffer))
    return buffer


def receive_text(connection: socket.socket, num_bytes: int) -> str:
    return receive_bytes(connection, num_bytes).decode(errors="replace")


def receive_json(connection: socket.socket, expected: FrameKind) -> dict[str, Any]:
    """The JSON of the next frame, which is of the expected kind.

    Raises:
        ProtocolError: it is another frame; the text of a FAILED frame is the message.
    """
    header = receive_header(connection)
    if header.kind not in (expected, FrameKind.FAILED) or header.num_bytes > MAX_JSON_BYTES:
        raise ProtocolError("the peer does not speak this protocol: is that the address of an attention host?")
    content = receive_text(connection, header.num_bytes)
    if header.kind == FrameKind.FAILED:
        raise ProtocolError(content)
    try:
        return dict(json.loads(content))
    except ValueError:
        raise ProtocolError("the peer sent no JSON") from None


def send_json(connection: socket.socket, kind: FrameKind, content: Mapping[str, Any], sequence: int = 0) -> None:
    send_frame(connection, Header(kind, sequence=sequence), [json.dumps(content).encode()])


def set_up(connection: socket.socket) -> None:
    """No delay of small frames. A peer whose machine is gone is noticed, even while only sending."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(HANDSHAKE_S * 1000))


def set_silence_limit(connection: socket.socket, seconds: float) -> None:
    """From now on receiving fails after so many seconds without a byte (0: never); sending may take any time."""
    connection.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


@dataclass(frozen=True)
class KVShape:
    """What an engine stores: the sizes of a block in all layers of a group, and the heads of the queries."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    """Of queries, and of K and V that come in rows: float32, float16 or bfloat16."""
    cpu_kv_dtype: CpuKVDtype
    """See :attr:`swiftllm.config.EngineConfig.cpu_kv_dtype`."""

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def kv_format(self) -> KVFormat:
        """Of the blocks."""
        return cpu_format(self.cpu_kv_dtype, self.torch_dtype)

    @property
    def block(self) -> tuple[int, ...]:
        """Sizes of a block in one layer."""
        return self.num_kv_heads, *self.kv_format.head_shape(self.block_size, self.head_dim)

    @property
    def bytes_per_block(self) -> int:
        return self.num_layers * math.prod(self.block) * self.kv_format.dtype.itemsize

    def checked(self) -> KVShape:
        """Raises ValueError: it comes from a peer and makes no sense."""
        sizes = (self.num_layers, self.num_heads, self.num_kv_heads, self.head_dim, self.block_size)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"sizes of a KV cache must be positive: {self}")
        if self.dtype not in ("float32", "float16", "bfloat16") or self.cpu_kv_dtype not in ("auto", "int8"):
            raise ValueError(f"there is no KV cache of {self.dtype!r} and {self.cpu_kv_dtype!r}")
        self.kv_format.head_shape(self.block_size, self.head_dim)
        return self


def shared_secret() -> bytes:
    """The secret of $APEX_HOST_SECRET; empty if it is not set."""
    return os.environ.get(SECRET_VARIABLE, "").encode()


def proof(secret: bytes, nonce: bytes) -> str:
    return hmac.new(secret, nonce, hashlib.sha256).hexdigest()


def parse_address(text: str) -> tuple[str, int]:
    """``host:port`` or ``[host]:port``.

    Raises:
        ValueError: it is neither.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address of an attention host: write HOST:PORT, such as 10.0.0.7:7300")
    return host.strip("[]"), int(port)


def connect(address: tuple[str, int], secret: bytes, hello: Mapping[str, Any]) -> tuple[socket.socket, dict[str, Any]]:
    """Connect to an attention host and introduce this end. Returns the connection and the host's answer.

    Raises:
        OSError: the host cannot be reached or refuses; the message says why.
    """
    try:
        connection = socket.create_connection(address, timeout=HANDSHAKE_S)
    except ConnectionRefusedError as error:
        raise ConnectionRefusedError("nothing listens there: start `apex attention-host` on that machine") from error
    try:
        set_up(connection)
        header = receive_header(connection)
        if header.kind != FrameKind.GREETING or header.num_bytes != NONCE_BYTES:
            raise ProtocolError("the peer does not speak this protocol: is that the address of an attention host?")
        nonce = bytes(receive_bytes(connection, NONCE_BYTES))
        about = {"protocol": PROTOCOL, "byteorder": sys.byteorder, "proof": proof(secret, nonce)}
        send_json(connection, FrameKind.HELLO, {**hello, **about})
        return connection, receive_json(connection, FrameKind.WELCOME)
    except BaseException:
        connection.close()
        raise
