"""Where the matrices of a model come from, boundary by boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from swiftllm.config import EngineConfig
from swiftllm.model.config import ModelConfig
from swiftllm.model.weights import LayerWeights, LlamaWeights, ModelPart, dummy_weights, load_weights
from swiftllm.ops.interface import Crossing, CrossingParts, Linear, Ops
from swiftllm.ops.quantised_matrix import Matrix, QuantisedMatrix


@dataclass(frozen=True)
class FfnWeights:
    """A layer from its attention's output on."""

    o: Linear
    norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class BoundaryWeights:
    """A boundary: tokens are embedded or a layer is completed, then comes a norm and one more matrix."""

    embed: Callable[[torch.Tensor], torch.Tensor] | None
    """From token ids ``[rows]`` to hidden ``[rows, hidden_size]``; of boundary -1 alone."""
    ffn: FfnWeights | None
    """Of all boundaries but -1."""
    norm: torch.Tensor
    projection: Linear
    """QKV of the next layer; at the last boundary the vocabulary's."""
    head_norms: torch.Tensor | None
    """``[num_heads + num_kv_heads, head_dim]``: a norm for each head of Q and K, in models that have them."""
    in_one_call: Crossing | None = None
    """All of the above but the embedding, where the operations have it."""


class WeightProvider(Protocol):
    """Boundary ``i`` lies between the attentions of layers i and i + 1; -1 comes before all, the last after all."""

    num_logits: int
    """Columns of the last boundary's projection."""

    def boundary(self, layer: int) -> BoundaryWeights:
        """The matrices that the compute stream's next work uses, until the next call.

        A boundary may be asked for more than once while it is crossed. Where graphs are captured, the work of this call
        is captured too.
        """


class ResidentWeights:
    """Keeps all matrices on the device, in the layout that ``ops`` compute with."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, ops: Ops) -> None:
        """Takes ``weights`` over: its layers are gone afterwards, so that packed matrices don't double the memory."""
        self.num_logits = config.vocab_size
        lm_head = make_linear(ops, weights.lm_head, None)
        self._boundaries: list[BoundaryWeights] = []
        embed, ffn = partial(F.embedding, weight=weights.embedding), None
        while weights.layers:
            layer = weights.layers.pop(0)
            qkv = make_linear(ops, layer.qkv, layer.qkv_bias)
            norms = _head_norms(layer, config)
            rotated_heads = config.num_heads + config.num_kv_heads
            in_one_call = _in_one_call(ops, config, ffn, layer.input_norm, qkv, norms, rotated_heads)
            self._boundaries.append(BoundaryWeights(embed, ffn, layer.input_norm, qkv, norms, in_one_call))
            embed, ffn = None, _ffn(layer, ops)
            del layer
        in_one_call = _in_one_call(ops, config, ffn, weights.final_norm, lm_head, None, 0)
        self._boundaries.append(BoundaryWeights(None, ffn, weights.final_norm, lm_head, None, in_one_call))

    def boundary(self, layer: int) -> BoundaryWeights:
        return self._boundaries[layer + 1]


def open_weights(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    part: ModelPart | None = None,
) -> WeightProvider:
    """The weights that a configuration names, or a ``part`` of them.

    Raises what :func:`~swiftllm.model.weights.load_weights` does.
    """
    if config.load_format == "dummy":
        weights = dummy_weights(model, device, dtype, config.seed, part)
    else:
        weights = load_weights(config.model, model, device, dtype, part)
    return ResidentWeights(model if part is None else part.sizes, weights, ops)


def make_linear(ops: Ops, weight: Matrix, bias: torch.Tensor | None) -> Linear:
    """The linear of a matrix, by its kind; see :meth:`~swiftllm.ops.interface.Ops.make_linear`."""
    if isinstance(weight, torch.Tensor):
        return ops.make_linear(weight, bias)
    if isinstance(weight, QuantisedMatrix):
        return ops.make_quantised_linear(weight, bias)
    sizes = [part.shape[0] if isinstance(part, torch.Tensor) else part.out_features for part in weight]
    biases = [None] * len(sizes) if bias is None else bias.split(sizes)
    linears = [make_linear(ops, part, own) for part, own in zip(weight, biases, strict=True)]

    def side_by_side(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.cat([linear(x) for linear in linears], 1, out=out)

    return side_by_side


def _ffn(layer: LayerWeights, ops: Ops) -> FfnWeights:
    return FfnWeights(
        o=make_linear(ops, layer.o, layer.o_bias),
        norm=layer.post_norm,
        gate_up=make_linear(ops, layer.gate_up, layer.gate_up_bias),
        down=make_linear(ops, layer.down, layer.down_bias),
    )


def _in_one_call(
    ops: Ops,
    config: ModelConfig,
    ffn: FfnWeights | None,
    norm: torch.Tensor,
    projection: Linear,
    head_norms: torch.Tensor | None,
    rotated_heads: int,
) -> Crossing | None:
    """See :attr:`BoundaryWeights.in_one_call`."""
    if ffn is None:
        return None
    layer = {"o": ffn.o, "post_norm": ffn.norm, "gate_up": ffn.gate_up, "down": ffn.down}
    heads = {"rotated_heads": rotated_heads, "head_dim": config.head_dim, "head_norms": head_norms}
    return ops.make_crossing(CrossingParts(**layer, norm=norm, projection=projection, **heads, eps=config.rms_norm_eps))


def _head_norms(layer: LayerWeights, config: ModelConfig) -> torch.Tensor | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    norms = ((layer.q_norm, config.num_heads), (layer.k_norm, config.num_kv_heads))
    return torch.cat([norm.expand(heads, -1) for norm, heads in norms])
