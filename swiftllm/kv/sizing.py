"""Memory sizing: whether the weights fit, and how many KV blocks fit beside weights and activations.

Plain arithmetic on byte counts. Callers measure these, so tests can choose them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.machine import GIB, InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.model.packed_tensor import packed_bytes
from swiftllm.model.placement import Placement
from swiftllm.model.quantised.scheme import AWQ, QuantisationScheme
from swiftllm.model.weights import LlamaWeights, fused_matrices

EMBEDDED_GPU_TIER_BYTES = 1 * GIB  # the "GPU" tier without a GPU: small, as on the GPUs this engine is for
EMBEDDED_CPU_TIER_BYTES = 4 * GIB
HOST_HEADROOM_BYTES = GIB // 2  # left free for activations and other processes
GROUP_SIZES = (128, 64, 32, 16)  # of 4-bit weights, the usual one first


def weight_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights on the device in ``dtype``, whatever dtype the checkpoint has.

    Quantised matrices stay packed, with scales of 16 bits. That a checkpoint leaves single modules of a layer in 16
    bits is not known before it is read.
    """
    weights = LlamaWeights.empty(model, "meta", dtype)
    total = sum(tensor.nbytes for tensor in weights.by_checkpoint_name(model).values())
    if model.quantisation is None:
        return total
    packed = weights.empty_quantised(model, "meta", torch.float16)
    orders = sum(4 * matrix.in_features for matrix in packed) if model.quantisation.ordered else 0
    return total + orders + sum(matrix.nbytes for matrix in packed)


