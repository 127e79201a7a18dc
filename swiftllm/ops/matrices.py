"""Matrices that are not plain, and their reference products: 4-bit weights, and the FFN of experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

# -- 4-bit weights -----------------------------------------------------------------------------------------------------
# The one layout of 4-bit weights: what readers of checkpoints make, and what kernels multiply with.
#
# An input is a column of the matrix ``[out, in]``, an output a row. The inputs are cut into blocks of ``BLOCK_INPUTS``,
# the last one padded. Word ``16 b + i`` of an output holds eight codes: bits ``4 j`` to ``4 j + 3`` are the code of
# input ``128 b + 16 j + i``. So shifting a tile of 16 words by ``4 j`` gives 16 neighbouring inputs, the depth of a
# tensor core's multiplication, without moving data between lanes. Groups of inputs share a scale and a zero point per
# output.
#
# Codes are integers, or in MXFP4 numbers of two bits of exponent and one of mantissa, whose scales are powers of two.

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


# -- experts -----------------------------------------------------------------------------------------------------------
# An FFN of experts: a router chooses some of them for each row. Here is the reference, which computes them one by one.
#
# Ids of experts that are chosen for a row are a row's slots, the likeliest first. A pair is a row and one of its slots.

ExpertLinear = tuple[torch.Tensor | QuantisedMatrix, torch.Tensor | None]
"""A matrix ``[out, in]`` and its bias."""
Experts = Callable[..., torch.Tensor]
"""From rows ``[rows, hidden]`` to ``[rows, hidden]``. ``num_rows``, int32 ``[1]`` on the rows' device, may be given:
rows from that one on are padding. They go to no expert, and their results are 0."""


@dataclass(frozen=True)
class ClampedSwiGLU:
    """``(up + 1) * gate * sigmoid(alpha * gate)``, with gate at most ``limit`` and up within ``-limit`` and
    ``limit``."""

    limit: float
    alpha: float = 1.702


@dataclass(frozen=True)
class ExpertWeights:
    """The matrices of all experts of a layer, expert below expert.

    The likelihoods of experts are the softmax of the router's products, over all experts. Each row's products with its
    likeliest experts are added, each times its likelihood.
    """

    router: torch.Tensor
    """``[num_experts, hidden]``"""
    gate_up: Matrix
    """``[num_experts * 2 ffn, hidden]``: of each expert the rows of gate, then those of up."""
    down: Matrix
    """``[num_experts * hidden, ffn]``"""
    per_token: int
    """Experts of a row."""
    normalises: bool
    """Whether the likelihoods of a row's experts are divided by their sum."""
    router_bias: torch.Tensor | None = None
    """``[num_experts]``"""
    gate_up_bias: torch.Tensor | None = None
    """Of the rows of ``gate_up``, and ``down_bias`` of those of ``down``."""
    down_bias: torch.Tensor | None = None
    activation: ClampedSwiGLU | None = None
    """Of gate and up; None: SiLU of gate, times up."""

    def __post_init__(self) -> None:
        if isinstance(self.gate_up, tuple) or isinstance(self.down, tuple):
            raise ValueError("experts of a layer that are not all quantised alike (some not, or by act-order) are "
                             "not supported")  # fmt: skip
        if any(isinstance(m, QuantisedMatrix) and m.order is not None for m in (self.gate_up, self.down)):
            raise ValueError("experts that are quantised with act-order are not supported")

    @property
    def num_experts(self) -> int:
        return len(self.router)

    @property
    def stacks(self) -> tuple[torch.Tensor | QuantisedMatrix, torch.Tensor | QuantisedMatrix]:
        """``gate_up`` and ``down``, each in one piece."""
        assert not isinstance(self.gate_up, tuple) and not isinstance(self.down, tuple)  # others are refused
        return self.gate_up, self.down

    def of(self, expert: int) -> tuple[ExpertLinear, ExpertLinear]:
        """An expert's gate and up, and its down: views."""
        gate_up, down = self.stacks
        return self._part(gate_up, self.gate_up_bias, expert), self._part(down, self.down_bias, expert)

    def _part(self, stack: torch.Tensor | QuantisedMatrix, bias: torch.Tensor | None, expert: int) -> ExpertLinear:
        is_plain = isinstance(stack, torch.Tensor)
        size = (len(stack) if is_plain else stack.out_features) // self.num_experts
        own = slice(expert * size, (expert + 1) * size)
        return stack[own] if is_plain else stack.of_outputs(own), None if bias is None else bias[own]


