"""The CPU tier as the backend sees it: what may be done with its blocks, wherever they lie.

:class:`LocalCpuTier` is the memory of this process. :mod:`swiftllm.remote` has tiers in other processes.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swiftllm.device.device import Event
from swiftllm.engine.backend import Ticket
from swiftllm.ops.interface import Ops
from swiftllm.runtime.workers.interface import AttentionWorker
from swiftllm.runtime.workers.task import AttentionTask, BlocksWrite, HostWrite, RowsWrite, TaskRunner

MAX_STAGED_BYTES = 256 << 20  # of pinned memory whose content is not yet written to the tier


class CpuTier(Protocol):
    """Operations take effect in the order of the calls. All tensors are in host memory.

    Blocks are int64, rows of a prompt are ``[rows, 2 num_kv_heads, head_dim]`` with the heads of K first. ``arrived``
    is when an input may be read; the caller does not change the input afterwards. On another host any call, and a
    ticket's ``wait``, may raise :class:`swiftllm.engine.backend.HostDied`.
    """

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor) -> Any:
        """What :meth:`attend` needs to know of the rows of one token: int32 ``[rows, max_blocks]`` and ``[rows]``."""

    def attend(
        self,
        layer: int,
        rows: Any,
        qkv: torch.Tensor,
        out: torch.Tensor,
        arrived: Event,
        send_back: Callable[[], None] | None = None,
    ) -> Ticket:
        """Decode attention of opened rows in one layer; stores their K and V first.

        ``qkv [rows, num_heads + 2 num_kv_heads, head_dim]``, ``out [rows, num_heads, head_dim]``. Once ``out`` is
        written, ``send_back`` is called on any thread. Then the ticket is ready.
        """

    def store(self, layer: int, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, arrived: Event) -> None:
        """Write K and V of prompt tokens: row i of ``kv`` to slot ``offsets[i]`` of block ``blocks[i]``."""

    def load(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """K and V of a request's first tokens, ``[2, num_kv_heads, num_tokens, head_dim]``."""

    def put(self, content: torch.Tensor, blocks: torch.Tensor, arrived: Event) -> None:
        """Write whole blocks, ``content [num_layers, blocks, num_kv_heads, 2, block_size, head_dim]``."""

    def get(self, blocks: torch.Tensor, content: torch.Tensor) -> None:
        """Read whole blocks of all layers into ``content``, shaped as in :meth:`put`."""

    def recover(self) -> None:
        """Wait until no write is under way, ignore their errors, and make the tier usable again."""

    def close(self) -> None: ...


class LocalCpuTier:
    """See :class:`CpuTier`: blocks in the memory of this process, and its attention worker."""

    def __init__(
        self,
        pool: torch.Tensor,
        ops: Ops,
        runner: TaskRunner,
        worker: AttentionWorker,
        *,
        num_heads: int,
        scale: float,
    ) -> None:
        """``pool [num_layers, num_blocks, num_kv_heads, 2, block_size, head_dim]`` is the tier that ``runner`` has."""
        self._pool = pool
        self._layers = pool.unbind(0)
        self._ops = ops
        self._worker = worker
        self._writes = HostWrites(runner, worker)
        self._sizes = (num_heads, pool.shape[2], pool.shape[2])
        self._scale = scale

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return block_tables, seq_lens

    def attend(
        self,
        layer: int,
        rows: tuple[torch.Tensor, torch.Tensor],
        qkv: torch.Tensor,
        out: torch.Tensor,
        arrived: Event,
        send_back: Callable[[], None] | None = None,
    ) -> Ticket:
        task = AttentionTask(layer, *qkv.split(self._sizes, dim=1), *rows, out, self._scale)
        return self._worker.submit(task, arrived, send_back)

    def store(self, layer: int, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, arrived: Event) -> None:
        self._writes.submit(RowsWrite(layer, kv, blocks, offsets), arrived, range(layer, layer + 1), kv.nbytes)

    def load(self, layer: int, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
        self._writes.settle(range(layer, layer + 1))
        return self._ops.gather_kv(self._layers[layer], blocks, num_tokens)

    def put(self, content: torch.Tensor, blocks: torch.Tensor, arrived: Event) -> None:
        self._writes.submit(BlocksWrite(content, blocks), arrived, range(len(self._layers)), content.nbytes)

    def get(self, blocks: torch.Tensor, content: torch.Tensor) -> None:
        self._writes.settle(range(len(self._layers)))
        self._ops.gather_blocks(self._pool, blocks, content)

    def recover(self) -> None:
        self._writes.drop_writes()
        self._worker.start_again()

    def close(self) -> None:
        self._worker.close()


@dataclass(frozen=True)
class _Pending:
    layers: range
    num_bytes: int
    ticket: Ticket


class HostWrites:
    """Writes to the CPU tier, in order, of data that may still be on its way from the device."""

    def __init__(self, runner: TaskRunner, worker: AttentionWorker) -> None:
        self._runner = runner
        self._worker = worker
        self._pending: deque[_Pending] = deque()

    def submit(self, write: HostWrite, arrived: Event, layers: range, num_bytes: int) -> None:
        """Write after ``arrived``: on this thread at once if there is nothing to wait for, else on the worker."""
        while self._pending and self._pending[0].ticket.ready():
            self._finish(self._pending[0])
        if not self._pending and arrived.done():
            self._runner.run_task(write)
            return
        self._pending.append(_Pending(layers, num_bytes, self._worker.submit(write, arrived)))
        while sum(pending.num_bytes for pending in self._pending) > MAX_STAGED_BYTES:
            self._finish(self._pending[0])

    def settle(self, layers: range) -> None:
        """Wait for the writes to these layers; raises what they raised."""
        for pending in list(self._pending):
            if pending.layers.start < layers.stop and layers.start < pending.layers.stop:
                self._finish(pending)

    def _finish(self, pending: _Pending) -> None:
        self._pending.remove(pending)
        try:
            pending.ticket.wait()
        except BaseException:
            # The caller gives up all work under way: the other writes must not fail again afterwards.
            self.drop_writes()
            raise

    def drop_writes(self) -> None:
        """Wait for all writes and ignore their errors."""
        while self._pending:
            with contextlib.suppress(Exception):
                self._pending.popleft().ticket.wait()
