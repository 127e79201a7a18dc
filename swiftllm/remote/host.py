"""The process that serves CPU attention to an engine on another host: a part of its CPU tier, and cores."""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from queue import Queue
from typing import Any

import torch

import pacpu
from swiftllm.kv.tensors import spread_tensor
from swiftllm.machine import GIB, available_host_bytes, cpu_model, usable_cores
from swiftllm.remote.protocol import (
    HANDSHAKE_S,
    HEARTBEAT_S,
    NONCE_BYTES,
    PROTOCOL,
    SECRET_VARIABLE,
    Buffer,
    FrameKind,
    Header,
    KVShape,
    ProtocolError,
    as_bytes,
    proof,
    receive_header,
    receive_into,
    receive_json,
    send_frame,
    send_json,
    set_silence_limit,
    set_up,
)
from swiftllm.runtime.cpu_tier import (
    AttentionTask,
    BlocksRead,
    BlocksWrite,
    ContextRead,
    CpuTask,
    OpenedRows,
    RowsWrite,
    TaskRunner,
)
from swiftllm.runtime.cpu_tuning import read_limit, use_fastest_attention
from swiftllm.runtime.execution_context import default_kernel
from swiftllm.runtime.memory import HOST_HEADROOM_BYTES

logger = logging.getLogger(__name__)

QUEUE_DEPTH = 64  # frames that are received and not yet computed
MAX_FRAME_BYTES = 1 << 30
MEASURED_JSON_BYTES = 1024  # answers have a size that the asking side knows


