"""Collects the tensors of quantised modules as they are read, and makes a matrix of each as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from swiftllm.model.quantised.joined import JoinedMatrix, New, Part
from swiftllm.model.quantised.readers import (
    GROUPS_OF_INPUTS,
    IN,
    OPTIONAL,
    OUT,
    SCALES,
    Axis,
    divisible_axes,
    open_matrix,
    required_tensors,
)
from swiftllm.model.quantised.scheme import QuantisationScheme
from swiftllm.ops.quantised_matrix import Matrix


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
    """Where a fused matrix goes: ``new`` makes its memory, ``put`` takes it, on ``device``; ``modules`` are its parts
    with their outputs, from top to bottom. The sizes are those of the part that is wanted, but for
    ``whole_in_features``."""

    modules: Mapping[str, int]
    in_features: int
    whole_in_features: int
    new: New
    put: Callable[[Matrix], None]
    device: torch.device | str
    groups: dict[str, int] = field(default_factory=dict)
    """By module: a hash of the groups of its inputs, where that is known beforehand."""
    _joined: JoinedMatrix | None = None
    _own: dict[str, Matrix] = field(default_factory=dict)
    _written: list[str] = field(default_factory=list)

    def add(self, module: str, part: Part) -> None:
        """Write a module's matrix beside the others, or by itself if they do not fit together; the last one puts
        all."""
        if not self._written and len(set(self.groups.values())) < 2:
            self._joined = JoinedMatrix(part, sum(self.modules.values()), self.new)
        elif self._joined is not None and not self._joined.fits(part):
            self._own = {name: self._joined.copy_of(self._start(name), self.modules[name]) for name in self._written}
            self._joined = None
        if self._joined is None:
            own = JoinedMatrix(part, self.modules[module], self.new)
            own.write(0, part)
            self._own[module] = own.matrix
        else:
            self._joined.write(self._start(module), part)
        self._written.append(module)
        if len(self._written) == len(self.modules):
            joined, own_matrices = self._joined, tuple(self._own[name] for name in self.modules if name in self._own)
            self._joined, self._own = None, {}
            self.put(own_matrices if joined is None else joined.matrix)

    def _start(self, module: str) -> int:
        """A module's first output."""
        names = list(self.modules)
        return sum(self.modules[name] for name in names[: names.index(module)])


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

    def look_ahead(self, name: str, stored: StoredTensor) -> None:
        """Note the groups of a module's inputs. Where neighbours differ, each matrix gets memory of its own from the
        start."""
        module, _, kind = name.rpartition(".")
        place = self._places.get(module)
        if place is not None and len(place.modules) > 1 and kind in GROUPS_OF_INPUTS:
            place.groups[module] = hash(bytes(stored[(slice(None),)].numpy()))

    def take(self, name: str, stored: StoredTensor) -> bool:
        """Take what is wanted of a tensor of the checkpoint; False: it belongs to no matrix.

        Raises:
            ValueError: it does not have the shape that config.json tells, or is a scale that is not finite.
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
            self._made.add(module)
            place.add(module, tensor.to(place.device, self._dtype))
            return True
        if kind in SCALES and not bool(torch.isfinite(tensor).all()):  # every token would be 0, without an error
            raise ValueError(f"{name} holds NaN or infinity: the checkpoint is damaged, download it again")
        tensors = self._waiting.setdefault(module, {})
        tensors[kind] = tensor.to(place.device)
        if self._required <= tensors.keys():
            del self._waiting[module]
            try:
                sizes = place.modules[module], place.in_features
                matrix = open_matrix(self._scheme, tensors, *sizes, self._dtype, place.whole_in_features)
            except ValueError as error:
                raise ValueError(f"{module}: {error}") from None
            self._made.add(module)
            place.add(module, matrix)
        return True

    def missing(self) -> list[str]:
        """Names of tensors that never came."""
        names = []
        for module in self._places.keys() - self._made:
            kinds = self._required - self._waiting.get(module, {}).keys()
            names += [f"{module}.{kind}" for kind in kinds]
        return names
