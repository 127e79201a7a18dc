"""`apex doctor`: checks and measures what the engine needs of this machine."""

from __future__ import annotations

import contextlib
import glob
import importlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from apex.cli.output import stdout_console
from apex.environment import TESTED
from apex.source_tree import IS_SOURCE_TREE, SETUP
from swiftllm.files import cache_dir
from swiftllm.machine import GIB, available_host_bytes, cpu_flags, cpu_model, host_memory_bytes, usable_cores

if TYPE_CHECKING:
    from swiftllm.device import NvidiaDriver
    from swiftllm.model.quantisation import QuantisationScheme

# -- attention hosts ---------------------------------------------------------------------------------------------------
# What `apex doctor` says of attention hosts: the way to each, and what it could add.

# Llama-3.1-8B in bfloat16: 32 layers, 32 query heads on 8 KV heads of 128
LAYERS = 32
ROW_OUT_BYTES, ROW_BACK_BYTES, TOKEN_BYTES = (32 + 2 * 8) * 128 * 2, 32 * 128 * 2, 2 * 8 * 128 * 2
CONTEXT = 1000


def host_lines(addresses: str) -> Iterator[tuple[str, str, Literal["ok", "note"]]]:
    """What was looked at, what was found, and a status of the report, for addresses ``HOST:PORT`` with commas."""
    from swiftllm.remote.probe import probe_host
    from swiftllm.remote.protocol import parse_address, shared_secret

    for text in addresses.split(","):
        try:
            way = probe_host(parse_address(text), shared_secret())
        except (OSError, ValueError, RuntimeError) as error:
            yield text, f"not usable: {error}", "note"
            continue
        host, to_gbps, from_gbps = way.host, way.to_host * 8e-9, way.from_host * 8e-9
        yield (
            f"{text}, network",
            f"round trip {1e3 * way.round_trip_s:.2f} ms, {to_gbps:.1f} Gb/s there, {from_gbps:.1f} Gb/s back",
            "ok" if way.round_trip_s < 1e-3 else "note",
        )
        read = host["read_bytes_per_s"] / 1e9
        yield f"{text}, host", f"{host['cpu']} ({host['isa']}), {host['threads']} threads read {read:.1f} GB/s", "ok"
        rows_per_s, is_network = way.rows_per_s(ROW_OUT_BYTES, ROW_BACK_BYTES, CONTEXT * TOKEN_BYTES)
        memory = host["lent_bytes"]
        yield (
            f"{text}, could add",
            f"{memory / GIB:.1f} GiB of KV cache, {memory / (LAYERS * TOKEN_BYTES):,.0f} tokens of Llama-3.1-8B; "
            f"at most {rows_per_s / LAYERS:,.0f} tokens/s of it at {CONTEXT:,} tokens of context, bound by "
            f"{'the network' if is_network else 'its memory'}",
            "ok",
        )


# -- the command -------------------------------------------------------------------------------------------------------

Status = Literal["ok", "note", "missing"]  # note: a part of the engine is limited; missing: the engine cannot run

