"""The tensors in a model folder's safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

INDEX_FILES = "*.safetensors.index.json"
SINGLE_FILES = ("model.safetensors", "gptq_model*.safetensors")  # the latter as AutoGPTQ writes them


class WeightsError(ValueError):
    """A checkpoint does not hold the tensors that config.json requires; the message names the tensors."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint, of which slices can be read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor: ...


def tensor_names(folder: Path) -> set[str]:
    """Of a folder's tensors; none if there are no weights, or they cannot be read."""
    indices = sorted(folder.glob(INDEX_FILES))
    if indices:
        return set(json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"])
    try:
        return {name for name, _ in read_tensors(folder)}
    except (FileNotFoundError, WeightsError):
        return set()


def read_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Names of tensors, and what reads slices of each.

    Raises:
        FileNotFoundError: no safetensors in the folder, or a shard of the index is missing.
        WeightsError: a file is damaged.
    """
    from safetensors import SafetensorError, safe_open  # not needed for dummy weights

    indices = sorted(folder.glob(INDEX_FILES))
    single = [path.name for pattern in SINGLE_FILES for path in sorted(folder.glob(pattern))]
    if indices:
        files = sorted(set(json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].values()))
    elif single:
        files = single[:1]
    else:
        raise FileNotFoundError(
            f"{folder} has neither {SINGLE_FILES[0]} nor {INDEX_FILES}; "
            "convert the model to safetensors, or use load_format='dummy' to run without weights"
        )
    for file in files:
        path = folder / file
        if not path.is_file():
            raise FileNotFoundError(f"{path} is named in {indices[0].name} and is not there: finish the download")
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in sorted(tensors.keys()):  # the tensors of a module one after the other
                    yield name, tensors.get_slice(name)
        except SafetensorError as error:
            raise WeightsError(f"{path} is no readable safetensors file: {error}") from None
