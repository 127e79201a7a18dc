"""Random 4-bit matrices, packed input by input as `pacpu.rows.PackedCodes` describes the layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from pacpu import rows

WORDS, RUN, RUNS = 16, 16, 8
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
NUMBERS = torch.tensor(MAGNITUDES + [-number for number in MAGNITUDES])


class CodedMatrix(NamedTuple):
    packed: rows.PackedCodes
    in_order: torch.Tensor
    """The elements, columns in the order of codes."""
    weight: torch.Tensor
    """The elements, columns in the order of inputs."""
    arrays: tuple[torch.Tensor | None, ...]
    """What ``packed`` is made of, with these sizes."""
    sizes: dict[str, int]


def random_matrix(
    out_features: int,
    in_features: int,
    group_size: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype = torch.float16,
    *,
    is_ordered: bool = False,
) -> CodedMatrix:
    """With arbitrary codes and NaN as scales where the packed arrays are padded. uint8 scales: of MXFP4."""
    columns = rows.CODE_COLUMNS
    panels, blocks, groups = -(-out_features // columns), -(-in_features // 128), in_features // group_size
    codes = torch.randint(16, (out_features, in_features))
    zeros = torch.randint(16, (out_features, groups))
    is_mxfp4 = scale_dtype is torch.uint8
    if is_mxfp4:
        highest = 126 - in_features.bit_length() // 2
        scales = torch.randint(highest - 3, highest, (out_features, groups), dtype=torch.uint8)
    else:
        scales = ((torch.rand(out_features, groups) + 0.2) / 8 / in_features**0.5).to(scale_dtype)
    words = np.random.default_rng(int(codes.sum())).integers(0, 1 << 32, (panels, blocks, columns, WORDS), np.uint32)
    column = np.arange(out_features)
    for i, codes_of_input in enumerate(codes.t().numpy().astype(np.uint32)):
        place = column // columns, i // 128, column % columns, i % RUN
        shift = 4 * (i % 128 // RUN)
        words[place] = words[place] & ~np.uint32(15 << shift) | codes_of_input << np.uint32(shift)
    packed_scales = torch.full((panels, groups, columns), 255 if is_mxfp4 else torch.nan).to(scale_dtype)
    packed_zeros = torch.full((panels, groups, columns), 255, dtype=torch.uint8)
    for column in range(out_features):
        packed_scales[column // columns, :, column % columns] = scales[column]
        packed_zeros[column // columns, :, column % columns] = zeros[column]
    of_input = torch.arange(in_features) // group_size
    numbers = NUMBERS[codes] if is_mxfp4 else (codes - zeros[:, of_input]).float()
    factors = 2.0 ** (scales.float() - 127) if is_mxfp4 else scales.float()
    in_order = (numbers * factors[:, of_input]).to(dtype)
    order = torch.randperm(in_features, dtype=torch.int32) if is_ordered else None
    weight = in_order.clone() if order is None else torch.empty_like(in_order).index_copy_(1, order.long(), in_order)
    sizes = {"out_features": out_features, "in_features": in_features}
    arrays = torch.from_numpy(words.view(np.int32)), packed_scales, None if is_mxfp4 else packed_zeros, order
    return CodedMatrix(rows.PackedCodes(*arrays, **sizes), in_order, weight, arrays, sizes)
