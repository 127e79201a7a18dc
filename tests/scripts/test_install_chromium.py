"""The paths of install_chromium.sh that need no network."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "install_chromium.sh"
TOOLS = ["bash", "cat", "dirname", "env", "grep", "head", "id", "mkdir", "mktemp", "rm", "sh", "tail", "timeout"]


@pytest.fixture
def bare_path(tmp_path) -> Path:
    """A folder to use as PATH, with the everyday tools and neither a browser nor apt-get."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        (folder / tool).symlink_to(shutil.which(tool))
    add_tool(folder, "uname", "echo x86_64")
    return folder


def add_tool(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def run_script(bare_path: Path, cache: Path) -> subprocess.CompletedProcess:
    env = {"PATH": str(bare_path), "APEX_CACHE_DIR": str(cache), "HOME": os.environ.get("HOME", "/")}
    return subprocess.run([SCRIPT], env=env, capture_output=True, text=True, timeout=60)


def test_working_system_browser_is_used(bare_path, tmp_path):
    add_tool(bare_path, "chromium", '[ "$1" = --version ] && echo "fake 1.0" || echo "<p>rendered</p>"')
    result = run_script(bare_path, tmp_path / "cache")
    assert result.returncode == 0
    assert f"using the system's {bare_path}/chromium (fake 1.0)" in result.stdout
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_where_there_is_no_recipe_it_says_what_to_do(bare_path, tmp_path, machine):
    add_tool(bare_path, "chromium", "exit 3")
    add_tool(bare_path, "uname", f"echo {machine}")
    result = run_script(bare_path, tmp_path / "cache")
    assert result.returncode == 1
    assert "not installed" in result.stderr and "yourself and put it on PATH" in result.stderr
    assert not (tmp_path / "cache" / "chromium").exists()
