"""The stages of scripts/gpu_check.sh: what is checked and measured on a GPU machine, in this order.

python -m evaluation.gpu.stages [FOLDER] [--stages NAMES] [--minutes N] [--rehearse]

What the first minutes on a card must tell comes first. A stage is begun if what is left of the call's time is enough
for what it takes by estimate, and ends with the call. The same command with the same folder goes on with the stages
that are missing or did not go well.

The parts of a stage run side by side: nothing is timed in a stage that has several. parts.txt says how each part
ended; of those that failed the log stays. The page, summary.json and the archive of it all are written anew after every
stage, so stopping early keeps what was done until then. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import datetime
import fnmatch
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

if __name__ == "__main__":
    NEEDS = ("numpy", "pybind11", "setuptools", "torch")
    from evaluation import here

from evaluation.gpu.report import (
    CHECKS,
    NOT_REACHED,
    OK,
    PARTS,
    missing_packages,
    read_parts,
    write_archive,
    write_page,
)
from evaluation.measure.processes import describe_status, end_session, start_session, stop_on_sigterm
from evaluation.results.paths import REPO_ROOT, RESULTS_DIR

# -- running: each part of a stage in a process of its own that ends at the stage's limit -----------------------------

POLL_S = 0.1
GRACE_S = 5.0
MOST_LOG_BYTES = 256 << 10
SHOWN_LINES = 40


@dataclass(frozen=True)
class CheckProcess:
    """A process. In its command ``{limit_s}`` stands for the seconds it has."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """Parts that run side by side. They end within ``limit_s`` seconds.

    With fewer than ``least_s`` left of a call the stage is not begun; with fewer than its limit it has what is left.
    By default it is begun only with all of its limit.
    """

    name: str
    limit_s: float
    parts: tuple[CheckProcess, ...]
    least_s: float | None = None

    def is_done(self, folder: Path) -> bool:
        """Whether all its parts went well in this folder, perhaps in an earlier call."""
        ended = {name: result for name, result, _ in read_parts(folder)}
        return all(ended.get(part.name) == OK for part in self.parts)


def run_stages(
    stages: Sequence[Stage], folder: Path, end_s: float, archive: Path | None = None
) -> tuple[bool, list[Stage]]:
    """Run the stages that there is time for before ``end_s`` of :func:`time.monotonic`; of the others it is recorded
    that they were not reached. ``archive`` is a file that packs the folder.

    Returns whether those that ran went well, and the stages that there was no time for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    all_well, left_over, known = True, [], {name for name, *_ in read_parts(folder)}
    for part in (part for stage in stages for part in stage.parts):  # at once: a call may be cut
        if part.name not in known:
            record_result(folder, part.name, NOT_REACHED, 0.0)
    for stage in stages:
        left_s = end_s - time.monotonic()
        if left_s < min(stage.limit_s, stage.limit_s if stage.least_s is None else stage.least_s):
            print(f"== {stage.name}: not begun, since only {left_s:.0f} s are left", flush=True)
            left_over.append(stage)
            continue
        all_well &= run_stage(replace(stage, limit_s=min(stage.limit_s, left_s)), folder)
        try:
            write_page(folder, archive)
        except Exception:  # the rest is still to be measured
            traceback.print_exc()
            all_well = False
    return all_well, left_over


def run_stage(stage: Stage, folder: Path) -> bool:
    """Run the parts of a stage; whether all went well. An interrupt leaves no process behind."""
    names = ", ".join(part.name for part in stage.parts)
    print(f"== {stage.name}: {names} (at most {stage.limit_s:.0f} s)", flush=True)
    start_s, all_well = time.monotonic(), True
    running: dict[CheckProcess, subprocess.Popen[bytes]] = {}
    try:
        for part in stage.parts:
            running[part] = start_part(part, folder, stage.limit_s)
        while running:
            time.sleep(POLL_S)
            is_late = time.monotonic() - start_s >= stage.limit_s
            for part, process in list(running.items()):
                status = process.poll()
                if status is None and not is_late:
                    continue
                if status is None:
                    result = "time limit" if stop_part(process) else "time limit, and the kernel still holds it"
                else:
                    result = OK if status == 0 else f"failed ({describe_status(status).removeprefix('status ')})"
                del running[part]
                all_well &= status == 0
                record_part(folder, part.name, result, time.monotonic() - start_s)
    finally:
        for process in running.values():
            stop_part(process)
    return all_well


