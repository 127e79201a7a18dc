"""The tensors that hold the KV cache of both tiers."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

import pacpu
from swiftllm.core.request import Tier
from swiftllm.kv.format import KVFormat
from swiftllm.kv.layer_groups import LayerGroups
from swiftllm.machine import GIB
from swiftllm.model.config.model_config import ModelConfig


@dataclass(frozen=True)
class KVPlan:
    """Number of blocks in each tier, their tokens, and their bytes in all layers of a group."""

    num_blocks: Mapping[Tier, int]
    block_size: int
    bytes_per_block: Mapping[Tier, int]

    def describe(self, max_model_len: int, groups: LayerGroups) -> list[str]:
        """One line per tier: blocks, tokens, GiB, and how many requests of ``max_model_len`` tokens it holds; one more
        where layers have windows."""
        blocks_per_request = groups.blocks_for(max_model_len)
        lines = [
            f"{tier.value.upper()} tier: {blocks:,} blocks of {self.block_size} = {blocks * self.block_size:,} tokens, "
            f"{blocks * self.bytes_per_block[tier] / GIB:.2f} GiB, {blocks / blocks_per_request:,.1f} requests of "
            f"{max_model_len:,} tokens"
            for tier, blocks in self.num_blocks.items()
        ]
        return lines if groups.are_exact else [*lines, groups.describe()]


class KVPools:
    """The KV cache of both tiers, each in its format; :meth:`~swiftllm.kv.format.KVFormat.pool_shape` has the shapes.

    ``layers[tier][layer]`` is the view of one of the model's layers. Layers of two ``groups`` may have the same view,
    and use other blocks of it. Only the first ``num_written`` blocks of each tier are initialised.
    """

    def __init__(
        self, model: ModelConfig, plan: KVPlan, device: torch.device, formats: Mapping[Tier, KVFormat]
    ) -> None:
        self.plan, self.formats, self.groups = plan, formats, LayerGroups.of(model, plan.block_size)
        self._on_device = frozenset[Tier]() if device.type == "cpu" else {Tier.GPU}

        def pool(tier: Tier) -> torch.Tensor:
            shape, dtype = formats[tier].pool_shape(model, plan.num_blocks[tier], plan.block_size), formats[tier].dtype
            if tier in self._on_device:
                return torch.empty(shape, dtype=dtype, device=device)
            return host_tensor(shape, dtype)

        self.tensors = {tier: pool(tier) for tier in (Tier.GPU, Tier.CPU)}
        self.layers = {tier: [tensor[i] for i in self.groups.place_of] for tier, tensor in self.tensors.items()}
        self.num_written = 0

    def write(self, num_blocks: int, num_threads: int, progress: Callable[[float, str], None]) -> None:
        """Zero the first ``num_blocks`` blocks of each tier. Takes seconds, since the first write maps the pages.

        Those of host memory are written by ``num_threads`` threads of pacpu in turn, so that they lie on the NUMA nodes
        of all threads that will read them.
        """
        layers = [(tier, layer[:num_blocks]) for tier in Tier for layer in self.tensors[tier]]
        for done, (tier, layer) in enumerate(layers):
            progress(done / len(layers), f"{num_blocks:,} blocks of each tier at most")
            if tier in self._on_device:
                layer.zero_()
            else:
                pacpu.zero(layer, num_threads=num_threads)
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
