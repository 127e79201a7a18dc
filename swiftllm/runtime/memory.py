"""What fits: bytes of weights and activations, and how many KV blocks the memory of GPU and host then holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.kv.tensors import KVPlan
from swiftllm.machine import GIB, InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import Placement
from swiftllm.model.quantisation import AWQ, MXFP4, QuantisationScheme
from swiftllm.model.weight_memory import packed_bytes
from swiftllm.model.weights import EXPERT_MATRICES, LinearTensors, LlamaWeights, fused_matrices, linear_matrices
from swiftllm.ops.matrices import MXFP4_GROUP, QuantisedMatrix

# -- bytes of weights --------------------------------------------------------------------------------------------------
# Bytes of a model's weights, before any is read: all, those of each stage, and all in 4 bits.

GROUP_SIZES = (128, 64, 32, 16)  # of 4-bit weights, the usual one first


def weight_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights on the device in ``dtype``, whatever dtype the checkpoint has.

    Quantised matrices stay packed, with scales of 16 bits; those that the checkpoint has in 16 bits do not.
    """
    weights = LlamaWeights.empty(model, "meta", dtype)
    total = sum(tensor.nbytes for tensor in weights.by_checkpoint_name(model).values())
    if model.quantisation is None:
        return total
    matrices = weights.empty_quantised(model, "meta", dtype)
    packed = [matrix for matrix in matrices if isinstance(matrix, QuantisedMatrix)]
    orders = sum(4 * matrix.in_features for matrix in packed) if model.quantisation.ordered else 0
    return total + orders + sum(matrix.nbytes for matrix in matrices)


def stage_bytes(model: ModelConfig, dtype: torch.dtype) -> list[int]:
    """Bytes of what may be elsewhere than on the device, for each stage from -1 on; see :func:`weight_bytes`."""
    return [packed_bytes(linears) for linears in _linears(model, dtype)]


def expert_bytes(model: ModelConfig, dtype: torch.dtype) -> list[int]:
    """Of :func:`stage_bytes` those of the experts."""
    if model.experts is None:
        return [0] * (model.num_layers + 1)
    return [
        packed_bytes(tuple(linears[name] for name in EXPERT_MATRICES if name in linears))
        for linears in _linears(model, dtype)
    ]


def _linears(model: ModelConfig, dtype: torch.dtype) -> list[dict[str, LinearTensors]]:
    """The matrices of each stage from -1 on, without memory."""
    weights = LlamaWeights.empty(model, "meta", dtype)
    if model.quantisation is not None:
        weights.empty_quantised(model, "meta", dtype)
    return [weights.take_linears(stage) for stage in range(-1, model.num_layers)]


def embedding_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of an embedding that may be in host memory: none where it is the vocabulary's matrix too."""
    return 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * dtype.itemsize


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
        if model.has_swiglu_limit:
            scheme: QuantisationScheme | None = QuantisationScheme(MXFP4, MXFP4_GROUP)
        else:
            inputs = [matrix.in_features for matrix in (*fused_matrices(model), *linear_matrices(model))]
            group_size = next((size for size in GROUP_SIZES if all(n % size == 0 for n in inputs)), None)
            scheme = None if group_size is None else QuantisationScheme(AWQ, group_size)
        four_bit = None
        if model.quantisation is None and scheme is not None:
            four_bit = weight_bytes(replace(model, quantisation=scheme), dtype)
        elsewhere = sum(stage_bytes(model, dtype)) + embedding_bytes(model, dtype)
        return cls(total, total - elsewhere, four_bit)


# -- how many KV blocks fit --------------------------------------------------------------------------------------------
# How many KV blocks fit: a memory, less weights, activations, graphs and headroom, over the bytes of a block.
#
# Plain arithmetic on bytes, which the callers find out in their own ways: the engine measures at its start,
# ``swiftllm/runtime/memory_estimate.py`` estimates before anything is loaded, and ``apex/simulator`` reads data sheets.

HOST_HEADROOM_BYTES = GIB // 2  # left free for activations and other processes
CPU_TIER_SHARE = 0.5  # of host memory, by default: page caches and other programs grow meanwhile
SNAPSHOT_SHARE = 0.2  # of the CPU tier's bytes, with a prefix cache: snapshots of states of linear attention
EMBEDDED_GPU_TIER_BYTES = 1 * GIB  # the "GPU" tier without a GPU: small, as on the GPUs this engine is for
EMBEDDED_CPU_TIER_BYTES = 4 * GIB

