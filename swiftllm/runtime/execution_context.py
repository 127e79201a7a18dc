"""What computes: the device of the linear layers, the CPU beside it, and the division of its cores."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

import pacpu
from swiftllm.config import CpuKVDtype, EngineConfig
from swiftllm.device import Device
from swiftllm.machine import allowed_cores, count_physical, cpu_flags, cpu_model, usable_cores
from swiftllm.model.config import ModelConfig, stored_dtype
from swiftllm.model.folder import tell
from swiftllm.ops.cpu import CpuOps, torch_threads
from swiftllm.ops.interface import Ops
from swiftllm.ops.library import LibraryProducts, installed_version

# -- operations for a device -------------------------------------------------------------------------------------------
# The choice of operations for a device, made here only.

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


# -- the context and its cores -----------------------------------------------------------------------------------------

# -- dividing the cores ------------------------------------------------------------------------------------------------
# Ways of dividing this machine's cores between the GPU batch and the CPU attention worker.

SERVER_LEAVES_FROM = 4
"""Hardware threads from which on a server beside a GPU leaves two of them. With fewer, CPU attention would lose half of
its threads or all."""


@dataclass
class _Server:
    is_here: bool = False


_server = _Server()


def serve_from_here() -> None:
    """Call it before the engine is built in a process that serves: another one, the front end, shares the cores."""
    _server.is_here = True


@dataclass(frozen=True)
class CoreDivision:
    """Threads of the GPU batch and of the CPU attention worker."""

    gpu_batch_threads: int
    cpu_threads: int
    reason: str
    """Why so many, for people."""

    def gpu_batch_input(self) -> str:
        return f"{counted(self.gpu_batch_threads)} ({self.reason})"


def counted(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def most_gpu_batch_threads(cores: int) -> int:
    """As many as there are cores, unless OMP_NUM_THREADS asks for fewer: the GPU batch computes in OpenMP threads."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    return max(1, min(cores, int(asked))) if asked.isdigit() else cores


def physical_cores() -> int:
    """Of those that this process may use: hardware threads of one core count once."""
    return count_physical(allowed_cores())


