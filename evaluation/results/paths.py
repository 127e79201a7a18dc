"""Paths: the repository, experiments, results, the default model; and what to type for a command."""

from __future__ import annotations

from pathlib import Path

from apex.source_tree import CONFIGS, IS_SOURCE_TREE, ROOT, python_command
from swiftllm.files import cache_dir

REPO_ROOT = ROOT
EXPERIMENTS_DIR = CONFIGS / "experiments"
CLAIMS_FILE = CONFIGS / "claims.yaml"
RESULTS_DIR = ROOT / "results" if IS_SOURCE_TREE else Path("results")


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
        remedy = "point --model at a Hugging Face folder"
        if IS_SOURCE_TREE and not given:
            remedy = "type `make setup` to fetch the default model"
        raise ValueError(f"no model in {folder}: {remedy}")
    return folder


def evaluation_command(name: str) -> str:
    """What to type for a command of ``evaluation``, e.g. ``reproduce_fig5``."""
    return f"{python_command()} " + (f"evaluation/{name}.py" if IS_SOURCE_TREE else f"-m evaluation.{name}")
