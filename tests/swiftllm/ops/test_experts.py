"""Experts of gpt-oss beside those of transformers: biases, the clamped SwiGLU, MXFP4."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from swiftllm.ops.matrices import ClampedSwiGLU, ExpertWeights, QuantisedMatrix
from tests.reference.tolerances import TOLERANCES

EXPERTS, SLOTS, HIDDEN, FFN = 8, 3, 96, 64
DTYPES = torch.float32, torch.bfloat16, torch.float16


@pytest.fixture(autouse=True)
def new_draws() -> None:
    print("seed", torch.seed())


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.dtype.itemsize])


def random_mxfp4(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks ``[..., in / 32, 16]`` and scales of a matrix ``[..., in]`` with elements of about 1."""
    *outer, in_features = shape
    blocks = torch.randint(256, (*outer, in_features // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(122, 126, (*outer, in_features // 32), dtype=torch.uint8)


def test_mxfp4_is_that_of_transformers_bit_by_bit() -> None:
    blocks = torch.randint(256, (256, 3, 16), dtype=torch.uint8)
    blocks[:, 1] = torch.arange(16, dtype=torch.uint8) * 17  # every code
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(-1, 3)
    for dtype in DTYPES:
        matrix = QuantisedMatrix.from_mxfp4(blocks, scales, dtype).dequantise()
        wanted = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].t()
        assert torch.equal(bits(matrix[:255]), bits(wanted[:255])), dtype
        assert matrix[255].isnan().all()
        exact = QuantisedMatrix.from_mxfp4(blocks, scales, torch.float32).dequantise()
        lowest, highest = (104, 140) if dtype is torch.float16 else (0, 252)
        assert torch.equal(matrix[lowest : highest + 1].float(), exact[lowest : highest + 1]), "rounded"
    assert torch.equal(matrix[100:102], exact[100:102].half()) and matrix[145].isinf().any()


def assert_near(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Three products are rounded one after the other."""
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.float(), wanted, atol=4 * atol * float(wanted.abs().max()), rtol=4 * rtol)


def reference_mlp() -> GptOssMLP:
    config = GptOssConfig(
        hidden_size=HIDDEN, intermediate_size=FFN, num_local_experts=EXPERTS, num_experts_per_tok=SLOTS
    )
    config._experts_implementation = "eager"
    mlp = GptOssMLP(config).eval()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-2] ** 0.5 if parameter.dim() == 3 else 0.3)
    return mlp


def weights_of(mlp: GptOssMLP, gate_up: torch.Tensor, down: torch.Tensor) -> ExpertWeights:
    """``gate_up [experts, 2 ffn, hidden]`` in turn, as in a checkpoint, and ``down [experts, hidden, ffn]``."""
    experts = mlp.experts
    return ExpertWeights(
        mlp.router.weight.data,
        one_above_the_other(gate_up),
        down.flatten(0, 1),
        SLOTS,
        normalises=True,
        router_bias=mlp.router.bias.data,
        gate_up_bias=one_above_the_other(experts.gate_up_proj_bias.data),
        down_bias=experts.down_proj_bias.data.flatten(),
        activation=ClampedSwiGLU(experts.limit, experts.alpha),
    )


def one_above_the_other(gate_up: torch.Tensor) -> torch.Tensor:
    return torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), 1).flatten(0, 1)


@torch.inference_mode()
def test_experts_of_gpt_oss_are_those_of_transformers() -> None:
    mlp = reference_mlp()
    plain = weights_of(mlp, *(stack.data.mT for stack in (mlp.experts.gate_up_proj, mlp.experts.down_proj)))
    x = 4 * torch.randn(2, 13, HIDDEN)  # both limits are reached
    gate_up = mlp.experts.gate_up_proj
    assert (x.view(-1, HIDDEN) @ gate_up[0]).abs().max() > 7
    for ops in (Ops(), CpuOps()):
        assert_near(ops.make_experts(plain)(x.view(-1, HIDDEN)), mlp(x)[0].view(-1, HIDDEN), torch.float32)

    blocks = [random_mxfp4(EXPERTS, 2 * FFN, HIDDEN), random_mxfp4(EXPERTS, HIDDEN, FFN)]
    for stack, own in zip((mlp.experts.gate_up_proj, mlp.experts.down_proj), blocks, strict=True):
        stack.data.copy_(convert_moe_packed_tensors(*own, dtype=torch.float32))
    for dtype in DTYPES:
        coded = coded_weights(mlp, blocks, dtype)
        rows = x.view(-1, HIDDEN).to(dtype)
        wanted = mlp(rows.float().view(x.shape))[0].view(-1, HIDDEN)
        for ops in (Ops(), CpuOps()):
            experts = ops.make_experts(coded)
            out = experts(torch.cat((rows, torch.full_like(rows[:3], torch.nan))), torch.tensor([len(rows)]))
            assert_near(out[:-3], wanted, dtype)
            assert not out[-3:].any()


def coded_weights(mlp: GptOssMLP, blocks: list[tuple[torch.Tensor, torch.Tensor]], dtype) -> ExpertWeights:
    (gate_up, gate_up_scales), (down, down_scales) = blocks
    own = weights_of(mlp, *(stack.data.mT for stack in (mlp.experts.gate_up_proj, mlp.experts.down_proj)))
    return replace(
        own,
        router=own.router,
        gate_up=QuantisedMatrix.from_mxfp4(one_above_the_other(gate_up), one_above_the_other(gate_up_scales), dtype),
        down=QuantisedMatrix.from_mxfp4(down.flatten(0, 1), down_scales.flatten(0, 1), dtype),
        gate_up_bias=own.gate_up_bias.to(dtype),
        down_bias=own.down_bias.to(dtype),
    )