def core_divisions(config: EngineConfig, *, without_gpu: bool) -> list[CoreDivision]:
    """The divisions to choose from, the one with most GPU batch threads first; a single one if there is no choice.

    A GPU batch on a CPU has all cores, half of them or a quarter, since its linear layers are mostly the larger part of
    the work. The worker has the rest. If the GPU batch has all cores, the worker has them too: each sleeps while it
    waits for the other, and the system schedules the excess threads. OMP_NUM_THREADS, if set, bounds the GPU batch.

    Beside a GPU one thread launches. The worker has all other hardware threads, or leaves a physical core to that
    thread, or has half of the hardware threads: attention waits for memory, so a core's second thread may add little.
    In a server it leaves two hardware threads at least, from :data:`SERVER_LEAVES_FROM` on: its helpers spin between
    calls, and the front end and the reader of the CPU tier would take turns with them.
    Each rank of several divides an equal share of the cores.
    """
    cores = max(1, usable_cores() // config.tensor_parallel)
    if not without_gpu:
        physical = min(cores, max(1, physical_cores() // config.tensor_parallel))
        most = cores - (2 if _server.is_here and cores >= SERVER_LEAVES_FROM else 1)
        choices = [min(most, part) for part in (most, physical - 1, cores // 2)]
        workers = [config.cpu_threads] if config.cpu_threads else choices
        return [CoreDivision(1, worker, "a GPU computes it") for worker in dict.fromkeys(max(1, n) for n in workers)]
    if config.gpu_batch_threads is not None:
        gpu_batches, reason = [config.gpu_batch_threads], "as asked for"
    else:
        most = most_gpu_batch_threads(cores)
        gpu_batches = [min(most, part) for part in (cores, cores // 2, cores // 4)]
        reason = "one for every core" if most == cores else "as OMP_NUM_THREADS has it"
    return [
        CoreDivision(gpu_batch, config.cpu_threads or (cores - gpu_batch if gpu_batch < cores else cores), reason)
        for gpu_batch in dict.fromkeys(max(1, gpu_batch) for gpu_batch in gpu_batches)
    ]


# -- the context -------------------------------------------------------------------------------------------------------
# What computes: the device of the linear layers, and the CPU beside it.

# The launching thread hands over a layer's work and sleeps, over and over. It may wake up while the CPU worker, or the
# event loop of a server, has the interpreter's lock. With Python's default of 5 ms it, and the device, would wait that
# long for it: a layer takes less.
SWITCH_INTERVAL_S = 0.001

BFLOAT16_MAJOR = 8  # major number of the compute capability from which on NVIDIA's GPUs have bfloat16
FAST_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
FLOAT16_RESIDUAL_SCALE = 2.0**-8
"""The outputs of layers may be 256 times as large as float16's range. Elements of ``o`` and ``down`` below 2^-9 are
rounded, to multiples of 2^-16."""


class ExecutionContext:
    """
    Attributes:
        hardware: where the linear layers run.
        dtype: of weights, activations and KV cache.
        residual_dtype: of the sums of layers' outputs, which are activations too.
        cpu_kernel: pacpu's kernel for attention over the CPU tier.
        ops, host_ops: the device's operations; those of stages that the CPU computes.
        cores: threads of a GPU batch on a CPU, and of attention over the CPU tier.
    """

    def __init__(self, config: EngineConfig, hardware: Device) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.hardware, device = hardware, hardware.torch_device
        self.dtype = resolve_dtype(config, device)
        self.residual_dtype = resolve_residual_dtype(config.model, self.dtype)
        self.cpu_kernel = resolve_kernel(config, self.dtype)
        self.ops = select_ops(device, self.dtype, self.cpu_kernel)
        self.host_ops = CpuOps()
        self.use_cores(core_divisions(config, without_gpu=device.type == "cpu")[0])

    def use_cores(self, division: CoreDivision) -> None:
        """Compute with these numbers of threads from now on."""
        self.cores = division
        self.host_ops.num_threads = division.cpu_threads
        if isinstance(self.ops, CpuOps):
            torch.set_num_threads(torch_threads(self.dtype, division.gpu_batch_threads))
            self.ops.num_threads = division.gpu_batch_threads
        else:  # torch copies in host memory: more threads would spin after each copy on the worker's cores
            torch.set_num_threads(division.gpu_batch_threads)
            self.ops.num_threads = division.cpu_threads


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and KV cache: on a GPU the checkpoint's of the two in 16 bits, on a CPU the one
    its instructions are faster in."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cuda":
        return _gpu_dtype(config.model, device)
    # With bfloat16 instructions a matrix product is twice as fast as in float32. Without them torch widens first and
    # is slower, and float16 on x86 is slower still.
    return torch.bfloat16 if cpu_flags() & FAST_BFLOAT16_FLAGS else torch.float32


def _gpu_dtype(model: str, device: torch.device) -> torch.dtype:
    if stored_dtype(model) != "bfloat16":
        return torch.float16
    about = torch.cuda.get_device_properties(device)
    if about.major >= BFLOAT16_MAJOR:
        return torch.bfloat16
    tell(
        f"{model} was trained in bfloat16, which sm_{about.major}{about.minor} does not compute: it runs in float16, "
        "whose numbers end at 65,504, with residuals in float32 and the outputs of layers scaled. If a request fails "
        "because of logits that are not finite, give --dtype float32"
    )
    return torch.float16


def resolve_residual_dtype(model: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of residuals, in which the outputs of all layers are added up: float32 where a checkpoint in bfloat16
    runs in float16, since it may reach numbers that float16 does not have; else that of the other activations."""
    return torch.float32 if dtype is torch.float16 and stored_dtype(model) == "bfloat16" else dtype


def read_model_config(model: str, dtype: torch.dtype) -> ModelConfig:
    """The configuration of a model that is computed in ``dtype``. Where residuals are float32 because float16 ends too
    early for them, what layers add to them is scaled, since a product of ``down`` may itself be beyond 65,504."""
    config = ModelConfig.from_folder(model)
    is_scaled = resolve_residual_dtype(model, dtype) is not dtype
    return config.with_residual_scale(FLOAT16_RESIDUAL_SCALE) if is_scaled else config


def default_kernel(cpu_kv_dtype: CpuKVDtype, dtype: torch.dtype) -> str:
    """The name of pacpu's kernel for attention over the CPU tier, if none is asked for."""
    return "native" if cpu_kv_dtype == "int8" else pacpu.default_kernel(dtype)


def resolve_kernel(config: EngineConfig, dtype: torch.dtype) -> str:
    """The name of pacpu's kernel for attention over the CPU tier."""
    kernel = config.cpu_kernel or default_kernel(config.cpu_kv_dtype, dtype)
    usable = pacpu.kernels(dtype)
    if kernel not in usable:
        why = pacpu.unavailable().get(kernel, "there is no such kernel")
        if kernel in pacpu.kernels():
            why = f"it does not compute in {str(dtype).removeprefix('torch.')}"
        raise ValueError(f"cpu_kernel={kernel!r} is not among {', '.join(usable)}: {why}")
    return kernel


def device_name(device: torch.device) -> str:
    """The product's name of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_model()
