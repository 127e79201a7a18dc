"""Backends and engines on the CUDA made of Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
import torch

import apex.build
import apex.placement.measured
import swiftllm.ops.triton.ops as triton_ops
import swiftllm.parallel.backend
import swiftllm.runtime.execution_context
import swiftllm.runtime.torch_backend
from swiftllm.device import CudaDevice
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Draw, Linear, Ops, StateChunk, StateRows
from swiftllm.ops.matrices import Experts
from swiftllm.ops.triton.ops import efficient_attention, flash_attention, takes_flash
from swiftllm.runtime.execution_context import core_divisions
from tests.reference.draw_by_attempts import draw_by_attempts
from tests.reference.fake_device import FakeCuda
from tests.reference.fake_kernels import CAPABILITY, with_triton
from tests.reference.fake_streams import DEVICE, FakeWorker, Hazard

OWN_CARD = 1


class FakeOps(Ops):
    """Decode attention as a kernel of its own, which like Triton's passes over empty rows. Of the other operations
    it is noted which of Triton's kernels they are."""

    takes_empty_rows = True
    rms_norm = with_triton("rms_norm")
    add_rms_norm_ = with_triton("add_rms_norm_")
    norm_heads_ = with_triton("norm_heads_")
    rotary_ = with_triton("rotary_")
    silu_and_mul = with_triton("silu_and_mul")
    norm_and_gate = with_triton("norm_and_gate")
    store_kv = with_triton("store_kv")
    gather_blocks = with_triton("gather_blocks")
    scatter_blocks = with_triton("scatter_blocks")
    quantise_blocks = with_triton("quantise_blocks")
    dequantise_blocks = with_triton("dequantise_blocks")

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def make_quantised_linear(self, matrix, bias) -> Linear:
        multiply = super().make_quantised_linear(matrix, bias)
        note = self.cuda.kernels.made_by_triton("make_quantised_linear", matrix, bias)

        def linear(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            note(x, out)
            with self.cuda.kernels.in_place_of_triton():
                return multiply(x, out)

        return linear

    def make_experts(self, weights) -> Experts:
        # The linears of single experts are the reference's own: a GPU has none.
        compute = Ops().make_experts(weights)
        note = self.cuda.kernels.made_by_triton("make_experts", weights)

        def experts(x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
            note(x, num_rows)
            with self.cuda.kernels.in_place_of_triton():
                return compute(x, num_rows)

        return experts

    def embed(self, token_ids, embedding) -> torch.Tensor:
        if token_ids.device != DEVICE:
            return super().embed(token_ids, embedding)
        self.cuda.kernels.launch_as_triton("embed", token_ids, embedding)
        if embedding.device == DEVICE:
            return super().embed(token_ids, embedding)
        if embedding.data_ptr() not in self.cuda.runtime.mapped:
            raise Hazard("a kernel reads host memory that is not mapped")
        out = torch.empty(len(token_ids), embedding.shape[1], dtype=embedding.dtype, device=DEVICE)
        self.cuda.launch(lambda ids, rows: rows.copy_(embedding[ids]), token_ids, out)
        return out

    def make_draw(self) -> Draw:
        def draw(logits, chosen, likeliest, settings) -> torch.Tensor:
            self.cuda.kernels.launch_as_triton("draw", logits, chosen, likeliest, settings)
            tokens = torch.empty_like(chosen)
            self.cuda.launch(draw_by_attempts, logits, chosen, likeliest, settings, tokens)
            return tokens

        return draw

    def gather_contexts(self, kv_layer, contexts) -> torch.Tensor:
        if kv_layer.device != DEVICE:
            return super().gather_contexts(kv_layer, contexts)
        self.cuda.kernels.launch_as_triton("gather_contexts", kv_layer, contexts)
        _, heads, _, block_size, head_dim = kv_layer.shape
        out = kv_layer.new_empty((2, heads, sum(contexts.tokens), head_dim))

        def kernel(kv_layer, blocks, columns, out) -> None:
            firsts = [*columns.tolist(), out.shape[2]]
            for block, (first, end) in zip(blocks.tolist(), pairwise(firsts), strict=True):
                count = min(block_size, end - first)
                out[:, :, first : first + count] = kv_layer[block, :, :, :count].transpose(0, 1)

        self.cuda.launch(kernel, kv_layer, contexts.blocks, contexts.columns, out)
        return out

    def prefill_attention(self, q, k, v, lens, out, scale, window=None, sinks=None) -> None:
        if q.device != DEVICE:
            return super().prefill_attention(q, k, v, lens, out, scale, window, sinks)
        attend = flash_attention if takes_flash(q, self.cuda.kernels.capability) else efficient_attention
        attend(q, k, v, lens, out, scale, window, sinks)

    def convolve(self, x, weight, inputs, rows) -> torch.Tensor:
        if x.device != DEVICE:
            return super().convolve(x, weight, inputs, rows)
        out = torch.empty(x.shape, dtype=x.dtype, device=DEVICE)
        return self._continue_states("convolve", out, rows, x, weight, inputs)

    def delta_rule(self, q, k, v, log_decay, beta, states, rows) -> torch.Tensor:
        if q.device != DEVICE:
            return super().delta_rule(q, k, v, log_decay, beta, states, rows)
        out = torch.empty(v.shape, dtype=torch.float32, device=DEVICE)
        return self._continue_states("delta_rule", out, rows, q, k, v, log_decay, beta, states)

    def _continue_states(self, operation: str, out, rows: StateRows, *tensors: torch.Tensor) -> torch.Tensor:
        """As kernels do: slots are what they are by then, and those of -1 are passed over without a wait."""
        self.cuda.kernels.launch_as_triton(operation, *tensors, rows)

        def kernel(out, slots, *tensors) -> None:
            chunks = ()
            if rows.chunk_table is not None:
                *tensors, table = tensors
                chunks = tuple(StateChunk(slot, count, source < 0) for _, count, source, slot in table.tolist())
            out.copy_(getattr(Ops(), operation)(*tensors, StateRows(chunks, slots, has_padding=True)))

        table = () if rows.chunk_table is None else (rows.chunk_table,)
        self.cuda.launch(kernel, out, rows.decode_slots, *tensors, *table)
        return out

    def decode_attention(self, q, k, v, kv_layer, block_tables, seq_lens, out, scale, window=None, sinks=None) -> None:
        tensors = q, k, v, kv_layer, block_tables, seq_lens, out
        self.cuda.kernels.launch_as_triton("decode_attention", *tensors, scale, window, sinks)

        def kernel(q, k, v, kv_layer, block_tables, seq_lens, out, *sinks) -> None:
            self.cuda.attended.append(tuple(block_tables.shape))
            rows = seq_lens.nonzero()[:, 0]
            if len(rows):
                attended = torch.empty(len(rows), *out.shape[1:], dtype=out.dtype)
                new = q[rows], k[rows], v[rows]
                addressed = kv_layer, block_tables[rows], seq_lens[rows]
                CpuOps().decode_attention(*new, *addressed, attended, scale, window, *sinks)
                out[rows] = attended

        self.cuda.launch(kernel, *tensors, *(() if sinks is None else (sinks,)))


@contextmanager
def fake_gpu(
    seed: int,
    *,
    can_capture: bool = True,
    ignored: str | None = None,
    total_bytes: int = 1 << 30,
    measure_cores: bool = False,
    capability: int = CAPABILITY,
) -> Iterator[FakeCuda]:
    """Inside, backends compute on the second of two fake GPUs, and engines have their CPU attention done by its worker.

    The threads of that are chosen by measuring, as on a GPU, only with ``measure_cores``. Whoever works on the first
    GPU by mistake is found at the end.
    """
    fake = FakeCuda(seed, ignored=ignored, total_bytes=total_bytes, capability=capability)
    with pytest.MonkeyPatch.context() as patch, fake as cuda:

        def open_device(name: str, index: int | None = OWN_CARD, *, in_group: bool = False) -> CudaDevice:
            device = CudaDevice(index, can_capture=can_capture, in_group=in_group)
            device.torch_device = DEVICE
            return device

        for module in (swiftllm.runtime.torch_backend, swiftllm.parallel.backend, apex.placement.measured):
            patch.setattr(module, "open_device", open_device)
        for module in (swiftllm.runtime.execution_context, apex.placement.measured):
            patch.setattr(module, "select_ops", lambda *_: FakeOps(cuda))
        patch.setattr(apex.build, "CpuWorker", partial(FakeWorker, cuda))
        patch.setattr(triton_ops, "launch", cuda.kernels.launch)
        if not measure_cores:
            patch.setattr(
                apex.build, "core_divisions", lambda *about, **gpu_batch: core_divisions(*about, **gpu_batch)[:1]
            )
        yield cuda
        if cuda.cards.contexts != {OWN_CARD}:
            raise Hazard(f"the process has contexts on GPUs {cuda.cards.contexts}, and computes on {OWN_CARD}")
