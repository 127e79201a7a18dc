"""Runs the parts of scripts/gpu_check.sh, each a process of its own, and shares out the time there is.

Stages come one after the other, the parts of a stage side by side: nothing is timed in a stage that has several.
The time left is divided among the stages still to come, in proportion to their shares. So later stages get the time
that one does not use, and a stage that hangs cannot exceed its limit.

parts.txt says how each part ended; of those that failed the log stays. The page and summary.json are written
anew after every stage, so stopping early keeps what was done until then. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

if __package__ in (None, ""):  # run as a file: import from the repository, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from apex.environment import use_environment

    use_environment("numpy", "pybind11", "setuptools", "torch")

from evaluation.gpu.report import PARTS, write_page
from evaluation.results.paths import REPO_ROOT, RESULTS_DIR

TOTAL_S = 525.0  # nine minutes, less the moment it takes to end a part that hangs
POLL_S = 0.1
GRACE_S = 5.0
GPU_NAME_S = 90.0
MOST_LOG_BYTES = 256 << 10
SHOWN_LINES = 40
KERNEL_CHECKS = ("rows", "blocks", "decode-attention")
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"  # often not on PATH
# Seconds as of a stage. Apex first: the others find the profile that it has measured.
END_TO_END_S = {
    "llama-3.1-8b": {"apex": 80.0, "swiftllm": 55.0, "neo": 65.0},
    "llama-2-7b": {"apex": 60.0, "swiftllm": 55.0, "neo": 45.0},
}
REHEARSAL_S = {"rehearsal": END_TO_END_S["llama-2-7b"]}


@dataclass(frozen=True)
class Part:
    """A process. In its command ``{limit_s}`` stands for the seconds it has."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """``seconds``: what it takes on a machine that is neither fast nor slow, and so its share."""

    seconds: float
    parts: tuple[Part, ...]


def all_stages(folder: Path, cache: Path, rehearse: bool) -> list[Stage]:
    """``cache``: an empty folder, so that profiles are measured here and now and none is taken from an earlier run."""
    device, cases, load_s = ("cpu", REHEARSAL_S, 1) if rehearse else ("cuda", END_TO_END_S, 40)
    check = (sys.executable, "-m", "tests.gpu", "--device", device)
    coded, streamed = ((), ()) if rehearse else (("quantised", "library"), ("tokens-streamed",))  # slow on a CPU
    checks = [
        Part("operations", (*check, *KERNEL_CHECKS, "prefill-attention", "sampling", *coded)),
        Part("tokens", (*check, "graphs", "tokens-float32", "tokens-float16", *streamed)),
        Part("random-load", (*check, "--seconds", str(load_s), "random-load")),
    ]
    if not rehearse and (found := shutil.which("compute-sanitizer") or shutil.which(SANITIZER)):
        # Tensors of their own, since it knows the ends of what CUDA allocates, and not what torch makes of it; and
        # accesses alone: that torch and CUDA ask each other for functions that are not there is no fault of ours.
        sanitizer = ("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", found, "--report-api-errors", "no")
        checks.append(Part("compute-sanitizer", (*sanitizer, "--error-exitcode", "3", *check, *KERNEL_CHECKS)))
    kernels = (sys.executable, "benchmarks/bench_gpu.py", "--output", str(folder / "kernels.json"))
    stages = [
        Stage(100.0, (Part("build", (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")),)),
        Stage(110.0, tuple(checks)),
        Stage(60.0, (Part("kernels", (*kernels, "--rehearse") if rehearse else kernels),)),
    ]
    measure = ("env", f"APEX_CACHE_DIR={cache}", sys.executable, "evaluation/gpu/check.py")
    for case, systems in cases.items():
        for system, seconds in systems.items():
            options = ("--system", system, "--case", case, "--limit", "{limit_s}", "--folder", f"{folder}/end_to_end")
            stages.append(Stage(seconds, (Part(f"{system}-{case}", (*measure, *options)),)))
    report = (sys.executable, "evaluation/gpu/report.py", str(folder))
    return [*stages, Stage(15.0, (Part("report", report),))]


def share(left_s: float, seconds: Sequence[float]) -> float:
    """Of the time left, what the first of the stages down for ``seconds`` may take."""
    return max(0.0, left_s) * seconds[0] / sum(seconds)


def run_stages(stages: Sequence[Stage], folder: Path, end_s: float) -> bool:
    """Run all stages until ``end_s`` of :func:`time.monotonic`; whether everything went well."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PARTS).write_text("")
    all_well = True
    for place, stage in enumerate(stages):
        limit_s = share(end_s - time.monotonic(), [later.seconds for later in stages[place:]])
        print(f"== {', '.join(part.name for part in stage.parts)} (at most {limit_s:.0f} s)", flush=True)
        all_well &= run_stage(stage, folder, limit_s)
        try:
            write_page(folder)
        except Exception:  # the rest is still to be measured
            traceback.print_exc()
            all_well = False
    return all_well


