"""Bytes that the launching thread copies in host memory beside a CUDA made of Python: meanwhile a GPU may idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pacpu import rows
from tests.reference.fake_device import DeviceTensor
from tests.reference.fake_streams import FakeStream, FakeWorker

GATHERS = ("gather_kv", "gather_blocks")
"""pacpu's, which write their third argument."""


class HostCopies(TorchDispatchMode):
    """Inside, torch's copies and pacpu's gathers are counted, but not what streams and workers do meanwhile.

    Attributes:
        num_bytes: written to host memory so far.
        others: streams and workers that are at work.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.others = 0

    def count(self, *written: torch.Tensor) -> None:
        if not self.others:
            self.num_bytes += sum(tensor.nbytes for tensor in written)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)]
        crosses = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        if not (is_view or crosses or func._schema.name.startswith("aten::empty")):
            self.count(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        return result


@contextmanager
def counted_host_copies() -> Iterator[HostCopies]:
    with pytest.MonkeyPatch.context() as patch, HostCopies() as copies:
        for other in (FakeStream, FakeWorker):
            patch.setattr(other, "step", _beside(other.step, copies))
        for name in GATHERS:
            patch.setattr(rows, name, _counted(getattr(rows, name), copies))
        yield copies


def _counted(gather: Callable[..., None], copies: HostCopies) -> Callable[..., None]:
    def counted(*arguments: Any, **options: Any) -> None:
        gather(*arguments, **options)
        copies.count(arguments[2])

    return counted


def _beside(step: Callable[[Any], bool], copies: HostCopies) -> Callable[[Any], bool]:
    def step_beside(one: Any) -> bool:
        copies.others += 1
        try:
            return step(one)
        finally:
            copies.others -= 1

    return step_beside