class AttentionHost:
    """Listens for engines. One at a time may store K and V here; others may measure the way to this host.

    Attributes:
        address: where it listens, with the port that the system chose for port 0.
    """

    def __init__(
        self,
        address: tuple[str, int],
        secret: bytes,
        *,
        memory_bytes: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        """``memory_bytes`` for K and V: by default half of what is available when an engine connects. ``num_threads``
        of attention: by default all cores. At the first start on a machine it times how CPU attention is fastest.

        Raises:
            ValueError: there is no secret, and others than this machine could connect.
            OSError: this address cannot be listened at.
        """
        if not secret and not _is_loopback(address[0]):
            raise ValueError(
                f"without a secret, anyone who reaches {address[0]} could use this host: set ${SECRET_VARIABLE} to the "
                "same value here and for the engine, or listen at 127.0.0.1"
            )
        use_fastest_attention()
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listening = socket.create_server(address, family=family)
        self.address: tuple[str, int] = self._listening.getsockname()[:2]
        self.num_threads = num_threads or usable_cores()
        self._secret = secret
        self._memory_bytes = memory_bytes
        self._in_use = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._is_closed = False

    def serve_forever(self) -> None:
        """Accept connections, each on a thread of its own, until :meth:`close`."""
        while not self._is_closed:
            try:
                connection, peer = self._listening.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # too many open files, say
                continue
            name = f"engine-{peer[0]}:{peer[1]}"
            threading.Thread(target=self._serve, args=[connection, name], name=name, daemon=True).start()

    def close(self) -> None:
        """Stop listening and end all connections."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def make_runner(self, pool: torch.Tensor, kernel: str) -> TaskRunner:
        """What computes the tasks of an engine."""
        return TaskRunner(pool, kernel=kernel, num_threads=self.num_threads)

    def _serve(self, connection: socket.socket, name: str) -> None:
        self._connections.add(connection)
        try:
            with connection, contextlib.ExitStack() as held:
                self._greet(connection, name, held).run()
        except (OSError, ValueError) as error:
            logger.info("%s: %s", name, error)
        finally:
            self._connections.discard(connection)

    def _greet(self, connection: socket.socket, name: str, held: contextlib.ExitStack) -> Session:
        """The session of an engine. ``held`` gives back what it takes."""
        connection.settimeout(HANDSHAKE_S)
        set_up(connection)
        nonce = os.urandom(NONCE_BYTES)
        send_frame(connection, Header(FrameKind.GREETING), [nonce])
        hello = receive_json(connection, FrameKind.HELLO)
        try:
            self._check_hello(hello, nonce)
            if not hello.get("shape"):
                store, about = None, {"num_blocks": 0, "lent_bytes": self._lendable_bytes(exactly=False)}
            else:
                shape = KVShape(**hello["shape"]).checked()
                if not self._in_use.acquire(blocking=False):
                    raise ValueError("this host serves another engine: end that first, or start another attention host")
                held.callback(self._in_use.release)
                kernel = default_kernel(shape.cpu_kv_dtype, shape.torch_dtype)
                pool = self._allocate(shape, int(hello["num_blocks"]), exactly=bool(hello["exactly"]))
                store = Store(shape, pool, self.make_runner(pool, kernel))
                about = {"num_blocks": pool.shape[1], "kernel": kernel, "isa": pacpu.isa()}
        except (ValueError, TypeError, KeyError, OSError) as error:
            send_frame(connection, Header(FrameKind.FAILED), [str(error).encode()])
            raise ValueError(str(error)) from None
        send_json(connection, FrameKind.WELCOME, {**about, "threads": self.num_threads})
        if store is not None:
            sizes = store.pool.shape[1], store.shape.bytes_per_block
            logger.warning("%s stores %s KV blocks of %s bytes here", name, *sizes)
            held.callback(logger.warning, "%s has left", name)
        return Session(connection, store, self.num_threads)

    def _check_hello(self, hello: dict[str, Any], nonce: bytes) -> None:
        if not hmac.compare_digest(str(hello.get("proof")), proof(self._secret, nonce)):
            raise ValueError(f"the secrets differ: set ${SECRET_VARIABLE} to the same value on both hosts")
        if hello.get("protocol") != PROTOCOL or hello.get("byteorder") != sys.byteorder:
            raise ValueError("engine and attention host are of different versions: install the same on both")

    def _lendable_bytes(self, exactly: bool) -> int:
        if self._memory_bytes is not None:
            return self._memory_bytes
        # Who takes another host's place must have as much, if it can be had.
        return max(0, available_host_bytes() - HOST_HEADROOM_BYTES) // (1 if exactly else 2)

    def _allocate(self, shape: KVShape, asked_blocks: int, *, exactly: bool) -> torch.Tensor:
        """Memory for an engine that can use so many blocks, or needs ``exactly`` so many; see :attr:`Store.pool`."""
        memory_bytes = self._lendable_bytes(exactly)
        num_blocks, needed = min(memory_bytes // shape.bytes_per_block, asked_blocks), asked_blocks if exactly else 1
        if num_blocks < needed:
            raise ValueError(
                f"there is memory for {num_blocks:,} KV blocks ({memory_bytes / GIB:.2f} GiB) and {needed:,} are "
                "needed: give this host more memory"
            )
        return spread_tensor((shape.num_layers, num_blocks, *shape.block), shape.kv_format.dtype)


@dataclass(frozen=True)
class Store:
    """The blocks of one engine, and what computes on them."""

    shape: KVShape
    pool: torch.Tensor  # see KVFormat.pool_shape
    runner: TaskRunner

    def task_of(self, header: Header, payload: torch.Tensor, opened: Mapping[int, OpenedRows]) -> CpuTask:
        """The task that a frame asks for; see :class:`FrameKind`.

        Raises:
            ValueError: a block is not in the pool, or there is no such frame.
        """
        shape, dtype, in_blocks, layer = self.shape, self.shape.torch_dtype, self.pool.dtype, header.a
        if header.kind == FrameKind.ATTEND:
            rows = opened[header.b]
            sizes = len(rows.seq_lens), shape.num_heads + 2 * shape.num_kv_heads, shape.head_dim
            qkv, sinks = payload.tensor_split([math.prod(sizes) * dtype.itemsize])
            out = torch.empty((len(rows.seq_lens), shape.num_heads, shape.head_dim), dtype=dtype)
            own_sinks = sinks.view(torch.float32) if len(sinks) else None
            return AttentionTask(layer, rows, qkv.view(dtype).view(sizes), out, own_sinks)
        blocks, rest = _blocks_first(payload, header.b if header.kind != FrameKind.LOAD else None)
        if len(blocks) and not 0 <= int(blocks.min()) <= int(blocks.max()) < self.pool.shape[1]:
            raise ValueError(f"blocks {blocks.tolist()} are not all in the pool of {self.pool.shape[1]}")
        match header.kind:
            case FrameKind.STORE:
                offsets, content = _blocks_first(rest, header.b)
                content = content.view(dtype).view(header.b, 2 * shape.num_kv_heads, shape.head_dim)
                return RowsWrite(layer, content, blocks, offsets)
            case FrameKind.PUT:
                content = rest.view(in_blocks).view(-1, header.b, *shape.block)
                return BlocksWrite(range(layer, layer + len(content)), content, blocks)
            case FrameKind.GET:
                layers = range(layer, int(rest.view(torch.int64)))
                return BlocksRead(layers, blocks, torch.empty((len(layers), header.b, *shape.block), dtype=in_blocks))
            case FrameKind.LOAD:
                sizes = 2, shape.num_kv_heads, header.b, shape.head_dim
                return ContextRead(layer, blocks, torch.empty(sizes, dtype=dtype))
        raise ValueError(f"unknown frame {header.kind}")


class Session:
    """One connection: frames are received on the calling thread and carried out in order on another."""

    def __init__(self, connection: socket.socket, store: Store | None, num_threads: int) -> None:
        """Without a ``store`` the engine may only measure, with ``num_threads``."""
        self._connection = connection
        self._num_threads = num_threads
        self._store = store
        self._sending = threading.Lock()
        self._queue: Queue[tuple[Header, torch.Tensor] | None] = Queue(QUEUE_DEPTH)
        self._opened: dict[int, OpenedRows] = {}
        self._has_ended = threading.Event()

    def run(self) -> None:
        """Serve until the connection ends.

        Raises:
            OSError: it ended.
        """
        set_silence_limit(self._connection, 0)
        threads = [threading.Thread(target=work, daemon=True) for work in (self._compute_all, self._beat)]
        for thread in threads:
            thread.start()
        try:
            while not self._has_ended.is_set():
                header = receive_header(self._connection)
                if header.num_bytes > MAX_FRAME_BYTES:
                    raise ProtocolError(f"a frame of {header.num_bytes} bytes")
                payload = torch.empty(header.num_bytes, dtype=torch.uint8)
                receive_into(self._connection, as_bytes(payload))
                self._queue.put((header, payload))
        finally:
            self._has_ended.set()
            self._queue.put(None)
            for thread in threads:
                thread.join()

    def _beat(self) -> None:
        with contextlib.suppress(OSError):
            while not self._has_ended.wait(HEARTBEAT_S):
                self._send(Header(FrameKind.BEAT))

    def _send(self, header: Header, *buffers: Buffer) -> None:
        with self._sending:
            send_frame(self._connection, header, buffers)

    @torch.inference_mode()
    def _compute_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._has_ended.is_set():
                continue  # frees the receiving thread, which may wait for room in the queue
            try:
                self._carry_out(*item)
            except OSError:
                self._end()
            except Exception as error:
                self._report(item[0], error)

    def _report(self, header: Header, error: Exception) -> None:
        logger.error("frame %s failed: %r", header, error)
        with contextlib.suppress(OSError):
            self._send(Header(FrameKind.FAILED, sequence=header.sequence), f"{type(error).__name__}: {error}".encode())
        if header.sequence == 0:
            self._end()  # later frames would read what was never written

    def _end(self) -> None:
        self._has_ended.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _carry_out(self, header: Header, payload: torch.Tensor) -> None:
        answer, start_s = None, time.perf_counter()
        match header.kind:
            case FrameKind.ECHO:
                answer = torch.empty(min(header.b, MAX_FRAME_BYTES), dtype=torch.uint8)
            case FrameKind.MEASURE:
                answer = _measured_json(self._num_threads)
            case FrameKind.DROP:
                self._opened.pop(header.b, None)
            case _ if self._store is None:
                raise ValueError("this connection may only measure")
            case FrameKind.OPEN:
                numbers = payload.view(torch.int32)
                (window,), lens, tables = numbers.tensor_split([1, 1 + header.a])
                self._opened[header.b] = OpenedRows(tables.view(header.a, -1), lens, int(window) or None)
            case _:
                task = self._store.task_of(header, payload, self._opened)
                self._store.runner.run_task(task)
                answer = getattr(task, "out", None)
        if answer is not None:
            seconds = time.perf_counter() - start_s
            self._send(Header(FrameKind.RESULT, sequence=header.sequence, seconds=seconds), as_bytes(answer))


def _blocks_first(payload: torch.Tensor, count: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` int64 (None: all there are), and the bytes after them."""
    end = len(payload) if count is None else 8 * count
    return payload[:end].view(torch.int64), payload[end:]


def _measured_json(num_threads: int) -> torch.Tensor:
    """JSON, as bytes: the processor, and the limit of streaming reads with so many threads."""
    about = {
        "cpu": cpu_model(),
        "read_bytes_per_s": read_limit(num_threads),
        "isa": pacpu.isa(),
    }
    text = json.dumps(about).encode().ljust(MEASURED_JSON_BYTES)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
