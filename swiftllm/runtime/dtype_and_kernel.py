"""The dtype and the CPU kernel of a backend, where the configuration leaves them open."""

from __future__ import annotations

import torch

import pacpu
from swiftllm.config import EngineConfig
from swiftllm.machine import cpu_flags, cpu_model

FAST_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def resolve_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """The dtype of weights, activations and KV cache: on a CPU the one its instructions are faster in."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cuda":
        return torch.float16  # every GPU has it; the T4, which this engine is for, has no bfloat16
    # With bfloat16 instructions a matrix product is twice as fast as in float32. Without them torch widens first and
    # is slower, and float16 on x86 is slower still.
    return torch.bfloat16 if cpu_flags() & FAST_BFLOAT16_FLAGS else torch.float32


def resolve_kernel(config: EngineConfig, dtype: torch.dtype) -> str:
    """The name of pacpu's kernel for attention over the CPU tier.

    Raises:
        ValueError: the kernel asked for cannot run here; the message says why.
    """
    kernel = config.cpu_kernel or pacpu.default_kernel(dtype)
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
