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

TEXT_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "language_model.": "model.",
}
BARE = ("layers.", "embed_tokens.", "norm.")  # how names begin in a checkpoint of the model without its vocabulary
IMAGE_PREFIXES = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "visual.",
    "model.visual.",
)
DRAFT_PREFIX = "mtp."  # of layers that guess several tokens ahead


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


def text_name(name: str, is_wrapped: bool) -> str | None:
    """The name that a tensor of a checkpoint has in one of the text model alone; None: it is of the part for images.
    ``is_wrapped``: whether there is such a part."""
    if is_wrapped:
        if name.startswith(IMAGE_PREFIXES):
            return None
        prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
        name = TEXT_PREFIXES.get(prefix, "") + name.removeprefix(prefix)
    return f"model.{name}" if name.startswith(BARE) else name


def stored_names(folder: Path) -> list[str] | None:
    """Names of a folder's tensors; None if it has no weights, or these cannot be read."""
    try:
        return [name for name, _ in read_tensors(folder)]
    except (OSError, DamagedFile):
        return None


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
