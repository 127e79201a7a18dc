"""The CPU tier as the backend sees it: what may be done with its blocks, wherever they lie.

:class:`LocalCpuTier` is the memory of this process. :mod:`swiftllm.remote` has tiers in other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from swiftllm.device.device import Event
from swiftllm.engine.backend import Ticket
from swiftllm.runtime.tier_order import TierOrder
from swiftllm.runtime.workers.interface import AttentionWorker
from swiftllm.runtime.workers.task import AttentionTask, BlocksRead, BlocksWrite, ContextRead, RowsWrite, TaskRunner


class CpuTier(Protocol):
    """Operations take effect in the order of the calls. All tensors are in host memory.

    Blocks are int64, rows of a prompt are ``[rows, 2 num_kv_heads, head_dim]`` with the heads of K first. ``arrived``
    is when an input may be read; the caller does not change the input afterwards. Whole blocks of some layers are
    ``content [layers, blocks, num_kv_heads, 2, block_size, head_dim]``. Once an output is written, ``send_back`` is
    called on any thread; then the ticket is ready. On another host any call, and a ticket's ``wait``, may raise
    :class:`swiftllm.engine.backend.HostDied`.
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

        ``qkv [rows, num_heads + 2 num_kv_heads, head_dim]``, ``out [rows, num_heads, head_dim]``.
        """

    def store(self, layer: int, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, arrived: Event) -> None:
        """Write K and V of prompt tokens: row i of ``kv`` to slot ``offsets[i]`` of block ``blocks[i]``."""

    def load(self, layer: int, blocks: torch.Tensor, out: torch.Tensor) -> Ticket:
        """Read K and V of a request's first tokens into ``out [2, num_kv_heads, tokens, head_dim]``."""

    def put(self, layers: range, content: torch.Tensor, blocks: torch.Tensor, arrived: Event) -> None:
        """Write whole blocks."""

    def get(
        self,
        layers: range,
        blocks: torch.Tensor,
        content: torch.Tensor,
        send_back: Callable[[], None] | None = None,
    ) -> Ticket:
        """Read whole blocks into ``content``."""

    def recover(self) -> None:
        """Wait until no read or write is under way, ignore their errors, and make the tier usable again."""

    def close(self) -> None: ...


class LocalCpuTier:
    """See :class:`CpuTier`: blocks in the memory of this process, and its workers."""

    def __init__(
        self,
        runner: TaskRunner,
        worker: AttentionWorker,
        reader: AttentionWorker,
        *,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
    ) -> None:
        """``worker`` attends and writes. ``reader`` reads for the device, which need not wait for attention; without it
        a read would stand behind a cohort's. Both carry out tasks by ``runner``."""
        self._worker = worker
        self._reader = reader
        self._order = TierOrder(runner, worker, reader)
        self._sizes = (num_heads, num_kv_heads, num_kv_heads)
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
        return self._worker.submit(task, self._order.after_reads(arrived), send_back)

    def store(self, layer: int, kv: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, arrived: Event) -> None:
        self._order.write(RowsWrite(layer, kv, blocks, offsets), arrived, range(layer, layer + 1), kv.nbytes)

    def load(self, layer: int, blocks: torch.Tensor, out: torch.Tensor) -> Ticket:
        return self._order.read(ContextRead(layer, blocks, out), range(layer, layer + 1), out.nbytes)

    def put(self, layers: range, content: torch.Tensor, blocks: torch.Tensor, arrived: Event) -> None:
        self._order.write(BlocksWrite(layers, content, blocks), arrived, layers, content.nbytes)

    def get(
        self,
        layers: range,
        blocks: torch.Tensor,
        content: torch.Tensor,
        send_back: Callable[[], None] | None = None,
    ) -> Ticket:
        return self._order.read(BlocksRead(layers, blocks, content), layers, content.nbytes, send_back)

    def recover(self) -> None:
        self._order.drop_all()
        self._worker.start_again()
        self._reader.start_again()

    def close(self) -> None:
        self._reader.close()
        self._worker.close()
