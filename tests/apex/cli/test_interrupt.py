"""An interrupt where it is hard to catch: it ends the command with status 130 all the same."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from apex.cli import main
from tests.reference.tiny_model import make_tiny_llama

REPO = Path(__file__).resolve().parents[3]


def test_out_of_exec(tmp_path):
    """As where dataclasses are made while torch loads: the process must not die of a signal it has caught."""
    package = tmp_path / "evaluation"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "validate.py").write_text('def command(arguments):\n    exec("raise KeyboardInterrupt")\n')
    command = [sys.executable, "-m", "apex", "validate"]
    environment = os.environ | {"PYTHONPATH": str(REPO)}  # searched after the working directory
    end = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert (end.returncode, end.stderr) == (130, "apex: interrupted\n")


def test_a_start_leaves_no_worker_behind(tmp_path, monkeypatch):
    started = []

    def interrupted(config, backend, profile):
        started.extend(thread for thread in threading.enumerate() if thread.name == "cpu-attention")
        raise KeyboardInterrupt

    monkeypatch.setattr("apex.build.load_or_measure", interrupted)
    before = threading.enumerate()
    model = make_tiny_llama(tmp_path)
    assert main(["generate", str(model), "hi", "--num-gpu-blocks", "8", "--num-cpu-blocks", "64"]) == 130
    workers = set(started) - set(before)
    assert workers and not any(worker.is_alive() for worker in workers)
