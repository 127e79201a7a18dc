"""Which Python a script goes on with: the one at hand, or that of the virtual environment of `make setup`; what its
figures are drawn on, and what is printed of letters that the terminal has not.

A script imports this before anything else. So this file and ``apex/source_tree.py`` need the standard library
alone, run under Python 3.8, and stand in a package whose ``__init__`` imports nothing.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import NoReturn

from apex.source_tree import IS_SOURCE_TREE, ROOT, SETUP

os.environ["MPLBACKEND"] = "agg"
"""Figures are files, wherever they are drawn: a shell of Jupyter names a package that this Python may lack, and then
matplotlib cannot even be imported."""

if isinstance(sys.stdout, TextIOWrapper):  # not in a notebook; standard error has its own way
    sys.stdout.reconfigure(errors="replace")
    """Letters that a terminal of ASCII or Latin-1 has not are question marks."""

TESTED = ((3, 11), (3, 12))
CHANGED = "APEX_CHANGED_PYTHON"
"""Set for the moment in which one Python takes over from another, so that this happens once."""
IMPORTED_AS = {"pyyaml": "yaml"}


def pinned_modules(requirements: str) -> dict[str, str]:
    """The packages that a requirements file pins, each with the name by which it is imported."""
    names: list[str] = re.findall(r"^([\w.-]+)==", requirements, re.MULTILINE)
    return {name: IMPORTED_AS.get(name.lower(), name.lower().replace("-", "_")) for name in names}


_PINNED = ROOT / "requirements.txt"
REQUIREMENTS = _PINNED.read_text() if IS_SOURCE_TREE and _PINNED.is_file() else ""
PACKAGES = ("pacpu", *pinned_modules(re.sub(".*;.*|(?s:# development.*)", "", REQUIREMENTS)).values())
"""What a command needs that simulates, measures, serves and draws: what every platform has of the requirements."""


def use_environment(*packages: str) -> None:
    """Return if this Python has ``packages``; otherwise start the same command with the virtual environment's Python.

    The environment is ``$VENV``, by default ``.venv`` in the repository's root; an empty ``VENV`` means none. It is
    also used where this Python is not a tested version. ``pacpu`` counts as missing until it is built for this Python.

    Raises:
        SystemExit: 2, after a message that says what to type: packages are missing and there is no environment, or the
            environment lacks them too, or this Python is too old.
    """
    venv = os.environ.get("VENV", ".venv")
    python = ROOT / venv / "bin" / "python"
    is_changed = os.environ.pop(CHANGED, None) is not None
    is_environment = is_changed or (venv != "" and os.path.realpath(sys.prefix) == os.path.realpath(ROOT / venv))
    lacking = [name for name in packages if not has_package(name)]
    is_tested = sys.version_info[:2] in TESTED
    if not lacking and (is_tested or is_environment):
        return
    if venv and not is_environment and os.access(str(python), os.X_OK):
        os.environ[CHANGED] = "1"
        os.execv(str(python), [str(python), *arguments_as_typed()])
    if lacking or sys.version_info < TESTED[0]:
        what = ", ".join(lacking) or "Python {}.{} or later".format(*TESTED[0])
        refuse(f"{sys.executable} has no {what}", remedy(venv, is_environment, lacking))


def has_package(name: str) -> bool:
    """Whether ``import name`` would find a package, without importing it."""
    spec = find_spec(name)
    if name != "pacpu" or spec is None:
        return spec is not None
    folders = spec.submodule_search_locations or ()
    return any(Path(folder, "_pacpu" + suffix).exists() for folder in folders for suffix in EXTENSION_SUFFIXES)


def arguments_as_typed() -> list[str]:
    """What stood behind ``python`` on the command line, options of Python included from 3.10 on."""
    typed = getattr(sys, "orig_argv", None)
    if typed:
        return typed[1:]
    spec = sys.modules["__main__"].__spec__
    return [*(["-m", spec.name] if spec else sys.argv[:1]), *sys.argv[1:]]


def remedy(venv: str, is_environment: bool, lacking: list[str]) -> str:
    if not IS_SOURCE_TREE:
        return SETUP
    setup = "`make setup`" if Path.cwd() == ROOT else f"`make setup` in {ROOT}"
    if lacking == ["pacpu"]:
        return f"type {setup}, which builds it"
    if not venv:
        return f"use a Python that has it, or unset VENV and type {setup}"
    if is_environment:
        return f"type {setup}; if that finds everything up to date, delete {venv} and type it again"
    return f"type {setup}, then try again"


def refuse(problem: str, what_to_do: str) -> NoReturn:
    script = Path(sys.argv[0])
    name = script.parent.name if script.stem == "__main__" else script.name
    print(f"{name}: {problem}\nwhat to do: {what_to_do}", file=sys.stderr)
    raise SystemExit(2)
