"""What try_clients.sh does before it installs anything, and the rows that a client's checks become."""

from __future__ import annotations

import re
import sys
from types import ModuleType

import pytest

from scripts.clients import run
from tests.scripts.conftest import SCRIPTS, add_tool, run_script

SCRIPT = "try_clients.sh"


def test_an_unknown_client_is_refused_before_anything_is_installed(bare_path, tmp_path):
    result = run_script(SCRIPT, bare_path, tmp_path / "cache", "--url", "http://127.0.0.1:1", "openai", "nobody")
    assert result.returncode == 2 and "no such client: nobody" in result.stderr


def test_what_cannot_be_installed_is_a_row(bare_path, tmp_path):
    for tool in ("cut", "ls"):
        add_tool(bare_path, tool, 'exec /usr/bin/$(basename $0) "$@"')
    add_tool(bare_path, "basename", 'echo "${1##*/}"')
    add_tool(bare_path, "python3", 'echo "no venv here" >&2; exit 1')
    result = run_script(SCRIPT, bare_path, tmp_path / "cache", "--url", "http://127.0.0.1:1", "openai", "node/ai")
    assert result.returncode == 1
    assert result.stdout.splitlines()[2:] == [
        "| openai | installing | no venv here |",
        "| node/ai | | not tried: there is no npm |",
    ]


def test_each_check_is_a_row(monkeypatch, capsys):
    def works(server):
        """it works."""

    def fails(server):
        """it fails."""
        raise ValueError(f"a | b\nof {server.openai_url}")

    module = ModuleType("scripts.clients.use_it")
    module.PACKAGE, module.CHECKS = "pytest", [works, fails]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert run.main("it", "http://x", "m") == 1
    rows = capsys.readouterr().out.splitlines()
    name = f"pytest {pytest.__version__}"
    assert rows == [f"| {name} | it works | works |", f"| {name} | it fails | ValueError: a \\| b of http://x/v1 |"]


def test_the_script_knows_every_client_and_the_pinned_version_of_openai():
    script = (SCRIPTS / SCRIPT).read_text()
    default = re.search(r"^ +clients=\((.*)\)$", script, re.MULTILINE)[1].split()
    files = [path.stem.removeprefix("use_") for path in (SCRIPTS / "clients").glob("use_*.py")]
    nodes = [f"node/{path.stem.removeprefix('use_')}" for path in (SCRIPTS / "clients" / "node").glob("use_*.mjs")]
    assert sorted(default) == sorted(files + nodes)
    pinned = re.search(r"^openai==\S+$", (SCRIPTS.parent / "requirements.txt").read_text(), re.MULTILINE)[0]
    assert f"openai) echo {pinned} ;;" in script
