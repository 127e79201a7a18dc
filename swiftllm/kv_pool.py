"""Memory of the KV cache: how many blocks fit in each tier, and the tensors that hold them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch

from swiftllm.config import EngineConfig
from swiftllm.model.config import ModelConfig
from swiftllm.ops import Ops
from swiftllm.plan import Swap
from swiftllm.request import Tier

GIB = 1 << 30
EMBEDDED_GPU_TIER_BYTES = 1 * GIB  # the "GPU" tier when the linear layers run on the CPU: small, as on the GPUs meant
EMBEDDED_CPU_TIER_BYTES = 4 * GIB
STAGING_BYTES = 64 << 20  # of blocks on their way between the tiers
HOST_HEADROOM_BYTES = GIB // 2  # left to activations and to everything else on the machine
CUDA_HEADROOM = 0.05  # share of the GPU's memory left to its context, libraries and fragmentation


class InsufficientMemory(RuntimeError):
    """The KV cache asked for does not fit; the message says what is there and how much is missing."""


class KVPools:
    """The KV cache of both tiers: ``[num_layers, num_blocks, num_kv_heads, 2, block_size, head_dim]`` each.

    ``layers[tier][layer]`` is one layer's view. Memory is not initialised.
    """

    def __init__(
        self, model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, ops: Ops
    ) -> None:
        """``ops`` copies blocks on ``device`` and in host memory.

        Raises:
            InsufficientMemory: the numbers of blocks in ``config`` do not fit.
        """
        self._ops = ops
        self.block_size = config.block_size
        self.bytes_per_block = model.kv_bytes_per_token(dtype.itemsize) * config.block_size
        self.num_blocks = _plan_blocks(model, config, device, dtype, self.bytes_per_block)

        def shape(tier: Tier) -> tuple[int, ...]:
            blocks = self.num_blocks[tier]
            return (model.num_layers, blocks, model.num_kv_heads, 2, config.block_size, model.head_dim)

        on_host = device.type == "cpu"
        self.tensors = {
            Tier.GPU: host_tensor(shape(Tier.GPU), dtype)
            if on_host
            else torch.empty(shape(Tier.GPU), dtype=dtype, device=device),
            Tier.CPU: host_tensor(shape(Tier.CPU), dtype),
        }
        self.layers = {tier: list(tensor.unbind(0)) for tier, tensor in self.tensors.items()}

    def swap(self, swaps: Sequence[Swap]) -> None:
        """Copy blocks between the tiers, in the order given: a later swap may fill blocks an earlier one emptied."""
        for source_tier, run in groupby(swaps, key=lambda swap: swap.source):
            pairs = list(_block_pairs(run))
            # In batches: the gathered copies in between stay small.
            batch = max(1, STAGING_BYTES // self.bytes_per_block)
            for first in range(0, len(pairs), batch):
                self._copy(source_tier, *torch.tensor(pairs[first : first + batch]).T.contiguous())

    def _copy(self, source_tier: Tier, sources: torch.Tensor, targets: torch.Tensor) -> None:
        source, target = self.tensors[source_tier], self.tensors[source_tier.other]
        shape = (source.shape[0], len(sources), *source.shape[2:])
        staging = torch.empty(shape, dtype=source.dtype, device=source.device)
        self._ops.gather_blocks(source, sources.to(source.device), staging)
        self._ops.scatter_blocks(staging.to(target.device), target, targets.to(target.device))


def host_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in anonymous memory of its own, in huge pages where the system grants them.

    Pages come into being on the NUMA node of the thread that first writes them, and cost nothing before.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def available_host_bytes() -> int:
    """Host memory that can be taken without swapping: the machine's, or the container's where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no control group, or "max": no limit
        return available
    return min(available, limit - used + int(statistics.get("inactive_file", 0)))


def _block_pairs(swaps: Iterator[Swap]) -> Iterator[tuple[int, int]]:
    for swap in swaps:
        yield from zip(swap.source_blocks, swap.target_blocks, strict=True)


def _plan_blocks(
    model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype, bytes_per_block: int
) -> dict[Tier, int]:
    host = available_host_bytes()
    if device.type == "cpu":
        default_gpu_bytes = min(EMBEDDED_GPU_TIER_BYTES, host // 4)
        default_cpu_bytes = min(EMBEDDED_CPU_TIER_BYTES, host // 2)
    else:
        default_gpu_bytes = available_cuda_bytes(model, config, device, dtype)
        default_cpu_bytes = host // 2

    def blocks(requested: int | None, default_bytes: int) -> int:
        return max(0, default_bytes) // bytes_per_block if requested is None else requested

    num_blocks = {
        Tier.GPU: blocks(config.num_gpu_blocks, default_gpu_bytes),
        Tier.CPU: blocks(config.num_cpu_blocks, default_cpu_bytes),
    }
    sizes = {tier: count * bytes_per_block for tier, count in num_blocks.items()}
    if device.type == "cpu":
        checks = [("host", "num_gpu_blocks + num_cpu_blocks", sum(sizes.values()), host - HOST_HEADROOM_BYTES)]
    else:
        checks = [
            ("GPU", "num_gpu_blocks", sizes[Tier.GPU], default_gpu_bytes),
            ("host", "num_cpu_blocks", sizes[Tier.CPU], host - HOST_HEADROOM_BYTES),
        ]
    for where, what, needed, there in checks:
        if needed > max(0, there):
            missing_blocks = -(-(needed - max(0, there)) // bytes_per_block)
            raise InsufficientMemory(
                f"a KV cache of {what} = {needed // bytes_per_block} blocks takes {needed / GIB:.2f} GiB of {where} "
                f"memory and {max(0, there) / GIB:.2f} GiB can be had: ask for {missing_blocks} blocks less"
            )
    return num_blocks


def available_cuda_bytes(model: ModelConfig, config: EngineConfig, device: torch.device, dtype: torch.dtype) -> int:
    """GPU memory left for KV blocks once the weights are there: what is free, less activations and headroom."""
    free, total = torch.cuda.mem_get_info(device)
    # Widest point of a boundary: gate_up and its product beside hidden, residual and QKV; logits in two precisions.
    row = 3 * model.intermediate_size + model.qkv_size + 4 * model.hidden_size
    activations = config.max_num_batched_tokens * row * dtype.itemsize
    logits = config.max_num_seqs * model.vocab_size * (dtype.itemsize + 8)
    return int(free - activations - logits - CUDA_HEADROOM * total)
