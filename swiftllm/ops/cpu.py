"""Operations for rows in host memory: torch, where it is fast.

Decode attention is pacpu's, since torch could only do it by gathering. Matrices are packed once into the blocked
layout of oneDNN: in the plain layout they are packed anew by each call, which at a few rows takes longer than the
product (SmolLM2, 4 rows, one core of an EPYC with AVX-512: 54 ms plain, 25 ms packed in bfloat16; 136 and 45 ms in
float32).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import pacpu
from swiftllm.ops.reference import ReferenceOps

PACKING_ROWS = 32  # oneDNN packs for a number of rows: best at decodes, and no slower at prefills


class CpuOps(ReferenceOps):
    """See :class:`swiftllm.ops.Ops` for the contracts; everything runs on the calling thread."""

    def __init__(self, cpu_kernel: str | None = None) -> None:
        """``cpu_kernel``: a kernel of pacpu, default the best for the dtype."""
        self._cpu_kernel = cpu_kernel

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        if not _can_pack(weight.dtype):
            return super().make_linear(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
        linear = torch.ops.mkldnn._linear_pointwise
        return lambda x: linear(x, packed, bias, "none", [], "")

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


def _can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN is in this build of torch and computes in this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.float32:
        return True
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
