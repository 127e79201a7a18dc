"""The choice of operations for a device, made here only."""

from __future__ import annotations

import os
import shutil
import sysconfig
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch

from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from swiftllm.ops.library import LibraryProducts, installed_version

BFLOAT16_CAPABILITY = 80
TRITON_CAPABILITY = 75


def select_ops(
    device: torch.device, dtype: torch.dtype, cpu_kernel: str | None = None, library: LibraryProducts | None = None
) -> Ops:
    """The fastest operations for a device. ``cpu_kernel``: pacpu's kernel for decodes on a CPU. ``library``: what
    chooses 4-bit products; by default, where it is installed, one that measures."""
    if device.type == "cpu":
        return CpuOps(cpu_kernel)
    gpu = torch.cuda.get_device_properties(device)
    capability = 10 * gpu.major + gpu.minor
    if dtype is torch.bfloat16 and capability < BFLOAT16_CAPABILITY:
        raise ValueError(f"{gpu.name} (sm_{capability}) has no bfloat16: use dtype='float16'")
    if why := why_no_triton(capability):
        warnings.warn(f"decode attention gathers the KV cache of the whole batch with torch: {why}", stacklevel=2)
        return Ops()
    from swiftllm.ops.triton.ops import LEAST_SHARED_BYTES, TritonOps

    shared_bytes = getattr(gpu, "shared_memory_per_multiprocessor", LEAST_SHARED_BYTES)  # older torch does not tell
    if library is None and dtype.itemsize == 2 and installed_version() is not None:
        library = LibraryProducts()
    return TritonOps(device, capability, gpu.multi_processor_count, library, shared_bytes)


def why_no_triton(capability: int) -> str | None:
    """Why the Triton kernels cannot run on a GPU of this compute capability (75 for sm_75); None if they can."""
    if capability < TRITON_CAPABILITY:
        return f"the Triton kernels are checked from sm_{TRITON_CAPABILITY} on, and this GPU is sm_{capability}"
    if find_spec("triton") is None:
        return "Triton is not installed: type `pip install triton`"
    # Triton compiles a launcher in C for every kernel.
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler: install gcc, or set CC"
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        return f"Triton needs Python's headers, and there is no {header}: install python3-dev"
    return None