MARKS: Mapping[Status, str] = {"ok": "[green]ok[/]", "note": "[yellow]--[/]", "missing": "[bold red]NO[/]"}
CPU_FLAGS = ("avx2", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
PACKAGES = {  # and what needs each of them; everything needs torch
    "torch": "",
    "transformers": "tokenizers of models",
    "triton": "kernels on a GPU",
    "fastapi": "apex serve",
    "uvicorn": "apex serve",
    "prometheus_client": "apex serve",
}
DEFAULT_MODEL = "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Doctor:
    """Check this machine: is everything there that the engine needs, and what will it be slow at?

    It looks at packages, compilers, CPU kernels, memory and its speed, GPU, settings of the papers, models and profile
    tables.

    NO marks what keeps the engine from running, -- what limits a part of it; each line says what to do. It takes about
    ten seconds, as it measures the memory bandwidth. The exit status is 0 if the engine can run here, else 1.
    """

    attention_hosts: str | None = None
    """Also measure the way to these attention hosts, HOST:PORT with commas, and what each could add."""

    def run(self) -> int:
        report = examine()
        if self.attention_hosts is not None:
            report["Attention hosts"] = [Finding(*line) for line in host_lines(self.attention_hosts)]
        print_report(report, stdout_console())
        return 0 if can_run(report) else 1


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    status: Status = "ok"


def examine() -> dict[str, list[Finding]]:
    """The findings of the report by section. Takes a few seconds to import torch and to measure memory bandwidth."""
    sections: Mapping[str, Callable[[], Iterator[Finding]]] = {
        "Software": software,
        "Compilers": compilers,
        "CPU attention": cpu_kernels,
        "Machine": machine,
        "GPU": gpus,
        "Settings": settings,
        "Files": files,
    }
    return {title: list(section()) for title, section in sections.items()}


def can_run(report: Mapping[str, list[Finding]]) -> bool:
    return all(finding.status != "missing" for findings in report.values() for finding in findings)


def print_report(report: Mapping[str, list[Finding]], console: Console) -> None:
    """Print the report: a table on a terminal, one line a finding elsewhere."""
    verdict = "the engine can run here" if can_run(report) else "the engine cannot run here yet: see the lines with NO"
    if not console.is_terminal:
        for title, findings in report.items():
            for finding in findings:
                print(f"{title}: {finding.what}: {finding.found} [{finding.status}]", file=console.file)
        print(f"{verdict[0].upper()}{verdict[1:]}.", file=console.file)
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    for title, findings in report.items():
        for row, finding in enumerate(findings):
            section = f"[bold]{title}[/]" if row == 0 else ""
            table.add_row(section, MARKS[finding.status], finding.what, escape(finding.found))
        table.add_row()
    console.print(table)
    console.print(f"[bold {'green' if can_run(report) else 'red'}]{verdict[0].upper()}{verdict[1:]}.[/]")


# -- sections ---------------------------------------------------------------------------------------------------------


def software() -> Iterator[Finding]:
    tested = sys.version_info[:2] in TESTED
    remark = "" if tested else " (tested on 3.11 and 3.12)"
    yield Finding("Python", platform.python_version() + remark, "ok" if tested else "note")
    for name, needed_for in PACKAGES.items():
        module, problem = try_import(name)
        if module is not None:
            yield Finding(name, getattr(module, "__version__", None) or metadata.version(name))
        elif needed_for:
            yield Finding(name, f"{problem}; needed for {needed_for} only", "note")
        else:
            yield Finding(name, f"{problem}: {SETUP}", "missing")


def compilers() -> Iterator[Finding]:
    cxx = shlex.split(os.environ.get("CXX", "g++"))[0]
    yield compiler("C++", shutil.which(cxx), f"no {cxx}: install g++ or set CXX, to build the CPU kernels")
    # The same places that the build looks in.
    named = os.environ.get("ISPC")
    ispc = shutil.which(named) if named else shutil.which("ispc") or shutil.which(cache_dir() / "ispc/bin/ispc")
    remedy = SETUP if IS_SOURCE_TREE else "build the package where it is on PATH"
    yield compiler("ISPC", ispc, f"not found; optional, for the ispc kernel: {remedy}")


def compiler(what: str, path: str | None, otherwise: str) -> Finding:
    if path is None:
        return Finding(what, otherwise, "note")
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(what, f"{path} does not run: {error}", "note")
    version = re.search(r"\d+\.\d+(\.\d+)?", answer)
    return Finding(what, f"{version.group() if version else 'version unknown'} ({path})")


def cpu_kernels() -> Iterator[Finding]:
    pacpu, problem = try_import("pacpu")
    if pacpu is None:
        build = f"{SETUP}, or `python setup.py build_ext --inplace`" if IS_SOURCE_TREE else SETUP
        yield Finding("pacpu", f"{problem}: {build}", "missing")
        return
    kernels = pacpu.kernels()
    yield Finding("kernels", ", ".join(kernels) or f"none: {SETUP}", "ok" if kernels else "missing")
    for name, reason in pacpu.unavailable().items():
        yield Finding(name, f"not available: {reason}", "note")
    defaults = {}
    for dtype in ("float32", "float16", "bfloat16"):
        try:
            defaults.setdefault(pacpu.default_kernel(dtype), []).append(dtype)
        except ValueError as error:
            yield Finding(dtype, str(error), "note")
    yield Finding("default", "; ".join(f"{kernel} for {', '.join(dtypes)}" for kernel, dtypes in defaults.items()))
    yield Finding("int8", f"native by {int8_instructions(pacpu.isa())}, for --cpu-kv-dtype int8")
    yield Finding("instructions", f"{pacpu.isa()} (PACPU_ISA=portable|avx2|avx512 overrides)")
    if try_import("torch")[0] is not None:
        yield from attention_choices()


def int8_instructions(isa: str) -> str:
    """The instruction set of CPU attention over int8, where pacpu uses ``isa``."""
    if isa in ("portable", "avx2"):
        return isa
    return "avx512 with VNNI" if "avx512_vnni" in cpu_flags() else "avx2"


def attention_choices() -> Iterator[Finding]:
    """How CPU attention prefetches and shares blocks here, as an engine has measured it."""
    from swiftllm.runtime.cpu_tuning import fastest, kept

    measured = kept()
    if measured is None:
        yield Finding("prefetch", "into L1; what is faster here is measured at an engine's first start", "note")
        yield Finding("shared blocks", "read by each row; measured at an engine's first start", "note")
        return
    for calls, by_way in measured.rates.items():
        best = fastest(by_way)
        others = ", ".join(f"{way} {rate:.1f}" for way, rate in by_way.items() if way != best)
        yield Finding(f"prefetch, {calls}", f"{best}: measured {by_way[best]:.1f} GB/s of K and V; {others}")
    for calls, cost in measured.shared_row_costs.items():
        how = "read once" if round(8 * cost) < 8 else "read by each row"
        yield Finding(f"shared blocks, {calls}", f"{how}: a further row costs {cost:.2f} of a row's own block")


def machine() -> Iterator[Finding]:
    load = os.getloadavg()[0]
    busy = load > usable_cores() / 2
    remark = f", busy with other work (load {load:.1f}): measured figures will be low" if busy else ""
    yield Finding("CPU", f"{cpu_model()} x{usable_cores()} ({platform.machine()}){remark}", "note" if busy else "ok")
    flags = cpu_flags()
    yield Finding("CPU features", ", ".join(f"{'' if name in flags else 'no '}{name}" for name in CPU_FLAGS))
    available = available_host_bytes()
    yield Finding("memory", f"{available / GIB:.1f} GiB available of {host_memory_bytes() / GIB:.1f} GiB")
    yield Finding("NUMA nodes", str(len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1))
    yield from bandwidth(usable_cores(), available)


def gpus(driver: NvidiaDriver | None = None) -> Iterator[Finding]:
    """``driver``: of this machine where None."""
    torch, problem = try_import("torch")
    if torch is None:
        yield Finding("CUDA", f"unknown without torch ({problem})", "note")
        return
    if not torch.cuda.is_available():
        from swiftllm.device import NvidiaDriver

        if (problem := (driver or NvidiaDriver()).why_no_gpu()) is not None:
            yield Finding("CUDA", f"{problem}; --device cpu computes without it", "missing")
            return
        cuda = torch.version.cuda
        build = f"torch is built for CUDA {cuda}" if cuda else f"torch {torch.__version__} is a build without CUDA"
        reason = "no NVIDIA driver is loaded, or CUDA_VISIBLE_DEVICES hides its GPUs"
        yield Finding("CUDA", f"{build}; {reason}. Without a GPU the GPU batch runs on the CPU's cores", "note")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        if (products := coded_products(device.name, device.major >= 8)) is not None:
            yield products
        if device.major < 8:
            yield Finding("experts", experts_without_tensor_cores(device.name), "note")
        free, total = torch.cuda.mem_get_info(index)
        yield Finding(
            f"cuda:{index}",
            f"{device.name}, capability {device.major}.{device.minor}, "
            f"{free / 2**30:.1f} GiB free of {total / 2**30:.1f} GiB, CUDA {torch.version.cuda}",
        )
    if (count := torch.cuda.device_count()) > 1:
        has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
        found = f"--tensor-parallel up to {count}" if has_nccl else "not with this build of torch, which lacks NCCL"
        yield Finding("several GPUs", found, "ok" if has_nccl else "note")


def coded_products(gpu: str, has_tensor_cores: bool) -> Finding | None:
    """What multiplies 4-bit weights; None where no model here has any. ``has_tensor_cores``: in Triton."""
    from swiftllm.ops.library import PACKAGE, how_to_install, installed_version

    if version := installed_version():
        dtypes = "16 bits" if has_tensor_cores else "float16"
        found = f"multiplied on {gpu} in {dtypes} by {PACKAGE} {version}, where it measures faster at the start"
        return Finding("4-bit weights", found)
    if not has_tensor_cores:
        slow = f"{gpu} writes them out before each multiplication: slow. {how_to_install()}"
        return Finding("4-bit weights", slow, "note")
    if not has_coded_models():
        return None
    own = f"multiplied on {gpu} by the own kernels. {how_to_install()}, and is used where it measures faster"
    return Finding("4-bit weights", own, "note")


def experts_without_tensor_cores(gpu: str) -> str:
    """What models with experts lose on a GPU for which Triton has no tensor cores."""
    from swiftllm.ops.library import PACKAGE

    return (
        f"multiplied on {gpu} without tensor cores, 4 rows of an expert at a time, in 16 and in 4 bits: prompts and "
        f"large batches take several times as long as on newer GPUs. In 4 bits {PACKAGE} may be faster"
    )


def settings() -> Iterator[Finding]:
    """The papers' settings (``configs/experiments/papers.yaml``) that can be measured here."""
    torch, problem = try_import("torch")
    if torch is None:
        yield Finding("of the papers", f"unknown without torch ({problem})", "note")
    elif not torch.cuda.is_available():
        yield Finding("of the papers", "need a GPU; here only `--setting small` runs at speed", "note")
    else:
        from apex.simulator.paper_settings import setting_lines

        gpu = torch.cuda.get_device_properties(0)
        for line in setting_lines(gpu.name, gpu.total_memory, available_host_bytes()):
            yield Finding(*line)


def cached(pattern: str) -> list[Path]:
    """The files of the cache that match; none where it cannot be searched."""
    return [cache_dir() / name for name in glob.glob(pattern, root_dir=cache_dir())]


def model_folders() -> list[Path]:
    """Of the models in the cache."""
    return sorted(path.parent for path in cached("models/*/config.json"))


def files() -> Iterator[Finding]:
    if models := model_folders():
        yield from (Finding("model", f"{model}{quantisation(model)}") for model in models)
    else:
        remedy = f"{SETUP}, or name" if IS_SOURCE_TREE else "name"
        found = f"{cache_dir() / 'models' / DEFAULT_MODEL} is not there: {remedy} another folder, or a model on the hub"
        yield Finding("model", found, "note")
    tables = sum(map(is_profile, cached("profiles/*.json")))
    count = f"{tables} in {cache_dir() / 'profiles'}" if tables else "none yet: made on the first start"
    yield Finding("profile tables", count, "ok" if tables else "note")


def quantisation(model: Path) -> str:
    """What to add to the line of a model folder with quantised weights."""
    if try_import("torch")[0] is None:
        return ""
    try:
        scheme = scheme_of(model)
    except (OSError, ValueError) as error:
        return f" (not supported: {error})"
    return "" if scheme is None else f" ({scheme.describe()})"


def scheme_of(model: Path) -> QuantisationScheme | None:
    """How the weights of a model folder are quantised.

    Raises:
        OSError, ValueError: the folder is incomplete, or of an unsupported kind.
    """
    from swiftllm.model.config import ModelConfig

    return ModelConfig.from_folder(model).quantisation


def has_coded_models() -> bool:
    """Whether the weights of any model in the cache are quantised."""
    for model in model_folders():
        with contextlib.suppress(OSError, ValueError):
            if scheme_of(model) is not None:
                return True
    return False


# -- probes -----------------------------------------------------------------------------------------------------------


def try_import(name: str) -> tuple[ModuleType | None, str | None]:
    """A module, or the reason why it cannot be imported."""
    try:
        module = importlib.import_module(name)
        return (module, None) if getattr(module, "is_built", True) else (None, "not built")
    except ModuleNotFoundError as error:
        return None, "not installed" if error.name == name else str(error)
    except Exception as error:  # a broken installation may raise anything, and the report must go on
        return None, f"does not load ({type(error).__name__}: {error})"


def is_profile(path: Path) -> bool:
    try:
        return "identity" in json.loads(path.read_text())
    except (OSError, ValueError):
        return False  # the engine reports it when it needs it


def bandwidth(cores: int, available_bytes: int) -> Iterator[Finding]:
    """Bandwidth of streaming reads, the limit of CPU attention, on one core and on all. No cache holds the buffer."""
    for needed in ("pacpu", "torch"):
        if try_import(needed)[0] is None:
            yield Finding("read bandwidth", f"not measured: it needs {needed}", "note")
            return
    from swiftllm.runtime.cpu_tuning import read_limit, read_limit_bytes

    size = read_limit_bytes()
    if size > available_bytes // 4:
        too_much = f"not measured: it needs {size >> 20} MiB, more than a quarter of the free memory"
        yield Finding("read bandwidth", too_much, "note")
        return
    for threads in sorted({1, cores}):
        name = "1 thread" if threads == 1 else f"{threads} threads"
        yield Finding(f"read, {name}", f"{read_limit(threads) / 1e9:.1f} GB/s (best pass over {size >> 20} MiB)")
