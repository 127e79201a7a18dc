"""An FFN of experts: a router chooses some of them for each row. Here is the reference, which computes them one by one.

Ids of experts that are chosen for a row are a row's slots, the likeliest first. A pair is a row and one of its slots.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swiftllm.ops.quantised_matrix import Matrix, QuantisedMatrix

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
        num_experts, (rows, slots) = len(self._linears), ids.shape
        if x.device.type != "cpu":
            return add_slots(self._of_all_rows(x, ids), likelihoods)
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
