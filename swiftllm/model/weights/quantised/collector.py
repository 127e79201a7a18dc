"""Collects the tensors of quantised modules as they are read, and makes a matrix of each as soon as it is complete."""

from __future__ import annotations

from collections.abc import Callable

import torch

from swiftllm.model.config.quantisation import QuantisationScheme
from swiftllm.model.folder.checkpoint import StoredTensor
from swiftllm.model.weights.quantised.fused import FusedTarget
from swiftllm.model.weights.quantised.readers import (
    IN,
    INPUT_GROUPS,
    OPTIONAL,
    OUT,
    SCALES,
    StoredMatrix,
    divisible_axes,
    open_matrix,
    required_tensors,
)


class QuantisedCollector:
    """Takes a checkpoint's tensors one by one. A module's tensors wait on its device, packed, for the last of them."""

    def __init__(
        self,
        scheme: QuantisationScheme,
        targets: list[FusedTarget],
        dtype: torch.dtype,
        slices: Callable[..., tuple[slice, ...]],
        fold: Callable[[str, torch.Tensor | StoredMatrix], torch.Tensor | StoredMatrix],
    ) -> None:
        """``dtype``: of activations, and of matrices that are not quantised. ``slices``: the part that is wanted of a
        tensor, see :meth:`swiftllm.model.weights.llama_weights.ModelPart.slices`. ``fold``: what is done to a module's
        matrix."""
        self._scheme, self._dtype, self._slices, self._fold = scheme, dtype, slices, fold
        self._axes = {**divisible_axes(scheme), "weight": (OUT, IN)}
        self._targets = {module: target for target in targets for module in target.modules}
        self._required = required_tensors(scheme)
        self._made: set[str] = set()
        self._waiting: dict[str, dict[str, torch.Tensor]] = {}

    def look_ahead(self, name: str, stored: StoredTensor) -> None:
        """Note what of a tensor decides whether its module's matrix can lie beside its neighbours'; before
        :meth:`take` takes the first tensor of any module."""
        module, _, kind = name.rpartition(".")
        target = self._targets.get(module)
        if target is None or len(target.modules) == 1:
            return
        if kind in INPUT_GROUPS:
            target.kinds[module].add(hash(bytes(stored[(slice(None),)].numpy())))
        elif kind in SCALES:
            target.kinds[module].add(stored.get_dtype())
        elif kind == "weight":
            target.kinds[module].add(kind)

    def take(self, name: str, stored: StoredTensor) -> bool:
        """Take what is wanted of a tensor of the checkpoint; False: it belongs to no matrix.

        Raises:
            ValueError: it does not have the shape that config.json tells, or is a scale that is not finite.
        """
        module, _, kind = name.rpartition(".")
        target = self._targets.get(module)
        if target is None or kind not in self._axes:
            return False
        if module in self._made:
            return kind in OPTIONAL  # the matrix could be made without it
        tensor = stored[self._slices(name, stored.get_shape(), self._axes[kind])]
        if kind == "weight":
            shape = [target.modules[module], target.in_features]
            if list(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {list(tensor.shape)}, config.json asks for {shape}")
            self._made.add(module)
            target.add(module, self._fold(module, tensor.to(target.device, self._dtype)))
            return True
        if kind in SCALES and not bool(torch.isfinite(tensor).all()):  # every token would be 0, without an error
            raise ValueError(f"{name} holds NaN or infinity: the checkpoint is damaged, download it again")
        tensors = self._waiting.setdefault(module, {})
        tensors[kind] = tensor.to(target.device)
        if self._required <= tensors.keys():
            del self._waiting[module]
            try:
                sizes = target.modules[module], target.in_features
                matrix = open_matrix(self._scheme, tensors, *sizes, self._dtype, target.whole_in_features)
            except ValueError as error:
                raise ValueError(f"{module}: {error}") from None
            self._made.add(module)
            target.add(module, self._fold(module, matrix))
        return True

    def missing(self) -> list[str]:
        """Names of tensors that never came."""
        names = []
        for module in self._targets.keys() - self._made:
            kinds = self._required - self._waiting.get(module, {}).keys()
            names += [f"{module}.{kind}" for kind in kinds]
        return names
