"""Separates a user's mistakes, shown as one line, from defects, shown with their traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from apex.source_tree import SETUP


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
            import pacpu  # noqa: F401  fails before anything is read or measured
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


def check_at_least(least: int, options: object, *names: str) -> None:
    """
    Raises:
        InputError: one of these fields is a number below ``least``, 0 or 1; the message names it.
    """
    for name in names:
        value = getattr(options, name)
        if value is not None and value < least:
            raise InputError(f"{name}={value} must {f'be at least {least}' if least else 'not be negative'}")


def check_positive(options: object, name: str, what: str = "number") -> None:
    """
    Raises:
        InputError: the field is a number that is not above 0, or infinite.
    """
    value = getattr(options, name)
    if value is not None and not 0.0 < value < float("inf"):
        raise InputError(f"{name}={value} must be a positive {what}")