def start_part(part: CheckProcess, folder: Path, limit_s: float) -> subprocess.Popen[bytes]:
    command = [word.replace("{limit_s}", f"{limit_s:.0f}") for word in part.command]
    streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    with log_path(folder, part.name).open("wb") as log:
        return start_session(command, cwd=REPO_ROOT, stdout=log, **streams)


def stop_part(process: subprocess.Popen[bytes]) -> bool:
    """A Python that hangs says where on SIGABRT (with PYTHONFAULTHANDLER). Whether it is gone."""
    return end_session(process, signal.SIGABRT, GRACE_S)


def record_part(folder: Path, name: str, result: str, seconds: float) -> None:
    """Show the end of a part's log, and keep it if the part failed: not more of it than can be committed."""
    log = log_path(folder, name)
    text = log.read_bytes()
    shown = text.decode(errors="replace").splitlines()[-SHOWN_LINES:]
    print("\n".join([*shown, f"-- {name}: {result}, {seconds:.0f} s"]), flush=True)
    if result == OK:
        log.unlink()
    else:
        log.write_bytes(text[-MOST_LOG_BYTES:])
    record_result(folder, name, result, seconds)


def record_result(folder: Path, name: str, result: str, seconds: float) -> None:
    parts = {part[0]: part for part in read_parts(folder)} | {name: [name, result, f"{seconds:.0f}"]}
    (folder / PARTS).write_text("".join("\t".join(part) + "\n" for part in parts.values()))


def log_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


# -- what runs --------------------------------------------------------------------------------------------------------

GPU_NAME_S = 90.0
MINUTES = 9.0
END_S = 30.0  # of a call's time, for the report and for ending a part that hangs
REHEARSAL_FACTOR = 10.0
"""A rehearsal has no GPU that could hang, and the machine may be busy with other work: its limits are so much wider."""
KERNEL_CHECKS = ("rows", "blocks", "decode-attention")
LONG_TOKENS = ("tokens-float32", "tokens-streamed", "tokens-linear")
MACHINE_PARTS = ("versions", "both_ways", "pinned_allocation", "polling", "wake_up", "memory", "gemm")
GPU_BATCH_PARTS = ("captures", "gpu_batch_profiles", "gpu_batch_times")
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"  # often not on PATH
# The limit and the least seconds of a run. Apex first: it measures the profile, from which all others are predicted.
END_TO_END_S = {
    "llama-3.1-8b": {"apex": (150.0, 50.0), "swiftllm": (90.0, 40.0), "neo": (120.0, 40.0), "adaptive": (120.0, 45.0)},
    "llama-2-7b": {"apex": (120.0, 40.0), "swiftllm": (110.0, 30.0), "neo": (110.0, 30.0), "adaptive": (110.0, 30.0)},
}
REHEARSAL_S = {"rehearsal": END_TO_END_S["llama-2-7b"]}
FIRST_SYSTEMS = ("apex", "swiftllm")  # of the first case, before the long benchmark


