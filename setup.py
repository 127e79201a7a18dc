"""Builds `pacpu`, the C++ (and, where there is a compiler for it, ISPC) extension, and packages the project.

`python setup.py build_ext --inplace` is what a source tree needs: no network, g++ (or $CXX) only. Files are compiled
one by one and only when they, their headers or their command have changed.

ISPC is looked for in $ISPC, on PATH, and in <cache>/ispc/bin (<cache> is $APEX_CACHE_DIR or ~/.cache/apex). Without
it the build goes on, and `pacpu.unavailable()` says why. PACPU_SANITIZE=1 adds the address and undefined-behaviour
sanitizers; then run Python with ASAN_OPTIONS=detect_leaks=0 and g++'s libasan.so and libstdc++.so.6 in LD_PRELOAD.
PACPU_SANITIZE=thread adds the thread sanitizer: TSAN_OPTIONS=ignore_noninstrumented_modules=1 and libtsan.so.
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pybind11
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

SOURCE_DIR = Path("pacpu/src")
# pybind11's headers are a system's, so that they are no dependencies: pip has a copy of its own for each build.
INCLUDES = ["-Ipacpu/include", f"-I{sysconfig.get_paths()['include']}", "-isystem", pybind11.get_include()]
IN_PLACE_TEMP = f"build/temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
CXX = shlex.split(os.environ.get("CXX", "g++"))
CXX_FLAGS = shlex.split("-std=gnu++17 -O3 -fPIC -fvisibility=hidden -fno-math-errno -Wall -Wextra -pthread")
# Without checks of each pointer, which double the time to compile; the address sanitizer makes most of them. Without
# optimisation for the same reason.
SANITIZERS = {
    "": "",
    "1": "-O0 -g1 -fsanitize=address,undefined -fno-sanitize=null,object-size,vptr,pointer-overflow "
    "-fno-sanitize-recover",
    "thread": "-O0 -g1 -fsanitize=thread",
}

BINDS = re.compile(r'pybind11|"arguments\.h"|"dlpack\.h"')  # sources that do

# Instruction sets that have variants of their own; all other files are compiled for every CPU of the architecture.
IS_X86 = platform.machine() in ("x86_64", "AMD64")
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c"]
AVX512_FLAGS = [*AVX2_FLAGS, *(f"-mavx512{part}" for part in ("f", "bw", "cd", "dq", "vl"))]
ISA_FLAGS = {"avx2": AVX2_FLAGS, "avx512": AVX512_FLAGS} if IS_X86 else {}
BF16_FLAGS = [*AVX512_FLAGS, "-mavx512bf16"]  # AMX needs no flag: its instructions stand as assembly
VNNI_FLAGS = [*AVX512_FLAGS, "-mavx512vnni"]
NATIVE_FLAGS = ISA_FLAGS | ({"avx512bf16": BF16_FLAGS, "amx": BF16_FLAGS, "avx512vnni": VNNI_FLAGS} if IS_X86 else {})
ISPC_TARGETS = {"avx2": "avx2-i32x8", "avx512": "avx512skx-x16"}
ELEMENTS = ["float32", "float16", "bfloat16"]


def find_ispc() -> str | None:
    """Path of the ISPC compiler, or None."""
    if named := os.environ.get("ISPC"):
        return shutil.which(named)
    return shutil.which("ispc") or shutil.which(str(cache_dir() / "ispc/bin/ispc"))


def find_llamafile() -> tuple[Path | None, str | None]:
    """The source of llamafile's matrix product, or why there is none."""
    if not IS_X86:
        return None, "it is built on x86-64 only"
    found = sorted((cache_dir() / "llamafile").glob("*/sgemm.cpp"))
    if found:
        return found[-1], None
    return None, (
        "its matrix product was not there when pacpu was built: run scripts/fetch_llamafile.py, then build again"
    )


def cache_dir() -> Path:
    return Path(os.path.expanduser(os.environ.get("APEX_CACHE_DIR") or "~/.cache/apex"))


def is_current(output: Path, command: list[str]) -> bool:
    """Whether `output` was made by `command` and is newer than every file it was made from (listed in its .d file)."""
    record, dependencies = output.with_suffix(".cmd"), output.with_suffix(".d")
    if not (output.exists() and record.exists() and dependencies.exists()):
        return False
    if record.read_text() != recorded(command):
        return False
    files = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1].split()
    made = output.stat().st_mtime_ns
    return all(os.path.exists(file) and os.stat(file).st_mtime_ns <= made for file in files)


