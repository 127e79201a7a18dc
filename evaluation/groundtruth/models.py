"""The sizes of a run's model that its operator tables do not have."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunModel:
    """Layers, elements of a token between them, and tokens of the vocabulary."""

    num_layers: int
    hidden_size: int
    vocab_size: int


MODELS = {
    "llama-3.1-8b": RunModel(32, 4096, 128256),
    "llama-3.1-70b": RunModel(80, 8192, 128256),
    "llama-3.2-1b": RunModel(16, 2048, 128256),
    "llama-3.2-3b": RunModel(28, 3072, 128256),
    "llama-3.3-70b": RunModel(80, 8192, 128256),
    "mistral-7b": RunModel(32, 4096, 32768),
    "mixtral-8x7b": RunModel(32, 4096, 32000),
    "qwen2.5-7b": RunModel(28, 3584, 152064),
    "qwen2.5-14b": RunModel(48, 5120, 152064),
    "qwen2.5-32b": RunModel(64, 5120, 152064),
    "qwen2.5-72b": RunModel(80, 8192, 152064),
    "qwen3-0.6b": RunModel(28, 1024, 151936),
    "qwen3-1.7b": RunModel(28, 2048, 151936),
    "qwen3-4b": RunModel(36, 2560, 151936),
    "qwen3-8b": RunModel(36, 4096, 151936),
    "qwen3-14b": RunModel(40, 5120, 151936),
    "qwen3-32b": RunModel(64, 5120, 151936),
    "qwen3-30b-a3b": RunModel(48, 2048, 151936),
}
"""By the beginning of the name, without its owner and in lower case."""


def find_model(name: str, config: Path | None = None) -> RunModel:
    """The sizes of a model, from the config.json of a folder if one is given.

    Raises:
        ValueError: it is unknown, or the file lacks a size.
    """
    if config is not None:
        return _read_config(config)
    short = name.rsplit("/", 1)[-1].lower()
    known = [model for beginning, model in MODELS.items() if short == beginning or short.startswith(f"{beginning}-")]
    if not known:
        raise ValueError(
            f"the layers of {name!r} are not known, only those of {', '.join(MODELS)}: give the folder of its "
            "config.json with --run-model"
        )
    return known[-1]


def _read_config(folder: Path) -> RunModel:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        return RunModel(int(raw["num_hidden_layers"]), int(raw["hidden_size"]), int(raw["vocab_size"]))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} lacks num_hidden_layers, hidden_size or vocab_size: {error}") from None
