"""Collects the tensors of quantised modules as they are read, and makes a matrix of each as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swiftllm.model.quantised.readers import IN, OPTIONAL, OUT, Axis, divisible_axes, read_matrix, required_tensors
from swiftllm.model.quantised.scheme import QuantisationScheme
from swiftllm.ops.quantised_matrix import Matrix, QuantisedMatrix, fuse


class StoredTensor(Protocol):
    """A tensor of a checkpoint, of which slices can be read."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor: ...


class Slices(Protocol):
    """The part that is wanted of a tensor with a shape and these axes; see
    :meth:`swiftllm.model.weights.ModelPart.slices`."""

    def __call__(self, name: str, shape: Sequence[int], axes: Sequence[Axis]) -> tuple[slice, ...]: ...


@dataclass
class FusedPlace:
    """Where a fused matrix goes: ``put`` takes it, on ``device``; ``modules`` are its parts with their outputs, from
    top to bottom. The sizes are those of the part that is wanted, but for ``whole_in_features``."""

    modules: Mapping[str, int]
    in_features: int
    whole_in_features: int
    put: Callable[[Matrix], None]
    device: torch.device | str
    parts: dict[str, torch.Tensor | QuantisedMatrix] = field(default_factory=dict)


class QuantisedCollector:
    """Takes a checkpoint's tensors one by one. A module's tensors wait on its device, packed, for the last of them."""

    def __init__(
        self, scheme: QuantisationScheme, places: list[FusedPlace], dtype: torch.dtype, slices: Slices
    ) -> None:
        """``dtype``: of activations, and of matrices that are not quantised."""
        self._scheme, self._dtype, self._slices = scheme, dtype, slices
        self._axes = {**divisible_axes(scheme), "weight": (OUT, IN)}
        self._places = {module: place for place in places for module in place.modules}
        self._required = required_tensors(scheme)
        self._optional = OPTIONAL[scheme.method]
        self._made: set[str] = set()
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def take(self, name: str, stored: StoredTensor) -> bool:
        """Take what is wanted of a tensor of the checkpoint; False: it belongs to no matrix.

        Raises:
            ValueError: it does not have the shape that config.json tells.
        """
        module, _, kind = name.rpartition(".")
        place = self._places.get(module)
        if place is None or kind not in self._axes:
            return False
        if module in self._made:
            return kind in self._optional  # the matrix could be made without it
        tensor = stored[self._slices(name, stored.get_shape(), self._axes[kind])]
        if kind == "weight":
            shape = [place.modules[module], place.in_features]
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, config.json asks for {shape}")
            self._add(place, module, tensor.to(place.device, self._dtype))
            return True
        tensors = self._waiting.setdefault(module, {})
        tensors[kind] = tensor.to(place.device)
        if self._required <= tensors.keys():
            del self._waiting[module]
            try:
                sizes = place.modules[module], place.in_features
                matrix = read_matrix(self._scheme, tensors, *sizes, self._dtype, place.whole_in_features)
            except ValueError as error:
                raise ValueError(f"{module}: {error}") from None
            self._add(place, module, matrix)
        return True

    def missing(self) -> list[str]:
        """Names of tensors that never came."""
        names = []
        for module in self._places.keys() - self._made:
            kinds = self._required - self._waiting.get(module, {}).keys()
            names += [f"{module}.{kind}" for kind in kinds]
        return names

    def _add(self, place: FusedPlace, module: str, part: torch.Tensor | QuantisedMatrix) -> None:
        place.parts[module] = part
        self._made.add(module)
        if len(place.parts) == len(place.modules):
            place.put(fuse([place.parts[name] for name in place.modules]))
            place.parts.clear()
