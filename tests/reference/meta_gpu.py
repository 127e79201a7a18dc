"""A GPU that only counts memory: the engine's own code runs on tensors of the device "meta", in any size.

Inside ``with MetaGpu(total_bytes)`` every tensor on that device takes its bytes until its last reference is dropped,
and torch.cuda reports them. Nothing is computed. Triton's kernels are not launched.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import swiftllm.ops.triton.ops as triton_ops
from swiftllm.ops.triton.ops import TritonOps
from tests.reference.counted_memory import CountedMemory

DEVICE = torch.device("meta")


class MetaStream:
    """Copies between the memories: zeros arrive at the host."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(DEVICE)

    def mark(self) -> MetaStream:
        return self

    def synchronize(self) -> None: ...


class MetaGpu(CountedMemory):
    """Attributes beside the counts: ``compute``, a stream; what a sampler needs of a device."""

    torch_device = DEVICE
    compute = MetaStream()

    def __init__(self, total_bytes: int, context_bytes: int = 0) -> None:
        """``context_bytes`` are taken by CUDA itself."""
        super().__init__(DEVICE.type)
        self.total_bytes, self.context_bytes = total_bytes, context_bytes

    def ops(self, capability: int, num_multiprocessors: int) -> TritonOps:
        return TritonOps(DEVICE, capability, num_multiprocessors)

    def __enter__(self) -> MetaGpu:
        self._patches = pytest.MonkeyPatch()
        on_cuda = {
            "current_device": lambda: 0,
            "default_stream": lambda device: None,
            "Stream": lambda device: None,
            "graph_pool_handle": lambda: None,
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (self.total_bytes - self.context_bytes - self.allocated, self.total_bytes),
            "get_device_properties": lambda device: SimpleNamespace(major=9, minor=0),
            "caching_allocator_alloc": lambda num_bytes: 0,
            "caching_allocator_delete": lambda address: None,
            "memory_reserved": lambda device: self.allocated,
            "max_memory_reserved": lambda device: self.peak,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", self.allocated),
        }
        for name, function in on_cuda.items():
            self._patches.setattr(torch.cuda, name, function)
        self._patches.setattr(triton_ops, "launch", lambda *arguments, **sizes: None)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.undo()
