"""A tiny model in bfloat16 whose residuals are beyond 65,504, the largest number of float16. No other numbers are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.reference.tiny_model import make_tiny_llama

TO_RESIDUAL = ("embed_tokens.weight", "o_proj.weight", "down_proj.weight")
"""Ends of the names of tensors whose outputs are added to residuals."""
SCALE, SEED = 2.0**13, 14
"""Residuals are some 11 times as large, and outputs of ``o`` and ``down`` at most 6 times. With this seed no greedy
token of the tests is so near to another that float16 could choose that."""


def make_wide(
    path: Path,
    scale: float = SCALE,
    names: tuple[str, ...] = TO_RESIDUAL,
    dtype: str = "bfloat16",
    make: Callable[..., Path] = make_tiny_llama,
    seed: int = SEED,
) -> Path:
    """Write the folder. What is added to residuals is multiplied by ``scale``, which norms undo: the tokens are those
    of the model with ``scale`` 1.

    ``names``: ends of the names of tensors that are multiplied. ``dtype``: of the checkpoint; its numbers are
    bfloat16's in any case. ``make`` writes the folder of the model that is changed.
    """
    make(path, tie_word_embeddings=False, seed=seed)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path / "model.safetensors").items()}
    for name in tensors:
        if name.endswith(names):
            tensors[name] = tensors[name] * scale
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    stored = {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    return path
