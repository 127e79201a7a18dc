"""A fused matrix whose parts are written where they stay, as they come: there is no second copy of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from swiftllm.model.packed_tensor import PackedTensor, map_tensors
from swiftllm.model.quantised.readers import StoredMatrix
from swiftllm.ops.quantised_matrix import BLOCK_INPUTS, BLOCK_WORDS, QuantisedMatrix

Part = torch.Tensor | StoredMatrix
"""A module's matrix as it is read: plain ``[out, in]``, or quantised."""
New = Callable[[Sequence[int], torch.dtype], torch.Tensor | PackedTensor]
"""Memory of a shape and a dtype, where a matrix is wanted."""


class JoinedMatrix:
    """The outputs of several parts, side by side in memory of their own.

    Attributes:
        matrix: what is written so far; its tensors are those that were made for it.
    """

    def __init__(self, first: Part, out_features: int, new: New) -> None:
        """``first``: the part that tells of what kind all are; it is not written yet. ``out_features``: of all."""
        self.matrix: torch.Tensor | PackedTensor | QuantisedMatrix
        if isinstance(first, torch.Tensor):
            self.matrix = new((out_features, first.shape[1]), first.dtype)
            return
        words, groups = -(-first.in_features // BLOCK_INPUTS) * BLOCK_WORDS, first.scales.shape[0]
        self.matrix = QuantisedMatrix(
            new((words, out_features), torch.int32),
            new((groups, out_features), first.scales.dtype),
            new((groups, out_features), torch.uint8),
            first.in_features,
            first.group_size,
            first.dtype,
            first.order,
            first.runs,
        )

    def fits(self, part: Part) -> bool:
        """Whether it can be beside others: it is of their kind, and of one group size and order of inputs."""
        ours = self.matrix
        if isinstance(part, torch.Tensor) or not isinstance(ours, QuantisedMatrix):
            return isinstance(part, torch.Tensor) and not isinstance(ours, QuantisedMatrix)
        if part.runs is not None or ours.runs is not None:
            return False
        if (part.group_size, part.scales.dtype) != (ours.group_size, ours.scales.dtype):
            return False
        if part.order is None or ours.order is None:
            return part.order is ours.order
        return torch.equal(part.order, ours.order)

    def write(self, first: int, part: Part) -> None:
        """Put a part's outputs at output ``first``."""
        ours = self.matrix
        if isinstance(part, torch.Tensor):
            if isinstance(ours, PackedTensor):
                ours.write(first, part)
            else:
                ours[first : first + len(part)].copy_(part)
            return
        for start, words in part.pieces():
            _write_columns(ours.codes, first + start, words)
        _write_columns(ours.scales, first, part.scales)
        _write_columns(ours.zeros, first, part.zeros)

    def copy_of(self, first: int, count: int) -> torch.Tensor | QuantisedMatrix:
        """So many outputs from ``first`` on, as a matrix of their own."""
        ours = map_tensors(self.matrix, lambda x: x.read() if isinstance(x, PackedTensor) else x)
        outputs = slice(first, first + count)
        if isinstance(ours, torch.Tensor):
            return ours[outputs].clone()
        parts = {name: getattr(ours, name)[:, outputs].clone() for name in ("codes", "scales", "zeros")}
        return replace(ours, **parts)


def _write_columns(target: torch.Tensor | PackedTensor, first: int, columns: torch.Tensor) -> None:
    if isinstance(target, PackedTensor):
        target.write_columns(first, columns)
    else:
        target[:, first : first + columns.shape[1]].copy_(columns)
