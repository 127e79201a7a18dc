"""The memory of GPU and host that an engine has for weights and KV cache, before the model is loaded."""

from __future__ import annotations

import torch

from apex.placement.budget import UniformLoad
from swiftllm.config import EngineConfig
from swiftllm.device.cuda import CONTEXT_BYTES
from swiftllm.kv.budget import CPU_TIER_SHARE, HOST_HEADROOM_BYTES
from swiftllm.kv.layer_groups import LayerGroups
from swiftllm.machine import GIB, available_host_bytes, gib_rounded_up
from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.weights.sizes import embedding_bytes, stage_bytes
from swiftllm.runtime.memory_estimate import estimate_memory
from swiftllm.runtime.processors import resolve_residual_dtype


class EngineMemory:
    """What fits where: a part of :class:`apex.placement.budget.CostModel`. All sizes are bytes.

    Attributes:
        usable_bytes: GPU memory for weights and KV cache.
        host_bytes: host memory for both, beside the embedding.
        embedding_bytes: of an embedding that leaves the GPU before other weights do.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, free_bytes: int) -> None:
        """``free_bytes``: the GPU's free memory."""
        self.config, self.model, self.dtype = config, model, dtype
        card_bytes = free_bytes + CONTEXT_BYTES  # the context has taken its memory already
        host_bytes = available_host_bytes()
        sizes = {"device_bytes": card_bytes, "host_bytes": host_bytes}
        residual_dtype = resolve_residual_dtype(config.model, dtype)
        budget = estimate_memory(config, model, dtype, residual_dtype=residual_dtype, **sizes)
        self.stage_bytes = stage_bytes(model, dtype)
        assert budget.weights is not None, "an estimate has them"
        self.weight_bytes, self.other_bytes = budget.weight_bytes, budget.weights.staying
        self.embedding_bytes = embedding_bytes(model, dtype)
        self.block_bytes = budget.bytes_per_block
        self.cpu_block_bytes = budget.host_block_bytes
        self.layer_groups = LayerGroups.of(model, config.block_size)
        self.kv_bytes_per_token = budget.bytes_per_block // config.block_size
        self.cpu_kv_bytes_per_token = budget.host_block_bytes // config.block_size
        self.usable_bytes = budget.usable_bytes
        self.host_bytes = host_bytes - HOST_HEADROOM_BYTES - self.embedding_bytes

    def given_bytes(self, memory_gib: float) -> float:
        """Bytes for resident stages and slots, and an embedding beside all of them, where weights may use
        ``memory_gib``.

        Raises:
            ValueError: it is too little, or the host does not hold the others.
        """
        gpu_bytes = memory_gib * GIB - self.other_bytes
        if gpu_bytes < 0:
            raise ValueError(
                f"weights_gpu_memory={memory_gib:g} GiB is less than vocabulary and norms, which stay on the GPU: "
                f"give at least {gib_rounded_up(self.other_bytes)}, or take a smaller model"
            )
        self._left_on_host(sum(self.stage_bytes) - gpu_bytes)
        return gpu_bytes

    def check_tiers(self) -> None:
        """Check that GPU and host together hold the weights.

        Raises:
            ValueError: they do not.
        """
        gpu_bytes, host_bytes = max(0, self.usable_bytes), max(0, self.host_bytes)
        if self.other_bytes > gpu_bytes or self.weight_bytes - self.embedding_bytes > gpu_bytes + host_bytes:
            raise ValueError(
                f"the weights take {self.weight_bytes / GIB:.1f} GiB, of which {self.other_bytes / GIB:.1f} stay on "
                f"the GPU: it has {gpu_bytes / GIB:.1f} GiB for them and the host {host_bytes / GIB:.1f}: "
                f"{self._remedy}"
            )

    def holds_all(self, workload: UniformLoad) -> bool:
        """Whether the GPU has room for all weights and the KV cache of a workload: the blocks asked for, else all
        requests at once at their full lengths."""
        blocks = self.config.num_gpu_blocks
        if blocks is None:
            each = self.layer_groups.blocks_for(int(workload.input_len + workload.output_len))
            blocks = workload.num_requests * each
        return self.usable_bytes - self.weight_bytes >= blocks * self.block_bytes

    def gpu_kv_bytes(self, weight_bytes: float) -> float:
        """That of the blocks asked for, else what is left; see :class:`apex.placement.budget.CostModel`."""
        asked = (self.config.num_gpu_blocks or 0) * self.block_bytes
        left = self.usable_bytes - weight_bytes
        if left < asked:
            raise ValueError(
                f"{weight_bytes / GIB:.2f} GiB of weights leave {max(0.0, left) / GIB:.2f} GiB of GPU memory, and the "
                f"KV blocks asked for take {asked / GIB:.2f}: lower num_gpu_blocks"
            )
        return left if self.config.num_gpu_blocks is None else asked

    def cpu_kv_bytes(self, off_gpu_bytes: float) -> float:
        """That of the blocks asked for, else a share of what is left."""
        asked = (self.config.num_cpu_blocks or 0) * self.cpu_block_bytes
        left = self._left_on_host(off_gpu_bytes, asked)
        return left * CPU_TIER_SHARE if self.config.num_cpu_blocks is None else asked

    def _left_on_host(self, off_gpu_bytes: float, kv_bytes: float = 0) -> float:
        """Host memory beside so many bytes of weights, which must hold ``kv_bytes``."""
        left = self.host_bytes - off_gpu_bytes
        if left < kv_bytes:
            blocks = f" and {kv_bytes / GIB:.1f} GiB of KV blocks" if kv_bytes else ""
            raise ValueError(
                f"{off_gpu_bytes / GIB:.1f} GiB of weights{blocks} would be the host's, which has "
                f"{max(0, self.host_bytes) / GIB:.1f} GiB: {self._remedy}"
            )
        return left

    @property
    def _remedy(self) -> str:
        remedy = "take 4-bit weights" if self.model.quantisation is None else "take a smaller model"
        return f"{remedy}, a host with more memory, or a GPU that holds them"
