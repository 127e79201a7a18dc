"""Files outside the project: the cache directory, atomic writes, and what becomes of results that cannot be written."""

from __future__ import annotations

import logging
import os
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp

logger = logging.getLogger(__name__)

NO_HOME = Path(os.devnull, "no-home-folder")
"""Where a user without a home folder has one: nothing is found there, and nothing can be written."""


def expand(path: str | Path) -> Path:
    """The path with ``~`` replaced by the home folder; as it is where there is none."""
    return Path(os.path.expanduser(path))


def cache_dir() -> Path:
    """The folder of models, profile tables, traces and tools: $APEX_CACHE_DIR, by default ~/.cache/apex."""
    given = os.environ.get("APEX_CACHE_DIR")
    if given:
        return expand(given)
    home = expand("~")
    return (home if home.is_absolute() else NO_HOME) / ".cache" / "apex"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, even if the machine stops. Creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Check that files can be written to a folder, before the work whose results go there. It is created.

    Raises:
        OSError: they cannot.
    """
    folder.mkdir(parents=True, exist_ok=True)
    TemporaryFile(dir=folder).close()


def is_kept(path: Path) -> bool:
    """Whether there is such a file in the cache. One in a folder that cannot be searched is not there."""
    return os.path.isfile(path)


def keep(path: Path, content: str | bytes) -> bool:
    """Write a file of the cache, for later starts. Where that cannot be, a warning says so, once a process and folder.
    Returns whether it was written."""
    try:
        write_atomically(path, content)
    except OSError as error:
        _warn_once(path.parent, error.strerror)
        return False
    return True


@cache
def _warn_once(folder: Path, why: str) -> None:
    logger.warning(
        "the cache %s cannot be written to (%s): what is measured is used now, and measured again at the next start; "
        "set APEX_CACHE_DIR to another folder to keep it",
        folder,
        why,
    )


def save_result(path: Path, content: str | bytes) -> bool:
    """Write what took long to come by; where that cannot be, :func:`rescue` it. Returns whether it was written."""
    try:
        write_atomically(path, content)
    except OSError as error:
        rescue(path, content, error)
        return False
    return True


def rescue(path: Path, content: str | bytes, error: OSError) -> None:
    """Write what belongs to ``path``, which cannot be written, to a temporary folder, else text to standard error."""
    try:
        elsewhere = Path(mkdtemp(prefix="apex-")) / path.name
        write_atomically(elsewhere, content)
        logger.warning("%s cannot be written (%s): its content is in %s", path, error.strerror, elsewhere)
    except OSError:
        logger.warning("neither %s nor a temporary file can be written (%s)", path, error.strerror)
        if isinstance(content, str):
            print(f"the content of {path.name}:\n{content}", file=sys.stderr, flush=True)
