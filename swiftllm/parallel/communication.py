"""How ranks talk: collective operations over tensors, and messages between the driver and a rank."""

from __future__ import annotations

import logging
import marshal
import os
import select
import socket
import threading
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GatherOptions

from swiftllm.device import Device
from swiftllm.processes import DeviceThread

if TYPE_CHECKING:
    from swiftllm.runtime.graphs import LayerGraphs

# -- collective operations ---------------------------------------------------------------------------------------------
# The collective operations of the ranks: NCCL between GPUs, gloo between CPUs.
#
# A group outlives its communicators. After a failure all ranks leave and join again; meanwhile, and before the first
# time, each rank computes alone, so that it can load and measure without waiting for others.

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"  # all ranks are in one machine
TIMEOUT = timedelta(seconds=60)  # of a collective, for a rank that is alive and does not answer
LEAVE_S = 10.0  # that the communicator gets to give up its collectives


class Group:
    """One rank's access to all ranks.

    Attributes:
        rank, size: this rank, from 0, and how many there are.
        port: of the store where ranks find each other; rank 0 holds it.
        fails_by_itself: whether a collective raises once another rank has died. Else only :meth:`leave` releases it.
        epoch: the one joined last; None: this rank computes alone.
        graphs: captured graphs that hold collectives of this group, if there may be any.
    """

    epoch: int | None = None
    graphs: LayerGraphs | None = None

    def __init__(self, rank: int, size: int, hardware: Device, port: int = 0) -> None:
        self.rank = rank
        self.size = size
        self.fails_by_itself = hardware.torch_device.type == "cpu"
        self._hardware = hardware
        self._store = dist.TCPStore(HOST, port, None, rank == 0, TIMEOUT, wait_for_workers=False)
        self.port = self._store.port
        self._ranks: dist.ProcessGroup | None = None

    def join(self, epoch: int) -> None:
        """Meet the ranks that join the same ``epoch``, a number not used before; returns when all have."""
        store = dist.PrefixStore(f"epoch-{epoch}", self._store)
        if self.fails_by_itself:
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
            options._threads, options._timeout = 1, TIMEOUT
            self._ranks = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            self._ranks = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            self.all_agree(True)  # NCCL connects in the first collective, which must not be captured
        self.epoch = epoch

    def leave(self) -> None:
        """Break off: collectives under way raise, here and on the other ranks. From any thread.

        Captured graphs are destroyed first, as NCCL waits until none holds its collectives. It gets ``LEAVE_S``; what
        it still waits for then is left behind.
        """
        if self.graphs is not None:
            self.graphs.close()
        ranks, self._ranks, self.epoch = self._ranks, None, None
        if ranks is None:
            return
        failures: list[BaseException] = []

        def abort() -> None:
            try:
                ranks.abort()
            except BaseException as error:
                failures.append(error)

        thread = DeviceThread(abort, name="leave-group")
        thread.start()
        thread.join(LEAVE_S)
        if thread.is_alive():
            logger.error("rank %d leaves the group behind, which is not given up within %g s", self.rank, LEAVE_S)
        if failures:
            raise failures[0]

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self._ranks is not None:
            self._ranks.allreduce([tensor], _on_this_stream(dist.AllreduceOptions())).wait()
        return tensor

    def gather(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        """On rank 0 the columns of all ranks side by side, ``[rows, width]``: those beyond ``width`` are left out.
        Elsewhere ``columns`` itself."""
        if self.rank > 0:
            if self._ranks is not None:
                self._ranks.gather([], [columns], _on_this_stream(GatherOptions())).wait()
            return columns
        parts = [torch.zeros_like(columns) for _ in range(self.size)]
        if self._ranks is not None:
            self._ranks.gather([parts], [columns], _on_this_stream(GatherOptions())).wait()
        return torch.cat(parts, dim=1)[:, :width].contiguous()

    def all_agree(self, is_well: bool) -> bool:
        """Whether all ranks say so."""
        if self._ranks is None:
            return is_well
        stream = self._hardware.compute
        answer = torch.full((1,), int(not is_well), device=self._hardware.torch_device)
        fetched = stream.fetch(self.all_reduce(answer))
        stream.mark().synchronize()
        return not fetched.item()


def _on_this_stream(options: dist.AllreduceOptions | GatherOptions) -> dist.AllreduceOptions | GatherOptions:
    options.asyncOp = False  # NCCL: in order with the work around it, and in a captured graph
    return options


# -- messages ----------------------------------------------------------------------------------------------------------
# Messages between the driver and a rank, over a socket within the machine.
#
# A message is a tuple of plain values: numbers, texts, bytes, and tuples and lists of these. Its first value is its
# name.

Message = tuple[Any, ...]


class PipeClosed(ConnectionError):
    """The other end has closed, or its process has ended."""


class Pipe:
    """One end. Messages may be sent from any thread, and received by one."""

    def __init__(self, end: socket.socket) -> None:
        """Takes ``end`` over."""
        self._end = Connection(end.detach())
        self._sending = threading.Lock()
        self._arrivals = select.poll()
        self._arrivals.register(self._end, select.POLLIN)

    def send(self, *message: Any) -> None:
        """Waits only while the other end has a hundred kilobytes unread.

        Raises:
            PipeClosed: the other end has closed.
        """
        try:
            with self._sending:
                self._end.send_bytes(marshal.dumps(message))
        except OSError as error:
            raise PipeClosed(str(error)) from None

    @overload
    def receive(self, timeout_s: None = None) -> Message: ...

    @overload
    def receive(self, timeout_s: float | None) -> Message | None: ...

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message. None: none came within ``timeout_s``; 0 does not wait, None waits for ever.

        Raises:
            PipeClosed: the other end has closed, and all of its messages have been received.
        """
        try:
            if timeout_s is not None and not self._arrivals.poll(1000 * timeout_s):
                return None
            return marshal.loads(self._end.recv_bytes())
        except (EOFError, OSError) as error:
            raise PipeClosed(str(error) or "the other end has closed") from None

    def wait_until_closed(self) -> None:
        """Sleep until the other end has closed, whatever it sent before. From any thread."""
        poll = select.poll()
        poll.register(self._end, select.POLLRDHUP)
        poll.poll()

    def exit_when_closed(self) -> None:
        """From now on this process exits as soon as the other end closes, whatever it is doing."""

        def watch() -> None:
            self.wait_until_closed()
            os._exit(0)

        DeviceThread(watch, name="exit-when-closed").start()

    def close(self) -> None:
        self._end.close()