class Router:
    """Chooses the experts of rows."""

    def __init__(self, weights: ExpertWeights) -> None:
        self._matrix, self._per_token, self._normalises = weights.router.float(), weights.per_token, weights.normalises
        self._bias = None if weights.router_bias is None else weights.router_bias.float()

    def __call__(self, x: torch.Tensor, num_rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`choose_experts`. Padding has an id that no expert has, and likelihoods of 0."""
        ids, likelihoods = choose_experts(self.logits(x), self._per_token, self._normalises)
        if num_rows is None:
            return ids, likelihoods
        is_padding = torch.arange(len(x), device=x.device)[:, None] >= num_rows
        return ids.masked_fill(is_padding, len(self._matrix)), likelihoods.masked_fill(is_padding, 0.0)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """float32 ``[rows, num_experts]``. In 16 bits, near-ties would fall the other way."""
        if x.device.type != "cpu":
            logits = x.float() @ self._matrix.t()
        elif not len(x):
            return x.new_empty((0, len(self._matrix)), dtype=torch.float32)
        else:  # row by row: a product of many rows at once depends, in its last bits, on their number
            logits = torch.stack([self._matrix.mv(row) for row in x.float()])
        return logits if self._bias is None else logits.add_(self._bias)


class ExpertByExpert:
    """See :data:`Experts`. A row's result has the same bits whatever rows come with it, if the linears' have."""

    def __init__(
        self,
        weights: ExpertWeights,
        make_linear: Callable[..., Callable[[torch.Tensor], torch.Tensor]],
        activate: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """``make_linear``: from the parts of an :data:`ExpertLinear`."""
        self._router, self._activate = Router(weights), activate
        self._linears = [
            tuple(make_linear(*linear) for linear in weights.of(expert)) for expert in range(weights.num_experts)
        ]

    def __call__(self, x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        ids, likelihoods = self._router(x, num_rows)
        if x.device.type != "cpu":
            return add_slots(self._of_all_rows(x, ids), likelihoods)
        return self.compute(x, ids, likelihoods)

    def compute(self, x: torch.Tensor, ids: torch.Tensor, likelihoods: torch.Tensor) -> torch.Tensor:
        """The rows, in host memory, of experts that a router chose: see :func:`choose_experts`."""
        num_experts, (rows, slots) = len(self._linears), ids.shape
        pairs = torch.argsort(ids.flatten(), stable=True)
        counts = torch.bincount(ids.flatten(), minlength=num_experts)[:num_experts].tolist()
        products = x.new_zeros(rows * slots, x.shape[1])
        first = 0
        for (gate_up, down), count in zip(self._linears, counts, strict=True):
            if count:
                own = pairs[first : first + count]
                products[own] = down(self._activate(gate_up(x[own // slots])))
                first += count
        return add_slots(products.unflatten(0, (rows, slots)), likelihoods)

    def _of_all_rows(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Products ``[rows, slots, hidden]`` where the host does not know which rows an expert has."""
        products = x.new_zeros(*ids.shape, x.shape[1])
        for expert, (gate_up, down) in enumerate(self._linears):
            own = down(self._activate(gate_up(x)))
            products = torch.where((ids == expert)[..., None], own[:, None], products)
        return products


def choose_experts(logits: torch.Tensor, per_token: int, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the likeliest experts, int64 ``[rows, per_token]``, of equal ones the lower, and their likelihoods."""
    ids = logits.sort(descending=True, stable=True).indices[:, :per_token]
    likelihoods = logits.softmax(-1).gather(1, ids)
    return ids, likelihoods / likelihoods.sum(-1, keepdim=True) if normalises else likelihoods


def add_slots(products: torch.Tensor, likelihoods: torch.Tensor) -> torch.Tensor:
    """``[rows, hidden]`` of ``products [rows, slots, hidden]``: summed in float32, slot by slot."""
    total = torch.zeros(products.shape[0], products.shape[2], device=products.device)
    for slot in range(products.shape[1]):
        total += products[:, slot].float() * likelihoods[:, slot, None]
    return total.to(products.dtype)
