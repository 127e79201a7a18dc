"""`make test ROOM=...` finds the tests of a room, or says which rooms there are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def make_test(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What `make test` would run."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    outer = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ROOM", "VENV")  # of a make that runs this test
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    command = ["make", "--dry-run", "test", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("room", "folder"),
    [
        ("kv", "tests/swiftllm/kv/"),
        ("schedulers", "tests/apex/schedulers/"),
        ("pacpu", "tests/pacpu/"),
        ("evaluation", "tests/evaluation/"),
    ],
)
def test_a_room_is_tested_alone_and_without_linters(room: str, folder: str) -> None:
    *_, command = make_test(f"ROOM={room}").stdout.splitlines()
    assert [word for word in command.split() if word.startswith("tests/")] == [folder]
    assert "lint.py" not in make_test(f"ROOM={room}").stdout


def test_all_tests_come_after_the_linters() -> None:
    commands = make_test().stdout
    assert 0 < commands.index("scripts/lint.py") < commands.index("pytest") and "tests/" not in commands


def test_an_unknown_room_is_answered_by_the_list_of_all() -> None:
    answer = make_test("ROOM=attic")
    assert answer.returncode == 2 and "there is no room attic: there are" in answer.stderr
    assert {"kv", "scheduling", "engine", "schedulers", "server", "model", "ops", "simulator"} <= {
        *answer.stderr.rstrip(". Stop\n").split()
    }
