"""The tensors of the KV cache in both tiers, and the format of their blocks."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from swiftllm.config import CpuKVDtype, EngineConfig
from swiftllm.core.request import Tier
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.machine import GIB, spread_over_nodes
from swiftllm.model.config import ModelConfig

# -- the format of a tier ----------------------------------------------------------------------------------------------
# How K and V lie in the blocks of a tier: as elements of the model's dtype, or as int8 codes with scales.
#
# The GPU tier always holds elements. ``cpu_kv_dtype`` chooses for the CPU tier. Whoever writes to the CPU tier makes
# codes of elements, whoever reads it for the device makes elements of codes. Both ways lie in :mod:`pacpu`; elements
# that come from codes become the same codes again (:mod:`pacpu.int8`), so moving a request changes its bits once at
# most.

LEAST_BLOCK = 16
"""Tokens of the smallest block that every format has."""


@dataclass(frozen=True)
class KVFormat:
    """
    Attributes:
        name: for people and identities: int8, or the name of the elements' dtype.
        dtype: of the tensors that hold it; uint8 for int8.
    """

    name: str
    dtype: torch.dtype

    @classmethod
    def exact(cls, dtype: torch.dtype) -> KVFormat:
        """The elements themselves."""
        return cls(str(dtype).removeprefix("torch."), dtype)

    @property
    def is_exact(self) -> bool:
        return self != INT8

    def head_shape(self, block_size: int, head_dim: int) -> tuple[int, ...]:
        """Shape of K and V of one KV head in a block."""
        if self.is_exact:
            return (2, block_size, head_dim)
        from pacpu import int8  # loads native code, which simulations do without

        return (int8.head_bytes(block_size, head_dim),)

    def pool_shape(self, model: ModelConfig, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Shape of a tier's tensor: ``[layers, num_blocks, num_kv_heads, 2, block_size, head_dim]``, or for int8
        ``[layers, num_blocks, num_kv_heads, head_bytes]``; its layers are those of a group."""
        layers = LayerGroups.of(model, block_size).pool_layers
        return (layers, num_blocks, model.num_kv_heads, *self.head_shape(block_size, model.head_dim))

    def block_bytes(self, model: ModelConfig, block_size: int) -> int:
        """Bytes of K and V of a block in all layers of a group, scales included."""
        return math.prod(self.pool_shape(model, 1, block_size)) * self.dtype.itemsize

    def token_bytes(self, model: ModelConfig) -> int:
        """Bytes of K and V of a token in all layers of a group, scales included."""
        return self.block_bytes(model, LEAST_BLOCK) // LEAST_BLOCK


INT8 = KVFormat("int8", torch.uint8)


def cpu_format(cpu_kv_dtype: CpuKVDtype, dtype: torch.dtype) -> KVFormat:
    """The format of the CPU tier. ``dtype``: of weights and activations."""
    return INT8 if cpu_kv_dtype == "int8" else KVFormat.exact(dtype)


def check_kv(config: EngineConfig, model: ModelConfig) -> None:
    """Check that a model's K and V can be held as asked for, before anything is loaded."""
    if config.cpu_kv_dtype == "int8" and model.head_dim % 8:
        raise ValueError(f"cpu_kv_dtype=int8 needs a head dim that 8 divides, and this model has {model.head_dim}")
    tiers = config.prefix_cache_tiers
    if model.windows is not None and config.enable_prefix_caching and tiers != "auto":
        raise ValueError(
            f"prefix_cache_tiers={tiers} needs a model that keeps all K and V, and this one's attention windows let "
            "them be overwritten: drop it"
        )
    if model.linear is not None and config.enable_prefix_caching and tiers != "auto" and config.num_cpu_blocks == 0:
        raise ValueError(
            f"prefix_cache_tiers={tiers} needs a CPU tier, and num_cpu_blocks is 0: this model has linear attention, "
            "whose states after a prefix are kept beside the CPU tier"
        )


def tier_formats(config: EngineConfig, dtype: torch.dtype) -> Mapping[Tier, KVFormat]:
    """The format of each tier. ``dtype``: of weights and activations."""
    return {Tier.GPU: KVFormat.exact(dtype), Tier.CPU: cpu_format(config.cpu_kv_dtype, dtype)}


def block_bytes(formats: Mapping[Tier, KVFormat], model: ModelConfig, block_size: int) -> Mapping[Tier, int]:
    """Bytes of a block of each tier, in all layers of a group."""
    return {tier: kv_format.block_bytes(model, block_size) for tier, kv_format in formats.items()}


# -- the tensors -------------------------------------------------------------------------------------------------------
# The tensors that hold the KV cache of both tiers.


@dataclass(frozen=True)
class KVPlan:
    """Number of blocks in each tier, their tokens, and their bytes in all layers of a group. ``num_snapshots``: copies
    of states of linear attention, in host memory beside the CPU tier."""

    num_blocks: Mapping[Tier, int]
    block_size: int
    bytes_per_block: Mapping[Tier, int]
    num_snapshots: int = 0

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
    """The KV cache of both tiers, each in its format; :meth:`~swiftllm.kv.tensors.KVFormat.pool_shape` has the shapes.

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
            return spread_tensor(shape, dtype)

        self.tensors = {tier: pool(tier) for tier in (Tier.GPU, Tier.CPU)}
        self.layers = {tier: [tensor[i] for i in self.groups.place_of] for tier, tensor in self.tensors.items()}
        self.num_written = 0

    def write(self, num_blocks: int, num_threads: int, progress: Callable[[float, str], None]) -> None:
        """Zero the first ``num_blocks`` blocks of each tier. Takes seconds, since the first write maps the pages.

        Those of host memory are written by ``num_threads`` threads of pacpu in turn: where :func:`spread_tensor` may
        not spread them, they so lie on the NUMA nodes of all threads that will read them.
        """
        from pacpu import zero  # simulations use formats, and do without native code

        layers = [(tier, layer[:num_blocks]) for tier in Tier for layer in self.tensors[tier]]
        for done, (tier, layer) in enumerate(layers):
            progress(done / len(layers), f"{num_blocks:,} blocks of each tier at most")
            if tier in self._on_device:
                layer.zero_()
            else:
                zero(layer, num_threads=num_threads)
        self.num_written = num_blocks


def spread_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A :func:`host_tensor` whose pages lie on all NUMA nodes in turn: any thread may read any block."""
    tensor = host_tensor(shape, dtype)
    spread_over_nodes(tensor.data_ptr(), tensor.nbytes)
    return tensor


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
