"""What the tests of the install scripts share: a PATH with nothing on it but everyday tools."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
TOOLS = ("awk", "bash", "cat", "dirname", "env", "grep", "head", "id", "mkdir", "mktemp", "rm", "sh", "tail", "timeout")


@pytest.fixture
def bare_path(tmp_path) -> Path:
    """A folder to use as PATH, with the everyday tools and neither apt-get nor what the scripts install."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    add_tool(folder, "uname", 'case "$1" in -s) echo Linux ;; *) echo x86_64 ;; esac')
    return folder


def add_tool(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def run_script(name: str, bare_path: Path, cache: Path, *arguments: str) -> subprocess.CompletedProcess:
    env = {"PATH": str(bare_path), "APEX_CACHE_DIR": str(cache), "HOME": os.environ.get("HOME", "/")}
    return subprocess.run([SCRIPTS / name, *arguments], env=env, capture_output=True, text=True, timeout=300)
