"""How much of a checkpoint is read, tensor by tensor."""

from __future__ import annotations

from typing import Any

import pytest
import safetensors
import torch


class _CountedSlice:
    def __init__(self, stored: Any, name: str, read: dict[str, int]) -> None:
        self.stored, self.name, self.read = stored, name, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stored, name)

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        part = self.stored[slices]
        self.read[self.name] = self.read.get(self.name, 0) + part.nbytes
        return part


def counted_reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of each tensor that safetensors reads from now on."""
    read: dict[str, int] = {}
    honest = safetensors.safe_open

    class CountedFile:
        def __init__(self, *where: Any, **how: Any) -> None:
            self.file = honest(*where, **how)

        def __enter__(self) -> CountedFile:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def keys(self) -> list[str]:
            return self.file.keys()

        def get_slice(self, name: str) -> _CountedSlice:
            return _CountedSlice(self.file.get_slice(name), name, read)

    monkeypatch.setattr(safetensors, "safe_open", CountedFile)
    return read
