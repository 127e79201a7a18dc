"""Every script, typed with a Python that has no packages, goes on with the environment or says how to make it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from apex import environment
from apex.environment import ROOT, has_package, use_environment

FOLDERS = ("evaluation", "scripts", "benchmarks")
FILES = [
    file.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for file in sorted((ROOT / folder).glob("*.py"))
    if '__name__ == "__main__"' in file.read_text()
]
MODULES = ("apex", "evaluation.calibrate", *(f"evaluation.gpu.{name}" for name in ("check", "report", "stages")))
COMMANDS = [(file,) for file in FILES] + [("-m", name) for name in MODULES]
NEED_NO_PACKAGE = {("-m", "evaluation.gpu.report"), ("scripts/fetch_llamafile.py",), ("scripts/prepare_model.py",)}


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without packages."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin/python"


def run(python: Path, venv: Path | str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(python), *arguments]
    env = {**inherited, "VENV": str(venv)}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)


def run_all(python: Path, venv: Path, *further: str) -> list[tuple[Sequence[str], subprocess.CompletedProcess[str]]]:
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda command: run(python, venv, *command, *further), COMMANDS)
        return list(zip(COMMANDS, done, strict=True))


def make_environment(folder: Path, body: str) -> Path:
    """A virtual environment whose Python is a shell script."""
    python = folder / "bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    return folder


def test_before_setup_every_script_names_the_command(bare_python: Path, tmp_path: Path) -> None:
    assert {("evaluation/reproduce_fig5.py",), ("benchmarks/bench_batches.py",), *NEED_NO_PACKAGE} <= {*COMMANDS}
    for command, done in run_all(bare_python, tmp_path / "none", "--help"):
        assert "Traceback" not in done.stderr, (command, done.stderr)
        if command in NEED_NO_PACKAGE:
            assert done.returncode == 0 and "usage: " in done.stdout, (command, done.stderr)
        else:
            assert done.returncode == 2 and not done.stdout, (command, done.stderr)
            assert "type `make setup`, then try again" in done.stderr and done.stderr.count("\n") == 2


def test_after_setup_every_script_goes_on_with_the_same_arguments(bare_python: Path, tmp_path: Path) -> None:
    venv = make_environment(tmp_path / "venv", 'printf "%s|" "$@"')
    for command, done in run_all(bare_python, venv, "--help", "two words"):
        if command not in NEED_NO_PACKAGE:
            assert (done.returncode, done.stderr) == (0, ""), command
            assert done.stdout == "".join(f"{word}|" for word in (*command, "--help", "two words"))


@pytest.mark.parametrize(
    "command",
    [("-u", "evaluation/reproduce_fig5.py"), ("-m", "apex"), ("-m", "evaluation.gpu.check"), ("scripts/ablation.py",)],
    ids=lambda command: command[-1],
)
def test_after_setup_help_is_help(bare_python: Path, tmp_path: Path, command: Sequence[str]) -> None:
    venv = make_environment(tmp_path / "venv", f'exec {sys.executable} "$@"')
    done = run(bare_python, venv, *command, "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: "), done.stderr


def test_an_environment_without_the_packages_is_asked_once(bare_python: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    venv = make_environment(tmp_path / "venv", f'echo started >>{log}; exec {bare_python} "$@"')
    for python, folder in ((bare_python, venv), (bare_python, bare_python.parents[1])):
        done = run(python, folder, "evaluation/reproduce_fig5.py")
        assert done.returncode == 2 and "has no" in done.stderr and "Traceback" not in done.stderr
        assert f"type `make setup`; if that finds everything up to date, delete {folder}" in done.stderr
    assert log.read_text() == "started\n"


def test_an_empty_venv_means_this_python(bare_python: Path, tmp_path: Path) -> None:
    done = run(bare_python, "", str(ROOT / "evaluation/reproduce_fig5.py"), cwd=tmp_path)
    assert done.returncode == 2 and f"unset VENV and type `make setup` in {ROOT}" in done.stderr


def test_a_python_with_all_packages_goes_on_and_imports_none(tmp_path: Path) -> None:
    venv = make_environment(tmp_path / "venv", "exit 3")
    code = (
        "import sys; from apex.environment import PACKAGES, use_environment; use_environment(*PACKAGES)\n"
        "print(not {*PACKAGES} & {*sys.modules})"
    )
    assert run(Path(sys.executable), venv, "-c", code).stdout == "True\n"


def test_a_python_that_is_not_tested_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    class Replaced(BaseException):
        """What execv() does to a process."""

    def replace(path: str, arguments: list[str]) -> None:
        raise Replaced(path, *arguments[:1])

    monkeypatch.setattr(os, "execv", replace)
    monkeypatch.setenv("VENV", str(make_environment(tmp_path / "venv", "exit")))
    monkeypatch.setenv(environment.CHANGED, "")  # for its old value to come back
    monkeypatch.delenv(environment.CHANGED)
    use_environment("numpy")
    python = str(tmp_path / "venv/bin/python")
    for tested in ((3, 8),), ((4, 0),):
        monkeypatch.setattr(environment, "TESTED", tested)
        with pytest.raises(Replaced) as replaced:
            use_environment("numpy")
        assert replaced.value.args == (python, python)
        monkeypatch.delenv(environment.CHANGED)
    monkeypatch.setenv("VENV", str(tmp_path / "none"))
    with pytest.raises(SystemExit) as end:
        use_environment("numpy")
    assert (
        end.value.code == 2 and "has no Python 4.0 or later\nwhat to do: type `make setup`" in capsys.readouterr().err
    )
    monkeypatch.setattr(environment, "TESTED", ((3, 8),))
    use_environment("numpy")
    monkeypatch.setenv("VENV", sys.prefix)  # as a process that this environment's Python has spawned
    use_environment("numpy")


def test_pacpu_is_missing_until_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert has_package("pacpu")
    (tmp_path / "pacpu").mkdir()
    (tmp_path / "pacpu/__init__.py").write_text("raise AssertionError('imported')")
    (tmp_path / "pacpu/_pacpu.cpython-27-x86_64-linux-gnu.so").touch()  # built for another Python
    monkeypatch.delitem(sys.modules, "pacpu", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("VENV", "")
    with pytest.raises(SystemExit) as end:
        use_environment("numpy", "pacpu")
    message = capsys.readouterr().err
    assert end.value.code == 2 and "has no pacpu\n" in message and "`make setup`, which builds it" in message


@pytest.mark.parametrize("file", ["apex/environment.py", "apex/__init__.py", "apex/__main__.py", *FILES])
def test_old_pythons_can_read_it(file: str) -> None:
    ast.parse((ROOT / file).read_text(), feature_version=(3, 8))


def test_the_package_wants_the_versions_of_python_that_are_tested() -> None:
    """pip refuses the others by ``python_requires``; README and `make setup` name the same."""
    (oldest, newest), setup = (environment.TESTED[0], environment.TESTED[-1]), (ROOT / "setup.py").read_text()
    assert f'python_requires=">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"' in setup
    names = [f"{major}.{minor}" for major, minor in environment.TESTED]
    assert all(f'"Programming Language :: Python :: {name}"' in setup for name in names)
    for file in ("README.md", "scripts/setup.sh"):
        assert f"Python {' or '.join(names)}" in (ROOT / file).read_text()
