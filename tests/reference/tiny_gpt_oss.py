"""A tiny random gpt-oss, written with transformers, and its MXFP4 checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig

from tests.reference.tiny_model import make_tiny_llama

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 8.0,
    "beta_slow": 1.0,
    "truncate": False,
}
GPT_OSS: dict[str, Any] = {
    "kind": GptOssConfig,
    "num_hidden_layers": 4,
    "intermediate_size": 128,  # two ranks have whole groups of 32
    "head_dim": 16,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 8,
    "swiglu_limit": 1.0,  # so small that many elements are clamped
    "rope_parameters": YARN,
}
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 32


def make_tiny_gpt_oss(path: Path, **more: Any) -> Path:
    """Write the folder; ``more`` replaces fields of its configuration. Sinks have a deviation of 3."""
    make_tiny_llama(path, **{**GPT_OSS, **more})
    file = path / "model.safetensors"
    tensors = load_file(file)
    draw = torch.Generator().manual_seed(7)
    for name, tensor in tensors.items():
        if name.endswith("sinks"):
            tensor.copy_(3 * torch.randn(tensor.shape, generator=draw))
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def make_folders(root: Path) -> dict[str, Path]:
    """The model in float32, in MXFP4, and dequantised."""
    folders = {name: root / name for name in ("plain", "packed", "dense")}
    make_tiny_gpt_oss(folders["plain"])
    write_mxfp4(*folders.values())
    return folders


def write_mxfp4(source: Path, packed: Path, dense: Path) -> None:
    """The same model with the experts' matrices rounded to MXFP4: as OpenAI writes them, and dequantised."""
    tensors, codes = load_file(source / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales, rounded = to_mxfp4(tensors[name].mT)
        codes |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = rounded.mT.contiguous()
    raw = json.loads((source / "config.json").read_text())
    for folder in (packed, dense):
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    plain = {name: t for name, t in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    save_file(plain | codes, packed / "model.safetensors", metadata={"format": "pt"})
    left_out = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left_out}
    (packed / "config.json").write_text(json.dumps(raw))


def to_mxfp4(matrices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks uint8 ``[..., in / 32, 16]``, scales uint8 ``[..., in / 32]`` and the rounded matrices ``[..., in]``."""
    groups = matrices.unflatten(-1, (-1, GROUP))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled.abs()[..., None] - NUMBERS).abs().argmin(-1)
    rounded = NUMBERS[codes] * scaled.sign() * exponents.exp2()[..., None]
    codes = (codes + 8 * (scaled < 0)).to(torch.uint8)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return blocks, (exponents + 127).to(torch.uint8), rounded.flatten(-2)
