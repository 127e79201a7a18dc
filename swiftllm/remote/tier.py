"""The CPU tier over several hosts: the part of it that another host holds, and the connection to that host."""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from queue import SimpleQueue

import torch

from swiftllm.device import Event
from swiftllm.engine.backend import AttentionFuture, AttentionTimes, HostDied
from swiftllm.processes import DeviceThread
from swiftllm.remote.protocol import (
    HEADER,
    SILENCE_S,
    FrameKind,
    Header,
    KVShape,
    ProtocolError,
    as_bytes,
    connect,
    receive_header,
    receive_into,
    receive_text,
    send_frame,
    set_silence_limit,
)
from swiftllm.runtime.cpu_tier import (
    AttentionTask,
    BlocksRead,
    BlocksWrite,
    ContextRead,
    CpuTier,
    HostRead,
    HostWrite,
    RowsWrite,
    WorkFuture,
)

# -- the connection to an attention host -------------------------------------------------------------------------------
# The engine's end of a connection to an attention host: a thread that sends frames and one that receives answers.

MAX_QUEUED_BYTES = 256 << 20  # of frames that are not sent yet


class RemoteFuture(WorkFuture):
    """An answer under way, whose bytes go to ``target``."""

    def __init__(self, target: memoryview, send_back: Callable[[], None] | None = None) -> None:
        super().__init__(send_back)
        self.target = target

    def answer(self, seconds: float) -> None:
        """The answer is in ``target``; the host computed so many seconds."""
        self.done_s = time.perf_counter()
        # It computes just before it answers; the way back is short beside the way there.
        self.start_s = max(self.submitted_s, self.done_s - seconds)
        self.finish()

    def _end(self) -> None:
        self.target = memoryview(b"")  # it holds a tensor, and the attention task may outlive it
        super()._end()


