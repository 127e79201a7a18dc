"""What a CPU attention worker computes: tasks that are plain data, and the runner that carries them out.

A task names blocks and layers of the CPU tier instead of holding its memory, so that it can be sent to another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import pacpu
from pacpu import rows


@dataclass(frozen=True, eq=False)
class AttentionTask:
    """Decode attention of a cohort in one layer, one row per request. All tensors are in host memory."""

    layer: int
    q: torch.Tensor  # [rows, num_heads, head_dim]
    k: torch.Tensor  # [rows, num_kv_heads, head_dim]; stored at position seq_lens - 1
    v: torch.Tensor  # as k
    block_tables: torch.Tensor  # int32 [rows, max_blocks]
    seq_lens: torch.Tensor  # int32 [rows]
    out: torch.Tensor  # as q; overwritten
    scale: float


@dataclass(frozen=True, eq=False)
class RowsWrite:
    """K and V of prompt tokens for one layer of the CPU tier."""

    layer: int
    kv: torch.Tensor  # [rows, 2 num_kv_heads, head_dim], the heads of K first
    blocks: torch.Tensor  # int64 [rows]
    offsets: torch.Tensor  # int64 [rows]


@dataclass(frozen=True, eq=False)
class BlocksWrite:
    """Whole blocks of some layers for the CPU tier."""

    layers: range
    content: torch.Tensor  # [layers, blocks, num_kv_heads, 2, block_size, head_dim]
    blocks: torch.Tensor  # int64 [blocks]


@dataclass(frozen=True, eq=False)
class ContextRead:
    """K and V of a request's first tokens in one layer of the CPU tier."""

    layer: int
    blocks: torch.Tensor  # int64, of the request in order
    out: torch.Tensor  # [2, num_kv_heads, tokens, head_dim]; overwritten


@dataclass(frozen=True, eq=False)
class BlocksRead:
    """Whole blocks of some layers of the CPU tier."""

    layers: range
    blocks: torch.Tensor  # int64 [blocks]
    content: torch.Tensor  # [layers, blocks, num_kv_heads, 2, block_size, head_dim]; overwritten


HostWrite = RowsWrite | BlocksWrite
HostRead = ContextRead | BlocksRead
CpuTask = AttentionTask | HostWrite | HostRead


class TaskRunner:
    """Carries tasks out on the CPU tier of this process.

    Attributes:
        num_threads: of each task; may be changed between tasks.
    """

    def __init__(self, pool: torch.Tensor, *, kernel: str, num_threads: int) -> None:
        """``pool [num_layers, num_blocks, num_kv_heads, 2, block_size, head_dim]`` is the CPU tier, ``kernel`` one of
        pacpu's."""
        self.num_threads = num_threads
        self._pool = pool
        self._layers: Sequence[torch.Tensor] = pool.unbind(0)
        self._kernel = kernel

    def run_task(self, task: CpuTask) -> None:
        """Raises ValueError where a task names blocks or shapes that the pool does not have."""
        threads = {"num_threads": self.num_threads}
        match task:
            case AttentionTask():
                self._attend(task)
            case RowsWrite():
                k, v = task.kv.chunk(2, 1)
                rows.store_kv(k, v, self._layers[task.layer], task.blocks, task.offsets, **threads)
            case BlocksWrite():
                rows.scatter_blocks(task.content, self._part(task.layers), task.blocks, **threads)
            case ContextRead():
                rows.gather_kv(self._layers[task.layer], task.blocks, task.out, **threads)
            case BlocksRead():
                rows.gather_blocks(self._part(task.layers), task.blocks, task.content, **threads)

    def _part(self, layers: range) -> torch.Tensor:
        return self._pool[layers.start : layers.stop]

    def _attend(self, task: AttentionTask) -> None:
        pacpu.paged_attention(
            task.q,
            task.k,
            task.v,
            self._layers[task.layer],
            task.block_tables,
            task.seq_lens,
            task.out,
            task.scale,
            num_threads=self.num_threads,
            kernel=self._kernel,
        )