# Of machines that are not at hand only a data sheet's gigabytes are known, so the simulator takes shares of these where
# the engine subtracts what it measures. Recorded results were made with these numbers.
SIMULATED_GPU_SHARE = 0.9  # for weights and KV cache; activations, the driver and the CUDA context need the rest
SIMULATED_HOST_SHARE = 0.9  # for weights and the CPU tier together


def blocks_in(free_bytes: float, bytes_per_block: int) -> int:
    """Whole blocks in so much memory; none where it is overdrawn."""
    return max(0, int(free_bytes // bytes_per_block))


@dataclass(frozen=True)
class MemoryBudget:
    """What a card and its host hold of a model, in bytes, and the KV blocks that fit beside it.

    Attributes:
        device_bytes: the card's memory that may be used. None: no card, weights and both pools lie in host memory.
        host_bytes: available host memory.
        weight_bytes: of all weights.
        bytes_per_block: K and V of a block in all layers of a group.
        cpu_bytes_per_block: the same in the CPU tier; None: its format is no other.
        activation_bytes: at the peak of the widest iteration, with the buffers that stay.
        reserved_bytes: for the CUDA context, captured graphs, libraries and fragmentation; without a card, of the host.
        host_headroom_bytes: of the host beside a card, for the engine's process, its pinned buffers and all else.
        weights: their sizes if they are placed elsewhere or quantised, for advice; None of predicted machines.
    """

    device_bytes: float | None
    host_bytes: float
    weight_bytes: int
    bytes_per_block: int
    activation_bytes: int = 0
    reserved_bytes: int = 0
    host_headroom_bytes: int = 0
    weights: WeightSizes | None = None
    cpu_bytes_per_block: int | None = None

    @property
    def host_block_bytes(self) -> int:
        """Of a block in the CPU tier."""
        return self.bytes_per_block if self.cpu_bytes_per_block is None else self.cpu_bytes_per_block

    @property
    def usable_bytes(self) -> float:
        """For weights and KV cache: of the card, without one of the host."""
        all_bytes = self.host_bytes if self.device_bytes is None else self.device_bytes
        return all_bytes - self.activation_bytes - self.reserved_bytes

    @property
    def max_gpu_blocks(self) -> int:
        """Blocks that fit beside weights, activations and reserve. Without a card both pools share the memory."""
        return blocks_in(self.usable_bytes - self.weight_bytes, self.bytes_per_block)

    @property
    def max_cpu_blocks(self) -> int:
        """Blocks that fit the host beside its headroom."""
        if self.device_bytes is None:
            return blocks_in(self.usable_bytes - self.weight_bytes, self.host_block_bytes)
        return blocks_in(self.host_bytes - self.host_headroom_bytes, self.host_block_bytes)

    def check(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        """Check that pools of these numbers of blocks fit."""
        room_bytes = self.usable_bytes - self.weight_bytes
        weights, activations, reserved = map(_gib, (self.weight_bytes, self.activation_bytes, self.reserved_bytes))
        parts = f"Needed are weights {weights}, activations {activations}, {reserved}"
        host = f"the host has {_gib(self.host_bytes)} of memory available"
        if self.device_bytes is None:
            blocks = num_gpu_blocks + num_cpu_blocks
            needed = num_gpu_blocks * self.bytes_per_block + num_cpu_blocks * self.host_block_bytes
            if needed > room_bytes:
                most = self.max_gpu_blocks if self.host_block_bytes == self.bytes_per_block else None
                raise InsufficientMemory(
                    f"{host}. {parts} of headroom, and "
                    f"{_words('num_gpu_blocks + num_cpu_blocks', blocks, needed, most)}. Lower both "
                    "numbers, or take a smaller model"
                )
            return
        if num_gpu_blocks * self.bytes_per_block > room_bytes:
            most = self.max_gpu_blocks
            if self.weight_bytes + self.reserved_bytes > self.device_bytes:
                assert self.weights is not None, "a budget without the sizes that advice is about"
                advice = weights_advice(self.weights, self.usable_bytes, self.host_bytes)
                remedy = f"The weights alone do not fit: {advice}"
            elif most == 0:
                remedy = (
                    "Lower max_num_batched_tokens, max_num_seqs or max_model_len, or give --weights-gpu-memory auto"
                )
            else:
                remedy = f"Set num_gpu_blocks to {most:,}, or lower max_num_batched_tokens"
            raise InsufficientMemory(
                f"the GPU has {_gib(self.device_bytes)} of memory. {parts} for CUDA and headroom, and "
                f"{_words('num_gpu_blocks', num_gpu_blocks, num_gpu_blocks * self.bytes_per_block, most)}. {remedy}"
            )
        if num_cpu_blocks > (most := self.max_cpu_blocks):
            needed = num_cpu_blocks * self.host_block_bytes
            raise InsufficientMemory(
                f"{host}. Needed are {_gib(self.host_headroom_bytes)} for the engine's process, its pinned buffers and "
                f"the system, and {_words('num_cpu_blocks', num_cpu_blocks, needed, most)}. Set num_cpu_blocks to "
                f"{most:,}, end other programs, or take a machine with more memory"
            )


def _words(name: str, blocks: int, num_bytes: int, most: int | None) -> str:
    fit = "" if most is None else f"; {most:,} blocks fit"
    return f"{_gib(num_bytes)} for {name} = {blocks:,} blocks{fit}"


def snapshots_beside(tier_bytes: float, state_bytes: int) -> int:
    """Snapshots of states of linear attention beside blocks of the CPU tier of so many bytes."""
    return int(tier_bytes * SNAPSHOT_SHARE / (1 - SNAPSHOT_SHARE) // state_bytes)


def choose_blocks(
    given: tuple[int | None, int | None], most: tuple[int, int], defaults: tuple[int, int]
) -> tuple[int, int]:
    """Blocks of the GPU and the CPU tier of a predicted machine: the given numbers, else the defaults."""
    for name, number, limit in zip(("num_gpu_blocks", "num_cpu_blocks"), given, most, strict=True):
        if number is not None and number > limit:
            raise ValueError(f"{name}={number} exceeds the memory, which holds at most {limit}")
    gpu, cpu = (default if number is None else number for number, default in zip(given, defaults, strict=True))
    return gpu, cpu


# -- weights ----------------------------------------------------------------------------------------------------------


def check_weights(
    model: ModelConfig,
    dtype: torch.dtype,
    free_bytes: int,
    placement: Placement | None = None,
    *,
    host_bytes: int | None = None,
    max_num_seqs: int = 0,
) -> None:
    """Check that the weights fit, before any is loaded, and beside them the states of linear attention.

    ``placement``: by default all are on the device. ``host_bytes``: available host memory, if weights may be placed
    there. ``max_num_seqs``: requests that have a state.

    Raises:
        InsufficientMemory: the weights, with the states of linear attention, exceed the device's free memory; the
            message says what to do.
    """
    needed = weight_bytes(model, dtype)
    placed = None if placement is None or placement.is_all_resident else placement
    if placed is not None:
        sizes = stage_bytes(model, dtype)
        needed += int(placed.gpu_bytes(sizes, expert_bytes(model, dtype))) - sum(sizes)
    if placement is not None and placement.embedding_on_host:
        needed -= embedding_bytes(model, dtype)
    if needed <= free_bytes:
        check_states(model, dtype, max_num_seqs, free_bytes - needed)
        return
    if placed is not None:
        remedy = "take a smaller weights_gpu_memory, or auto"
    elif host_bytes is not None:
        remedy = f"free memory, or {weights_advice(WeightSizes.of(model, dtype), free_bytes, host_bytes)}"
    else:
        remedy = "free memory, or take a narrower dtype or a smaller model"
    raise InsufficientMemory(
        f"the model's weights take {_gib(needed)} in {str(dtype).removeprefix('torch.')} and {_gib(free_bytes)} is "
        f"available: {_gib(needed - free_bytes)} are missing; {remedy}"
    )


def check_states(model: ModelConfig, dtype: torch.dtype, max_num_seqs: int, free_bytes: float) -> None:
    """Check that the states of ``max_num_seqs`` requests fit in what is free beside the weights.

    Raises:
        InsufficientMemory: they do not; the message names a number that does.
    """
    each = model.state_bytes(dtype.itemsize)
    if max_num_seqs * each <= free_bytes:
        return
    fit = int(free_bytes // each)
    remedy = f"set max_num_seqs to {fit} or less, so that K and V have room too" if fit else "take a smaller model"
    raise InsufficientMemory(
        f"the states of max_num_seqs = {max_num_seqs} requests take {_gib(max_num_seqs * each)}, and beside the "
        f"weights {_gib(free_bytes)} is available: {remedy}"
    )


def weights_advice(sizes: WeightSizes, device_bytes: float, host_bytes: float) -> str:
    """What can be done where all weights do not fit a GPU, with the numbers.

    Args:
        device_bytes: of the GPU, for weights and KV cache.
        host_bytes: available host memory.
    """
    device_bytes, host_bytes = max(0, device_bytes), max(0, host_bytes - HOST_HEADROOM_BYTES)
    stays = sizes.staying <= device_bytes
    ways = []
    if stays and sizes.total <= device_bytes + host_bytes:
        ways.append(
            f"give --weights-gpu-memory auto: {(sizes.total - device_bytes) / GIB:.1f} GiB or more of them would "
            f"be in host memory, where {host_bytes / GIB:.1f} GiB are free"
        )
    if sizes.four_bit is not None and sizes.four_bit <= device_bytes + (host_bytes if stays else 0):
        how = ", which fit" if sizes.four_bit <= device_bytes else ", with --weights-gpu-memory auto"
        ways.append(f"take 4-bit weights, {sizes.four_bit / GIB:.1f} GiB{how}")
    return ", or ".join(ways) or (
        f"GPU and host, with {device_bytes / GIB:.1f} and {host_bytes / GIB:.1f} GiB for them, do not hold "
        "them together either: take a smaller model, a larger GPU or more host memory"
    )


# -- the engine's start -----------------------------------------------------------------------------------------------


def plan_blocks(
    config: EngineConfig,
    bytes_per_block: Mapping[Tier, int],
    host_bytes: int,
    device_bytes: int | None,
    state_bytes: int = 0,
) -> KVPlan:
    """The number of blocks in each tier: as set in ``config``, else a share of the available memory.

    ``host_bytes``: available host memory. ``device_bytes``: GPU memory left by weights, activations and headroom;
    None: no GPU, and both tiers share the host memory. ``state_bytes``: of a request's state of linear attention, of
    which snapshots take a share of the CPU tier.

    Raises:
        InsufficientMemory: the blocks set in ``config``, or a single block, do not fit.
    """
    cpu_bytes = host_bytes * CPU_TIER_SHARE
    if device_bytes is None:
        gpu_bytes, cpu_bytes = min(EMBEDDED_GPU_TIER_BYTES, host_bytes / 4), min(EMBEDDED_CPU_TIER_BYTES, cpu_bytes)
    else:
        gpu_bytes = device_bytes
    of_gpu, of_cpu = bytes_per_block[Tier.GPU], bytes_per_block[Tier.CPU]
    gpu = blocks_in(gpu_bytes, of_gpu) if config.num_gpu_blocks is None else config.num_gpu_blocks
    share = SNAPSHOT_SHARE if state_bytes and config.enable_prefix_caching else 0.0
    cpu = blocks_in(cpu_bytes * (1 - share), of_cpu) if config.num_cpu_blocks is None else config.num_cpu_blocks
    num_snapshots = snapshots_beside(cpu * of_cpu, state_bytes) if share else 0
    with_snapshots = cpu * of_cpu + num_snapshots * state_bytes
    host_limit = host_bytes - HOST_HEADROOM_BYTES
    if device_bytes is None:
        needed = gpu * of_gpu + with_snapshots
        most = gpu + cpu - -(-(needed - max(0, host_limit)) // of_cpu)
        checks = [("host", "num_gpu_blocks + num_cpu_blocks", gpu + cpu, needed, most, host_limit)]
    else:
        if config.num_gpu_blocks is None and gpu == 0:
            raise InsufficientMemory(
                f"weights and activations leave no room for a KV cache: a block takes {of_gpu / GIB:.4f} GiB "
                f"and {_gib(of_gpu - device_bytes)} are missing for the first; lower "
                "max_num_batched_tokens or max_num_seqs, or set num_gpu_blocks=0 to keep all KV cache on the host"
            )
        checks = [
            ("GPU", "num_gpu_blocks", gpu, gpu * of_gpu, device_bytes // of_gpu, device_bytes),
            ("host", "num_cpu_blocks", cpu, with_snapshots, blocks_in(host_limit * (1 - share), of_cpu), host_limit),
        ]
    for where, what, blocks, needed, most, there in checks:
        there = max(0, there)
        if needed > there:
            beside = ", with snapshots of states," if num_snapshots and where == "host" else ""
            raise InsufficientMemory(
                f"a KV cache of {what} = {blocks} blocks{beside} takes {_gib(needed)} of {where} memory and "
                f"{_gib(there)} is available: ask for {blocks - max(0, most)} blocks less"
            )
    return KVPlan({Tier.GPU: gpu, Tier.CPU: cpu}, config.block_size, bytes_per_block, num_snapshots)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