def all_stages(folder: Path, rehearse: bool) -> list[Stage]:
    """In the order in which they are most worth their time."""
    device, cases, load_s = ("cpu", REHEARSAL_S, 1) if rehearse else ("cuda", END_TO_END_S, 40)
    check = (sys.executable, "-m", "tests.gpu", "--device", device)
    bench = (sys.executable, "benchmarks/bench_gpu.py", "--output", str(folder / "kernels.json"))
    bench = (*bench, "--rehearse") if rehearse else bench

    def checks(name: str, *names: str) -> CheckProcess:
        return CheckProcess(name, (*check, "--results", str(folder / CHECKS / f"{name}.json"), *names))

    # Of what takes long on a CPU, a rehearsal leaves out what has nothing of its own there.
    coded, experts, more_tokens = ((), (), ()) if rehearse else (("quantised",), ("experts",), LONG_TOKENS)
    operations = (
        checks("operations", *KERNEL_CHECKS[:2], "int8-blocks", "contexts", "prefill-attention", "sampling", "states"),
        checks("decode-attention", KERNEL_CHECKS[2]),
        checks("quantised", *coded, "library"),
        checks("experts", "sort-pairs", *experts),
    )
    tokens = (
        checks("tokens", "graphs", "tokens-float16", "tokens-eager", *more_tokens),
        checks("tokens-models", "tokens-windows", "tokens-gpt-oss", "tokens-4-bit"),
        checks("tokens-tiers", "tokens-int8", "tokens-prefixes"),
        checks("random-load", "--seconds", str(load_s), "random-load"),
    )
    # Profiles are kept with the results, and none is taken from elsewhere.
    measure = ("env", f"APEX_CACHE_DIR={folder}/measured", sys.executable, "-m", "evaluation.gpu.check")

    def run(system: str, case: str) -> Stage:
        options = ("--system", system, "--case", case, "--limit", "{limit_s}", "--folder", f"{folder}/end_to_end")
        limit_s, least_s = cases[case][system]
        return one(f"{system}-{case}", limit_s, least_s, *measure, *options)

    first_case = next(iter(cases))
    first = [(system, first_case) for system in FIRST_SYSTEMS]
    later = [(system, case) for case, systems in cases.items() for system in systems if (system, case) not in first]
    stages = [
        one("build", 150.0, 30.0, sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"),
        one("machine", 120.0, 30.0, *bench, "--parts", *MACHINE_PARTS),
        Stage("kernels", 150.0, operations, 60.0),
        Stage("tokens", 180.0, tokens, 60.0),
        one("gpu_batches", 150.0, 60.0, *bench, "--parts", *GPU_BATCH_PARTS),
        *(run(*system_and_case) for system_and_case in first),
        one("speeds", 200.0, 60.0, *bench),
        *(run(*system_and_case) for system_and_case in later),
    ]
    if not rehearse and (found := find_sanitizer()) is not None:
        # Tensors of their own, since it knows the ends of what CUDA allocates, and not what torch makes of it; and
        # accesses alone: that torch and CUDA ask each other for functions that are not there is no fault of ours.
        sanitizer = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", found, "--report-api-errors", "no")
        command = (*sanitizer, "--error-exitcode", "3", *check, *KERNEL_CHECKS)
        stages.append(Stage("sanitizer", 300.0, (CheckProcess("compute-sanitizer", command),), 60.0))
    factor = REHEARSAL_FACTOR if rehearse else 1.0
    return [replace(stage, limit_s=factor * stage.limit_s) for stage in stages]


def one(name: str, limit_s: float, least_s: float, *command: str) -> Stage:
    """A stage of one part, which has its name."""
    return Stage(name, limit_s, (CheckProcess(name, command),), least_s)


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
        "import torch\nfrom swiftllm.device import NvidiaDriver\n"
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
    parser.add_argument("--archive", type=Path, help="the one file with all results; default FOLDER.tar.gz")
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
    archive = (options.archive or folder.with_name(f"{folder.name}.tar.gz")).resolve()
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
    all_well, _ = run_stages(chosen, folder, end_s, archive)
    limit_s = END_S * (REHEARSAL_FACTOR if options.rehearse else 1.0)
    report = sys.executable, "-m", "evaluation.gpu.report", str(folder), "--archive", str(archive)
    all_well &= run_stage(one("report", limit_s, limit_s, *report), folder)
    write_archive(folder, archive)  # with the report's own result
    if left := [stage.name for stage in stages if not stage.is_done(folder)]:
        same = f"{'--rehearse ' if options.rehearse else ''}--minutes {options.minutes:g}"
        print(f"gpu_check: not done yet: {', '.join(left)}\nto go on: scripts/gpu_check.sh {same} {folder}")
    print(f"gpu_check: results in {folder} (to commit them: git add --force {folder}), all in one file: {archive}")
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
