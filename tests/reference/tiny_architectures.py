"""A tiny random model of each architecture beside Llama, with every part that its row of the table has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Glm4Config,
    GlmConfig,
    GraniteConfig,
    Ministral3Config,
    Mistral3Config,
    MistralConfig,
    Phi3Config,
    PixtralVisionConfig,
    PreTrainedModel,
    SeedOssConfig,
    SmolLM3Config,
)

from tests.reference.tiny_model import TINY, fill_tiny, make_tiny_llama

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
LONGROPE = {
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [1.0, 3.0, 6.0, 9.0],
    },
}
GRANITE = {
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.11,
    "residual_multiplier": 0.22,
    "logits_scaling": 3.0,
    "rms_norm_eps": 0.02,  # so large that its factor shows
}
GLM = {"head_dim": 32, "pad_token_id": None, "attention_bias": True}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Mistral3": {"kind": MistralConfig, "sliding_window": None, "head_dim": 32},
    "Ministral3": {"kind": Ministral3Config, "head_dim": 32, "rope_parameters": YARN},
    "Ministral3 alone": {"kind": Ministral3Config, "head_dim": 16, "rope_parameters": YARN},
    "Phi3": {"kind": Phi3Config, "pad_token_id": None, "partial_rotary_factor": 0.5},
    "Phi3 whole": {"kind": Phi3Config, "pad_token_id": None},
    "Phi3 long": {"kind": Phi3Config, "pad_token_id": None, **LONGROPE},
    "Glm": {"kind": GlmConfig, **GLM, "head_dim": 16, "num_attention_heads": 32},  # 16 on each KV head
    "Glm4": {"kind": Glm4Config, **GLM, "partial_rotary_factor": 0.25},
    "SeedOss": {"kind": SeedOssConfig, "head_dim": 16, "pad_token_id": None},
    "SmolLM3": {"kind": SmolLM3Config, "no_rope_layers": [1, 0, 1], "pad_token_id": None, "tie_word_embeddings": True},
    "Granite": {"kind": GraniteConfig, **GRANITE, "tie_word_embeddings": True},
    "Granite untied": {"kind": GraniteConfig, **GRANITE, "mlp_bias": True, "attention_bias": True},
}
WRAPPED = ("Mistral3", "Ministral3")
EYE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}


def make_tiny(path: Path, name: str, **more: Any) -> Path:
    """Write the folder of an entry of :data:`ARCHITECTURES`; ``more`` replaces fields of its configuration."""
    overrides = {**ARCHITECTURES[name], **more}
    if name not in WRAPPED:
        return make_tiny_llama(path, **overrides)
    torch.manual_seed(0)
    kind = overrides.pop("kind")
    text = kind(**{**TINY, **overrides})
    config = Mistral3Config(text_config=text, vision_config=PixtralVisionConfig(**EYE), tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config).float()
    fill_tiny(model)
    model.save_pretrained(path)
    return path


def tiny_judge(path: Path, name: str) -> PreTrainedModel:
    """transformers' model of such a folder, in float32."""
    kind = AutoModelForImageTextToText if name in WRAPPED else AutoModelForCausalLM
    return kind.from_pretrained(path, dtype=torch.float32)
