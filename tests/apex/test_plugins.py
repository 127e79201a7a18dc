"""A scheduler from outside the tree: examples/custom_scheduler.py, run as a reader would run it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from swiftllm.systems import System, find_system, register_system

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def example(tmp_path) -> Path:
    """A folder that holds the example, away from the tree."""
    shutil.copy(REPO / "examples/custom_scheduler.py", tmp_path)
    return tmp_path


def apex(folder: Path, plugins: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "APEX_PLUGINS": plugins, "PYTHONPATH": f"{folder}{os.pathsep}{REPO}"}
    command = [sys.executable, "-m", "apex", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


def test_a_scheduler_of_a_users_own_is_simulated_beside_the_papers(example):
    sizes = ("--num-requests", "60", "--input-len", "300", "--output-len", "30", "--num-gpu-blocks", "400")
    answer = apex(
        example, "custom_scheduler", "simulate", "--system", "swiftllm", "join-all", *sizes, "--output", "out.json"
    )
    assert answer.returncode == 0, answer.stderr
    records = {record["system"]: record for record in json.loads((example / "out.json").read_text())}
    assert records["join-all"]["completed"] == 60 and records["join-all"]["cpu_busy_fraction"] > 0
    assert records["swiftllm"]["cpu_busy_fraction"] == 0


def test_run_as_a_file_it_simulates_itself():
    answer = subprocess.run([sys.executable, "examples/custom_scheduler.py"], capture_output=True, text=True, cwd=REPO,
                            env={**os.environ, "PYTHONPATH": str(REPO)}, check=False)  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    assert "\njoin-all " in answer.stdout and "\nneo " in answer.stdout


def test_a_plugin_that_cannot_be_imported_is_named(tmp_path):
    answer = apex(tmp_path, "no_such_plugin", "simulate")
    message = "apex: APEX_PLUGINS names 'no_such_plugin': No module named 'no_such_plugin'; is it on PYTHONPATH?\n"
    assert (answer.returncode, answer.stderr) == (2, message)


def test_a_name_belongs_to_one_system():
    with pytest.raises(ValueError, match="'neo'"):
        register_system(System("neo", "another", find_system("swiftllm").scheduler))
    with pytest.raises(ValueError, match="unknown system 'orca'; there are vllm, swiftllm, neo"):
        find_system("orca")
