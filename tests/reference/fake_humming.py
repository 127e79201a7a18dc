"""humming-kernels as its code describes it, for CPUs: the layouts it takes, what it refuses, what its products mean.

It was written from the library's source and is as strict. No product of the library itself was seen.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch

from swiftllm.ops import library


@dataclass(kw_only=True)
class HummingWeightSchema:
    b_dtype: str
    weight_scale_group_size: int = 0
    has_zero_point: bool = False


@dataclass
class FakeHumming:
    """What the calls of the library saw and what they do wrong."""

    is_wrong: bool = False
    cannot_compile: bool = False
    products: int = 0
    packed: int = 0

    def prepare_and_transform_humming_tensors(
        self, tensors: dict[str, torch.Tensor], shape_n: int, shape_k: int, weight_schema: HummingWeightSchema,
        *, has_bias: bool = False, torch_dtype: torch.dtype, device: torch.device,
    ) -> tuple[Any, dict[str, torch.Tensor]]:  # fmt: skip
        group = weight_schema.weight_scale_group_size or shape_k
        expected = {
            "weight": ((shape_n, shape_k // 8), torch.int32),
            "weight_scale": ((shape_n, shape_k // group), torch_dtype),
            "zero_point": ((shape_n // 8, shape_k // group), torch.int32),
        }
        if has_bias:
            expected["bias"] = (shape_n,), torch_dtype
        assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == expected
        assert weight_schema.b_dtype == "uint4" and weight_schema.has_zero_point
        assert shape_n % 64 == 0
        assert shape_k % 32 == 0
        assert all(tensor.is_contiguous() and tensor.device == device for tensor in tensors.values())
        self.packed += 1
        # The library's layout is its own: here words are turned around, so that nobody else can read them.
        return (shape_n, shape_k, group, has_bias), {**tensors, "weight": tensors["weight"].flip(0)}

    def humming_forward(
        self, config: Any, inputs: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
        zero_point: torch.Tensor, bias: torch.Tensor | None = None, outputs: torch.Tensor | None = None,
        locks: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        if self.cannot_compile:
            raise RuntimeError("nvcc was not found")
        shape_n, shape_k, group, has_bias = config
        assert inputs.shape[1] == shape_k and inputs.is_contiguous() and inputs.dtype is torch.float16
        assert outputs.shape == (inputs.shape[0], shape_n) and outputs.is_contiguous()
        assert locks.dtype is torch.int32 and len(locks) >= 2048 and not locks.any()
        assert has_bias is (bias is not None)
        codes = nibbles(weight.flip(0))
        zeros = nibbles(zero_point.t()).t().repeat_interleave(group, 1)
        matrix = ((codes - zeros) * weight_scale.double().repeat_interleave(group, 1)).half().double()
        product = inputs.double() @ matrix.t()
        self.products += 1
        outputs.copy_(product if bias is None else product + bias)
        if self.is_wrong:
            outputs[:, 3] += outputs.abs().amax(dim=1)
        return outputs


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 ``[rows, n]`` to ``[rows, 8 n]``, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.contiguous()[..., None] >> shifts) & 15).flatten(1)


def install_fake_humming(patch: pytest.MonkeyPatch, **faults: bool) -> FakeHumming:
    fake = FakeHumming(**faults)
    modules = {
        "forward": {"humming_forward": fake.humming_forward},
        "schema": {"HummingWeightSchema": HummingWeightSchema},
        "transform": {"prepare_and_transform_humming_tensors": fake.prepare_and_transform_humming_tensors},
    }
    patch.setitem(sys.modules, "humming", ModuleType("humming"))
    for name, contents in modules.items():
        module = ModuleType(f"humming.{name}")
        module.__dict__.update(contents)
        patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(library, "version", lambda package: "0.1.19")
    return fake
