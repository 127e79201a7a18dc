"""How K and V lie in the blocks of a tier: as elements of the model's dtype, or as int8 codes with scales.

The GPU tier always holds elements. ``cpu_kv_dtype`` chooses for the CPU tier. Whoever writes to the CPU tier makes
codes of elements, whoever reads it for the device makes elements of codes. Both ways lie in :mod:`pacpu`; elements that
come from codes become the same codes again (:mod:`pacpu.int8`), so moving a request changes its bits once at most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from swiftllm.config import CpuKVDtype, EngineConfig
from swiftllm.core.request import Tier
from swiftllm.kv.layer_groups import LayerGroups
from swiftllm.model.config.model_config import ModelConfig

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
        """Shape of K and V of one KV head in a block.

        Raises:
            ValueError: int8 has no such block or head.
        """
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
    """Check that a model's K and V can be held as asked for, before anything is loaded.

    Raises:
        ValueError: they do not.
    """
    if config.cpu_kv_dtype == "int8" and model.head_dim % 8:
        raise ValueError(f"cpu_kv_dtype=int8 needs a head dim that 8 divides, and this model has {model.head_dim}")
    tiers = config.prefix_cache_tiers
    if model.windows is not None and config.enable_prefix_caching and tiers != "auto":
        raise ValueError(
            f"prefix_cache_tiers={tiers} needs a model that keeps all K and V, and this one's attention windows let "
            "them be overwritten: drop it"
        )


def tier_formats(config: EngineConfig, dtype: torch.dtype) -> Mapping[Tier, KVFormat]:
    """The format of each tier. ``dtype``: of weights and activations."""
    return {Tier.GPU: KVFormat.exact(dtype), Tier.CPU: cpu_format(config.cpu_kv_dtype, dtype)}


def block_bytes(formats: Mapping[Tier, KVFormat], model: ModelConfig, block_size: int) -> Mapping[Tier, int]:
    """Bytes of a block of each tier, in all layers of a group.

    Raises:
        ValueError: the model's heads have no int8 format.
    """
    return {tier: kv_format.block_bytes(model, block_size) for tier, kv_format in formats.items()}
