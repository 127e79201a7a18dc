"""What layers add to residuals is scaled where a checkpoint in bfloat16 runs in float16."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantise import write_folder
from transformers import Qwen3Config

from swiftllm.model.config import ModelConfig
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from swiftllm.runtime.execution_context import read_model_config
from tests.reference.tiny_architectures import make_tiny, tiny_judge
from tests.reference.tiny_experts import make_tiny_experts
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.wide_residuals import TO_RESIDUAL, make_wide
from tests.swiftllm.model.test_llama import resident_model, whole_prompt_logits

TOKENS = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(1)).tolist()
LARGE_EPS = {"rms_norm_eps": 0.02}  # so large that a factor of it shows
MODELS: dict[str, Any] = {
    "Llama": make_tiny_llama,
    "Qwen3, which norms heads": partial(make_tiny_llama, kind=Qwen3Config, head_dim=16, **LARGE_EPS),
    "Glm4, which norms outputs": partial(make_tiny, name="Glm4", **LARGE_EPS),
    "Granite, which has a scale": partial(make_tiny, name="Granite untied"),
    "Qwen3Moe": partial(make_tiny_experts, name="Qwen3Moe"),
}


def logits_of(folder: Path, config: ModelConfig, dtype: torch.dtype, ops: Ops | None = None) -> torch.Tensor:
    residual_dtype = torch.float32 if dtype is torch.float16 else dtype
    return whole_prompt_logits(resident_model(folder, config, dtype, ops or CpuOps(), residual_dtype), TOKENS).float()


def error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return (logits - expected).square().mean().sqrt().item()


@pytest.mark.parametrize("name", MODELS)
def test_products_beyond_float16_give_the_logits_of_float32(tmp_path: Path, name: str) -> None:
    model = make_wide(tmp_path, 2.0**17, TO_RESIDUAL[1:], make=MODELS[name])
    with torch.inference_mode():
        expected = tiny_judge(model, "")(input_ids=torch.tensor([TOKENS])).logits[0]
    unscaled = ModelConfig.from_folder(model)
    assert not logits_of(model, unscaled, torch.float16).isfinite().all()
    in_bfloat16 = error(logits_of(model, unscaled, torch.bfloat16), expected)
    config = read_model_config(str(model), torch.float16)
    assert config.residual_scale == 2.0**-8
    assert config.head_norm_eps == unscaled.rms_norm_eps or not config.norms_heads
    for ops in (CpuOps(), Ops()):
        assert error(logits_of(model, config, torch.float16, ops), expected) < 0.5 * in_bfloat16
    assert (logits_of(model, config, torch.float32) - expected).abs().max() < 1e-4


def test_norms_of_heads_keep_their_eps_in_a_crossing_in_one_call(tmp_path: Path) -> None:
    """In bfloat16, where pacpu multiplies: a power of two as scale changes no bit, if each norm has its own eps."""
    model = MODELS["Qwen3, which norms heads"](tmp_path)
    unscaled = ModelConfig.from_folder(model)
    plain, scaled = (
        logits_of(model, config, torch.bfloat16) for config in (unscaled, unscaled.with_residual_scale(2.0**-8))
    )
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("layout", ["awq", "gptq"])
def test_so_do_quantised_ones(tmp_path: Path, layout: str) -> None:
    wide = make_wide(tmp_path / "wide", 2.0**17, TO_RESIDUAL[1:])
    for name in (layout, "dequantised"):
        write_folder(wide, tmp_path / name, name, 32, layout == "gptq", False)
    exact = tmp_path / "dequantised"
    expected = logits_of(exact, ModelConfig.from_folder(exact), torch.float32)
    in_bfloat16 = error(logits_of(exact, ModelConfig.from_folder(exact), torch.bfloat16), expected)
    packed = str(tmp_path / layout)
    assert not logits_of(tmp_path / layout, ModelConfig.from_folder(packed), torch.float16).isfinite().all()
    assert error(logits_of(tmp_path / layout, read_model_config(packed, torch.float16), torch.float16), expected) < (
        0.5 * in_bfloat16
    )


@pytest.mark.parametrize(("stored", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_other_models_are_as_they_were(tmp_path: Path, stored: str, dtype: torch.dtype) -> None:
    model = make_wide(tmp_path, 1.0, dtype=stored)
    assert read_model_config(str(model), dtype) == ModelConfig.from_folder(model)
