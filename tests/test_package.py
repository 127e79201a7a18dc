"""A wheel holds what `apex` and `evaluation` need away from the source tree, and asks for what they import."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path

import pybind11
import pytest

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ("apex", "evaluation", "pacpu", "swiftllm")
EXTRAS = {"humming": "t4", "ray": "ray"}  # imported packages that only an extra brings
DEVELOPMENT = {
    *("gguf", "hypothesis", "openai", "pybind11", "pyright", "pytest", "pytest-xdist", "ruff", "setuptools", "uv"),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this tree. Objects that are compiled already are taken from the tree's own build."""
    folder = tmp_path_factory.mktemp("wheel")
    stale = folder / "lib/apex/removed_long_ago.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    command = [sys.executable, "setup.py", "--quiet", "build", "--build-lib", str(folder / "lib")]
    command += ["egg_info", "--egg-base", str(folder)]
    command += ["bdist_wheel", "--bdist-dir", str(folder / "bdist"), "--dist-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(wheel: zipfile.ZipFile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files, as in site-packages."""
    folder = tmp_path_factory.mktemp("installed")
    wheel.extractall(folder)
    return folder


def metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def asked_for(wheel: zipfile.ZipFile) -> dict[str, str]:
    """What the package depends on without extras: name to the whole requirement."""
    lines = [line for line in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    return {re.match(r"[\w.-]+", line)[0].lower(): line for line in lines}


def tracked(*folders: str) -> set[str]:
    """Files of the source tree in these folders, without what runs and builds leave there."""
    found = (path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if path.suffix not in (".pyc", ".so")}


def run_away(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed package's Python from another folder."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_wheel_holds_every_module_page_template_and_config_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {name for name in tracked(*SHIPPED) if name.endswith(".py")}
    data = tracked("swiftllm/server/page", "evaluation/templates")
    configs = {f"apex/{name}" for name in tracked("configs")}
    assert len(data) >= 5 and len(configs) >= 40
    (library,) = {name for name in held if name.endswith(".so")}
    assert library.startswith("pacpu/_pacpu.")
    assert held == modules | data | configs | {library}


def test_the_package_depends_on_what_it_imports_and_not_on_what_develops_it(wheel: zipfile.ZipFile) -> None:
    distributions, imported = packages_distributions(), set()
    for path in (ROOT / name for name in tracked(*SHIPPED) if name.endswith(".py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    beside = {"here"}  # of a command that is run as a file
    outside = imported - {*sys.stdlib_module_names, *SHIPPED, *EXTRAS, *beside}
    dependencies = asked_for(wheel)
    # A part of a dependency that is a distribution of its own, as fastapi's starlette, comes with it.
    parts = {"starlette": "fastapi", "pydantic-core": "pydantic"}
    needed = {distributions[name][0].lower().replace("_", "-") for name in outside}
    assert {"torch", "numpy", "fastapi", "httpx"} <= needed
    assert {parts.get(name, name).replace("-", "_") for name in needed} <= {n.replace("-", "_") for n in dependencies}
    assert not {*dependencies, *EXTRAS} & {*DEVELOPMENT}


def test_versions_are_declared_once_in_requirements_txt(wheel: zipfile.ZipFile) -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    for name, requirement in asked_for(wheel).items():
        (pin,) = (version for pinned, version in pins.items() if pinned.lower() == name)
        assert pin in requirement, requirement
    assert asked_for(wheel)["torch"] == f"torch=={pins['torch']}"  # Triton's version and the kernels go with torch's
    extras = [line for line in metadata(wheel).get_all("Requires-Dist") if "extra ==" in line]
    assert {line for line in extras if line.startswith("ray")} == {
        f'ray=={pins["ray"]}; extra == "ray"',
        f'ray[serve]=={pins["ray"]}; extra == "ray-serve"',
    }
    assert f'pyarrow=={pins["pyarrow"]}; extra == "traces"' in extras
    assert any(line.startswith("humming-kernels[cu13]==") and 'extra == "t4"' in line for line in extras)


def test_an_empty_environment_can_build_it() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]
    assert wanted["build-backend"] == "setuptools.build_meta"
    assert {re.match(r"\w+", line)[0] for line in wanted["requires"]} == {"setuptools", "pybind11"}


def test_a_build_by_pip_compiles_nothing_that_the_source_tree_has_compiled(tmp_path: Path) -> None:
    compiler = tmp_path / "bin/g++"
    compiler.parent.mkdir()
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    (tmp_path / "pybind11").symlink_to(Path(pybind11.__file__).parent)  # pip has a copy of its own for each build
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PATH": f"{compiler.parent}:{os.environ['PATH']}"}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert list(tmp_path.glob("lib/pacpu/_pacpu.*.so"))


def test_the_package_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    described = metadata(wheel)
    assert described["Name"] == "apex-llm-serving" and described["Requires-Python"] == ">=3.11,<3.13"
    assert "Apache-2.0" in (described["License-Expression"], described["License"])
    assert described["Description-Content-Type"] == "text/markdown"
    assert described.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    names = {name.partition(".dist-info/")[2]: name for name in wheel.namelist()}
    assert "apex = apex.cli:main" in wheel.read(names["entry_points.txt"]).decode()
    assert "licenses/LICENSE" in names
    assert {line.split()[0] for line in wheel.read(names["top_level.txt"]).decode().splitlines()} == {*SHIPPED}


def test_away_from_the_source_tree_apex_simulates_and_results_go_to_the_current_folder(
    installed: Path, tmp_path: Path
) -> None:
    arguments = ("--gpu", "t4", "--model", "llama-2-7b", "--num-requests", "4", "--output-len", "4", "--system", "neo")
    done = run_away(installed, tmp_path, "-m", "apex", "simulate", *arguments)
    assert done.returncode == 0 and "neo" in done.stdout, done.stderr
    figure = ("--backend", "simulated", "--gpu", "t4", "--systems", "neo", "swiftllm", "--num-requests", "2")
    done = run_away(installed, tmp_path, "-m", "evaluation.reproduce_fig5", *figure, "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert "python -m evaluation.reproduce_fig5 --" in done.stdout  # how to vary an assumption
    assert (tmp_path / "results/fig5/latest/figure.png").is_file() and not (installed / "results").exists()


def test_a_copy_without_configs_says_so(installed: Path, tmp_path: Path) -> None:
    for package in SHIPPED:
        (tmp_path / package).symlink_to(installed / package)
    (tmp_path / "apex").unlink()
    shutil.copytree(installed / "apex", tmp_path / "apex", ignore=shutil.ignore_patterns("configs"))
    done = run_away(tmp_path, tmp_path, "-m", "apex", "simulate", "--gpu", "t4")
    assert done.returncode == 2 and f"there is no folder {tmp_path}/configs/hardware" in done.stderr, done.stderr
