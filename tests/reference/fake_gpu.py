"""Backends and engines on the CUDA made of Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

import apex.placement.measured
import apex.systems
import pacpu
import swiftllm.parallel.backend
import swiftllm.runtime.torch_backend
from swiftllm.device.cuda import CudaDevice
from swiftllm.ops.reference import ReferenceOps
from tests.reference.fake_device import FakeCuda
from tests.reference.fake_streams import DEVICE, FakeWorker, Hazard

OWN_CARD = 1


class FakeOps(ReferenceOps):
    """Decode attention as a kernel of its own, which like Triton's passes over empty rows."""

    takes_empty_rows = True

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def decode_attention(self, q, k, v, kv_layer, block_tables, seq_lens, out, scale) -> None:
        def kernel(q, k, v, kv_layer, block_tables, seq_lens, out) -> None:
            self.cuda.attended.append(tuple(block_tables.shape))
            rows = seq_lens.nonzero()[:, 0]
            if len(rows):
                attended = torch.empty(len(rows), *out.shape[1:], dtype=out.dtype)
                new = q[rows], k[rows], v[rows]
                pacpu.paged_attention(*new, kv_layer, block_tables[rows], seq_lens[rows], attended, scale)
                out[rows] = attended

        self.cuda.launch(kernel, q, k, v, kv_layer, block_tables, seq_lens, out)


@contextmanager
def fake_gpu(
    seed: int, *, can_capture: bool = True, ignored: str | None = None, total_bytes: int = 1 << 30
) -> Iterator[FakeCuda]:
    """Inside, backends compute on the second of two fake GPUs, and engines have their CPU attention done by its worker.

    Whoever works on the first one by mistake is found at the end.
    """
    fake = FakeCuda(seed, ignored=ignored, total_bytes=total_bytes)
    with pytest.MonkeyPatch.context() as patch, fake as cuda:

        def open_device(name: str, index: int | None = OWN_CARD) -> CudaDevice:
            device = CudaDevice(index, can_capture=can_capture)
            device.torch_device = DEVICE
            return device

        for module in (swiftllm.runtime.torch_backend, swiftllm.parallel.backend, apex.placement.measured):
            patch.setattr(module, "open_device", open_device)
            patch.setattr(module, "select_ops", lambda *_: FakeOps(cuda), raising=False)
        patch.setattr(apex.systems, "CpuWorker", partial(FakeWorker, cuda))
        yield cuda
        if cuda.cards.contexts != {OWN_CARD}:
            raise Hazard(f"the process has contexts on GPUs {cuda.cards.contexts}, and computes on {OWN_CARD}")
