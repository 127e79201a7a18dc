"""Files outside the project: where they lie, and how they are written."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Models, profile tables, traces and tools: $APEX_CACHE_DIR, by default ~/.cache/apex."""
    return Path(os.environ.get("APEX_CACHE_DIR") or Path.home() / ".cache" / "apex")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there whole or not at all, whenever the machine stops. Its folder is made."""
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
