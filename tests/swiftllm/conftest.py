"""Tiny model folders, written once per session and per set of overrides."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swiftllm.files import cache_dir
from tests.reference.tiny_model import make_tiny_llama


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model_dir(**overrides)``: the folder of a tiny Llama, see :func:`make_tiny_llama`."""
    folders: dict[str, Path] = {}

    def folder(**overrides: Any) -> Path:
        key = repr(sorted(overrides.items()))
        if key not in folders:
            folders[key] = make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"), **overrides)
        return folders[key]

    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    folder = cache_dir() / "models" / "SmolLM2-135M-Instruct"
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"{folder} is not there: run scripts/prepare_model.py")
    return folder
