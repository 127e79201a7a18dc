"""Operations for rows in host memory, by pacpu, or by torch where that is fast.

Matrices are packed once. torch (oneDNN) repacks a plain matrix in every call, which for a few rows takes longer than
the GEMM. In bfloat16 pacpu computes GEMMs where it is faster than oneDNN: on CPUs with AVX-512 and without AMX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import pacpu
from pacpu import rows
from pacpu.rows import convolve, delta_rule
from swiftllm.ops.interface import (
    ChunkLens,
    ContextBlocks,
    Crossing,
    CrossingParts,
    Linear,
    Ops,
    StateRows,
    concatenate,
)
from swiftllm.ops.matrices import BLOCK_WORDS, ExpertByExpert, Experts, ExpertWeights, QuantisedMatrix, Router

PACKING_ROWS = 32  # oneDNN packs for a row count: this one is best for decodes and no slower for prefills
WRITE_OUT_ROWS = 128  # with more, writing a 4-bit matrix out for a matrix unit takes less than that unit saves


class CpuOps(Ops):
    """See :class:`swiftllm.ops.interface.Ops` for the contracts."""

    def __init__(self, cpu_kernel: str | None = None, num_threads: int = 1) -> None:
        """``cpu_kernel``: a kernel of pacpu, by default the best for the dtype. ``num_threads``: threads of pacpu,
        changeable at any time; torch's are separate."""
        self._cpu_kernel = cpu_kernel
        self.num_threads = num_threads

    @property
    def in_place(self) -> Ops:
        return Ops()

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        if pacpu_multiplies(weight.dtype):
            return PackedLinear(self, weight, bias)
        if not onednn_packs(weight.dtype):
            return super().make_linear(weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKING_ROWS)
        linear = torch.ops.mkldnn._linear_pointwise
        return lambda x: linear(x, packed, bias, "none", [], "")

    def make_quantised_linear(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Linear:
        return CodedLinear(self, matrix, bias)

    def make_experts(self, weights: ExpertWeights) -> Experts:
        stacks = weights.gate_up, weights.down
        is_coded = all(isinstance(stack, QuantisedMatrix) for stack in stacks)
        return CodedExperts(self, weights) if is_coded else super().make_experts(weights)

    def store_experts(self, weights: ExpertWeights, store: Store) -> tuple[Any, CodedExperts | ExpertByExpert]:
        """Matrices and biases in the memory that ``store`` gives, and what computes with them where they are.

        4-bit ones are in panels, which :func:`copy_panels` undoes. Plain ones stay as they are: a packed copy would
        take as much memory again.
        """
        biases = weights.gate_up_bias, weights.down_bias
        gate_up, down = weights.stacks
        if isinstance(gate_up, QuantisedMatrix) and isinstance(down, QuantisedMatrix):
            if any(matrix.out_features // weights.num_experts % rows.CODE_COLUMNS for matrix in (gate_up, down)):
                raise ValueError(f"experts in host memory need outputs in multiples of {rows.CODE_COLUMNS}")
            panels = (panels_of(matrix, weights.num_experts) for matrix in (gate_up, down))
            stored = store((*panels, *biases))
            return stored, CodedExperts(self, weights, stored)
        stored = store((*weights.stacks, *biases))
        parts = dict(zip(("gate_up", "down", "gate_up_bias", "down_bias"), stored, strict=True))
        experts = self.in_place.make_experts(replace(weights, **parts))
        assert isinstance(experts, ExpertByExpert)
        return stored, experts

    def make_crossing(self, parts: CrossingParts) -> Crossing | None:
        linears = parts.o, parts.gate_up, parts.down, parts.projection
        is_all_packed = all(isinstance(linear, PackedLinear | CodedLinear) for linear in linears)
        takes_inputs = any(isinstance(linear, CodedLinear) and linear.taken is not None for linear in linears)
        if not is_all_packed or takes_inputs or not pacpu_multiplies(parts.norm.dtype):
            return None
        return PackedCrossing(self, parts)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0) -> torch.Tensor:
        if x.dtype is not weight.dtype:  # pacpu's arrays have one
            return self.rms_norm(x, weight.to(x.dtype), eps, offset).to(weight.dtype)
        out = torch.empty_like(x)
        rows.rms_norm(x, weight, eps, out, offset=offset, num_threads=self.num_threads)
        return out

    def add_rms_norm_(
        self, residual: torch.Tensor, addend: torch.Tensor, weight: torch.Tensor, eps: float, offset: float = 0.0
    ) -> torch.Tensor:
        if residual.dtype is not weight.dtype:
            wide = addend.to(residual.dtype), weight.to(residual.dtype)
            return self.add_rms_norm_(residual, *wide, eps, offset).to(weight.dtype)
        out = torch.empty_like(addend)
        rows.rms_norm(residual, weight, eps, out, addend=addend, offset=offset, num_threads=self.num_threads)
        return out

    def norm_heads_(self, x: torch.Tensor, weights: torch.Tensor, eps: float, offset: float = 0.0) -> None:
        rows.norm_heads(x, weights, eps, offset=offset, num_threads=self.num_threads)

    def rotary_(self, x: torch.Tensor, rotary_rows: torch.Tensor) -> None:
        rows.rotary(x, rotary_rows, num_threads=self.num_threads)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
        rows.silu_and_mul(gate_up, out, num_threads=self.num_threads)
        return out

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, inputs: torch.Tensor, rows: StateRows) -> torch.Tensor:
        out = x.new_empty(x.shape)
        convolve(x, weight, inputs, rows.chunks, rows.decode_slots, out, num_threads=self.num_threads)
        return out

    def delta_rule(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        rows: StateRows,
    ) -> torch.Tensor:
        out, where = v.new_empty(v.shape, dtype=torch.float32), (rows.chunks, rows.decode_slots)
        delta_rule(q, k, v, log_decay, beta, states, *where, out, num_threads=self.num_threads)
        return out

    def store_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layer: torch.Tensor,
        blocks: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        rows.store_kv(k, v, kv_layer, blocks, offsets, num_threads=self.num_threads)

    def gather_contexts(self, kv_layer: torch.Tensor, contexts: ContextBlocks) -> torch.Tensor:
        _, heads, _, block_size, head_dim = kv_layer.shape
        parts = [kv_layer.new_empty((2, heads, tokens, head_dim)) for tokens in contexts.tokens]
        for part, (blocks, _) in zip(parts, contexts.slices(block_size), strict=True):
            rows.gather_kv(kv_layer, contexts.blocks[blocks], part, num_threads=self.num_threads)
        return concatenate(parts, dim=2)

    def gather_blocks(self, pool: torch.Tensor, blocks: torch.Tensor, staging: torch.Tensor) -> None:
        rows.gather_blocks(pool, blocks, staging, num_threads=self.num_threads)

    def scatter_blocks(self, staging: torch.Tensor, pool: torch.Tensor, blocks: torch.Tensor) -> None:
        rows.scatter_blocks(staging, pool, blocks, num_threads=self.num_threads)

    def prefill_attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lens: ChunkLens,
        out: torch.Tensor,
        scale: float,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if not pacpu_multiplies(q.dtype) or not rows.has_prompt_attention():
            return super().prefill_attention(q, k, v, lens, out, scale, window, sinks)
        prompts = [(q[own], k[:, tokens], v[:, tokens], out[own]) for own, tokens in lens.slices()]
        rows.prompt_attention(prompts, scale, window=window, sinks=sinks, num_threads=self.num_threads)

    def _attend_chunk(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        if pacpu_multiplies(q.dtype):  # torch's attention also uses oneDNN's GEMMs; float32 takes a quarter less time
            q, k, v = q.float(), k.float(), v.float()
        return super()._attend_chunk(q, k, v, mask, scale, sinks)

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
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        how = {"window": window, "sinks": sinks, "num_threads": self.num_threads, "kernel": self._cpu_kernel}
        pacpu.paged_attention(q, k, v, kv_layer, block_tables, seq_lens, out, scale, **how)


Store = Callable[[Any], Any]
"""Copies tensors in host memory to other memory there, and returns the same structure of them."""


class PackedLinear:
    """``x weight^T + bias`` by pacpu; see :meth:`CpuOps.make_linear`."""

    def __init__(self, ops: CpuOps, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self.packed = weight.new_empty(rows.packed_shape(*weight.shape))
        self.bias = bias
        self._ops = ops
        rows.pack_matrix(weight, self.packed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = x.new_empty((x.shape[0], self.out_features))
        rows.linear(x, self.packed, self.bias, out, num_threads=self._ops.num_threads)
        return out


class CodedLinear:
    """``x weight^T + bias`` of a 4-bit matrix by pacpu. Where torch has a matrix unit, many rows are multiplied with
    the matrix written out, which is gone afterwards."""

    def __init__(self, ops: CpuOps, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> None:
        self.taken = None
        if matrix.runs is not None:  # a rank's part of a matrix with act-order: pacpu knows equal groups only
            self.taken, matrix = matrix.order, matrix.with_taken_inputs()
        self.out_features, self.in_features = matrix.out_features, matrix.in_features
        self.bias = bias
        self.order = matrix.order
        self.arrays = panels_of(matrix)
        self.packed = packed_codes(matrix, self.arrays)
        dtype = matrix.dtype
        has_matrix_unit = dtype is not torch.float32 and onednn_packs(dtype) and not pacpu_multiplies(dtype)
        self._most_rows = WRITE_OUT_ROWS if has_matrix_unit else None
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.taken is not None:
            x = x.index_select(1, self.taken)
        if self._most_rows is not None and x.shape[0] > self._most_rows:
            return self._written_out(x)
        out = x.new_empty((x.shape[0], self.out_features))
        self.packed.linear(x, self.bias, out, num_threads=self._ops.num_threads)
        return out

    def _written_out(self, x: torch.Tensor) -> torch.Tensor:
        weight = x.new_empty((self.out_features, self.in_features))
        self.packed.write_out(weight, num_threads=self._ops.num_threads)
        return F.linear(x if self.order is None else x[:, self.order], weight, self.bias)


class CodedExperts:
    """An FFN of experts in 4 bits by pacpu, in one call; see :meth:`CpuOps.make_experts`. A row's result has the same
    bits whatever rows come with it."""

    def __init__(self, ops: CpuOps, weights: ExpertWeights, stored: tuple[Any, ...] | None = None) -> None:
        """``stored``: panels of both stacks and their biases, where they are already; see
        :meth:`CpuOps.store_experts`."""
        self._ops, self._router, experts, clamp = ops, Router(weights), weights.num_experts, weights.activation
        of_gate_up, of_down = weights.stacks
        assert isinstance(of_gate_up, QuantisedMatrix) and isinstance(of_down, QuantisedMatrix)
        if stored is None:
            panels = (panels_of(matrix, experts) for matrix in (of_gate_up, of_down))
            stored = (*panels, weights.gate_up_bias, weights.down_bias)
        gate_up_panels, down_panels, gate_up_bias, down_bias = stored
        self._packed = rows.PackedExperts(
            (packed_codes(of_gate_up, gate_up_panels, experts), gate_up_bias),
            (packed_codes(of_down, down_panels, experts), down_bias),
            None if clamp is None else (clamp.limit, clamp.alpha),
            num_experts=experts,
            hidden_size=of_gate_up.in_features,
            ffn_size=of_down.in_features,
        )

    def __call__(self, x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        return self.compute(x, *self._router(x, num_rows))

    def compute(self, x: torch.Tensor, ids: torch.Tensor, likelihoods: torch.Tensor) -> torch.Tensor:
        """The rows of experts that a router chose; in page-locked memory, where ``x`` is."""
        out = torch.empty_like(x, pin_memory=x.is_pinned())
        routing = ids.contiguous(), likelihoods.contiguous()
        self._packed(x, *routing, out, num_threads=self._ops.num_threads)
        return out


Panels = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes int32 ``[panels, blocks, columns, 16]``, scales and zeros ``[panels, groups, columns]``, as pacpu has them."""


def panels_of(matrix: QuantisedMatrix, parts: int = 1) -> Panels:
    """The matrix in panels, without :attr:`~QuantisedMatrix.runs`. The outputs are of so many ``parts``; panels have
    those of one part only."""
    codes = matrix.codes.view(-1, BLOCK_WORDS, matrix.out_features)
    return (
        _in_panels(codes, parts).transpose(2, 3).contiguous(),
        _in_panels(matrix.scales, parts).contiguous(),
        None if matrix.zeros is None else _in_panels(matrix.zeros, parts).contiguous(),
    )


def packed_codes(matrix: QuantisedMatrix, panels: Panels, parts: int = 1) -> rows.PackedCodes:
    """pacpu's matrix of the panels of so many parts."""
    out_features = matrix.out_features if parts == 1 else len(panels[0]) * rows.CODE_COLUMNS
    return rows.PackedCodes(*panels, matrix.order, out_features=out_features, in_features=matrix.in_features)


def copy_panels(panels: Panels, matrix: QuantisedMatrix) -> None:
    """Fill a matrix, whose outputs fill whole panels, with what :func:`panels_of` made; on any device."""
    codes, scales, zeros = panels
    columns = -1, rows.CODE_COLUMNS
    of_words = matrix.codes.unflatten(0, (-1, BLOCK_WORDS)).unflatten(-1, columns)  # [blocks, 16, panels, columns]
    of_words.copy_(codes.permute(1, 3, 0, 2))
    for target, source in ((matrix.scales, scales), (matrix.zeros, zeros)):
        if target is not None and source is not None:
            target.unflatten(-1, columns).copy_(source.transpose(0, 1))


def _in_panels(x: torch.Tensor, parts: int) -> torch.Tensor:
    """``[n, ..., parts * out]`` as ``[parts * panels, n, ..., columns]``, each part padded."""
    apart = x.unflatten(-1, (parts, -1))
    more = -apart.shape[-1] % rows.CODE_COLUMNS
    padded = F.pad(apart, (0, more)) if more else apart
    return padded.flatten(-2).unflatten(-1, (-1, rows.CODE_COLUMNS)).movedim(-2, 0)


class PackedCrossing:
    """See :meth:`CpuOps.make_crossing`."""

    def __init__(self, ops: CpuOps, parts: CrossingParts) -> None:
        """The linears are :class:`PackedLinear` or :class:`CodedLinear`."""
        matrices = {name: getattr(parts, name) for name in ("o", "gate_up", "down", "projection")}
        self._ops = ops
        o, down, projection = parts.o, parts.down, parts.projection
        kinds = PackedLinear | CodedLinear
        assert isinstance(o, kinds) and isinstance(down, kinds) and isinstance(projection, kinds)
        self._out_features = projection.out_features
        self._crossing = rows.Crossing(
            **{name: (linear.packed, linear.bias) for name, linear in matrices.items()},
            post_norm=parts.post_norm,
            norm=parts.norm,
            head_norms=parts.head_norms,
            attention_size=o.in_features,
            intermediate_size=down.in_features,
            out_features=self._out_features,
            rotated_heads=parts.rotated_heads,
            head_dim=parts.head_dim,
            eps=parts.eps,
        )

    def __call__(
        self, attention_out: torch.Tensor, residual: torch.Tensor, rotary_rows: torch.Tensor | None
    ) -> torch.Tensor:
        out = residual.new_empty((residual.shape[0], self._out_features))
        self._crossing(attention_out, residual, rotary_rows, out, num_threads=self._ops.num_threads)
        return out


def torch_threads(dtype: torch.dtype, gpu_batch_threads: int) -> int:
    """How many threads torch should have if the GPU batch has ``gpu_batch_threads``.

    One where pacpu computes the GEMMs. Between operations torch's threads spin on cores that pacpu's threads need, and
    small layers then take ten times as long.
    """
    return 1 if pacpu_multiplies(dtype) else gpu_batch_threads


def pacpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether it does so faster than torch."""
    return dtype is torch.bfloat16 and rows.linear_is_fastest()


def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether this build of torch has oneDNN, and oneDNN supports the dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.float32:
        return True
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    return getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")()
