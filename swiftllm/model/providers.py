"""Where the matrices of a model come from, boundary by boundary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from swiftllm.config import EngineConfig
from swiftllm.model.boundary_tensors import BoundaryTensors, FfnTensors, split_boundaries
from swiftllm.model.config import ModelConfig
from swiftllm.model.packed_tensor import HostPlace
from swiftllm.model.weights import NONE_ON_HOST, LlamaWeights, ModelPart, dummy_weights, load_weights
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

    def enter(self, layer: int) -> None:
        """Work launched from now on reads the matrices of this boundary. Call it outside of captures."""

    def launched(self) -> None:
        """All that reads the boundary entered last is launched, so far."""

    def holds(self, layer: int) -> bool:
        """Whether a boundary can be entered without a copy of its own."""

    def boundary(self, layer: int) -> BoundaryWeights:
        """The matrices of a boundary, for work on the compute stream once it is entered."""


class ResidentWeights:
    """Keeps all matrices on the device, in the layout that ``ops`` compute with."""

    def __init__(self, config: ModelConfig, weights: LlamaWeights, ops: Ops) -> None:
        """Takes ``weights`` over: its layers are gone afterwards, so that packed matrices don't double the memory."""
        self.num_logits = config.vocab_size
        tensors = split_boundaries(weights)
        self._boundaries: list[BoundaryWeights] = []
        while tensors:
            self._boundaries.append(make_boundary(ops, config, tensors.pop(0)))

    def enter(self, layer: int) -> None:
        pass

    def launched(self) -> None:
        pass

    def holds(self, layer: int) -> bool:
        return True

    def boundary(self, layer: int) -> BoundaryWeights:
        return self._boundaries[layer + 1]


def read_weights(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    on_host: Mapping[int, HostPlace] = NONE_ON_HOST,
) -> LlamaWeights:
    """The tensors that a configuration names; see :func:`~swiftllm.model.weights.load_weights`."""
    if config.load_format == "dummy":
        return dummy_weights(model, device, dtype, config.seed, part, on_host)
    return load_weights(config.model, model, device, dtype, part, on_host)


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


def make_boundary(
    ops: Ops, config: ModelConfig, tensors: BoundaryTensors, layer_linears: Ops | None = None
) -> BoundaryWeights:
    """A boundary that ``ops`` compute; the matrices of layers go to ``layer_linears`` where that is given."""
    last, ffn, makes = tensors.projects_vocabulary, tensors.ffn, layer_linears or ops
    head_norms = None if last else _head_norms(tensors, config)
    weights = BoundaryWeights(
        embed=None if tensors.embedding is None else partial(F.embedding, weight=tensors.embedding),
        ffn=None if ffn is None else _ffn(ffn, makes),
        norm=tensors.norm,
        projection=make_linear(ops if last else makes, tensors.projection, tensors.projection_bias),
        head_norms=head_norms,
    )
    if weights.ffn is None or layer_linears is not None:
        return weights
    parts = CrossingParts(
        o=weights.ffn.o,
        post_norm=weights.ffn.norm,
        gate_up=weights.ffn.gate_up,
        down=weights.ffn.down,
        norm=weights.norm,
        projection=weights.projection,
        head_norms=head_norms,
        rotated_heads=0 if last else config.num_heads + config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
    )
    return replace(weights, in_one_call=ops.make_crossing(parts))


def _ffn(tensors: FfnTensors, makes: Ops) -> FfnWeights:
    return FfnWeights(
        o=make_linear(makes, tensors.o, tensors.o_bias),
        norm=tensors.norm,
        gate_up=make_linear(makes, tensors.gate_up, tensors.gate_up_bias),
        down=make_linear(makes, tensors.down, tensors.down_bias),
    )


def _head_norms(tensors: BoundaryTensors, config: ModelConfig) -> torch.Tensor | None:
    if tensors.q_norm is None or tensors.k_norm is None:
        return None
    norms = ((tensors.q_norm, config.num_heads), (tensors.k_norm, config.num_kv_heads))
    return torch.cat([norm.expand(heads, -1) for norm, heads in norms])
