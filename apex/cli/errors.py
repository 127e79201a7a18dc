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
