"""Where things are that are no modules, in a source tree and in an installed package.

``configs/`` stands at the top of the source tree and is a part of the installed package ``apex`` (setup.py). As the
scripts read this file before anything else, it needs the standard library alone and runs under Python 3.8.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""What holds the packages: the top of the source tree, or site-packages."""

_SHIPPED_CONFIGS = Path(__file__).resolve().parent / "configs"
IS_SOURCE_TREE = not _SHIPPED_CONFIGS.is_dir()
CONFIGS = ROOT / "configs" if IS_SOURCE_TREE else _SHIPPED_CONFIGS

SETUP = "type `make setup`" if IS_SOURCE_TREE else "install apex-llm-serving again with pip"
"""What to do where a package or the native build is missing."""


def configs_folder(name: str) -> Path:
    """A folder of ``configs/``.

    Raises:
        FileNotFoundError: this copy of the package came without it.
    """
    folder = CONFIGS / name
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: copy the source tree as a whole, or install the package")
    return folder


def python_command() -> str:
    """This Python as typed in the current folder, e.g. ``.venv/bin/python`` in the repository's root."""
    typed = os.path.relpath(sys.executable)
    return "python" if typed.startswith(os.pardir) else typed
