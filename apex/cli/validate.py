"""`apex validate`, and other optional parts of packages above this one, imported by name like plugins."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

from apex.cli.output import InputError

OPTIONAL_VERBS = {"validate": ("evaluation.validate", "Compare the simulator with real runs on this machine.")}
"""Verbs of a package above this one, which `apex` may not import directly: the module of each, and its summary."""


def run_optional(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb of another package with its own arguments and return its exit status."""
    return optional_module(OPTIONAL_VERBS[verb][0], f"apex {verb}").command(arguments)


def optional_module(module: str, wanted_by: str) -> ModuleType:
    """A module of a package above this one."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"`{wanted_by}` comes with the package `{package}`, which is not installed: run it from the repository, "
            "or install it with `make setup`"
        )
    return importlib.import_module(module)
