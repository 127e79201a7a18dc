"""The one layout of 4-bit weights: what readers of checkpoints make, and what kernels multiply with.

An input is a column of the matrix ``[out, in]``, an output a row. The inputs are cut into blocks of ``BLOCK_INPUTS``,
the last one padded. Word ``16 b + i`` of an output holds eight codes: bits ``4 j`` to ``4 j + 3`` are the code of input
``128 b + 16 j + i``. So shifting a tile of 16 words by ``4 j`` gives 16 neighbouring inputs, the depth of a tensor
core's multiplication, without moving data between lanes. Groups of inputs share a scale and a zero point per output.

Codes are integers, or in MXFP4 numbers of two bits of exponent and one of mantissa, whose scales are powers of two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

BITS = 4
CODES_PER_WORD = 8
BLOCK_WORDS = 16
BLOCK_INPUTS = BLOCK_WORDS * CODES_PER_WORD
GROUP_MULTIPLE = 16  # the neighbouring inputs of a shift must share a scale

MXFP4_GROUP = 32
MXFP4_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By code."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A matrix ``[out, in]`` with elements ``(code - zero) * scale``, or in MXFP4 ``MXFP4_NUMBERS[code] * 2^(scale -
    127)``; all tensors lie on one device.

    The difference is exact, so an element is rounded once, as formats define it. A float offset in its place would
    round twice. In MXFP4 elements are exact in bfloat16 and float32, but for infinity from 2^128 on; in float16 with
    scales of 104 to 140. Lower ones are rounded to its subnormal numbers, and elements from 65,520 on are infinite.
    """

    codes: torch.Tensor
    """int32 ``[16 * blocks, out]``, see the module; the codes of padded inputs are arbitrary."""
    scales: torch.Tensor
    """16-bit or float32 ``[groups, out]``, as in the checkpoint; in MXFP4 uint8, of which 255 is NaN."""
    zeros: torch.Tensor | None
    """uint8 ``[groups, out]``, 0 to 15; None in MXFP4."""
    in_features: int
    group_size: int
    """Inputs in a group; groups divide the inputs, unless there are ``runs``."""
    dtype: torch.dtype
    """Of the elements, and of activations and products."""
    order: torch.Tensor | None = None
    """int32 ``[in]``: column i of codes multiplies input ``order[i]``. None: column i multiplies input i."""
    runs: torch.Tensor | None = None
    """int32 ``[in / 16]``: the group of each 16 inputs, in a part of a matrix whose groups are not full. Then ``order``
    is there too, and names an input more than once: but for one time its elements are 0."""

    @classmethod
    def from_codes(
        cls,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor,
        group_size: int,
        dtype: torch.dtype,
        order: torch.Tensor | None = None,
        runs: torch.Tensor | None = None,
    ) -> QuantisedMatrix:
        """Pack ``codes``, uint8 ``[in, out]``, of which row i belongs to group ``i // group_size``, or
        ``runs[i // 16]``."""
        per_group = scales.contiguous(), zeros.contiguous()
        return cls(pack_codes(codes), *per_group, codes.shape[0], group_size, dtype, order, runs)

    @classmethod
    def from_mxfp4(cls, blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> QuantisedMatrix:
        """Of uint8 ``blocks [out, in / 32, 16]`` and ``scales [out, in / 32]``; the lower half of a byte is the code of
        the earlier input."""
        codes = torch.stack((blocks & 15, blocks >> BITS), -1).flatten(1)
        return cls(pack_codes(codes.t()), scales.t().contiguous(), None, codes.shape[1], MXFP4_GROUP, dtype)

    @property
    def is_mxfp4(self) -> bool:
        return self.zeros is None

    def of_outputs(self, outputs: slice) -> QuantisedMatrix:
        """The rows of some outputs: views."""
        codes, scales = self.codes[:, outputs], self.scales[:, outputs]
        return replace(self, codes=codes, scales=scales, zeros=None if self.zeros is None else self.zeros[:, outputs])

    @property
    def out_features(self) -> int:
        return self.codes.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        tensors = self.codes, self.scales, self.zeros, self.order, self.runs
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def unpack(self) -> torch.Tensor:
        """The codes, uint8 ``[in, out]``."""
        words = self.codes.view(-1, 1, BLOCK_WORDS, self.out_features)
        shifts = torch.arange(0, BITS * CODES_PER_WORD, BITS, dtype=torch.int32, device=self.codes.device)
        codes = (words >> shifts[:, None, None]).bitwise_and_(15).to(torch.uint8)
        return codes.view(-1, self.out_features)[: self.in_features]

    def dequantise(self) -> torch.Tensor:
        """The matrix ``[out, in]``, inputs in their own order: the reference for all kernels."""
        if self.zeros is None:  # MXFP4
            numbers = mxfp4_numbers(self.unpack())
            scales = powers_of_two(self.scales)
        else:
            numbers = self.unpack().float() - self._per_input(self.zeros).float()
            scales = self.scales.float()
        matrix = (numbers * self._per_input(scales)).to(self.dtype)
        if self.order is None:
            return matrix.t().contiguous()
        if self.runs is None:
            return torch.empty_like(matrix).index_copy_(0, self.order.long(), matrix).t().contiguous()
        in_place = matrix.new_zeros(int(self.order.max()) + 1, self.out_features)
        return in_place.index_add_(0, self.order.long(), matrix).t().contiguous()

    def with_taken_inputs(self) -> QuantisedMatrix:
        """The same of inputs that were taken in :attr:`order` before, with a scale for each 16 in place of
        :attr:`runs`."""
        assert self.runs is not None
        groups = self.runs.long()
        zeros = None if self.zeros is None else self.zeros[groups]
        of_runs = {"scales": self.scales[groups], "zeros": zeros, "group_size": GROUP_MULTIPLE}
        return replace(self, order=None, runs=None, **of_runs)

    @classmethod
    def allocate(
        cls,
        new: Callable[..., Any],
        out_features: int,
        in_features: int,
        groups: int,
        group_size: int,
        dtype: torch.dtype,
        scale_dtype: torch.dtype,
        order: torch.Tensor | None = None,
        runs: torch.Tensor | None = None,
    ) -> QuantisedMatrix:
        """Memory that is to be filled; ``new`` is called as ``torch.empty(shape, dtype=dtype)``. With a ``scale_dtype``
        of uint8, of MXFP4."""
        codes = new((-(-in_features // BLOCK_INPUTS) * BLOCK_WORDS, out_features), dtype=torch.int32)
        scales = new((groups, out_features), dtype=scale_dtype)
        zeros = None if scale_dtype is torch.uint8 else new((groups, out_features), dtype=torch.uint8)
        return cls(codes, scales, zeros, in_features, group_size, dtype, order, runs)

    def _per_input(self, of_groups: torch.Tensor) -> torch.Tensor:
        if self.runs is not None:
            return of_groups[self.runs.long().repeat_interleave(GROUP_MULTIPLE)]
        return of_groups.repeat_interleave(self.group_size, 0)


Matrix = torch.Tensor | QuantisedMatrix | tuple[torch.Tensor | QuantisedMatrix, ...]
"""A weight ``[out, in]``: plain, quantised, or parts whose outputs lie side by side."""


def mxfp4_numbers(codes: torch.Tensor) -> torch.Tensor:
    """float32 :data:`MXFP4_NUMBERS` of codes, computed: no table crosses to a device."""
    exponents, mantissas = (codes >> 1 & 3).int(), (codes & 1).float() / 2
    magnitudes = torch.where(exponents == 0, mantissas, torch.ldexp(mantissas + 1, exponents - 1))
    return magnitudes * ((codes >> 3).float() * -2 + 1)


def powers_of_two(scales: torch.Tensor) -> torch.Tensor:
    """float32 ``2^(scale - 127)`` of the uint8 scales of MXFP4; 255 is NaN."""
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return powers.masked_fill(scales == 255, torch.nan)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """:attr:`QuantisedMatrix.codes`, int32 ``[16 * blocks, out]``, of uint8 ``[in, out]``."""
    in_features, out_features = codes.shape
    blocks = -(-in_features // BLOCK_INPUTS)
    padded = codes.new_zeros(blocks * BLOCK_INPUTS, out_features)
    padded[:in_features] = codes
    parts = padded.view(blocks, CODES_PER_WORD, BLOCK_WORDS, out_features)
    words = torch.zeros(blocks, BLOCK_WORDS, out_features, dtype=torch.int32, device=codes.device)
    for j in range(CODES_PER_WORD):
        words |= parts[:, j].int() << BITS * j
    return words.flatten(0, 1)
