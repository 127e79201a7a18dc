"""The stages of scripts/gpu_check.sh: what is checked and measured on a GPU machine, in this order.

python evaluation/gpu/stages.py [FOLDER] [--stages NAMES] [--minutes N] [--rehearse]

A stage is started only if its limit lies within the call's time. The same command with the same folder goes on with
the stages that are missing or did not go well.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:  # run as a file
    NEEDS = ("numpy", "pybind11", "setuptools", "torch")
    import here

from evaluation.gpu.report import missing_packages
from evaluation.gpu.runner import CheckProcess, Stage, run_stage, run_stages
from evaluation.measure.sessions import stop_on_sigterm
from evaluation.results.paths import REPO_ROOT, RESULTS_DIR

GPU_NAME_S = 90.0
MINUTES = 35.0
END_S = 30.0  # of a call's time, for the report and for ending a part that hangs
REHEARSAL_FACTOR = 10.0
"""A rehearsal has no GPU that could hang, and the machine may be busy with other work: its limits are so much wider."""
KERNEL_CHECKS = ("rows", "blocks", "decode-attention")
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"  # often not on PATH
# Seconds. Apex first: it measures the profile, from which all others are predicted.
END_TO_END_S = {
    "llama-3.1-8b": {"apex": 150.0, "swiftllm": 90.0, "neo": 120.0, "adaptive": 120.0},
    "llama-2-7b": {"apex": 120.0, "swiftllm": 110.0, "neo": 110.0, "adaptive": 110.0},
}
REHEARSAL_S = {"rehearsal": END_TO_END_S["llama-2-7b"]}


def all_stages(folder: Path, rehearse: bool) -> list[Stage]:
    """In the order in which they are most worth their time."""
    device, cases, load_s = ("cpu", REHEARSAL_S, 1) if rehearse else ("cuda", END_TO_END_S, 40)
    check = (sys.executable, "-m", "tests.gpu", "--device", device)
    bench = (sys.executable, "benchmarks/bench_gpu.py", "--output", str(folder / "kernels.json"))
    bench = (*bench, "--rehearse") if rehearse else bench
    # Of what takes long on a CPU, a rehearsal leaves out what has nothing of its own there.
    coded, more_tokens = ((), ()) if rehearse else (("quantised", "library"), ("tokens-float32", "tokens-streamed"))
    operations = (*KERNEL_CHECKS, "prefill-attention", "sampling", *coded)
    tokens = CheckProcess("tokens", (*check, "graphs", "tokens-float16", "tokens-eager", *more_tokens))
    random_load = CheckProcess("random-load", (*check, "--seconds", str(load_s), "random-load"))
    stages = [
        one("build", 150.0, sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"),
        one("machine", 60.0, *bench, "--parts", "versions", "memory", "gemm"),
        Stage("kernels", 150.0, (CheckProcess("operations", (*check, *operations)),)),
        Stage("tokens", 180.0, (tokens, random_load)),
        one("speeds", 200.0, *bench),
    ]
    # Profiles are kept with the results, and none is taken from elsewhere.
    measure = ("env", f"APEX_CACHE_DIR={folder}/measured", sys.executable, "evaluation/gpu/check.py")
    for case, systems in cases.items():
        for system, limit_s in systems.items():
            options = ("--system", system, "--case", case, "--limit", "{limit_s}", "--folder", f"{folder}/end_to_end")
            stages.append(one(f"{system}-{case}", limit_s, *measure, *options))
    if not rehearse and (found := find_sanitizer()) is not None:
        # Tensors of their own, since it knows the ends of what CUDA allocates, and not what torch makes of it; and
        # accesses alone: that torch and CUDA ask each other for functions that are not there is no fault of ours.
        sanitizer = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", found, "--report-api-errors", "no")
        command = (*sanitizer, "--error-exitcode", "3", *check, *KERNEL_CHECKS)
        stages.append(Stage("sanitizer", 300.0, (CheckProcess("compute-sanitizer", command),)))
    factor = REHEARSAL_FACTOR if rehearse else 1.0
    return [Stage(stage.name, factor * stage.limit_s, stage.parts) for stage in stages]


def one(name: str, limit_s: float, *command: str) -> Stage:
    """A stage of one part, which has its name."""
    return Stage(name, limit_s, (CheckProcess(name, command),))


def find_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which(SANITIZER)


def chosen_stages(stages: Sequence[Stage], names: str | None, folder: Path) -> list[Stage]:
    """The stages of ``names``, patterns with commas between them; by default those that are not done in the folder.

    Raises:
        ValueError: no stage is called so.
    """
    if names is None:
        return [stage for stage in stages if not stage.is_done(folder)]
    patterns = [pattern.strip() for pattern in names.split(",")]
    for pattern in patterns:
        if not fnmatch.filter([stage.name for stage in stages], pattern):
            raise ValueError(f"no stage is called {pattern}; there are {', '.join(stage.name for stage in stages)}")
    return [stage for stage in stages if any(fnmatch.fnmatch(stage.name, pattern) for pattern in patterns)]


def lacking() -> str | None:
    """What the compilers lack here, and what to do about it. pacpu is built from C++, and Triton compiles a C file for
    each kernel's launcher: both include Python.h."""
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        version = ".".join(map(str, sys.version_info[:2]))
        return f"there is no {header}: install python{version}-dev, or set PYTHON to a Python with headers"
    for variable, compiler in (("CXX", "g++"), ("CC", "gcc")):
        if not (os.environ.get(variable) or shutil.which(compiler)):
            return f"there is no {compiler}: install it, or set {variable}"
    return None


