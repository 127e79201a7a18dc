"""Tells a user's mistakes from defects: the first end as one line, the second with their traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(Exception):
    """Something the user can put right; the message is all that is shown."""


@contextmanager
def input_errors() -> Iterator[None]:
    """Put around what checks the user's input: building an engine, adding requests. Not around running them.

    Raises:
        InputError: in place of what the engine raises for wrong flags, files, requests and installations.
    """
    try:
        import pacpu  # noqa: F401  before anything is read or measured
        from swiftllm.machine import InsufficientMemory
    except ImportError as error:
        # Name the package: the text of a failed import speaks of circular imports and other things it is not.
        raise InputError(
            f"{error.name or 'a package'} cannot be loaded: type `make setup`; `apex doctor` tells what is missing"
        ) from error
    try:
        yield
    except (ValueError, OSError, InsufficientMemory) as error:
        raise InputError(str(error)) from error
