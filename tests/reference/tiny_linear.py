"""Tiny random models with layers of linear attention, written with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from tests.reference.tiny_model import TINY, fill_tiny, make_tiny_llama

LINEAR = {
    "num_hidden_layers": 8,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"kind": Qwen3_5TextConfig, **LINEAR},
    "Qwen3_5Moe": {"kind": Qwen3_5MoeTextConfig, **LINEAR, **EXPERTS},
    "Qwen3Next": {"kind": Qwen3NextConfig, **LINEAR, **EXPERTS, "norm_topk_prob": False},
}
EYE = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}


def make_tiny_linear(path: Path, name: str, **more: Any) -> Path:
    """Write the folder of an entry of :data:`KINDS`; ``more`` replaces fields of its configuration."""
    return make_tiny_llama(path, **{**KINDS[name], **more})


def make_tiny_wrapped(path: Path) -> Path:
    """The folder of Qwen3.5 with a part for images."""
    torch.manual_seed(0)
    text = {name: value for name, value in {**TINY, **KINDS["Qwen3_5"]}.items() if name != "kind"}
    model = AutoModelForImageTextToText.from_config(Qwen3_5Config(text_config=text, vision_config=EYE)).float()
    fill_tiny(model)
    model.save_pretrained(path)
    return path


def linear_judge(path: Path) -> PreTrainedModel:
    """transformers' model of such a folder, in float32."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
