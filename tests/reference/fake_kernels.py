"""Which kernels a GPU has been asked for. Triton compiles and loads a kernel at its first launch, in a second or so. A
graph's capture does not allow that. CUDA loads torch's own kernels at their first launch too.

The CUDA made of Python computes with the torch reference. Beside it the engine's own :class:`TritonOps` is called with
tensors that have no content, and what it would launch is noted here, told apart as Triton does. So are the linears and
experts that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from swiftllm.ops.interface import Ops
from swiftllm.ops.matrices import ExpertWeights, QuantisedMatrix
from swiftllm.ops.triton.ops import TritonOps
from tests.reference.fake_streams import DEVICE
from tests.reference.trees import replaced

if TYPE_CHECKING:
    from tests.reference.fake_device import FakeCuda

CAPABILITY, NUM_MULTIPROCESSORS = 86, 72
PRODUCTS = {"aten::mm", "aten::addmm"}
ALIGNED = 16  # bytes, or a multiple of a number: Triton compiles another kernel for what is not


class Kernels:
    """Attributes: ``compiled``, the name of each of Triton's kernels that was launched for the first time, in order;
    ``capability``, of the GPU: 75 for sm_75."""

    def __init__(self, cuda: FakeCuda, capability: int) -> None:
        self.compiled: list[str] = []
        self.capability = capability
        self._cuda = cuda
        self._known: set[object] = set()
        self._loaded: set[object] = set()  # of torch's
        self._is_reference = False
        self._ops = TritonOps(DEVICE, capability, NUM_MULTIPROCESSORS)

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Takes the place of the launch itself."""
        params = zip(kernel.params, arguments, strict=True)
        key = (kernel.fn.__name__, *(_kind(param, argument) for param, argument in params), *options.items())
        if key not in self._known:
            self._cuda.refuse_while_capturing(f"launches {kernel.fn.__name__} for the first time")
            self._known.add(key)
            self.compiled.append(kernel.fn.__name__)

    def launch_as_triton(self, operation: str, *arguments: Any) -> None:
        """Launch what the engine's operation launches on a GPU."""
        with _disable_current_modes():
            getattr(self._ops, operation)(*replaced(torch.Tensor, _without_content, arguments))

    def made_by_triton(self, make: str, *weights: Any) -> Callable[..., None]:
        """What ``make`` of the engine's operations makes of weights, for its launches alone."""
        with _disable_current_modes():
            made = getattr(self._ops, make)(*map(_without_contents, weights))

        def launch(*arguments: Any) -> None:
            with _disable_current_modes():
                made(*replaced(torch.Tensor, _without_content, arguments))

        return launch

    @contextmanager
    def in_place_of_triton(self) -> Iterator[None]:
        """Inside, torch computes what Triton does on a GPU: those kernels of torch's are never launched there."""
        self._is_reference = True
        try:
            yield
        finally:
            self._is_reference = False

    def load(self, name: str, tensors: list[torch.Tensor]) -> None:
        """A kernel of torch's is launched, chosen by these tensors' dtypes, and by their shapes where it multiplies
        matrices."""
        key = name, *((tensor.dtype, tensor.shape if name in PRODUCTS else None) for tensor in tensors)
        if not self._is_reference and key not in self._loaded:
            self._cuda.refuse_while_capturing(f"launches {name} for the first time")
            self._loaded.add(key)


def with_triton(operation: str) -> Callable[..., Any]:
    """The reference's operation, which notes the kernels of Triton's where it computes on the device."""

    def on_device(self: Any, *arguments: Any) -> Any:
        if any(isinstance(x, torch.Tensor) and x.device == DEVICE for x in arguments[:1]):
            self.cuda.kernels.launch_as_triton(operation, *arguments)
        with self.cuda.kernels.in_place_of_triton():
            return getattr(Ops, operation)(self, *arguments)

    return on_device


def _kind(param: Any, argument: Any) -> object:
    """What of an argument decides which kernel is compiled."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.storage_offset() * argument.itemsize % ALIGNED == 0
    if param.is_constexpr:
        return argument
    if isinstance(argument, int):
        width = argument.bit_length() > 31
        return width if param.do_not_specialize else (width, argument == 1, argument % ALIGNED == 0)
    return type(argument)


def _without_contents(weights: Any) -> Any:
    """The same of a matrix, of the weights of experts, or of a bias."""
    if isinstance(weights, torch.Tensor):
        return _without_content(weights)
    if isinstance(weights, (QuantisedMatrix, ExpertWeights)):
        parts = {field.name: getattr(weights, field.name) for field in fields(weights)}
        return replace(weights, **{name: _without_contents(part) for name, part in parts.items()})
    return weights


def _without_content(tensor: torch.Tensor) -> torch.Tensor:
    size = tensor.storage_offset() + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    storage = torch.empty(max(0, size), dtype=tensor.dtype, device="meta")
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