def gpu_name() -> tuple[str | None, str]:
    """The GPU as a folder's name, or None and the reason. In a process of its own, which takes its CUDA with it."""
    ask = (
        "import torch\nfrom swiftllm.device.driver import NvidiaDriver\n"
        "print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')\n"
        "print(NvidiaDriver().why_no_gpu() or 'torch sees no GPU here')"
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, timeout=GPU_NAME_S, cwd=REPO_ROOT
        )
    except subprocess.TimeoutExpired:
        return None, f"torch has not found a GPU within {GPU_NAME_S:.0f} s"
    if answer.returncode:
        return None, "torch does not load here"
    name, reason = answer.stdout.splitlines()[-2:]
    return name.strip().lower().replace(" ", "-") or None, reason


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="where results go; default results/<gpu>/<date>")
    parser.add_argument("--rehearse", action="store_true", help="the same stages on the CPU with a tiny model")
    parser.add_argument("--stages", help="names or patterns, with commas; default those not done in the folder")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="all of this call; default %(default)g")
    options = parser.parse_args(arguments)
    minutes = options.minutes * (REHEARSAL_FACTOR if options.rehearse else 1.0)
    end_s = time.monotonic() + 60.0 * minutes - END_S
    problem, gpu = lacking(), "rehearsal"
    if problem is None and not options.rehearse:
        gpu, reason = gpu_name()
        if gpu is None:
            problem = f"{reason}; scripts/gpu_check.sh --rehearse runs the same parts on the CPU"
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M")
    folder = (options.folder or RESULTS_DIR / str(gpu) / now).resolve()
    stages = all_stages(folder, options.rehearse)
    try:
        chosen = chosen_stages(stages, options.stages, folder)
    except ValueError as error:
        problem = problem or str(error)
    if problem is not None:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    if missing := missing_packages():
        print(f"not installed here, so nothing that needs them is checked: {', '.join(missing)}", flush=True)
    if not options.rehearse and find_sanitizer() is None:
        print("compute-sanitizer is not here: its stage is left out", flush=True)
    stop_on_sigterm()
    all_well, _ = run_stages(chosen, folder, end_s)
    limit_s = END_S * (REHEARSAL_FACTOR if options.rehearse else 1.0)
    all_well &= run_stage(one("report", limit_s, sys.executable, "evaluation/gpu/report.py", str(folder)), folder)
    if left := [stage.name for stage in stages if not stage.is_done(folder)]:
        same = f"{'--rehearse ' if options.rehearse else ''}--minutes {options.minutes:g}"
        print(f"gpu_check: not done yet: {', '.join(left)}\nto go on: scripts/gpu_check.sh {same} {folder}")
    print(f"gpu_check: results in {folder} (to commit them: git add --force {folder})")
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
