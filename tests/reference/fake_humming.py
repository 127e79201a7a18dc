"""humming-kernels as its code describes it, for CPUs: the layouts it takes, what it refuses, what its products mean.

It was written from the library's source and is as strict. No product of the library itself was seen.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch

from swiftllm.ops import library


@dataclass(kw_only=True)
class HummingWeightSchema:
    b_dtype: str
    bs_dtype: str | None = None
    weight_scale_group_size: int = 0
    has_zero_point: bool = False


@dataclass(frozen=True)
class LayerConfig:
    shape_n: int
    shape_k: int
    group: int
    num_experts: int
    is_mxfp4: bool
    has_bias: bool
    dtype: torch.dtype
    has_scale_2: bool = False

    def to_str(self) -> str:
        return str(self)


@dataclass
class FakeHumming:
    """What the calls of the library saw and what they do wrong."""

    is_wrong: bool = False
    swaps_experts: bool = False
    cannot_compile: bool = False
    products: int = 0
    packed: int = 0

    def prepare_layer_config(
        self, shape_n: int, shape_k: int, weight_schema: HummingWeightSchema, *, num_experts: int | None = None,
        has_bias: bool = False, torch_dtype: torch.dtype, device: torch.device,
    ) -> LayerConfig:  # fmt: skip
        is_mxfp4 = weight_schema.b_dtype == "float4e2m1"
        if is_mxfp4:
            assert (weight_schema.bs_dtype, weight_schema.weight_scale_group_size) == ("float8e8m0", 32)
        else:
            assert weight_schema.b_dtype == "uint4" and weight_schema.bs_dtype is None
        assert weight_schema.has_zero_point is not is_mxfp4
        group = weight_schema.weight_scale_group_size or shape_k
        return LayerConfig(shape_n, shape_k, group, num_experts or 0, is_mxfp4, has_bias, torch_dtype)

    def prepare_fp16_e8m0_scale(self, config: LayerConfig, tensors: dict) -> tuple[LayerConfig, dict]:
        """Scales below 2^-14 or above 2^15 do not fit into float16: a scale of each expert takes them up."""
        if not config.is_mxfp4 or config.dtype is not torch.float16:
            return config, tensors
        scales = tensors["weight_scale"].view(torch.uint8).int()
        if bool(((scales >= 127 - 14) & (scales <= 127 + 15)).all()):
            return config, tensors
        shift = scales.reshape(config.num_experts or 1, -1).amax(1) - 127 - 15
        scales = (scales - shift.view(-1, 1, 1)).clamp(112, 142).to(torch.uint8).view(tensors["weight_scale"].shape)
        more = {"weight_scale": scales.view(torch.float8_e8m0fnu), "weight_scale_2": torch.exp2(shift.float())}
        return replace(config, has_scale_2=True), tensors | more

    def transform_humming_tensors(self, config: LayerConfig, tensors: dict[str, torch.Tensor]) -> dict:
        out, groups = config.shape_n, config.shape_k // config.group
        expected = {
            "weight": ((out, config.shape_k // 8), torch.int32),
            "weight_scale": ((out, groups), torch.float8_e8m0fnu if config.is_mxfp4 else config.dtype),
        }
        if not config.is_mxfp4:
            expected["zero_point"] = (out // 8, groups), torch.int32
        if config.has_bias:
            expected["bias"] = (out,), config.dtype
        if config.num_experts:
            expected = {name: ((config.num_experts, *shape), dtype) for name, (shape, dtype) in expected.items()}
        if config.has_scale_2:
            expected["weight_scale_2"] = (config.num_experts or 1,), torch.float32
        assert {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == expected
        assert out % 64 == 0
        assert config.shape_k % 32 == 0
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        self.packed += 1
        # The library's layout is its own: here words are turned around, so that nobody else can read them.
        return {**tensors, "weight": tensors["weight"].flip(-2)}

    def get_heuristics_config(self, config: LayerConfig, *, gemm_type: str, device: torch.device) -> list[list]:
        assert gemm_type == ("grouped_contiguous" if config.num_experts else "dense")
        tiles = {"block_shape": (16, 64, 64), "use_stream_k": True, "num_sms": 40}
        return [[0, 16, tiles], [16, 1 << 30, tiles | {"block_shape": (64, 64, 64)}]]

    def humming_forward(
        self, config: LayerConfig, inputs: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor,
        zero_point: torch.Tensor | None = None, bias: torch.Tensor | None = None,
        weight_scale_2: torch.Tensor | None = None, outputs: torch.Tensor | None = None,
        expert_layout: torch.Tensor | None = None, *, compute_config: str, tuning_config: str,
    ) -> torch.Tensor:  # fmt: skip
        if self.cannot_compile:
            raise RuntimeError("nvcc was not found")
        assert inputs.shape[1] == config.shape_k and inputs.is_contiguous() and inputs.dtype is config.dtype
        assert outputs.shape == (inputs.shape[0], config.shape_n) and outputs.is_contiguous()
        assert outputs.dtype is config.dtype and config.has_bias is (bias is not None)
        ranges = json.loads(tuning_config)
        assert [first for first, *_ in ranges[1:]] == [last for _, last, _ in ranges[:-1]]
        assert not any(how["use_stream_k"] for *_, how in ranges)  # which would need locks
        self.products += 1
        kind = json.loads(compute_config)["gemm_type"]
        if not config.num_experts:
            assert kind == "dense" and expert_layout is None
            parts = [(slice(0, len(inputs)), (weight, weight_scale, zero_point, bias, weight_scale_2))]
        else:
            assert kind == "grouped_contiguous" and expert_layout.dtype is torch.int32
            starts = expert_layout.tolist()
            assert len(starts) == config.num_experts + 1 and starts[0] == 0 and starts == sorted(starts)
            order = range(config.num_experts)
            order = order[::-1] if self.swaps_experts else order
            tensors = weight, weight_scale, zero_point, bias, weight_scale_2
            parts = [
                (slice(first, last), tuple(None if t is None else t[e] for t in tensors))
                for e, first, last in zip(order, starts, starts[1:], strict=False)
            ]
        for rows, of_one in parts:
            matrix, own_bias = self._matrix(config, *of_one[:3], of_one[4]), of_one[3]
            product = inputs[rows].double() @ matrix.t()
            outputs[rows] = (product if own_bias is None else product + own_bias).to(outputs.dtype)
        if self.is_wrong:
            outputs[:, 3] += outputs.abs().amax(dim=1)
        return outputs

    @staticmethod
    def _matrix(
        config: LayerConfig, weight: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None,
        scale_2: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        codes = nibbles(weight.flip(-2))
        if config.is_mxfp4:
            powers = torch.exp2(scale.view(torch.uint8).double() - 127).repeat_interleave(config.group, 1)
            magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
            numbers = magnitudes[codes.long() & 7] * (1 - 2 * (codes.long() >> 3))
            return numbers * powers * (1.0 if scale_2 is None else scale_2.double())
        zeros = nibbles(zero_point.t()).t().repeat_interleave(config.group, 1)
        return ((codes - zeros) * scale.double().repeat_interleave(config.group, 1)).to(config.dtype).double()


def nibbles(words: torch.Tensor) -> torch.Tensor:
    """int32 ``[rows, n]`` to ``[rows, 8 n]``, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.contiguous()[..., None] >> shifts) & 15).flatten(1)


def install_fake_humming(patch: pytest.MonkeyPatch, **faults: bool) -> FakeHumming:
    fake = FakeHumming(**faults)
    modules = {
        "forward": {"humming_forward": fake.humming_forward},
        "schema": {"HummingWeightSchema": HummingWeightSchema},
        "transform": {
            name: getattr(fake, name)
            for name in ("prepare_layer_config", "prepare_fp16_e8m0_scale", "transform_humming_tensors")
        },
        "tune": {"get_heuristics_config": fake.get_heuristics_config},
    }
    patch.setitem(sys.modules, "humming", ModuleType("humming"))
    for name, contents in modules.items():
        module = ModuleType(f"humming.{name}")
        module.__dict__.update(contents)
        patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(library, "version", lambda package: "0.1.19")
    return fake
