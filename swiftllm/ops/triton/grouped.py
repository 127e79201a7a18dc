"""An FFN of experts by the kernels of :mod:`swiftllm.ops.triton.experts`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from swiftllm.ops.experts import ExpertWeights, Router
from swiftllm.ops.library import GroupedProduct
from swiftllm.ops.quantised_matrix import QuantisedMatrix
from swiftllm.ops.triton.experts import (
    add_slots_kernel,
    choose_experts_kernel,
    clamped_swiglu_kernel,
    expert_codes_kernel,
    expert_product_kernel,
    sort_pairs_kernel,
)
from swiftllm.ops.triton.tiles import cdiv, next_power_of_2

PAIRS_TILE = 1024
COLUMNS_TILE = 1024
# Rows, outputs and, in 16 bits, inputs of a tile: with tensor cores, and where Triton has none.
DOT_ROWS, DOT_COLUMNS, DOT_DEPTH = (16, 32, 64), 64, 64
SUMMED_ROWS, SUMMED_COLUMNS, SUMMED_DEPTH = 4, 32, 16


class GroupedExperts:
    """See :data:`swiftllm.ops.experts.Experts`. Own products read weights where they are, call by call."""

    def __init__(
        self,
        weights: ExpertWeights,
        silu_and_mul: Callable[[torch.Tensor], torch.Tensor],
        has_tensor_cores: Callable[[torch.Tensor], bool],
        launch: Callable[..., None],
        products: Sequence[GroupedProduct] = (),
    ) -> None:
        """``launch``: that of :mod:`swiftllm.ops.triton.ops`. ``products`` of gate and up and of down, with their
        biases, take the place of own ones; the matrices are not kept then."""
        self._router = Router(weights)
        self._num_experts, self._per_token, self._normalises = (
            weights.num_experts,
            weights.per_token,
            weights.normalises,
        )
        self._activation = weights.activation
        self._silu_and_mul, self._has_tensor_cores, self._launch = silu_and_mul, has_tensor_cores, launch
        if products:
            self._gate_up, self._down = (partial(self._multiply_sorted, product) for product in products)
        else:
            gate_up, down = weights.stacks
            self._gate_up = partial(self._multiply, gate_up, weights.gate_up_bias)
            self._down = partial(self._multiply, down, weights.down_bias)

    def __call__(self, x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        (rows, hidden), experts, slots = x.shape, self._num_experts, self._per_token
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        logits = self._router.logits(x)
        num_pairs, experts_tile = rows * slots, next_power_of_2(experts)
        ids, pairs = (torch.empty(num_pairs, dtype=torch.int32, device=x.device) for _ in range(2))
        likelihoods = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
        starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
        count, has_padding = (ids, False) if num_rows is None else (num_rows, True)
        self._launch(
            choose_experts_kernel, (rows,),
            logits, count, ids, likelihoods,
            experts, slots, experts_tile, next_power_of_2(slots), self._normalises, has_padding,
            num_warps=1,
        )  # fmt: skip
        sizes = num_pairs, experts, pairs_tile(num_pairs)
        self._launch(sort_pairs_kernel, (experts + 1,), ids, pairs, starts, *sizes, num_warps=4)
        routing = num_pairs, pairs, starts
        gate_up = self._gate_up(x, *routing, takes_rows=True)
        activated = self._activate(gate_up)
        products = self._down(activated, *routing, takes_rows=False)
        grid = rows, cdiv(hidden, COLUMNS_TILE)
        sizes = slots, hidden, COLUMNS_TILE, has_padding
        self._launch(add_slots_kernel, grid, products, likelihoods, count, out, *sizes, num_warps=4)
        return out

    def _activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        if self._activation is None:
            return self._silu_and_mul(gate_up)
        rows, size = gate_up.shape[0], gate_up.shape[1] // 2
        out, kind = gate_up.new_empty((rows, size)), self._activation
        grid = rows, cdiv(size, COLUMNS_TILE)
        sizes = kind.limit, kind.alpha, size, COLUMNS_TILE
        self._launch(clamped_swiglu_kernel, grid, gate_up, out, *sizes, num_warps=4)
        return out

    def _multiply(
        self,
        stack: torch.Tensor | QuantisedMatrix,
        bias: torch.Tensor | None,
        x: torch.Tensor,
        num_pairs: int,
        pairs: torch.Tensor,
        starts: torch.Tensor,
        takes_rows: bool,
    ) -> torch.Tensor:
        """``[num_pairs, out]``: sorted by experts where ``x`` has rows, else in the order of the pairs."""
        experts, slots, by_dot = self._num_experts, self._per_token, self._has_tensor_cores(x)
        is_plain = isinstance(stack, torch.Tensor)
        outputs, in_features = stack.shape if is_plain else (stack.out_features, stack.in_features)
        out_features = outputs // experts
        rows_tile, columns_tile, depth = SUMMED_ROWS, SUMMED_COLUMNS, SUMMED_DEPTH
        if by_dot:
            rows_tile, columns_tile, depth = tile_rows(num_pairs, experts), DOT_COLUMNS, DOT_DEPTH
        out = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
        grid = most_tiles(num_pairs, experts, rows_tile), cdiv(out_features, columns_tile)
        routing = x if bias is None else bias, pairs, starts, out, x.stride(0)
        sizes = experts, slots, in_features, out_features, takes_rows, bias is not None
        tiles = next_power_of_2(experts), rows_tile, columns_tile, by_dot
        if is_plain:
            self._launch(expert_product_kernel, grid, x, stack, *routing, *sizes, *tiles, depth, num_warps=4)
        else:
            matrix = stack.codes, stack.scales, stack.codes if stack.is_mxfp4 else stack.zeros
            kind = stack.group_size, stack.is_mxfp4
            self._launch(expert_codes_kernel, grid, x, *matrix, *routing, *sizes, *tiles, *kind, num_warps=4)
        return out

    def _multiply_sorted(
        self,
        product: GroupedProduct,
        x: torch.Tensor,
        num_pairs: int,
        pairs: torch.Tensor,
        starts: torch.Tensor,
        takes_rows: bool,
    ) -> torch.Tensor:
        """The same by a product that takes and gives what is sorted by experts."""
        if takes_rows:
            return product(x.index_select(0, pairs // self._per_token), starts)
        products = product(x, starts)
        return torch.empty_like(products).index_copy_(0, pairs.long(), products)


def tile_rows(num_pairs: int, experts: int) -> int:
    """Rows of a tile: as many as an expert has on average."""
    return next((rows for rows in DOT_ROWS if rows * experts >= num_pairs), DOT_ROWS[-1])


def pairs_tile(num_pairs: int) -> int:
    """Pairs that a program of the sorting kernel looks at together."""
    return min(PAIRS_TILE, next_power_of_2(num_pairs))


def most_tiles(num_pairs: int, experts: int, rows_tile: int) -> int:
    """Tiles that there may be at most: each expert that is chosen has one that is not full."""
    chosen = min(num_pairs, experts)
    return chosen + (num_pairs - chosen) // rows_tile
