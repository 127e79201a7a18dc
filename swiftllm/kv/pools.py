"""The tensors that hold the KV cache of both tiers."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable

import torch

from swiftllm.core.request import Tier
from swiftllm.kv.budget import KVPlan
from swiftllm.model.config import ModelConfig


class KVPools:
    """The KV cache of both tiers: ``[num_layers, num_blocks, num_kv_heads, 2, block_size, head_dim]`` each.

    ``layers[tier][layer]`` is one layer's view. Only the first ``num_written`` blocks of each tier are initialised.
    """

    def __init__(self, model: ModelConfig, plan: KVPlan, device: torch.device, dtype: torch.dtype) -> None:
        self.plan = plan

        def shape(tier: Tier) -> tuple[int, ...]:
            blocks = plan.num_blocks[tier]
            return (model.num_layers, blocks, model.num_kv_heads, 2, plan.block_size, model.head_dim)

        on_host = device.type == "cpu"
        self.tensors = {
            Tier.GPU: host_tensor(shape(Tier.GPU), dtype)
            if on_host
            else torch.empty(shape(Tier.GPU), dtype=dtype, device=device),
            Tier.CPU: host_tensor(shape(Tier.CPU), dtype),
        }
        self.layers = {tier: list(tensor.unbind(0)) for tier, tensor in self.tensors.items()}
        self.num_written = 0

    def write(self, num_blocks: int, progress: Callable[[float, str], None]) -> None:
        """Zero the first ``num_blocks`` blocks of each tier. Takes seconds, since the first write maps the pages."""
        layers = [layer[:num_blocks] for tier in Tier for layer in self.layers[tier]]
        for done, layer in enumerate(layers):
            progress(done / len(layers), f"{num_blocks:,} blocks of each tier at most")
            layer.zero_()
        self.num_written = num_blocks


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in its own anonymous memory mapping, with huge pages where the system grants them.

    A page is allocated at its first write, on the NUMA node of the writing thread.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
