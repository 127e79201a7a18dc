"""Text that comes in pieces."""

from __future__ import annotations


def begun(mark: str, text: str) -> int:
    """Number of characters at the end of ``text`` that are a beginning of ``mark``."""
    most = min(len(mark) - 1, len(text))
    return next((length for length in range(most, 0, -1) if text.endswith(mark[:length])), 0)
