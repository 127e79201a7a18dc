"""Files outside the project: the cache directory, and atomic writes."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """The folder of models, profile tables, traces and tools: $APEX_CACHE_DIR, by default ~/.cache/apex."""
    return Path(os.environ.get("APEX_CACHE_DIR") or Path.home() / ".cache" / "apex")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, even if the machine stops. Creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
