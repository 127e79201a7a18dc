"""Builds `pacpu`, the C++ (and, where there is a compiler for it, ISPC) extension, and packages the project.

`python setup.py build_ext --inplace` is what a source tree needs: no network, g++ (or $CXX) only. Files are compiled
one by one and only when they, their headers or their command have changed.

ISPC is looked for in $ISPC, on PATH, and in <cache>/ispc/bin (<cache> is $APEX_CACHE_DIR or ~/.cache/apex). Without it
the build goes on, and `pacpu.unavailable()` says why. PACPU_SANITIZE=1 adds the address and undefined sanitizers; run
with LD_PRELOAD="$(g++ -print-file-name=libasan.so)".
"""

import os
import platform
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

SOURCE_DIR = Path("pacpu/src")
INCLUDE_DIRS = ["pacpu/include", sysconfig.get_paths()["include"], pybind11.get_include()]
CXX = shlex.split(os.environ.get("CXX", "g++"))
CXX_FLAGS = ["-std=gnu++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]
LINK_FLAGS = ["-shared", "-pthread"]
if os.environ.get("PACPU_SANITIZE") == "1":
    SANITIZE_FLAGS = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g"]
    CXX_FLAGS += SANITIZE_FLAGS
    LINK_FLAGS += SANITIZE_FLAGS

IS_X86 = platform.machine() in ("x86_64", "AMD64")
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
# Native variants by instruction set. Files not listed here are compiled for every CPU.
ISA_FLAGS = {"avx2": AVX2_FLAGS, "avx512": [*AVX2_FLAGS, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))]}
ISPC_TARGETS = {"avx2": "avx2-i32x8", "avx512": "avx512skx-x16"}


def find_ispc() -> str | None:
    """Path of the ISPC compiler, or None."""
    if named := os.environ.get("ISPC"):
        return shutil.which(named)
    cache = Path(os.environ.get("APEX_CACHE_DIR") or Path.home() / ".cache/apex")
    return shutil.which("ispc") or shutil.which(cache / "ispc/bin/ispc")


def is_current(output: Path, command: list[str]) -> bool:
    """Whether `output` was made by `command` and is newer than every file it was made from (listed in its .d file)."""
    record, dependencies = output.with_suffix(".cmd"), output.with_suffix(".d")
    if not (output.exists() and record.exists() and dependencies.exists()) or record.read_text() != shlex.join(command):
        return False
    files = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = output.stat().st_mtime_ns
    return all(os.path.exists(file) and os.stat(file).st_mtime_ns <= made for file in files)


def make(output: Path, command: list[str]) -> None:
    """Run `command`, which writes `output` and its .d file, unless the output is current."""
    if is_current(output, command):
        return
    print(shlex.join(command), flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.with_suffix(".cmd").unlink(missing_ok=True)
    subprocess.run(command, check=True)
    output.with_suffix(".cmd").write_text(shlex.join(command))


class BuildPacpu(build_ext):
    """Compiles pacpu's files, each for its own instruction set."""

    def build_extension(self, ext: Extension) -> None:
        build_dir = Path(self.build_temp) / "pacpu"
        ispc_objects, ispc_problem = self.build_ispc(build_dir)
        jobs = {}
        for source in sorted(SOURCE_DIR.rglob("*.cpp")):
            flags = [*CXX_FLAGS, *(f"-I{directory}" for directory in INCLUDE_DIRS)]
            if source.parent.name == "native" and source.stem != "native":
                if source.stem in ISA_FLAGS and not IS_X86:
                    continue
                flags += ISA_FLAGS.get(source.stem, [])
            if source.parent.name == "ispc" and ispc_problem:
                flags.append(f'-DPACPU_ISPC_UNAVAILABLE="{ispc_problem}"')
            output = build_dir / source.relative_to(SOURCE_DIR).with_suffix(".o")
            jobs[output] = [*CXX, *flags, "-MMD", "-c", str(source), "-o", str(output)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(make, jobs.keys(), jobs.values()))

        library = Path(self.get_ext_fullpath(ext.name))
        objects = [*jobs, *ispc_objects]
        command = [*CXX, *map(str, objects), *LINK_FLAGS, "-o", str(library)]
        linked = build_dir / "linked.o"  # stands for the library, which may have been moved or deleted
        linked.with_suffix(".d").write_text(f"{linked}: {' '.join(map(str, objects))}")
        if library.exists() and is_current(linked, command):
            return
        library.parent.mkdir(parents=True, exist_ok=True)
        linked.unlink(missing_ok=True)
        make_library(library, linked, command)

    def build_ispc(self, build_dir: Path) -> tuple[list[Path], str | None]:
        return [], "not there"


def make_library(library: Path, linked: Path, command: list[str]) -> None:
    print(shlex.join(command), flush=True)
    subprocess.run(command, check=True)
    linked.write_bytes(b"")
    linked.with_suffix(".cmd").write_text(shlex.join(command))


setup(
    name="apex-llm-serving",
    version="0.1.0",
    description="LLM serving for GPUs whose memory is too small for the KV cache",
    python_requires=">=3.11",
    packages=find_packages(include=["swiftllm*", "apex*", "pacpu*", "evaluation*"]),
    ext_modules=[Extension("pacpu._pacpu", sources=[])],
    cmdclass={"build_ext": BuildPacpu},
    entry_points={"console_scripts": ["apex = apex.cli:main"]},
)
