"""Triton's interpreter, repaired: import this before any kernel runs."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@cache
def repair_bfloat16_dot() -> None:
    """Give ``tl.dot`` the values of bfloat16 operands.

    The interpreter keeps them as the bits of unsigned integers, and up to Triton 3.9 multiplies those.
    """
    create_dot = InterpreterBuilder.create_dot

    def widened(operand: TensorHandle) -> TensorHandle:
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        return TensorHandle((operand.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot_of_values(self: Any, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
        return create_dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create_dot_of_values
