"""The Triton kernels without a GPU: interpreted in one process, compiled ahead of time in another.

Triton decides when a kernel is imported whether it interprets or compiles it, so neither can happen in the process of
the other tests. By hand: ``TRITON_INTERPRET=1 pytest tests/triton/interpreted*.py`` and
``pytest tests/triton/compiled.py -rP``, which prints the registers and shared memory of each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: the kernels for GPUs are not checked")

ROOT = Path(__file__).parents[2]
LIMIT_S = 480  # of each process; alone on a core either takes about a minute


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Both at once: each computes on one core."""
    started = {}
    for what in ("interpreted", "compiled"):
        files = sorted(str(file.relative_to(ROOT)) for file in Path(__file__).parent.glob(f"{what}*.py"))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5", *files]
        environment = {**os.environ, "TRITON_INTERPRET": "1" if what == "interpreted" else "0"}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started[what] = subprocess.Popen(command, cwd=ROOT, env=environment, **streams)
    yield started
    for process in started.values():
        process.kill()


@pytest.mark.parametrize("what", ["interpreted", "compiled"])
def test_kernels(processes, what: str) -> None:
    output, _ = processes[what].communicate(timeout=LIMIT_S)
    print(output[-20_000:])
    assert processes[what].returncode == 0 and " skipped" not in output