def boundary_bytes(model: ModelConfig, dtype: torch.dtype) -> list[int]:
    """Bytes of what may be elsewhere than on the device, for each boundary from -1 on; see :func:`weight_bytes`."""
    weights = LlamaWeights.empty(model, "meta", dtype)
    if model.quantisation is not None:
        weights.empty_quantised(model, "meta", torch.float16)
    return [packed_bytes(weights.take_linears(boundary)) for boundary in range(-1, model.num_layers)]


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights: all, those that stay on a GPU in every placement, and all of them in 4 bits.

    ``four_bit`` is None where they are quantised already, or no size of groups divides the matrices.
    """

    total: int
    staying: int
    four_bit: int | None

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype) -> WeightSizes:
        total = weight_bytes(model, dtype)
        return cls(total, total - sum(boundary_bytes(model, dtype)), _four_bit_bytes(model, dtype))

    def advice(self, device_bytes: int, host_bytes: int) -> str:
        """What can be done where all weights do not fit a GPU, with the numbers.

        Args:
            device_bytes: of the GPU, for weights and KV cache.
            host_bytes: available host memory.
        """
        device_bytes, host_bytes = max(0, device_bytes), max(0, host_bytes - HOST_HEADROOM_BYTES)
        ways = []
        if self.staying <= device_bytes and self.total <= device_bytes + host_bytes:
            ways.append(
                f"give --weights-gpu-memory auto: {(self.total - device_bytes) / GIB:.1f} GiB or more of them would "
                f"be in host memory, where {host_bytes / GIB:.1f} GiB are free"
            )
        if self.four_bit is not None and self.four_bit <= device_bytes:
            ways.append(f"take 4-bit weights, {self.four_bit / GIB:.1f} GiB, which fit")
        elif self.four_bit is not None and self.four_bit <= device_bytes + host_bytes and self.staying <= device_bytes:
            ways.append(f"take 4-bit weights, {self.four_bit / GIB:.1f} GiB, with --weights-gpu-memory auto")
        if not ways:
            return (
                f"GPU and host, with {device_bytes / GIB:.1f} and {host_bytes / GIB:.1f} GiB for them, do not hold "
                "them together either: take a smaller model, a larger GPU or more host memory"
            )
        return ", or ".join(ways)


def _four_bit_bytes(model: ModelConfig, dtype: torch.dtype) -> int | None:
    if model.quantisation is not None:
        return None
    for group_size in GROUP_SIZES:
        if all(matrix.in_features % group_size == 0 for matrix in fused_matrices(model)):
            return weight_bytes(replace(model, quantisation=QuantisationScheme(AWQ, group_size)), dtype)
    return None


def check_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    free_bytes: int,
    placement: Placement | None = None,
    *,
    host_bytes: int | None = None,
) -> None:
    """Check that the weights fit, before any is loaded.

    ``placement``: by default all are on the device. ``host_bytes``: available host memory, if weights may be placed
    there.

    Raises:
        InsufficientMemory: the weights alone exceed the device's free memory; the message says what to do.
    """
    needed = weight_bytes(model, dtype)
    is_placed = placement is not None and not placement.is_all_resident
    if is_placed:
        sizes = boundary_bytes(model, dtype)
        needed += int(placement.gpu_bytes(sizes)) - sum(sizes)
    if needed > free_bytes:
        if is_placed:
            remedy = "take a smaller weights_gpu_memory, or auto"
        elif host_bytes is not None:
            remedy = f"free memory, or {WeightSizes.of(model, dtype).advice(free_bytes, host_bytes)}"
        else:
            remedy = "free memory, or take a narrower dtype or a smaller model"
        raise InsufficientMemory(
            f"the model's weights take {needed / GIB:.2f} GiB in {str(dtype).removeprefix('torch.')} and "
            f"{free_bytes / GIB:.2f} GiB is available: {(needed - free_bytes) / GIB:.2f} GiB are missing; {remedy}"
        )


@dataclass(frozen=True)
class KVPlan:
    """Number of blocks in each tier, and their size."""

    num_blocks: Mapping[Tier, int]
    block_size: int
    bytes_per_block: int

    def describe(self, max_model_len: int) -> list[str]:
        """One line per tier: blocks, tokens, GiB, and how many requests of ``max_model_len`` tokens it holds."""
        blocks_per_request = -(-max_model_len // self.block_size)
        return [
            f"{tier.value.upper()} tier: {blocks:,} blocks of {self.block_size} = {blocks * self.block_size:,} tokens, "
            f"{blocks * self.bytes_per_block / GIB:.2f} GiB, {blocks / blocks_per_request:,.1f} requests of "
            f"{max_model_len:,} tokens"
            for tier, blocks in self.num_blocks.items()
        ]


def plan_blocks(config: EngineConfig, bytes_per_block: int, host_bytes: int, device_bytes: int | None) -> KVPlan:
    """The number of blocks in each tier: as set in ``config``, else a share of the available memory.

    ``host_bytes``: available host memory. ``device_bytes``: GPU memory left by weights, activations and headroom;
    None: no GPU, and both tiers share the host memory.

    Raises:
        InsufficientMemory: the blocks set in ``config``, or a single block, do not fit.
    """
    host_limit = host_bytes - HOST_HEADROOM_BYTES
    if device_bytes is None:
        default_bytes = {
            Tier.GPU: min(EMBEDDED_GPU_TIER_BYTES, host_bytes // 4),
            Tier.CPU: min(EMBEDDED_CPU_TIER_BYTES, host_bytes // 2),
        }
    else:
        default_bytes = {Tier.GPU: device_bytes, Tier.CPU: host_bytes // 2}
    asked = {Tier.GPU: config.num_gpu_blocks, Tier.CPU: config.num_cpu_blocks}
    num_blocks = {
        tier: max(0, default_bytes[tier]) // bytes_per_block if count is None else count
        for tier, count in asked.items()
    }
    if device_bytes is None:
        checks = [("host", "num_gpu_blocks + num_cpu_blocks", sum(num_blocks.values()), host_limit)]
    else:
        if asked[Tier.GPU] is None and num_blocks[Tier.GPU] == 0:
            raise InsufficientMemory(
                f"weights and activations leave no room for a KV cache: a block takes {bytes_per_block / GIB:.4f} GiB "
                f"and {(bytes_per_block - device_bytes) / GIB:.2f} GiB are missing for the first; lower "
                "max_num_batched_tokens or max_num_seqs, or set num_gpu_blocks=0 to keep all KV cache on the host"
            )
        checks = [
            ("GPU", "num_gpu_blocks", num_blocks[Tier.GPU], device_bytes),
            ("host", "num_cpu_blocks", num_blocks[Tier.CPU], host_limit),
        ]
    for where, what, blocks, there in checks:
        needed, there = blocks * bytes_per_block, max(0, there)
        if needed > there:
            raise InsufficientMemory(
                f"a KV cache of {what} = {blocks} blocks takes {needed / GIB:.2f} GiB of {where} memory and "
                f"{there / GIB:.2f} GiB is available: ask for {-(-(needed - there) // bytes_per_block)} blocks less"
            )
    return KVPlan(num_blocks, config.block_size, bytes_per_block)