def make(output: Path, command: list[str]) -> None:
    """Run `command`, which writes `output`, unless the output is current."""
    if is_current(output, command):
        return
    print(shlex.join(command), flush=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    record = output.with_suffix(".cmd")
    record.unlink(missing_ok=True)
    subprocess.run(command, check=True)
    record.write_text(recorded(command))


def recorded(command: list[str]) -> str:
    """A command with the version of pybind11 in place of its folder."""
    return shlex.join(command).replace(pybind11.get_include(), f"pybind11-{pybind11.__version__}")


def make_all(commands: dict[Path, list[str]]) -> None:
    """`make` several outputs at a time."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(make, commands.keys(), commands.values()))


def join_bindings(output: Path) -> list[Path]:
    """Write a file that includes every source with pybind11's headers, which take most of the time to compile.

    Returns the sources. The file is written anew only if they have changed."""
    sources = [source for source in sorted(SOURCE_DIR.rglob("*.cpp")) if BINDS.search(source.read_text())]
    text = "".join(f'#include "{source.resolve()}"\n' for source in sources)
    if not output.exists() or output.read_text() != text:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
    return sources


class BuildPacpu(build_ext):
    """Compiles each file of pacpu for its own instruction set."""

    def build_extension(self, ext: Extension) -> None:
        if shutil.which(CXX[0]) is None:
            problem = (
                f"there is no C++ compiler ({CXX[0]}) to build the CPU kernels with: install g++, or name one by CXX"
            )
            if not self.editable_mode:
                raise SystemExit(problem)
            self.warn(f"{problem}. Schedulers, block tables and the simulator work without them, engines do not")
            ext._needs_stub, ext.optional = False, True  # setuptools copies what is there
            return
        # For an editable install this would be a folder that is deleted afterwards, and everything compiled again.
        build_dir = Path(IN_PLACE_TEMP if self.editable_mode else self.build_temp) / "pacpu"
        sanitizer = os.environ.get("PACPU_SANITIZE", "")
        if sanitizer not in SANITIZERS:
            raise SystemExit(f"PACPU_SANITIZE must be 1 or thread, not {sanitizer}")
        sanitize_flags = shlex.split(SANITIZERS[sanitizer])
        ispc_objects, ispc_problem = self.build_ispc(build_dir / "ispc")
        if ispc_problem:
            self.warn(f"building without the ISPC kernel: {ispc_problem}")
        llamafile_source, llamafile_problem = find_llamafile()
        if llamafile_problem:
            self.warn(f"building without the llamafile kernel: {llamafile_problem}")

        commands = {}
        bindings = build_dir / "bindings.cpp"
        joined = join_bindings(bindings)
        for source in [bindings, *sorted({*SOURCE_DIR.rglob("*.cpp")} - {*joined})]:
            flags = [*CXX_FLAGS, *sanitize_flags, *INCLUDES]
            if any(map(source.match, ("native/a[vm]x*.cpp", "int8/avx*.cpp", "llamafile/avx*.cpp", "rows/avx*.cpp"))):
                if source.stem not in NATIVE_FLAGS or (source.match("llamafile/*") and llamafile_problem):
                    continue
                flags += NATIVE_FLAGS[source.stem]
            if source.match("ispc/ispc.cpp") and ispc_problem:
                flags.append(f'-DPACPU_ISPC_UNAVAILABLE="{ispc_problem}"')
            if source.match("llamafile/llamafile.cpp") and llamafile_problem:
                flags.append(f'-DPACPU_LLAMAFILE_UNAVAILABLE="{llamafile_problem}"')
            place = source.relative_to(build_dir if source == bindings else SOURCE_DIR)
            output = build_dir / place.with_suffix(".o")
            commands[output] = [*CXX, *flags, "-MMD", "-c", str(source), "-o", str(output)]
        if llamafile_source:
            for isa, isa_flags in ISA_FLAGS.items():
                # The product chooses its code by macros, so each instruction set gets a variant under its own name.
                # Its sums leave a vector one by one: packing four of them for a store costs more than four stores.
                flags = [*CXX_FLAGS, "-fno-tree-slp-vectorize", *sanitize_flags, *isa_flags, "-w", "-DNDEBUG"]
                flags.append(f"-Dllamafile_sgemm=pacpu_llamafile_sgemm_{isa}")
                if sanitize_flags:
                    flags.append("-O1")  # with less, unused functions ask for the rest of its library
                output = build_dir / f"llamafile/sgemm_{isa}.o"
                commands[output] = [*CXX, *flags, "-MMD", "-c", str(llamafile_source), "-o", str(output)]
        make_all(commands)

        objects = [str(path) for path in (*commands, *ispc_objects)]
        library = build_dir / "_pacpu.so"
        library.with_suffix(".d").write_text(f"{library}: {' '.join(objects)}")
        make(library, [*CXX, *objects, *sanitize_flags, "-shared", "-pthread", "-o", str(library)])
        destination = Path(self.get_ext_fullpath(ext.name))
        destination.parent.mkdir(parents=True, exist_ok=True)
        fresh = destination.with_suffix(".new")
        shutil.copy2(library, fresh)
        fresh.replace(destination)  # not overwritten: a running process may have it mapped, another may import it now

    def build_ispc(self, build_dir: Path) -> tuple[list[Path], str | None]:
        """Objects of the ISPC kernel, or why there are none."""
        if not IS_X86:
            return [], "it is built on x86-64 only"
        ispc = find_ispc()
        if ispc is None:
            return [], "no ISPC compiler was found when pacpu was built: run scripts/install_ispc.sh, then build again"
        source = str(SOURCE_DIR / "ispc/attend.ispc")
        commands = {}
        for isa, target in ISPC_TARGETS.items():
            for element in ELEMENTS:
                output = build_dir / f"attend_{isa}_{element}.o"
                defines = [f"-DELEMENT_{element}", f"-DATTEND=pacpu_ispc_{isa}_{element}"]
                # --werror covers performance warnings, such as gathers.
                flags = ["-O3", "--pic", "--werror", f"--target={target}", *defines]
                dependencies = ["-M", "-MF", str(output.with_suffix(".d")), "-MT", str(output)]
                commands[output] = [ispc, source, *flags, *dependencies, "-o", str(output)]
        try:
            make_all(commands)
        except (OSError, subprocess.CalledProcessError):
            return [], "the ISPC compiler failed when pacpu was built: see the messages of that build"
        return list(commands), None


class BuildPython(build_py):
    """Copies the packages to where a wheel is made of them."""

    def run(self) -> None:
        # A module of an earlier build, removed or renamed since, would get into the wheel.
        if not self.editable_mode and Path(self.build_lib).resolve() != Path.cwd():
            for package in {name.partition(".")[0] for name in self.packages}:
                shutil.rmtree(Path(self.build_lib, package), ignore_errors=True)
        super().run()


NEEDED, FOR_DEVELOPMENT = Path("requirements.txt").read_text().split("\n# development")
RAY, PYARROW = (re.search(rf"^{name}==(.+)$", FOR_DEVELOPMENT, re.MULTILINE)[1] for name in ("ray", "pyarrow"))


def dependencies() -> list[str]:
    """What the package depends on: of most packages the pinned version or a later one with the same first number.

    torch and triton are as pinned: the kernels are tested with that compiler, and torch asks for exactly that triton.
    """
    wanted = []
    for name, version, marker in re.findall(r"^([\w.-]+)==([\w.]+)(.*)$", NEEDED, re.MULTILINE):
        is_fixed = name in ("torch", "triton")
        versions = f"=={version}" if is_fixed else f">={version},<{int(version.partition('.')[0]) + 1}"
        wanted.append(name + versions + marker)
    return wanted


setup(
    name="apex-llm-serving",
    version=re.search(r'__version__ = "(.+)"', Path("swiftllm/__init__.py").read_text())[1],
    description="LLM serving for GPUs whose memory is too small for the KV cache",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license_expression="Apache-2.0",
    license_files=["LICENSE"],
    author="The authors of this implementation of APEX",
    keywords=["large language models", "inference", "serving", "CPU offloading", "KV cache", "scheduling"],
    classifiers=[
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C++",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11,<3.13",  # what apex/environment.py calls tested
    install_requires=dependencies(),
    packages=[*find_packages(include=["swiftllm*", "apex*", "pacpu*", "evaluation*"]), "apex.configs"],
    package_dir={"apex.configs": "configs"},  # apex/source_tree.py finds it in either place
    package_data={
        "swiftllm.server": ["page/*"],
        "evaluation": ["templates/*"],
        "apex.configs": ["**/*.yaml", "**/*.json", "groundtruth/**"],
    },
    extras_require={
        "ray": [f"ray=={RAY}"],
        "ray-serve": [f"ray[serve]=={RAY}"],
        "traces": [f"pyarrow=={PYARROW}"],
        "t4": ["humming-kernels[cu13]==0.1.19"],  # 4-bit weights; torch's wheels are for CUDA 13
    },
    ext_modules=[Extension("pacpu._pacpu", sources=[])],
    cmdclass={"build_ext": BuildPacpu, "build_py": BuildPython},
    entry_points={"console_scripts": ["apex = apex.cli:main"]},
)
