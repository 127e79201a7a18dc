"""The tensors in a model folder's safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from swiftllm.model.folder import DamagedFile, weight_files

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
"""How the names of the vocabulary's two matrices end."""
ROWS_AT_ONCE = 4096


class WeightsError(DamagedFile):
    """A checkpoint does not hold the tensors that config.json requires; the message names the tensors."""


class StoredTensor(Protocol):
    """A tensor of a checkpoint, of which slices can be read."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor: ...


def read_tensors(folder: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Names of tensors, and what reads slices of each."""
    for path in weight_files(folder):
        yield from read_file(path)


def read_file(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The same of one file.

    Raises:
        WeightsError: it is damaged.
    """
    from safetensors import SafetensorError, safe_open  # not needed for dummy weights

    try:
        with safe_open(path, framework="pt") as tensors:
            for name in sorted(tensors.keys()):  # the tensors of a module one after the other
                yield name, tensors.get_slice(name)
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is no readable safetensors file: {error}; download it again") from None


def vocabulary_matrices(folder: Path) -> dict[str, StoredTensor]:
    """Of :data:`HEAD` and :data:`EMBEDDING` those that a folder's weights hold; none if these cannot be read."""
    try:
        return {end: tensor for name, tensor in read_tensors(folder) for end in (HEAD, EMBEDDING) if name.endswith(end)}
    except (OSError, DamagedFile):
        return {}


def are_equal(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two matrices hold the same numbers. Reads no further than their first difference."""
    shape = first.get_shape()
    if shape != second.get_shape():
        return False
    pieces = (slice(start, start + ROWS_AT_ONCE) for start in range(0, shape[0], ROWS_AT_ONCE))
    return all(torch.equal(first[(piece,)].float(), second[(piece,)].float()) for piece in pieces)
