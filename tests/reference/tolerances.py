"""The one tolerance table for all attention kernels.

A kernel accumulates in float32 and rounds its output once, so the error is that of the output's rounding (half a unit
in the last place: 6e-8, 5e-4 and 4e-3 relative) plus, in float32, that of the order of summation. The comparison is
with a float64 reference on the very same inputs, for values of the order of 1.
"""

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Largest allowed error: `atol + rtol * |expected|`."""

    atol: float
    rtol: float


TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float32: Tolerance(atol=1e-5, rtol=1e-5),
    torch.float16: Tolerance(atol=1e-3, rtol=1e-3),
    torch.bfloat16: Tolerance(atol=8e-3, rtol=8e-3),
}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare with the tolerance of `dtype` (default: that of `actual`); both are compared in float64.

    Raises:
        AssertionError: they differ by more, or `actual` has a NaN that `expected` has not.
    """
    atol, rtol = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(actual.double(), expected.double(), atol=atol, rtol=rtol)
