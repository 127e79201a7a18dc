"""What each rank holds of a model, and its matrices with the sums over ranks that they need.

Query, key and value heads are divided, and so are the FFN's rows of gate and up. The outputs of attention and FFN (the
matrices ``o`` and ``down``) are sums over ranks, so each layer has two. The embedding and the vocabulary's matrix are
divided by tokens. Norms are whole on every rank.

A quantised matrix is divided in the same places: outputs and inputs in whole words of codes, inputs in whole groups.
With act-order a rank's inputs are of all groups, so it has the scales of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from swiftllm.model.config import ModelConfig
from swiftllm.model.providers import BoundaryWeights, WeightProvider
from swiftllm.model.quantised.readers import IN, OUT, Axis
from swiftllm.model.weights import ModelPart
from swiftllm.ops.interface import Linear
from swiftllm.parallel.group import Group

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_COLUMNS = ("o_proj", "down_proj")
BY_TOKENS = ("embed_tokens", "lm_head")


class Shard(ModelPart):
    """See :class:`swiftllm.model.weights.ModelPart`."""

    def __init__(self, model: ModelConfig, rank: int, size: int) -> None:
        """``model``: the whole one.

        Raises:
            ValueError: it cannot be divided among ``size`` ranks.
        """
        super().__init__(model.shard(size))
        self._rank = rank
        self._size = size

    def slices(self, name: str, shape: Sequence[int], axes: Sequence[Axis] = (OUT, IN)) -> tuple[slice, ...]:
        module, kind = name.rsplit(".", 2)[-2:]
        if module in BY_TOKENS:
            return (self._share(self.sizes.vocab_size),)
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


class ShardedWeights:
    """See :class:`swiftllm.model.providers.WeightProvider`: a rank's matrices, completed by the other ranks."""

    def __init__(self, own: WeightProvider, group: Group, num_layers: int, vocab_size: int) -> None:
        """``own``: the rank's part, of a model with ``vocab_size`` tokens."""
        self._own = own
        self._group = group
        self._last = num_layers - 1
        self._vocab_size = vocab_size
        self._part_size = own.num_logits
        self.num_logits = vocab_size if group.rank == 0 else own.num_logits

    def enter(self, layer: int) -> None:
        self._own.enter(layer)

    def launched(self) -> None:
        self._own.launched()

    def holds(self, layer: int) -> bool:
        return self._own.holds(layer)

    def boundary(self, layer: int) -> BoundaryWeights:
        weights = self._own.boundary(layer)
        if layer < 0:
            return replace(weights, embed=self._embed)
        ffn = replace(weights.ffn, o=self._summed(weights.ffn.o), down=self._summed(weights.ffn.down))
        if layer < self._last:
            return replace(weights, ffn=ffn, in_one_call=None)
        return replace(weights, ffn=ffn, in_one_call=None, projection=self._gathered(weights.projection))

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        own = token_ids - self._group.rank * self._part_size
        others = (own < 0) | (own >= self._part_size)
        hidden = self._own.boundary(-1).embed(own.clamp(0, self._part_size - 1))
        return self._group.all_reduce(hidden.masked_fill_(others[:, None], 0))

    def _summed(self, linear: Linear) -> Linear:
        return lambda x: self._group.all_reduce(linear(x))

    def _gathered(self, linear: Linear) -> Linear:
        """Logits ``[rows, vocab_size]`` on rank 0; elsewhere those of the rank's own tokens, which nobody reads."""
        return lambda x: self._group.gather(linear(x), self._vocab_size)
