"""What commands print: numbers, tables and errors, such as that of a package which is not installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

from rich.console import Console
from rich.table import Table

from apex.source_tree import SETUP

# -- numbers and tables ------------------------------------------------------------------------------------------------
# Formats numbers and tables for the terminal.

PLAIN_WIDTH = 120


def stdout_console() -> Console:
    """A console for standard output: plain and 120 columns wide if that is a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def number(value: float | None, form: str) -> str:
    """A number as a table cell; None is a dash."""
    return "-" if value is None else format(value, form)


def ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def strategy_mix(strategy_iterations: Mapping[str, int]) -> str:
    """Strategies by their share of the iterations, most frequent first."""
    total = sum(strategy_iterations.values())
    ordered = sorted(strategy_iterations.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count / total:.0%}" for name, count in ordered if count) or "-"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A table whose columns are numbers, except those named in ``left``."""
    result = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for title in columns:
        result.add_column(title, justify="left" if title in left else "right", no_wrap=title not in left)
    for row in rows:
        result.add_row(*row)
    return result


# -- errors ------------------------------------------------------------------------------------------------------------
# Separates a user's mistakes, shown as one line, from defects, shown with their traceback.


class InputError(Exception):
    """A mistake that the user can correct; only the message is shown."""


@contextmanager
def input_errors(*, of_engine: bool = True) -> Iterator[None]:
    """Wraps code that checks the user's input: building an engine, adding requests. Not code that runs them.

    ``of_engine=False``: for what does without the CPU kernels.

    Raises:
        InputError: in place of the engine's errors for wrong flags, files, requests and installations.
    """
    try:
        if of_engine:
            import pacpu

            pacpu.isa()  # fails before anything is read or measured
        from swiftllm.engine.backend import RankFailed
        from swiftllm.machine import InsufficientMemory
    except ImportError as error:
        # Name the package: Python's own message may report a circular import where a file is missing.
        raise InputError(
            f"{error.name or 'a package'} cannot be loaded: {SETUP}; `apex doctor` shows what is missing"
        ) from error
    try:
        yield
    except (ValueError, OSError, InsufficientMemory, RankFailed) as error:
        raise InputError(str(error)) from error


# -- packages that may be absent ---------------------------------------------------------------------------------------


def optional_module(module: str, wanted_by: str) -> ModuleType:
    """A module of a package above this one."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        raise InputError(
            f"`{wanted_by}` comes with the package `{package}`, which is not installed: run it from the repository, "
            "or install it with `make setup`"
        )
    return importlib.import_module(module)
