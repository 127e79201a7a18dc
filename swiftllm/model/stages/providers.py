"""Where the matrices of a model come from, stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from swiftllm.model.config.architectures import SWIGLU_ALPHA
from swiftllm.model.config.model_config import ExpertSizes, ModelConfig
from swiftllm.model.weights.llama_weights import LayerWeights, LinearTensors, LlamaWeights
from swiftllm.ops.experts import ClampedSwiGLU, Experts, ExpertWeights
from swiftllm.ops.interface import Crossing, CrossingParts, Linear, Ops
from swiftllm.ops.quantised_matrix import Matrix, QuantisedMatrix

MakeLinear = Callable[[Matrix, torch.Tensor | None], Linear]
"""From a matrix and a bias to their linear."""
MakeExperts = Callable[[ExpertWeights], Experts]


@dataclass(frozen=True)
class FfnWeights:
    """A layer from its attention's output on."""

    o: Linear
    norm: torch.Tensor
    mlp: Experts
    """Dense, or of experts. Only the latter look at ``num_rows``."""
    o_norm: torch.Tensor | None = None
    """Of the output of ``o``, and ``down_norm`` of that of ``down``, in models that norm these before they add them."""
    down_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class StageWeights:
    """A stage: tokens are embedded or a layer is completed, then comes a norm and one more matrix.

    Stage ``i`` lies between the attentions of layers i and i + 1; -1 comes before all, the last after all.
    """

    embed: Callable[[torch.Tensor], torch.Tensor] | None
    """From token ids ``[rows]`` to rows ``[rows, hidden_size]`` of the embedding; of stage -1 alone."""
    ffn: FfnWeights | None
    """Of all stages but -1."""
    norm: torch.Tensor
    projection: Linear
    """QKV of the next layer; at the last stage the vocabulary's."""
    head_norms: torch.Tensor | None
    """``[num_heads + num_kv_heads, head_dim]``: a norm for each head of Q and K, in models that have them."""
    rotates: bool = True
    """Whether Q and K of the next layer are rotated."""
    sinks: torch.Tensor | None = None
    """float32 ``[num_heads]`` of the next layer's attention, in models that have them."""
    in_one_call: Crossing | None = None
    """All of the above but the embedding, where the operations have it."""


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


def make_stage(
    ops: Ops,
    config: ModelConfig,
    weights: LlamaWeights,
    stage: int,
    linears: dict[str, LinearTensors],
    make_layers_linear: MakeLinear,
    make_experts: MakeExperts,
) -> StageWeights:
    """A stage that ``ops`` compute. ``make_layers_linear`` and ``make_experts`` make its ``linears``, without the
    vocabulary's.

    A matrix is taken from ``linears`` when its linear is made: so a packed copy does not double a stage's memory.
    """

    def take(name: str) -> Linear:
        return make_layers_linear(*linears.pop(name))

    layers, ffn, dense = weights.layers, None, None
    if stage >= 0:
        layer = layers[stage]
        o = take("o")
        if layer.router is None or config.experts is None:
            dense = take("gate_up"), take("down")
            mlp = partial(_dense, ops, *dense)
        else:
            mlp = make_experts(_take_experts(layer, layer.router, config.experts, linears))
        ffn = FfnWeights(o, layer.post_norm, mlp, layer.o_norm, layer.down_norm)
    sinks = layers[stage + 1].sinks if stage + 1 < len(layers) else None
    rotates = stage + 1 not in config.layers_without_rotary
    if stage + 1 < len(layers):
        norm, projection = layers[stage + 1].input_norm, take("qkv")
        head_norms = _head_norms(layers[stage + 1], config)
        rotated_heads = config.num_heads + config.num_kv_heads if rotates else 0
    else:
        norm, projection = weights.final_norm, make_linear(ops, weights.lm_head, None)
        head_norms, rotated_heads = None, 0
    embed = partial(ops.embed, embedding=weights.embedding) if stage < 0 else None
    in_one_call = None
    if ffn is not None and dense is not None and not config.norms_outputs:
        gate_up, down = dense
        parts = CrossingParts(
            ffn.o,
            ffn.norm,
            gate_up,
            down,
            norm,
            projection,
            head_norms,
            rotated_heads,
            config.head_dim,
            config.rms_norm_eps,
        )
        in_one_call = ops.make_crossing(parts)
    return StageWeights(embed, ffn, norm, projection, head_norms, rotates, sinks, in_one_call)


def _dense(
    ops: Ops, gate_up: Linear, down: Linear, rows: torch.Tensor, num_rows: torch.Tensor | None = None
) -> torch.Tensor:
    return down(ops.silu_and_mul(gate_up(rows)))


def _take_experts(
    layer: LayerWeights, router: torch.Tensor, sizes: ExpertSizes, linears: dict[str, LinearTensors]
) -> ExpertWeights:
    (gate_up, gate_up_bias), (down, down_bias) = linears.pop("gate_up"), linears.pop("down")
    activation = None if sizes.swiglu_limit is None else ClampedSwiGLU(sizes.swiglu_limit, SWIGLU_ALPHA)
    how = sizes.per_token, sizes.normalises, layer.router_bias, gate_up_bias, down_bias, activation
    return ExpertWeights(router, gate_up, down, *how)


def _head_norms(layer: LayerWeights, config: ModelConfig) -> torch.Tensor | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    norms = ((layer.q_norm, config.num_heads), (layer.k_norm, config.num_kv_heads))
    return torch.cat([norm.expand(heads, -1) for norm, heads in norms])
