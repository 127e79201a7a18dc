"""Quantised matrices without content, for dummy weights and for estimates of memory."""

from __future__ import annotations

from dataclasses import replace

import torch

from swiftllm.model.quantised.collector import FusedPlace
from swiftllm.model.quantised.scheme import QuantisationScheme
from swiftllm.ops.quantised_matrix import GROUP_MULTIPLE, QuantisedMatrix


def empty_matrix(scheme: QuantisationScheme, place: FusedPlace, dtype: torch.dtype) -> QuantisedMatrix:
    """A matrix of the size that a checkpoint's has.

    With act-order, a part of the inputs has some of each group. How many is random: each group's are taken to be filled
    up to whole runs by half a run.
    """
    out_features, device = sum(place.modules.values()), place.device
    if place.in_features == place.whole_in_features or not scheme.ordered or scheme.group_size is None:
        group_size = scheme.group_size_of(place.in_features)
        return QuantisedMatrix.empty(out_features, place.in_features, group_size, dtype, device)
    num_groups = place.whole_in_features // scheme.group_size_of(place.whole_in_features)
    num_runs = -(-(place.in_features + num_groups * GROUP_MULTIPLE // 2) // GROUP_MULTIPLE)
    in_features = num_runs * GROUP_MULTIPLE
    return replace(
        QuantisedMatrix.empty(out_features, in_features, GROUP_MULTIPLE, dtype, device),
        scales=torch.empty(num_groups, out_features, dtype=dtype, device=device),
        zeros=torch.empty(num_groups, out_features, dtype=torch.uint8, device=device),
        group_size=scheme.group_size,
        order=torch.arange(in_features, dtype=torch.int32, device=device) % place.in_features,
        runs=torch.arange(num_runs, dtype=torch.int32, device=device) * num_groups // num_runs,
    )