@dataclass(frozen=True)
class _Outgoing:
    header: Header
    tensors: Sequence[torch.Tensor]
    arrived: Event | None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Channel:
    """Frames to one host, sent in the order of the calls.

    The end of the connection, or ``SILENCE_S`` without a byte, ends the channel: every attention task under way and
    every later call fails with :class:`HostDied`.

    Attributes:
        bytes_sent: with headers.
        bytes_received: with headers, without heartbeats.
        error: why the channel has ended; None while it has not.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        """``name`` of the host, for messages."""
        self.bytes_sent = self.bytes_received = 0
        self.name = name
        self._connection = connection
        self._sequences = itertools.count(1)
        self._queue: SimpleQueue[_Outgoing | None] = SimpleQueue()
        self._state = threading.Condition()
        self._pending: dict[int, RemoteFuture] = {}
        self._queued_bytes = 0
        self.error: str | None = None
        set_silence_limit(connection, SILENCE_S)
        self._threads = [
            DeviceThread(work, name=f"{what}-{name}")
            for what, work in (("send", self._send_all), ("receive", self._receive_all))
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_dead(self) -> bool:
        return self.error is not None

    def wait_dead(self, timeout_s: float | None = None) -> bool:
        """Block until the channel has ended."""
        with self._state:
            return self._state.wait_for(lambda: self.is_dead, timeout_s)

    def post(self, header: Header, *tensors: torch.Tensor, arrived: Event | None = None) -> None:
        """Send a frame that needs no answer, with contiguous tensors that may be read once ``arrived`` has passed.
        Blocks while too many bytes wait to be sent.

        Raises:
            HostDied: the channel has ended.
        """
        frame = _Outgoing(header, tensors, arrived)
        with self._state:
            self._state.wait_for(lambda: self.is_dead or self._queued_bytes <= MAX_QUEUED_BYTES)
            self._check()
            self._queued_bytes += frame.num_bytes
            self._queue.put(frame)

    def ask(
        self,
        header: Header,
        *tensors: torch.Tensor,
        out: torch.Tensor,
        arrived: Event | None = None,
        send_back: Callable[[], None] | None = None,
    ) -> RemoteFuture:
        """As :meth:`post`, with an answer, which must fill ``out``."""
        future = RemoteFuture(as_bytes(out), send_back)
        sequence = next(self._sequences)
        # Before the frame is queued: its answer may come before this thread goes on. And with the check under one lock:
        # a channel that ends fails all that is pending by then, so none is left to be waited for.
        with self._state:
            self._check()
            self._pending[sequence] = future
        self.post(header._replace(sequence=sequence), *tensors, arrived=arrived)
        return future

    def _check(self) -> None:
        if self.is_dead:
            raise self._death(self.error)

    def _death(self, why: object) -> HostDied:
        return HostDied(f"attention host {self.name} is gone: {why}")

    def _send_all(self) -> None:
        try:
            while (frame := self._queue.get()) is not None:
                self._send_one(frame)
        except Exception as error:
            self._end(error)

    def _send_one(self, frame: _Outgoing) -> None:
        if frame.arrived is not None:  # waited for here: the engine's thread goes on launching
            frame.arrived.synchronize()
        self.bytes_sent += send_frame(self._connection, frame.header, [as_bytes(tensor) for tensor in frame.tensors])
        with self._state:
            self._queued_bytes -= frame.num_bytes
            self._state.notify_all()

    def _receive_all(self) -> None:
        try:
            while True:
                self._receive_one()
        except Exception as error:
            self._end(error)

    def _receive_one(self) -> None:
        header = receive_header(self._connection)
        if header.kind == FrameKind.BEAT:
            return
        self.bytes_received += HEADER.size + header.num_bytes
        if header.sequence == 0:
            raise ProtocolError(f"it ended the connection: {receive_text(self._connection, header.num_bytes)}")
        with self._state:
            future = self._pending.pop(header.sequence)
        try:
            if header.kind == FrameKind.FAILED:
                text = receive_text(self._connection, header.num_bytes)
                future.fail(RuntimeError(f"attention host {self.name}: {text}"))
                return
            if header.num_bytes != len(future.target):
                raise ProtocolError(f"an answer of {header.num_bytes} bytes came for one of {len(future.target)}")
            receive_into(self._connection, future.target)
        except BaseException as error:
            future.fail(self._death(error))
            raise
        future.answer(header.seconds)

    def _end(self, error: BaseException) -> None:
        with self._state:
            if self.error is not None:
                return
            self.error = str(error) or type(error).__name__
            pending, self._pending = self._pending, {}
            self._state.notify_all()
        # Both threads may be blocked in the socket; closing it would not wake them up.
        with contextlib.suppress(OSError):  # it is already
            self._connection.shutdown(socket.SHUT_RDWR)
        # Without the lock: what a future calls when it ends is not known here.
        for future in pending.values():
            future.fail(self._death(self.error))

    def close(self) -> None:
        """End the connection and its threads. Nothing may be under way."""
        self._end(ConnectionAbortedError("it was closed here"))
        self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._connection.close()


# -- another host's part of the tier -----------------------------------------------------------------------------------
# The part of the CPU tier that another host holds: each operation becomes a frame to its attention host.

logger = logging.getLogger(__name__)

FETCHED_AT_ONCE = 16 << 20  # bytes of one answer: those to attention come between them
RETRY_S = 0.5  # between two attempts to reach a host again

FindAddress = Callable[[], tuple[str, int]]
"""Gives the address of a host that serves nobody yet. Called again when the host is gone, so it may start another.
Raises OSError if there is none now."""


@dataclass(frozen=True, eq=False)
class RemoteRows:
    """Rows whose block tables and lengths the host has under a number."""

    number: int


class RemoteCpuTier:
    """See :class:`swiftllm.runtime.cpu_tier.CpuTier`: the blocks of one other host, numbered from 0.

    A thread keeps a connection to the host. When one ends, it connects again, to that host or the one that replaces it.
    The engine takes the new connection up (:meth:`take_returned`) after it has given up what the old one held.

    Attributes:
        num_blocks: as many as the host had memory for when it was first reached. Its successors must have as many.
        threads: of attention there.
    """

    may_die = True

    def __init__(self, find_address: FindAddress, secret: bytes, shape: KVShape, most_blocks: int) -> None:
        """Connect to the host; more than ``most_blocks`` would be of no use."""
        self.num_blocks = 0
        self._most_blocks = most_blocks
        self._shape = shape
        self._find_address = find_address
        self._secret = secret
        self._numbers = itertools.count(1)
        self._dropped: deque[int] = deque()  # rows that nobody holds any more
        self._fetched: dict[int, tuple[RemoteFuture, torch.Tensor]] = {}  # by block
        self._is_closed = threading.Event()
        self._fresh: Channel | None = None
        self._is_lost = False
        self.channel = self._connect()
        self._keeper = DeviceThread(self._keep, name=f"keep-{self.channel.name}")
        self._keeper.start()

    def _connect(self) -> Channel:
        address = self._find_address()
        name = f"{address[0]}:{address[1]}"
        asked, exactly = self.num_blocks or self._most_blocks, self.num_blocks > 0
        hello = {"shape": asdict(self._shape), "num_blocks": asked, "exactly": exactly}
        try:
            connection, about = connect(address, self._secret, hello)
        except OSError as error:
            raise type(error)(f"attention host {name}: {error}") from error
        self.num_blocks, self.threads = int(about["num_blocks"]), int(about["threads"])
        return Channel(connection, name)

    def _keep(self) -> None:
        newest = self.channel
        while True:
            newest.wait_dead()
            problem = ""
            while not self._is_closed.is_set():
                try:
                    newest = self._fresh = self._connect()
                    break
                except OSError as error:
                    if str(error) != problem:  # once, not at each attempt
                        logger.warning("%s", problem := str(error))
                    self._is_closed.wait(RETRY_S)
                except Exception:  # a failure to find a replacement must not end the search for one
                    logger.exception("looking for an attention host failed")
                    self._is_closed.wait(RETRY_S)
            if self._is_closed.is_set():
                return
            logger.warning("attention host %s is there again", newest.name)

    # -- on the engine's thread -------------------------------------------------------------------------------------

    def take_died(self) -> bool:
        """Whether the host is gone; true once for each time."""
        # A new connection may be there already, but its host has none of the K and V. It is taken up only once the
        # engine has been told of the death and has given up what was lost.
        if self._is_lost or not self.channel.is_dead:
            return False
        self._is_lost = True
        logger.warning("attention host %s is gone: %s", self.channel.name, self.channel.error)
        return True

    def take_returned(self) -> bool:
        """Whether a host is there again after :meth:`take_died`; true once, and from then on it is used."""
        fresh = self._fresh
        if not self._is_lost or fresh is None or fresh.is_dead:
            return False
        self.channel.close()
        self.channel, self._fresh, self._is_lost = fresh, None, False
        self._dropped.clear()
        self._fetched.clear()
        return True

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, window: int | None = None) -> RemoteRows:
        # Here, not where rows are finalized: that may happen on any thread, in the middle of another post.
        while self._dropped:
            self.channel.post(Header(FrameKind.DROP, b=self._dropped.popleft()))
        most = -(-int(seq_lens.max()) // self._shape.block_size)
        tables = block_tables[:, :most].clamp(min=0).contiguous()  # what pads a table is no block of this host
        rows = RemoteRows(next(self._numbers))
        weakref.finalize(rows, self._dropped.append, rows.number).atexit = False
        header = Header(FrameKind.OPEN, len(seq_lens), rows.number)
        self.channel.post(header, torch.tensor([window or 0], dtype=torch.int32), seq_lens, tables)
        return rows

    def attend(self, task: AttentionTask, arrived: Event, send_back: Callable[[], None] | None = None) -> RemoteFuture:
        header = Header(FrameKind.ATTEND, task.layer, task.rows.number)
        sinks = () if task.sinks is None else (task.sinks,)
        return self.channel.ask(header, task.qkv, *sinks, out=task.out, arrived=arrived, send_back=send_back)

    def write(self, write: HostWrite, arrived: Event) -> None:
        count = len(write.blocks)
        if isinstance(write, RowsWrite):
            header = Header(FrameKind.STORE, write.layer, count)
            # From a device it is a copy. From this host it is a part of the GPU batch's memory: copied here.
            self.channel.post(header, write.blocks, write.offsets, write.content.contiguous(), arrived=arrived)
        else:
            header = Header(FrameKind.PUT, write.layers.start, count)
            with _swaps_incomplete_if_it_dies():
                self.channel.post(header, write.blocks, write.content, arrived=arrived)

    def read(self, read: HostRead, send_back: Callable[[], None] | None = None) -> RemoteFuture:
        """Waits for the answer to a read of blocks, if :meth:`fetch` has not brought it: a host that dies later leaves
        nothing of a swap unknown."""
        if isinstance(read, ContextRead):
            header = Header(FrameKind.LOAD, read.layer, read.out.shape[2])
            return self.channel.ask(header, read.blocks, out=read.out, send_back=send_back)
        ids = read.blocks.tolist()
        with _swaps_incomplete_if_it_dies():
            if not self._are_here(ids):
                future = self._ask_for(read, send_back)
                future.wait()
                return future
            fetched = [self._fetched[block] for block in ids]
            for index, (future, kept) in enumerate(fetched):
                future.wait()
                read.out[:, index] = kept[read.layers.start : read.layers.stop]
        if read.layers.stop == self._shape.num_layers:  # of several parts of the layers this is the last
            self.drop_fetched(ids)
        if send_back is not None:
            send_back()
        return fetched[-1][0]

    def _ask_for(self, read: BlocksRead, send_back: Callable[[], None] | None = None) -> RemoteFuture:
        header = Header(FrameKind.GET, read.layers.start, len(read.blocks))
        stop = torch.tensor([read.layers.stop])
        return self.channel.ask(header, read.blocks, stop, out=read.out, send_back=send_back)

    def fetch(self, blocks: Sequence[int]) -> None:
        """Begin to read whole blocks, for a later :meth:`get`. Their death is told by :meth:`take_died`."""
        shape, count = self._shape, max(1, FETCHED_AT_ONCE // self._shape.bytes_per_block)
        self.drop_fetched(blocks)
        for first in range(0, len(blocks), count):
            some = blocks[first : first + count]
            content = torch.empty((shape.num_layers, len(some), *shape.block), dtype=shape.kv_format.dtype)
            with contextlib.suppress(HostDied):
                future = self._ask_for(BlocksRead(range(shape.num_layers), torch.tensor(some), content))
                self._fetched.update({block: (future, content[:, i]) for i, block in enumerate(some)})

    def has_fetched(self, blocks: Sequence[int]) -> bool:
        """Whether the answers to :meth:`fetch` are there. What was dropped meanwhile, with another request that shares
        it, is asked for again."""
        if dropped := [block for block in blocks if block not in self._fetched]:
            self.fetch(dropped)
        return self._are_here(blocks)

    def _are_here(self, blocks: Sequence[int]) -> bool:
        return all(block in self._fetched and self._fetched[block][0].ready() for block in blocks)

    def drop_fetched(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._fetched.pop(block, None)

    def recover(self) -> None:
        """Nothing to do: the host carries frames out in order, and :meth:`take_died` tells if it is gone."""

    def close(self) -> None:
        self._is_closed.set()
        for channel in (self.channel, self._fresh):
            if channel is not None:
                channel.close()
        self._keeper.join()
        if self._fresh is not None:  # made meanwhile
            self._fresh.close()


@contextmanager
def _swaps_incomplete_if_it_dies() -> Iterator[None]:
    """Marks a host's death inside the ``with`` as one that leaves swaps incomplete: of several parts, and of several
    hosts, nobody knows which have been carried out."""
    try:
        yield
    except HostDied as death:
        death.swaps_incomplete = True
        raise


# -- the tier over several hosts ---------------------------------------------------------------------------------------
# The CPU tier over several hosts: this one, and others that hold more of it and compute their own attention.

RowsByHost = list[tuple[CpuTier, slice, object]]
"""Adjacent rows that live on one host, and what its tier made of them."""


class AttentionHosts:
    """See :class:`swiftllm.runtime.cpu_tier.CpuTier`. Host 0 is this one and has the first block ids, then each other.

    Attributes:
        hosts: the others.
        num_blocks: of each of the others.
        deaths: hosts that were lost so far.
    """

    may_die = True

    def __init__(
        self,
        local: CpuTier,
        num_local_blocks: int,
        hosts: Sequence[RemoteCpuTier],
        close_hosts: Callable[[], None],
    ) -> None:
        self.num_blocks = tuple(host.num_blocks for host in hosts)
        self.deaths = 0
        self.hosts = tuple(hosts)
        self._tiers: tuple[CpuTier, ...] = (local, *hosts)
        self._firsts = torch.tensor([0, *accumulate((num_local_blocks, *self.num_blocks))][:-1])
        self._close_hosts = close_hosts

    def describe(self) -> list[str]:
        """One line per host: its address, blocks and threads."""
        return [f"{host.channel.name}: {host.num_blocks:,} blocks, {host.threads} threads" for host in self.hosts]

    # -- what became of the hosts -----------------------------------------------------------------------------------

    def take_died(self) -> list[int]:
        """The hosts that are gone since the last call: none of their K and V can be used any more."""
        died = [number for number, host in enumerate(self.hosts, 1) if host.take_died()]
        self.deaths += len(died)
        return died

    def take_returned(self) -> list[int]:
        """The hosts, of those once returned by :meth:`take_died`, that are there again; their blocks are empty."""
        return [number for number, host in enumerate(self.hosts, 1) if host.take_returned()]

    @property
    def num_connected(self) -> int:
        """Hosts whose blocks are in use."""
        return sum(not host.channel.is_dead for host in self.hosts)

    # -- blocks that are fetched before a swap (swiftllm.kv.kv_cache_manager.BlockFetcher) -----------------------

    def fetch(self, blocks: Sequence[int]) -> None:
        for tier, _, own in self._split(blocks):
            tier.fetch(own.tolist())

    def has_fetched(self, blocks: Sequence[int]) -> bool:
        return all(tier.has_fetched(own.tolist()) for tier, _, own in self._split(blocks))

    def drop_fetched(self, blocks: Sequence[int]) -> None:
        for tier, _, own in self._split(blocks):
            tier.drop_fetched(own.tolist())

    # -- operations -------------------------------------------------------------------------------------------------

    def _split(self, blocks: torch.Tensor | Sequence[int]) -> Iterator[tuple[CpuTier, slice, torch.Tensor]]:
        """Tier, rows and own numbers (int64) of each run of blocks that lie on one host."""
        blocks = torch.as_tensor(blocks, dtype=torch.int64)
        hosts = torch.bucketize(blocks, self._firsts, right=True) - 1
        first = 0
        for host, count in zip(*(part.tolist() for part in hosts.unique_consecutive(return_counts=True)), strict=True):
            rows = slice(first, first + count)
            yield self._tiers[host], rows, blocks[rows] - self._firsts[host]
            first += count

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, window: int | None = None) -> RowsByHost:
        # The first block tells the host of a row, since all blocks of a request are in one pool. The backend sorts rows
        # by it: so each host has one run of rows, and one part of each attention task.
        opened = []
        for tier, rows, own in self._split(block_tables[:, 0]):
            shift = int(own[0] - block_tables[rows.start, 0])
            opened.append((tier, rows, tier.open(block_tables[rows] + shift, seq_lens[rows], window)))
        return opened

    def attend(
        self, task: AttentionTask, arrived: Event, send_back: Callable[[], None] | None = None
    ) -> AttentionFuture:
        if len(task.rows) == 1:
            ((tier, _, opened),) = task.rows
            return tier.attend(replace(task, rows=opened), arrived, send_back)
        whole = JoinedFuture(len(task.rows), send_back)
        # Another host's part first: with a worker that computes at once, the local part would hold it up.
        for tier, rows, opened in sorted(task.rows, key=lambda part: part[0] is self._tiers[0]):
            part = AttentionTask(task.layer, opened, task.qkv[rows], task.out[rows], task.sinks)
            try:
                future = tier.attend(part, arrived, whole.part_done)
            except HostDied as error:  # the other parts are under way and must be waited for
                whole.error = error
            else:
                whole.parts.append(future)
        return whole

    def write(self, write: HostWrite, arrived: Event) -> None:
        for tier, rows, blocks in self._split(write.blocks):
            if isinstance(write, RowsWrite):
                part = RowsWrite(write.layer, write.content[rows], blocks, write.offsets[rows])
            elif len(blocks) == len(write.blocks):
                part = replace(write, blocks=blocks)
            else:
                arrived.synchronize()  # the host copies its part out of the content, which must be there
                part = BlocksWrite(write.layers, write.content[:, rows].contiguous(), blocks)
            tier.write(part, arrived)

    def read(self, read: HostRead, send_back: Callable[[], None] | None = None) -> AttentionFuture:
        parts = list(self._split(read.blocks))
        if len(parts) == 1:
            ((tier, _, blocks),) = parts
            return tier.read(replace(read, blocks=blocks), send_back)
        whole = JoinedFuture(len(parts), send_back)
        for tier, rows, blocks in parts:  # of whole blocks: a context is on one host
            part = torch.empty_like(read.out[:, rows], memory_format=torch.contiguous_format)

            def place(rows: slice = rows, part: torch.Tensor = part) -> None:
                read.out[:, rows] = part
                whole.part_done()

            whole.parts.append(tier.read(BlocksRead(read.layers, blocks, part), place))
        return whole

    def recover(self) -> None:
        for tier in self._tiers:
            tier.recover()

    def close(self) -> None:
        self._tiers[0].close()
        self._close_hosts()


class JoinedFuture:
    """The attention tasks of parts on several hosts, as one: ready when all are.

    Attributes:
        parts: attention tasks of the parts under way.
        error: why a part could not be submitted.
    """

    def __init__(self, num_parts: int, send_back: Callable[[], None] | None) -> None:
        self.error: Exception | None = None
        self.parts: list[AttentionFuture] = []
        self._left = num_parts
        self._send_back = send_back
        self._lock = threading.Lock()

    def part_done(self) -> None:
        """Called by each part, on any thread, once its result is there; the last call sends the whole back."""
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last and self._send_back is not None:
            self._send_back()

    def ready(self) -> bool:
        return all(part.ready() for part in self.parts)

    def wait(self) -> float:
        """The seconds of the host that computed longest. Waits for all parts before it raises."""
        errors, seconds = [] if self.error is None else [self.error], [0.0]
        # All of them, since whoever waits takes it that no host uses the blocks or writes into the output any more.
        for part in self.parts:
            try:
                seconds.append(part.wait())
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return max(seconds)

    def times(self) -> AttentionTimes:
        times = [part.times() for part in self.parts]
        done_s = max(of_part.done_s for of_part in times)
        return AttentionTimes(min(of_part.start_s for of_part in times), done_s, done_s)
