"""The help of every command. Where it names a path of this machine, which is replaced, the terminal is so wide that no
line is wrapped."""

from __future__ import annotations

import io
import os
import runpy
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from unittest.mock import patch

from swiftllm.files import cache_dir
from tests.golden.record import FOLDER

ROOT = FOLDER.parents[1]
APEX = ("serve", "generate", "bench", "simulate", "profile", "doctor", "attention-host", "validate")
SCRIPTS = ("ablation", "download_traces", "fetch_llamafile", "perplexity", "prepare_model", "quantise")
FILES = [
    *sorted(path for path in ROOT.glob("evaluation/[a-z]*.py") if 'if __name__ == "__main__":' in path.read_text()),
    *(ROOT / f"scripts/{name}.py" for name in SCRIPTS),
    *sorted(ROOT.glob("benchmarks/bench_*.py")),
]
COMMANDS = {
    "apex": ["apex", "--help"],
    **{f"apex-{name}": ["apex", name, "--help"] for name in APEX},
    **{f"{path.parent.name}-{path.stem}": [str(path.relative_to(ROOT)), "--help"] for path in FILES},
}
WITHOUT_PATHS = {"apex", *(f"apex-{name}" for name in APEX)} - {"apex-validate"}


def text(name: str) -> str:
    """What a command prints for ``--help``; it must end with 0."""
    command, *arguments = COMMANDS[name]
    out = io.StringIO()
    with terminal(COMMANDS[name], 100 if name in WITHOUT_PATHS else 10_000), redirect_stdout(out):
        try:
            if command == "apex":
                from apex.cli import main

                status = main(arguments)
            else:
                runpy.run_path(str(ROOT / command), run_name="__main__")
                status = "no exit"
        except SystemExit as end:
            status = end.code
    assert not status, f"{name} --help ends with {status}"
    lines = ("---" if set(line) == {" ", "-"} else line.rstrip() for line in out.getvalue().splitlines())
    return without_paths("\n".join(lines) + "\n")


def without_paths(printed: str) -> str:
    """The text, with names in place of paths of this machine."""
    for here, everywhere in ((ROOT, "REPOSITORY"), (cache_dir(), "CACHE"), (Path.home(), "HOME")):
        printed = printed.replace(str(here), everywhere)
    return printed


def path_of(name: str) -> Path:
    return FOLDER / "help" / f"{name}.txt"


@contextmanager
def terminal(arguments: list[str], columns: int) -> Iterator[None]:
    path = [str(ROOT / Path(arguments[0]).parent), *sys.path]  # as of a file, which puts the repository there
    sys.modules.pop("here", None)
    environ = {"COLUMNS": str(columns), "LINES": "50", "TERM": "dumb", "NO_COLOR": "1"}
    with (
        patch.object(sys, "argv", arguments),
        patch.object(sys, "path", path),
        patch.dict(os.environ, environ),
        patch.object(os, "sched_getaffinity", lambda _: {0}),  # defaults that count cores
        _same_signal_handlers(),
    ):
        yield


@contextmanager
def _same_signal_handlers() -> Iterator[None]:
    """Commands that start servers handle SIGTERM; the tests that follow should end by it as before."""
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
