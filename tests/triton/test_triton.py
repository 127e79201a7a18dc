"""The Triton kernels without a GPU: interpreted in one process, compiled ahead of time in another.

Triton decides when a kernel is imported whether it interprets or compiles it, so neither can happen in the process of
the other tests. By hand: ``TRITON_INTERPRET=1 pytest tests/triton/interpreted*.py`` and
``pytest tests/triton/compiled.py -rP``, which prints the registers and shared memory of each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sampled_cases import MOST_CASES

pytest.importorskip("triton", reason="Triton is not installed: the kernels for GPUs are not checked")

HERE = Path(__file__).parent
LIMIT_S = 600  # of each process; alone on a core it takes about half a minute
PROCESSES = {
    "interpreted": (
        "interpreted",
        "interpreted_draws",
        "interpreted_experts",
        "interpreted_faults",
        "interpreted_model",
        "interpreted_quantised",
        "interpreted_wide",
    ),
    "compiled": ("compiled", "compiled_experts", "compiled_quantised"),
}


def test_every_file_is_run() -> None:
    files = {path.stem for kind in ("interpreted", "compiled") for path in HERE.glob(f"{kind}*.py")}
    assert files == {name for names in PROCESSES.values() for name in names}
    assert len(PROCESSES) <= MOST_CASES  # more would be sampled


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("what", PROCESSES)
def test_kernels(what: str, pytestconfig: pytest.Config) -> None:
    files = [str(HERE / f"{name}.py") for name in PROCESSES[what]]
    cases = "--all-cases" if pytestconfig.getoption("--all-cases") else "--sample"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5", cases, *files]
    environment = {**os.environ, "TRITON_INTERPRET": str(int(what != "compiled"))}
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    print(done.stdout[-20_000:], done.stderr[-2000:])
    assert done.returncode == 0 and " skipped" not in done.stdout
