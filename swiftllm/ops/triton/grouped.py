"""An FFN of experts by the kernels of :mod:`swiftllm.ops.triton.experts`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from triton import cdiv, next_power_of_2

from swiftllm.ops.experts import ExpertWeights
from swiftllm.ops.quantised_matrix import QuantisedMatrix
from swiftllm.ops.triton.experts import (
    add_slots_kernel,
    choose_experts_kernel,
    expert_codes_kernel,
    expert_product_kernel,
    sort_pairs_kernel,
)

PAIRS_TILE = 1024
SLOTS_COLUMNS_TILE = 1024
# Rows, outputs and, in 16 bits, inputs of a tile: with tensor cores, and where Triton has none.
DOT_ROWS, DOT_COLUMNS, DOT_DEPTH = (16, 32, 64), 64, 64
SUMMED_ROWS, SUMMED_COLUMNS, SUMMED_DEPTH = 4, 32, 16


class GroupedExperts:
    """See :data:`swiftllm.ops.experts.Experts`. Weights are read where they are, call by call."""

    def __init__(
        self,
        weights: ExpertWeights,
        silu_and_mul: Callable[[torch.Tensor], torch.Tensor],
        has_tensor_cores: Callable[[torch.Tensor], bool],
        launch: Callable[..., None],
    ) -> None:
        """``launch``: that of :mod:`swiftllm.ops.triton.ops`."""
        self._weights, self._router = weights, weights.router.float()
        self._silu_and_mul, self._has_tensor_cores, self._launch = silu_and_mul, has_tensor_cores, launch

    def __call__(self, x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        weights, (rows, hidden) = self._weights, x.shape
        experts, slots = weights.num_experts, weights.per_token
        out = torch.empty((rows, hidden), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        logits = x.float() @ self._router.t()
        num_pairs, experts_tile = rows * slots, next_power_of_2(experts)
        ids, pairs = (torch.empty(num_pairs, dtype=torch.int32, device=x.device) for _ in range(2))
        likelihoods = torch.empty(num_pairs, dtype=torch.float32, device=x.device)
        starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
        count, has_padding = (ids, False) if num_rows is None else (num_rows, True)
        self._launch(
            choose_experts_kernel, (rows,),
            logits, count, ids, likelihoods,
            experts, slots, experts_tile, next_power_of_2(slots), weights.normalises, has_padding,
            num_warps=1,
        )  # fmt: skip
        pairs_tile = min(PAIRS_TILE, next_power_of_2(num_pairs))
        sizes = num_pairs, experts, pairs_tile
        self._launch(sort_pairs_kernel, (experts + 1,), ids, pairs, starts, *sizes, num_warps=4)
        gate_up = self._multiply(weights.gate_up, x, num_pairs, pairs, starts, takes_rows=True)
        activated = self._silu_and_mul(gate_up)
        products = self._multiply(weights.down, activated, num_pairs, pairs, starts, takes_rows=False)
        grid = rows, cdiv(hidden, SLOTS_COLUMNS_TILE)
        sizes = slots, hidden, SLOTS_COLUMNS_TILE, has_padding
        self._launch(add_slots_kernel, grid, products, likelihoods, count, out, *sizes, num_warps=4)
        return out

    def _multiply(
        self,
        stack: torch.Tensor | QuantisedMatrix,
        x: torch.Tensor,
        num_pairs: int,
        pairs: torch.Tensor,
        starts: torch.Tensor,
        takes_rows: bool,
    ) -> torch.Tensor:
        """``[num_pairs, out]``: sorted by experts where ``x`` has rows, else in the order of the pairs."""
        experts, slots, by_dot = self._weights.num_experts, self._weights.per_token, self._has_tensor_cores(x)
        is_plain = isinstance(stack, torch.Tensor)
        out_features = (stack.shape[0] if is_plain else stack.out_features) // experts
        rows_tile, columns_tile, depth = SUMMED_ROWS, SUMMED_COLUMNS, SUMMED_DEPTH
        if by_dot:
            rows_tile, columns_tile, depth = tile_rows(num_pairs, experts), DOT_COLUMNS, DOT_DEPTH
        out = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
        grid = most_tiles(num_pairs, experts, rows_tile), cdiv(out_features, columns_tile)
        tiles = next_power_of_2(experts), rows_tile, columns_tile
        if is_plain:
            sizes = experts, slots, stack.shape[1], out_features, takes_rows
            arguments = x, stack, pairs, starts, out, x.stride(0), *sizes, *tiles, depth, by_dot
            self._launch(expert_product_kernel, grid, *arguments, num_warps=4)
        else:
            sizes = experts, slots, stack.in_features, out_features, takes_rows, stack.group_size
            tensors = x, stack.codes, stack.scales, stack.zeros, pairs, starts, out
            self._launch(expert_codes_kernel, grid, *tensors, x.stride(0), *sizes, *tiles, by_dot, num_warps=4)
        return out


def tile_rows(num_pairs: int, experts: int) -> int:
    """Rows of a tile: as many as an expert has on average."""
    return next((rows for rows in DOT_ROWS if rows * experts >= num_pairs), DOT_ROWS[-1])


def most_tiles(num_pairs: int, experts: int, rows_tile: int) -> int:
    """Tiles that there may be at most: each expert that is chosen has one that is not full."""
    chosen = min(num_pairs, experts)
    return chosen + (num_pairs - chosen) // rows_tile
