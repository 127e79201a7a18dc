"""Tiny random models with experts, written with transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, Qwen3MoeConfig

from tests.reference.tiny_model import make_tiny_llama

EXPERTS = {"num_experts_per_tok": 3}
QWEN3_MOE = {"kind": Qwen3MoeConfig, "head_dim": 16, "moe_intermediate_size": 32, "num_experts": 8, **EXPERTS}
KINDS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {**QWEN3_MOE, "norm_topk_prob": False},
    "Qwen3Moe normalising": {**QWEN3_MOE, "norm_topk_prob": True},
    "Mixtral": {"kind": MixtralConfig, "num_local_experts": 6, **EXPERTS},
}


def make_tiny_experts(path: Path, name: str, **more: Any) -> Path:
    """Write the folder of an entry of :data:`KINDS`; ``more`` replaces fields of its configuration."""
    return make_tiny_llama(path, **{**KINDS[name], **more})


def stack_experts(folder: Path) -> None:
    """Rewrite Qwen3Moe's checkpoint with one tensor for all experts of a layer."""
    file = folder / "model.safetensors"
    tensors, stacks = load_file(file), {}
    while name := next((name for name in tensors if ".experts.0." in name), None):
        block = name.partition(".experts.")[0] + ".experts"
        experts = range(sum(other.startswith(f"{block}.") for other in tensors) // 3)
        gate, up, down = (
            torch.stack([tensors.pop(f"{block}.{expert}.{part}_proj.weight") for expert in experts])
            for part in ("gate", "up", "down")
        )
        stacks |= {f"{block}.gate_up_proj": torch.cat((gate, up), 1), f"{block}.down_proj": down}
    save_file(tensors | stacks, file, metadata={"format": "pt"})
