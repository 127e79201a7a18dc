"""A tiny random model folder, written with transformers: the judge and the engine read the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.15,  # large enough for greedy tokens to differ from step to step
}


def make_tiny_llama(
    path: str | Path,
    *,
    kind: type[PretrainedConfig] = LlamaConfig,
    seed: int = 0,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write config.json, generation_config.json and float32 safetensors to ``path`` and return it.

    ``overrides`` replace fields of the configuration; ``max_shard_size`` below the model's size gives shards.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**TINY, **overrides})).float()
    fill_tiny(model)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def fill_tiny(model: PreTrainedModel) -> None:
    """Give norms and biases values at random."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
