"""A model whose weights are in memory, before the KV cache takes the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from swiftllm.config import EngineConfig
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.kv.tensors import block_bytes, tier_formats
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.placement import Placement
from swiftllm.model.stages import LoadedWeights
from swiftllm.runtime.execution_context import ExecutionContext
from swiftllm.runtime.graphs import LayerGraphs
from swiftllm.runtime.memory import widest_iteration
from swiftllm.sampling.sampler import PromptScorer, Sampler


class LoadedModel:
    """
    Attributes:
        processors: what computes it.
        model_config: of the whole model; ``model.config`` has the sizes of what this process computes of it.
        placement: where the weights are.
        graphs: the memory of captured graphs, which are not captured yet; None where there can be none.
        kv_formats, bytes_per_block: how each tier holds K and V; bytes of a block of it, in all layers of a group.
        free_bytes: of the device, beside what the widest iteration needs. None: the device's memory is the host's.
    """

    def __init__(
        self,
        config: EngineConfig,
        processors: ExecutionContext,
        model_config: ModelConfig,
        sizes: ModelConfig,
        weights: LoadedWeights,
        placement: Placement,
        all_agree: Callable[[bool], bool] | None = None,
    ) -> None:
        """Put ``weights`` of these ``sizes`` to use, and measure what an iteration needs beside them.

        ``all_agree``: see :class:`~swiftllm.runtime.graphs.LayerGraphs`.
        """
        hardware, dtype = processors.hardware, processors.dtype
        longest = model_config.longest_request(config.max_model_len)
        self.processors, self.model_config, self.placement = processors, model_config, placement
        self.model = LlamaModel(sizes, weights, processors.ops, longest, processors.residual_dtype)
        self.sampler = Sampler(config.seed, hardware, processors.ops.make_draw())
        self.prompt_scorer = PromptScorer(model_config.vocab_size, hardware)
        self.kv_formats = tier_formats(config, dtype)
        self.bytes_per_block = block_bytes(self.kv_formats, sizes, config.block_size)
        self.graphs: LayerGraphs | None = None
        if hardware.can_capture:
            most = {"max_rows": config.max_num_seqs, "max_blocks": -(-longest // config.block_size)}
            where = {"layer_groups": LayerGroups.of(sizes, config.block_size), "placement": placement}
            self.graphs = LayerGraphs(hardware, self.model, dtype, all_agree=all_agree, **most, **where)
        self.free_bytes = hardware.left_free(partial(widest_iteration, self.model, self.sampler, config, dtype))
