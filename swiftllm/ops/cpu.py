"""Operations for rows in host memory: torch, except decode attention, which torch could only do by gathering."""

from __future__ import annotations

import torch

import pacpu
from swiftllm.ops.reference import ReferenceOps


class CpuOps(ReferenceOps):
    """See :class:`swiftllm.ops.Ops` for the contracts; everything runs on the calling thread."""

    def __init__(self, cpu_kernel: str | None = None) -> None:
        """``cpu_kernel``: a kernel of pacpu, default the best for the dtype."""
        self._cpu_kernel = cpu_kernel

    def decode_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        kernel = self._cpu_kernel
        pacpu.paged_attention(q, k, v, kv_layer, block_tables, seq_lens, out, scale, kernel=kernel)
