"""The part of the CPU tier that another host holds: each operation becomes a frame to its attention host."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from swiftllm.device.device import Event
from swiftllm.engine.backend import HostDied
from swiftllm.remote.channel import Channel, RemoteFuture
from swiftllm.remote.frames import FrameKind, Header, KVShape, connect
from swiftllm.runtime.workers import AttentionTask, BlocksRead, ContextRead, HostRead, HostWrite, RowsWrite
from swiftllm.threads import DeviceThread

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
        """Connect to the host; more than ``most_blocks`` would be of no use.

        Raises:
            OSError: it cannot be reached, or refuses; the message has its address.
        """
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
            with _in_swap():
                self.channel.post(header, write.blocks, write.content, arrived=arrived)

    def read(self, read: HostRead, send_back: Callable[[], None] | None = None) -> RemoteFuture:
        """Waits for the answer to a read of blocks, if :meth:`fetch` has not brought it: a host that dies later leaves
        nothing of a swap unknown."""
        if isinstance(read, ContextRead):
            header = Header(FrameKind.LOAD, read.layer, read.out.shape[2])
            return self.channel.ask(header, read.blocks, out=read.out, send_back=send_back)
        ids = read.blocks.tolist()
        with _in_swap():
            if not self._are_here(ids):
                future = self._ask_for(read, send_back)
                future.wait()
                return future
            fetched = [self._fetched[block] for block in ids]
            for index, (future, kept) in enumerate(fetched):
                future.wait()
                read.out[:, index] = kept[read.layers.start : read.layers.stop]
        if read.layers.stop == self._shape.num_layers:
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
def _in_swap() -> Iterator[None]:
    """Marks a host's death inside the ``with`` as one during swaps."""
    try:
        yield
    except HostDied as death:
        death.in_swap = True
        raise
