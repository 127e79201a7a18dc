"""Triton's interpreter, repaired: import this before any kernel runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@cache
def repair_bfloat16() -> None:
    """Give ``tl.dot`` the values of bfloat16 operands, and round numbers to the nearest bfloat16 as GPUs do.

    The interpreter keeps bfloat16 as the bits of unsigned integers. Up to Triton 3.9 it multiplies those, and it cuts
    off the bits of a float32 that bfloat16 lacks.
    """
    create_dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def widened(operand: TensorHandle) -> TensorHandle:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot_of_values(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return create_dot(self, widened(a), widened(b), *rest)

    def cast_to_nearest(self: Any, source: TensorHandle, kind: Any) -> TensorHandle:
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, kind)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        half_to_even = 0x7FFF + ((bits >> 16) & 1)
        rounded = np.where(np.isnan(source.data), bits | 0x400000, bits + half_to_even)
        return TensorHandle((rounded >> 16).astype(np.uint16), tl.bfloat16)

    InterpreterBuilder.cast_impl = cast_to_nearest
    InterpreterBuilder.create_dot = create_dot_of_values


@cache
def lend_libdevice() -> None:
    """Give the interpreter, which has none of NVIDIA's library, torch's exponential in its place."""

    def exp(x: tl.tensor) -> tl.tensor:
        values = torch.from_numpy(np.ascontiguousarray(x.handle.data)).exp().numpy()
        return tl.tensor(TensorHandle(values, x.handle.dtype), x.type)

    libdevice.exp = exp
