"""Counts the memory of tensors on a device while torch's operations run."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountedMemory(TorchDispatchMode):
    """Inside ``with`` it counts the bytes of tensors that operations return, until their last reference is dropped.

    Attributes: ``allocated`` and ``peak`` bytes.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self.allocated = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == self._device_type:
                self._count(leaf.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.allocated += storage.nbytes()
            self.peak = max(self.peak, self.allocated)
            weakref.finalize(storage, self._give_back, key, storage.nbytes())

    def _give_back(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.allocated -= num_bytes
