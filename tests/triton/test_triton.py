"""The Triton kernels without a GPU: interpreted in one process, compiled ahead of time in another, and in a third what
the compiler made of them executed on the host, where ``ttsem`` is installed.

Triton decides when a kernel is imported whether it interprets or compiles it, so neither can happen in the process of
the other tests. By hand: ``TRITON_INTERPRET=1 pytest tests/triton/interpreted*.py`` and
``pytest tests/triton/compiled.py -rP``, which prints the registers and shared memory of each. ``pytest
tests/triton/executed*.py -rP`` prints how many passes of the compiler were looked at.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.sampled_cases import MOST_CASES

pytest.importorskip("triton", reason="Triton is not installed: the kernels for GPUs are not checked")

HERE = Path(__file__).parent
LIMIT_S = 600  # of each process; alone on a core it takes about half a minute
PROCESSES = {
    "interpreted": (
        "interpreted",
        "interpreted_card_checks",
        "interpreted_draws",
        "interpreted_experts",
        "interpreted_faults",
        "interpreted_linear_attention",
        "interpreted_model",
        "interpreted_quantised",
        "interpreted_wide",
    ),
    "compiled": ("compiled", "compiled_experts", "compiled_quantised"),
}
EXECUTED = ("executed", "executed_faults")
EXECUTED_LIMIT_S = 3600  # alone on a core it takes about a quarter of an hour
HOW_TO_INSTALL_TTSEM = "pip install --no-deps --ignore-requires-python ttsem==0.1.0"  # its metadata asks for 3.12


def test_every_file_is_run() -> None:
    files = {path.stem for kind in ("interpreted", "compiled", "executed") for path in HERE.glob(f"{kind}*.py")}
    assert files == {name for names in (*PROCESSES.values(), EXECUTED) for name in names}
    assert len(PROCESSES) <= MOST_CASES  # more would be sampled


@pytest.mark.timeout(LIMIT_S + 30)
@pytest.mark.parametrize("what", PROCESSES)
def test_kernels(what: str, pytestconfig: pytest.Config) -> None:
    cases = "--all-cases" if pytestconfig.getoption("--all-cases") else "--sample"
    run_files(PROCESSES[what], cases, interprets=what != "compiled", limit_s=LIMIT_S)


@pytest.mark.thorough
@pytest.mark.timeout(EXECUTED_LIMIT_S + 30)
@pytest.mark.skipif(find_spec("ttsem") is None, reason=f"ttsem is not installed: {HOW_TO_INSTALL_TTSEM}")
def test_compiled_kernels_are_executed() -> None:
    run_files(EXECUTED, "--all-cases", interprets=False, limit_s=EXECUTED_LIMIT_S)


def run_files(names: tuple[str, ...], cases: str, interprets: bool, limit_s: float) -> None:
    files = [str(HERE / f"{name}.py") for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5", cases, *files]
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interprets))}
    done = subprocess.run(
        command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=limit_s, check=False
    )
    print(done.stdout[-20_000:], done.stderr[-2000:])
    assert done.returncode == 0 and " skipped" not in done.stdout
