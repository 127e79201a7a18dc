"""requirements.txt can be installed with both builds of torch and by both versions of Python, says a package index."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tests.scripts.conftest import SCRIPTS

REQUIREMENTS = SCRIPTS.parent / "requirements.txt"
NO_SOLUTION = "No solution found"


def resolve(python_version: str, *arguments: str) -> list[str]:
    """Lines ``name==version`` of all packages that requirements.txt brings; skips the test where no index answers.

    The index is the public one, whatever the settings of this machine: a GPU machine knows no other. uv resolves
    by metadata alone, where pip fetches gigabytes.
    """
    if importlib.util.find_spec("uv") is None:
        pytest.skip("uv is not installed")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    command = [sys.executable, "-m", "uv", "pip", "compile", "--no-config", "--system-certs", "--quiet"]
    done = subprocess.run(
        [*command, f"--python-version={python_version}", *arguments, str(REQUIREMENTS)],
        env=env | {"UV_HTTP_RETRIES": "0"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode and NO_SOLUTION not in done.stderr:
        pytest.skip(f"no package index answers: {done.stderr.strip().splitlines()[-1].strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("python_version", ["3.11", "3.12"])
def test_a_gpu_machine_can_install_the_requirements(python_version):
    packages = resolve(python_version)
    assert any(package.startswith("nvidia-cublas") for package in packages)  # torch's CUDA build
    text = re.sub(r"\[.*?\]", "", REQUIREMENTS.read_text())  # extras, which uv leaves out of its answer
    lines = text.lower().replace("_", "-").splitlines()
    assert {line.split(";")[0] for line in lines if line[:1].isalpha()} <= set(packages)


def test_a_machine_without_a_gpu_can_install_the_requirements():
    packages = resolve("3.11", "--torch-backend=cpu")
    assert not any(package.startswith("nvidia-") for package in packages)
