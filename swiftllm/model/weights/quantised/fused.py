"""A fused matrix of a quantised model. Its parts are written where they stay, as they come: there is no second copy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from swiftllm.model.config.quantisation import MXFP4, QuantisationScheme
from swiftllm.model.weights.packed_tensor import Allocate, PackedTensor, write_columns, write_rows
from swiftllm.model.weights.quantised.readers import StoredMatrix
from swiftllm.ops.quantised_matrix import GROUP_MULTIPLE, QuantisedMatrix

Made = torch.Tensor | PackedTensor | QuantisedMatrix


@dataclass
class FusedTarget:
    """Where a fused matrix goes. The sizes are those of the rank's part, but for ``whole_in_features``."""

    modules: Mapping[str, int]
    """From top to bottom, with their outputs."""
    in_features: int
    whole_in_features: int
    allocate: Allocate
    put: Callable[[Made | tuple[Made, ...]], None]
    """Takes the matrix; a tuple, if its modules do not fit together."""
    device: torch.device | str
    """Where tensors wait for the others of their module."""
    kinds: dict[str, set[object]] = field(default_factory=lambda: defaultdict(set))
    """What decides whether a module's outputs can lie beside its neighbours', as it is known before they come."""
    _made: dict[str, Made] = field(default_factory=dict)
    _num_written: int = 0

    def add(self, module: str, part: torch.Tensor | StoredMatrix) -> None:
        """Write a module's matrix beside the others, or by itself if they do not fit together; the last one puts
        all."""
        names = list(self.modules)
        fit = len({frozenset(self.kinds[name]) for name in names}) == 1
        beside = names if fit else [module]
        name, first = beside[0], sum(self.modules[other] for other in beside[: beside.index(module)])
        if name not in self._made:
            out_features = sum(self.modules[other] for other in beside)
            self._made[name] = _memory_for(part, out_features, self.allocate)
        _write(self._made[name], first, part)
        self._num_written += 1
        if self._num_written == len(names):
            made, self._made = self._made, {}
            self.put(made[names[0]] if fit else tuple(made[name] for name in names))

    def empty(self, scheme: QuantisationScheme, dtype: torch.dtype) -> QuantisedMatrix:
        """A matrix without content, of the size that a checkpoint's has: for dummy weights and estimates of memory.

        With act-order, a part of the inputs has some of each group. How many is random: each group's are taken to be
        filled up to whole runs by half a run.
        """
        out_features, whole = sum(self.modules.values()), self.whole_in_features
        if self.in_features == whole or not scheme.ordered or scheme.group_size is None:
            group_size = scheme.group_size_of(self.in_features)
            sizes = self.in_features, self.in_features // group_size, group_size
            scale_dtype = torch.uint8 if scheme.method == MXFP4 else dtype
            return QuantisedMatrix.allocate(self.allocate, out_features, *sizes, dtype, scale_dtype)
        num_groups = whole // scheme.group_size_of(whole)
        num_runs = -(-(self.in_features + num_groups * GROUP_MULTIPLE // 2) // GROUP_MULTIPLE)
        in_features = num_runs * GROUP_MULTIPLE
        order = torch.arange(in_features, dtype=torch.int32, device=self.device) % self.in_features
        runs = torch.arange(num_runs, dtype=torch.int32, device=self.device) * num_groups // num_runs
        sizes = in_features, num_groups, scheme.group_size
        return QuantisedMatrix.allocate(self.allocate, out_features, *sizes, dtype, dtype, order, runs)


def _memory_for(part: torch.Tensor | StoredMatrix, out_features: int, allocate: Allocate) -> Made:
    """Memory of so many outputs of the kind of ``part``, which are to be written."""
    if isinstance(part, torch.Tensor):
        return allocate((out_features, part.shape[1]), dtype=part.dtype)

    def copied(tensor: torch.Tensor | None) -> torch.Tensor | PackedTensor | None:
        if tensor is None:
            return None
        own = allocate(tensor.shape, dtype=tensor.dtype)
        write_rows(own, 0, tensor)
        return own

    sizes = part.in_features, len(part.scales), part.group_size
    dtypes, inputs = (part.dtype, part.scales.dtype), (copied(part.order), copied(part.runs))
    return QuantisedMatrix.allocate(allocate, out_features, *sizes, *dtypes, *inputs)


def _write(matrix: Made, first: int, part: torch.Tensor | StoredMatrix) -> None:
    """Put a part's outputs at output ``first``."""
    if isinstance(part, torch.Tensor):
        assert not isinstance(matrix, QuantisedMatrix)
        write_rows(matrix, first, part)
        return
    assert isinstance(matrix, QuantisedMatrix)
    for start, words in part.pieces():
        write_columns(matrix.codes, first + start, words)
    write_columns(matrix.scales, first, part.scales)
    if part.zeros is not None and matrix.zeros is not None:
        write_columns(matrix.zeros, first, part.zeros)
