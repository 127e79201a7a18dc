"""What each rank holds of a model, and its matrices with the sums over ranks that they need.

Query, key and value heads are divided, with their sinks and gates, and so are the rows of gate and up of the FFN, or of
each expert. The outputs of attention and FFN (the matrices ``o`` and ``down``) are sums over ranks, so each layer has
two. The embedding and the vocabulary's matrix are divided by tokens. Norms and routers are whole on every rank.

In linear attention a rank has some of the key heads and all of their value heads: their rows of the input's matrices
and of the convolution, and their states. Its output (the matrix ``out_proj``) is a sum over ranks.

A quantised matrix is divided in the same places: outputs and inputs in whole words of codes, inputs in whole groups.
With act-order a rank's inputs are of all groups, so it has the scales of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain

import torch

from swiftllm.config import EngineConfig
from swiftllm.device import Device
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import all_resident
from swiftllm.model.quantised_weights import IN, OUT, Axis
from swiftllm.model.stages import LoadedWeights, StageWeights, read_weights
from swiftllm.model.weights import LINEAR_PARTS, LlamaWeights, ModelPart
from swiftllm.ops.interface import Linear, Ops
from swiftllm.parallel.communication import Group
from swiftllm.runtime.execution_context import ExecutionContext, read_model_config
from swiftllm.runtime.memory import check_weights
from swiftllm.runtime.torch_backend import LoadedModel

# -- what a rank holds -------------------------------------------------------------------------------------------------

OF_LINEAR = ("in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba")
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", *OF_LINEAR, *chain(*LINEAR_PARTS.values()))
BY_COLUMNS = ("o_proj", "out_proj", "down_proj")
BY_HEADS = ("sinks", "A_log", "dt_bias")
BY_TOKENS = ("embed_tokens", "lm_head")


class Shard(ModelPart):
    """See :class:`swiftllm.model.weights.ModelPart`."""

    def __init__(self, model: ModelConfig, rank: int, size: int) -> None:
        """``model``: the whole one."""
        super().__init__(model.shard(size))
        self._rank = rank
        self._size = size

    def slices(self, name: str, shape: Sequence[int], axes: Sequence[Axis] = (OUT, IN)) -> tuple[slice, ...]:
        module, kind = name.rsplit(".", 2)[-2:]
        if module in BY_TOKENS:
            return (self._share(self.sizes.vocab_size),)
        if kind in BY_HEADS:
            return (self._share(shape[0] // self._size),)
        if module in BY_COLUMNS and kind == "bias":
            return (slice(None) if self._rank == 0 else slice(0, 0),)  # added once: to rank 0's part of the sum
        divided = OUT if module in BY_ROWS else IN if module in BY_COLUMNS else None
        slices = [slice(None)]
        for number, (axis, count) in enumerate(zip(axes, shape, strict=False)):  # a bias has no inputs
            if axis == divided:
                if count % self._size:
                    raise ValueError(f"{name} has shape {list(shape)}, which {self._size} ranks cannot divide")
                slices = [slice(None)] * number + [self._share(count // self._size)]
        return tuple(slices)

    def _share(self, count: int) -> slice:
        return slice(self._rank * count, (self._rank + 1) * count)


class ShardedWeights(LoadedWeights):
    """A rank's matrices, completed by the other ranks."""

    def __init__(self, sizes: ModelConfig, weights: LlamaWeights, ops: Ops, group: Group, vocab_size: int) -> None:
        """``sizes`` and ``weights``: the rank's part, of a model with ``vocab_size`` tokens."""
        super().__init__(sizes, weights, ops)
        self._group = group
        self._vocab_size = vocab_size
        self._part_size = sizes.vocab_size
        embed = self.stages[0].embed
        assert embed is not None
        self._embed_own = embed
        self.num_logits = vocab_size if group.rank == 0 else sizes.vocab_size
        first, *others = self.stages
        stages = [replace(first, embed=self._embed), *map(self._completed, others)]
        self.stages = [self._with_linear_layers(stage) for stage in stages]
        last = self.stages[-1]
        self.stages[-1] = replace(last, projection=self._gathered(last.projection))

    def _completed(self, stage: StageWeights) -> StageWeights:
        assert stage.ffn is not None  # which only stage -1 lacks
        ffn = replace(stage.ffn, o=self._summed(stage.ffn.o), mlp=self._summed(stage.ffn.mlp))
        return replace(stage, ffn=ffn, in_one_call=None)

    def _with_linear_layers(self, stage: StageWeights) -> StageWeights:
        layers = (
            replace(layer, out_proj=self._summed(layer.out_proj), mlp=self._summed(layer.mlp))
            for layer in stage.linear_layers
        )
        return replace(stage, linear_layers=tuple(layers))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        own = token_ids - self._group.rank * self._part_size
        others = (own < 0) | (own >= self._part_size)
        hidden = self._embed_own(own.clamp(0, self._part_size - 1))
        return self._group.all_reduce(hidden.masked_fill_(others[:, None], 0))

    def _summed(self, of_rows: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *rows: self._group.all_reduce(of_rows(*rows))

    def _gathered(self, linear: Linear) -> Linear:
        """Logits ``[rows, vocab_size]`` on rank 0; elsewhere those of the rank's own tokens, which nobody reads."""
        return lambda x: self._group.gather(linear(x), self._vocab_size)


# -- loading it --------------------------------------------------------------------------------------------------------
# Loads a rank's part of the model. A rank loads alone, and all load at the same time.


def load_rank(config: EngineConfig, hardware: Device, group: Group) -> LoadedModel:
    """The part of the model that is this rank's, all of it on its device."""
    processors = ExecutionContext(config, hardware)
    model = read_model_config(config.model, processors.dtype)
    shard = Shard(model, group.rank, group.size)
    device, dtype, free_bytes = hardware.torch_device, processors.dtype, hardware.free_bytes()
    if device.type == "cpu":  # a host's memory is that of all ranks
        free_bytes //= group.size
    check_weights(shard.sizes, dtype, free_bytes, max_num_seqs=config.max_num_seqs)
    tensors = read_weights(config, model, device, dtype, shard)
    weights = ShardedWeights(shard.sizes, tensors, processors.ops, group, model.vocab_size)
    placement = all_resident(model.num_layers)
    loaded = LoadedModel(config, processors, model, shard.sizes, weights, placement, group.all_agree)
    group.graphs = loaded.graphs
    return loaded
