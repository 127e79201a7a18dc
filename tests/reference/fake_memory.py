"""Memory and tensors of a CUDA made of Python, see :mod:`tests.reference.fake_device`."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from tests.reference.fake_streams import DEVICE, FakeStream, Hazard

if TYPE_CHECKING:
    from tests.reference.fake_device import FakeCuda


@torch.inference_mode()
def poison(tensor: torch.Tensor) -> None:
    if tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.nan if tensor.is_floating_point() else min(1 << 30, torch.iinfo(tensor.dtype).max))


class Memory:
    """An allocation; ends with the last tensor that lies in it."""

    def __init__(self, cuda: FakeCuda, inner: torch.Tensor) -> None:
        self.readers: set[FakeStream] = set()
        weakref.finalize(self, cuda.give_back, cuda.current, self.readers, inner)


class DeviceTensor(torch.Tensor):
    """Size and place of a tensor on the device; ``inner`` is what it holds by and by."""

    is_cuda = True

    @staticmethod
    def __new__(cls, cuda: FakeCuda, inner: torch.Tensor, memory: Memory) -> DeviceTensor:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, **layout, device=DEVICE)

    def __init__(self, cuda: FakeCuda, inner: torch.Tensor, memory: Memory) -> None:
        self.cuda, self.inner, self.memory = cuda, inner, memory

    def record_stream(self, stream: FakeStream) -> None:
        if not self.cuda.ignores("record_stream"):
            self.memory.readers.add(stream)

    def tolist(self) -> list:
        return self.cuda.read(self).tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Hazard(f"{func} outside the fake")
