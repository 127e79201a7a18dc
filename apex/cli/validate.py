"""`apex validate`, and other optional parts of packages above this one, imported by name like plugins."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from apex.cli.errors import InputError


class OptionalVerb(NamedTuple):
    """A verb of a package above this one, which `apex` may not import directly."""

    module: str
    summary: str


OPTIONAL_VERBS = {
    "validate": OptionalVerb("evaluation.validate", "Compare the simulator with real runs on this machine."),
}


def run_optional(verb: str, arguments: Sequence[str]) -> int:
    """Run a verb of another package with its own arguments and return its exit status.

    Raises:
        InputError: the package is not installed; the message says where it comes from.
    """
    return optional_module(OPTIONAL_VERBS[verb].module, f"apex {verb}").command(arguments)


def optional_module(module: str, wanted_by: str) -> ModuleType:
    """A module of a package above this one.

    Raises:
        InputError: the package is not installed; the message says where it comes from.
    """
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"`{wanted_by}` comes with the package `{package}`, which is not installed: run it from the repository, "
            "or install it with `make setup`"
        )
    return importlib.import_module(module)
