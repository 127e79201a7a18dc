"""Where things outside the project live."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Models, profile tables, traces and tools: $APEX_CACHE_DIR, by default ~/.cache/apex."""
    return Path(os.environ.get("APEX_CACHE_DIR") or Path.home() / ".cache" / "apex")
