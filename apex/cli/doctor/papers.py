"""Which settings of the papers this machine can run: the lines of ``apex doctor`` about them.

Imports torch to read models: import it late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch

from apex.simulator.hardware.files import load_gpu
from apex.simulator.paper_settings import (
    BLOCK_SIZE,
    PaperSetting,
    gpu_kind,
    load_setting,
    nearest_setting,
    setting_names,
)
from swiftllm.config import EngineConfig
from swiftllm.kv.budget import MemoryBudget
from swiftllm.machine import InsufficientMemory
from swiftllm.runtime.memory_estimate import estimate_memory

Status = Literal["ok", "note"]
Line = tuple[str, str, Status]
"""The name of a setting, what is found, and whether it runs as the paper sets it up."""


def setting_lines(product_name: str, device_bytes: int, host_bytes: int) -> Iterator[Line]:
    """A line for each setting.

    Args:
        product_name: of the GPU, as its driver reports it.
        device_bytes: the GPU's memory as torch reports it.
        host_bytes: available host memory.
    """
    kind = gpu_kind(product_name)
    nearest = {nearest_setting(kind, device_bytes, paper) for paper in ("apex", "neo")}
    for name in setting_names():
        setting = load_setting(name)
        if setting.tensor_parallel > 1:
            gpus = f"{setting.tensor_parallel}x {load_gpu(setting.gpu).name}"
            yield name, f"can only be simulated: it has {gpus}, and an engine uses one GPU", "note"
        elif setting.gpu == kind or name in nearest:
            yield name, *_found(setting, product_name, setting_fit(setting, device_bytes, host_bytes))
        else:
            card = load_gpu(setting.gpu)
            here = f"this is {product_name} with {device_bytes / 1e9:.1f} GB"
            yield name, f"needs another GPU: {card.name} with {card['memory_gb']:g} GB, and {here}", "note"


def _found(setting: PaperSetting, product_name: str, fit: MemoryBudget) -> tuple[str, Status]:
    """What a GPU that is the setting's own or near to it can run of it."""
    is_own = setting.gpu == gpu_kind(product_name)
    try:
        fit.check(setting.num_gpu_blocks if is_own else setting.min_gpu_blocks, 0)
    except InsufficientMemory as error:
        return f"{setting.hub_name} does not fit: {error}", "note"
    if is_own:
        pool = f"{setting.num_gpu_blocks:,} GPU blocks, of {fit.max_gpu_blocks:,} that fit"
    else:
        card = load_gpu(setting.gpu).name
        pool = f"{product_name} instead of {card}: same workload, up to {fit.max_gpu_blocks:,} GPU blocks"
    is_whole = fit.max_cpu_blocks >= setting.num_cpu_blocks
    held_gb = min(setting.num_cpu_blocks, fit.max_cpu_blocks) * fit.host_block_bytes / 1e9
    host = f"holds {'' if is_whole else 'only '}{held_gb:.1f} of {setting['cpu_kv_gb']:g} GB of KV cache"
    return f"{setting.hub_name}, {pool}; host memory {host}", "ok" if is_own and is_whole else "note"


def setting_fit(setting: PaperSetting, device_bytes: int, host_bytes: int) -> MemoryBudget:
    """What a machine's memory holds of a setting's model, beside the widest iteration of the setting's limits."""
    config = EngineConfig(setting.model, block_size=BLOCK_SIZE, **vars(setting.limits))
    dtype = getattr(torch, setting.dtype)
    return estimate_memory(config, setting.model_config, dtype, device_bytes=device_bytes, host_bytes=host_bytes)
