"""Paths: the repository, the cache, the trace folders, the default model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from swiftllm.files import cache_dir

REPO_ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS_DIR = REPO_ROOT / "configs" / "experiments"
CLAIMS_FILE = REPO_ROOT / "configs" / "claims.yaml"
RESULTS_DIR = REPO_ROOT / "results"


def default_model() -> Path:
    """The model that `make setup` puts into the cache."""
    return cache_dir() / "models" / "SmolLM2-135M-Instruct"


def model_folder(given: Path | None) -> Path:
    """The given model folder, or the default one.

    Raises:
        ValueError: there is no model; the message says what to do.
    """
    folder = given or default_model()
    if not (folder / "config.json").is_file():
        remedy = "point --model at a Hugging Face folder" if given else "type `make setup` to fetch the default model"
        raise ValueError(f"no model in {folder}: {remedy}")
    return folder


def python_command() -> str:
    """This Python as typed in the current folder, e.g. ``.venv/bin/python`` in the repository's root."""
    typed = os.path.relpath(sys.executable)
    return "python" if typed.startswith(os.pardir) else typed


def trace_dirs(first: Path | None = None) -> list[Path]:
    """Folders that may hold trace files, in search order."""
    fetched = cache_dir() / "traces"
    return [first, fetched] if first else [fetched]