def run_stage(stage: Stage, folder: Path, limit_s: float) -> bool:
    start_s, all_well = time.monotonic(), True
    running: dict[Part, subprocess.Popen] = {}
    try:
        for part in stage.parts:
            running[part] = start_part(part, folder, limit_s)
        while running:
            time.sleep(POLL_S)
            is_late = time.monotonic() - start_s >= limit_s
            for part, process in list(running.items()):
                status = process.poll()
                if status is None and not is_late:
                    continue
                if status is None:
                    stop_part(process)
                del running[part]
                result = "time limit" if status is None else result_text(status)
                all_well &= status == 0
                record_part(folder, part.name, result, time.monotonic() - start_s)
    finally:  # an interrupt leaves no process behind
        for process in running.values():
            stop_part(process)
    return all_well


def start_part(part: Part, folder: Path, limit_s: float) -> subprocess.Popen:
    """In a session of its own, so that what it has started goes with it."""
    command = [word.replace("{limit_s}", f"{limit_s:.0f}") for word in part.command]
    with log_path(folder, part.name).open("wb") as log:
        return subprocess.Popen(
            command,
            cwd=REPO_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def stop_part(process: subprocess.Popen) -> None:
    """A Python that hangs says where on SIGABRT (with PYTHONFAULTHANDLER). One that the driver holds fast is left."""
    for how in (signal.SIGABRT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)


def result_text(status: int) -> str:
    if status == 0:
        return "ok"
    return f"failed ({signal.Signals(-status).name if status < 0 else status})"


def record_part(folder: Path, name: str, result: str, seconds: float) -> None:
    """Show the end of a part's log, and keep it if the part failed: not more of it than can be committed."""
    log = log_path(folder, name)
    text = log.read_bytes()
    shown = text.decode(errors="replace").splitlines()[-SHOWN_LINES:]
    print("\n".join([*shown, f"-- {name}: {result}, {seconds:.0f} s"]), flush=True)
    if result == "ok":
        log.unlink()
    else:
        log.write_bytes(text[-MOST_LOG_BYTES:])
    with (folder / PARTS).open("a") as parts:
        parts.write(f"{name}\t{result}\t{seconds:.0f}\n")


def log_path(folder: Path, name: str) -> Path:
    return folder / f"{name}.log"


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


def gpu_name() -> str | None:
    """As a folder's name; None if torch sees no GPU. In a process of its own, which takes its CUDA with it."""
    ask = "import torch; print(torch.cuda.get_device_name())"
    try:
        answer = subprocess.run([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True, timeout=GPU_NAME_S)
    except subprocess.TimeoutExpired:
        return None
    return answer.stdout.strip().lower().replace(" ", "-") if answer.returncode == 0 else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="default results/<gpu>/<date>")
    parser.add_argument("--rehearse", action="store_true", help="the same parts on the CPU with a tiny model")
    options = parser.parse_args(arguments)
    end_s = time.monotonic() + TOTAL_S
    problem, gpu = lacking(), "rehearsal"
    if problem is None and not options.rehearse and (gpu := gpu_name()) is None:
        problem = "torch sees no GPU here; scripts/gpu_check.sh --rehearse runs the same parts on the CPU"
    if problem is not None:
        print(f"gpu_check: {problem}", file=sys.stderr)
        return 2
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d-%H%M")
    folder = (options.folder or RESULTS_DIR / gpu / now).resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with TemporaryDirectory() as cache:
        all_well = run_stages(all_stages(folder, Path(cache), options.rehearse), folder, end_s)
    print(f"gpu_check: results in {folder} (to commit them: git add --force {folder})")
    return 0 if all_well else 1


if __name__ == "__main__":
    sys.exit(main())
