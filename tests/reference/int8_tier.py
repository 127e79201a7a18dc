"""A CPU tier of int8, slowly: elements that have been codes, and attention over them in float64, by torch."""

from __future__ import annotations

from dataclasses import replace

import torch

from swiftllm.ops.interface import codes_and_scales
from swiftllm.runtime.cpu_tier import AttentionTask, BlocksWrite, CpuTask, RowsWrite, TaskRunner
from tests.reference.paged_attention import paged_attention, store_new_tokens


def poison_of(tensor: torch.Tensor) -> float:
    """What whoever reads it gets no tokens from: NaN, in an int8 tier as the bits of scales."""
    return 255 if tensor.dtype == torch.uint8 else torch.nan


def as_codes_and_back(x: torch.Tensor) -> torch.Tensor:
    """Rows ``[..., head_dim]`` as they come out of an int8 tier."""
    codes, scales = codes_and_scales(x)
    return (codes.float() * scales[..., None]).to(x.dtype)


class SlowInt8Runner(TaskRunner):
    """Takes the place of a :class:`TaskRunner` over an int8 tier; its pool is one of elements."""

    def run_task(self, task: CpuTask) -> None:
        match task:
            case AttentionTask():
                heads = task.out.shape[1], self._num_kv_heads, self._num_kv_heads
                q, k, v = task.qkv.split(heads, dim=1)
                pool, scale = self._layers[task.layer], q.shape[-1] ** -0.5
                tables, lens, window = task.rows
                store_new_tokens(as_codes_and_back(k), as_codes_and_back(v), pool, tables, lens)
                task.out.copy_(paged_attention(q, pool, tables, lens, scale, window, task.sinks))
            case RowsWrite() | BlocksWrite():
                super().run_task(replace(task, content=as_codes_and_back(task.content)))
            case _:
                super().run_task(task)
