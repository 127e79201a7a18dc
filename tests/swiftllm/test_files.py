"""The cache without a home folder and where nothing can be written, and results that cannot be written.

``/dev/null`` stands for a folder that cannot be made, for root as well: POSIX has ENOTDIR below a file.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from swiftllm import files
from swiftllm.files import cache_dir, check_writable, expand, is_kept, keep, save_result
from swiftllm.model.folder import model_folder

NOWHERE = Path(os.devnull)
WITHOUT_HOME = (
    "import os, pwd, sys\n"
    "def getpwuid(uid): raise KeyError(f'getpwuid(): uid not found: {uid}')\n"
    "pwd.getpwuid = getpwuid\n"
    "for name in ('HOME', 'USER', 'LOGNAME', 'APEX_CACHE_DIR'): os.environ.pop(name, None)\n"
)


@pytest.fixture(autouse=True)
def warnings_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    files._warn_once.cache_clear()


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither HOME nor an entry in the password file, as in a container with a user of its own."""

    def unknown(uid):
        raise KeyError(uid)

    for name in ("HOME", "APEX_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)


def test_without_a_home_folder_there_is_no_cache(no_home: None, caplog: pytest.LogCaptureFixture) -> None:
    assert not is_kept(cache_dir() / "profiles" / "x.json") and not (cache_dir() / "models").is_dir()
    assert not keep(cache_dir() / "profiles" / "x.json", "{}")
    assert "set APEX_CACHE_DIR" in caplog.text


@pytest.mark.parametrize("path", ["~/model", "~no-such-user/model"])
def test_a_home_folder_that_is_not_known_stays_as_it_was_written(no_home: None, path: str) -> None:
    assert expand(path) == model_folder(path) == Path(path)


def test_the_cache_is_where_its_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("APEX_CACHE_DIR", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "apex"
    monkeypatch.setenv("APEX_CACHE_DIR", "~/elsewhere")  # as the value of an env file, where no shell replaces ~
    assert cache_dir() == tmp_path / "elsewhere"


def test_a_folder_is_warned_of_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    with caplog.at_level(logging.WARNING):
        assert [keep(NOWHERE / "profiles" / name, "{}") for name in ("a", "b")] == [False, False]
    (record,) = caplog.records
    assert "/dev/null/profiles cannot be written to (Not a directory)" in record.getMessage()
    assert keep(tmp_path / "profiles" / "a", "{}") and is_kept(tmp_path / "profiles" / "a")


@pytest.mark.parametrize("content", ["figures\n", b"figures\n"])
def test_a_result_that_cannot_be_written_is_written_elsewhere(tmp_path, monkeypatch, caplog, content) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert save_result(tmp_path / "own" / "out.json", content) and (tmp_path / "own" / "out.json").stat().st_size == 8
    assert not save_result(NOWHERE / "out.json", content)
    (written,) = tmp_path.glob("apex-*/out.json")
    assert written.read_text() == "figures\n"
    assert "/dev/null/out.json cannot be written" in caplog.text and str(written) in caplog.text


def test_a_result_that_can_be_written_nowhere_is_printed(monkeypatch, caplog, capsys) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(NOWHERE))
    assert not save_result(NOWHERE / "out.json", "figures\n")
    assert "the content of out.json:\nfigures\n" in capsys.readouterr().err


def test_an_output_folder_is_checked_before_the_work(tmp_path: Path) -> None:
    check_writable(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
    with pytest.raises(OSError, match="/dev/null"):
        check_writable(NOWHERE / "new")


@pytest.mark.parametrize("words", [["serve", "~/model"], ["doctor", "--help"], ["profile", "~/model"]])
def test_commands_of_a_user_without_a_home_folder_end_without_a_traceback(words: list[str]) -> None:
    code = WITHOUT_HOME + f"sys.argv = {['apex', *words]}\nfrom apex.cli import main\nsys.exit(main())\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or "~/model/config.json is missing" in done.stderr
