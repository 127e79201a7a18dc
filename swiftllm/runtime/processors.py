"""What computes: the device of the linear layers, and the CPU beside it."""

from __future__ import annotations

import sys

import torch

import pacpu
from swiftllm.config import CpuKVDtype, EngineConfig
from swiftllm.device.device import Device
from swiftllm.machine import cpu_flags, cpu_model
from swiftllm.model.config.model_config import stored_dtype
from swiftllm.model.folder.files import tell
from swiftllm.ops.cpu import CpuOps, torch_threads
from swiftllm.ops.select import select_ops
from swiftllm.runtime.cores import CoreDivision, core_divisions

# The launching thread hands over a layer's work and sleeps, over and over. It may wake up while the CPU worker, or the
# event loop of a server, has the interpreter's lock. With Python's default of 5 ms it, and the device, would wait that
# long for it: a layer takes less.
SWITCH_INTERVAL_S = 0.001

BFLOAT16_CAPABILITY = 8  # major number of the compute capability from which on NVIDIA's GPUs have bfloat16
FAST_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


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
    if about.major >= BFLOAT16_CAPABILITY:
        return torch.bfloat16
    tell(
        f"{model} was trained in bfloat16, which sm_{about.major}{about.minor} does not compute: it runs in float16, "
        "whose numbers end at 65,504, with residuals in float32. If a request fails because of logits that are not "
        "finite, give --dtype float32"
    )
    return torch.float16


def resolve_residual_dtype(model: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of residuals, in which the outputs of all layers are added up: float32 where a checkpoint in bfloat16
    runs in float16, since it may reach numbers that float16 does not have; else that of the other activations."""
    return torch.float32 if dtype is torch.float16 and stored_dtype(model) == "bfloat16" else dtype


def default_kernel(cpu_kv_dtype: CpuKVDtype, dtype: torch.dtype) -> str:
    """The name of pacpu's kernel for attention over the CPU tier, if none is asked for."""
    return "native" if cpu_kv_dtype == "int8" else pacpu.default_kernel(dtype)


def resolve_kernel(config: EngineConfig, dtype: torch.dtype) -> str:
    """The name of pacpu's kernel for attention over the CPU tier.

    Raises:
        ValueError: the kernel asked for cannot run here; the message says why.
    """
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
