"""Weights of a Llama-family model: fused matrices, filled from safetensors or with random numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import torch

from swiftllm.model.checkpoint import DRAFT_PREFIX, StoredTensor, WeightsError, read_tensors, text_name
from swiftllm.model.config import LinearSizes, ModelConfig
from swiftllm.model.folder import tell
from swiftllm.model.quantised_weights import (
    IN,
    OUT,
    Axis,
    FusedTarget,
    QuantisedCollector,
    StoredMatrix,
    divisible_axes,
)
from swiftllm.model.rope import rotary_order
from swiftllm.model.weight_memory import Allocate, PackedTensor, write_rows
from swiftllm.ops.matrices import MXFP4_GROUP, MXFP4_NUMBERS, Matrix, QuantisedMatrix

# -- a checkpoint's tensors as Llama's ---------------------------------------------------------------------------------
# A checkpoint's tensors as Llama's: fused modules part by part, outputs in the order and with the factors that the
# operations expect.

EXPERT_NAMES = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj", "router": "gate"}
STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(?:_(bias|blocks|scales))?")
ROUTER = re.compile(r"\.mlp\.(gate|shared_expert_gate)\.")
EVERY_OTHER = slice(0, None, 2), slice(1, None, 2)
ROTATED = ("q_proj", "k_proj", "q_norm", "k_norm")
TO_RESIDUAL = ("o_proj", "out_proj", "down_proj", "post_self_attn_layernorm", "post_mlp_layernorm")
"""Modules whose outputs are added to residuals, or normed by the next of them before."""
LINEAR_PARTS = {
    "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
    "conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
}
"""Modules of linear attention that a checkpoint has in one, and their parts: of queries, keys and values."""
FINAL_NORM = "model.norm.weight"
EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"

Rows = TypeVar("Rows", torch.Tensor, StoredMatrix)


def fused_modules(config: ModelConfig) -> Mapping[str, Mapping[str, int]]:
    """Modules of a checkpoint that hold the outputs of several of ours, one after the other, and how many of each."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    ffn = config.intermediate_size
    fused = {
        "qkv_proj": {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
        "gate_up_proj": {"gate_proj": ffn, "up_proj": ffn},
    }
    if (linear := config.linear) is not None:  # each part has heads of its own, which ranks divide
        fused |= {of_all: dict(zip(parts, linear.qkv_sizes, strict=True)) for of_all, parts in LINEAR_PARTS.items()}
    return fused


def as_llama(config: ModelConfig, tensors: Iterable[tuple[str, StoredTensor]]) -> Iterator[tuple[str, StoredTensor]]:
    """The ``tensors`` of a checkpoint with the names that Llama's have; ``config`` is that of the whole model. A matrix
    that is tied has the embedding's, whatever a checkpoint calls it."""
    axes: dict[str, tuple[Axis, ...]] = {"weight": (OUT, IN), "bias": (OUT,)}
    if config.quantisation is not None:
        axes |= divisible_axes(config.quantisation)
    fused = fused_modules(config)
    for stored_name, stored in tensors:
        name = text_name(stored_name, config.is_wrapped)
        if name is None or (config.linear is not None and name.startswith(DRAFT_PREFIX)):
            continue
        if name == HEAD_NAME and config.tie_word_embeddings:
            name = EMBEDDING_NAME
        if config.experts is not None:
            name = ".".join(EXPERT_NAMES.get(word, word) for word in name.split("."))
            if ROUTER.search(name) and not name.endswith((".weight", ".bias")):
                raise WeightsError(f"{name}: routers that are quantised are not supported")
            if (stack := STACK.fullmatch(name)) is not None:
                block, module, kind = stack.groups()
                yield from _experts_of(block, module, kind, stored, config)
                continue
        place, _, kind = name.rpartition(".")
        block, _, module = place.rpartition(".")
        parts = fused.get(module)
        if parts is None or kind not in axes:
            yield name, stored
            continue
        first, total = 0, sum(parts.values())
        for part, size in parts.items():
            own = stored
            if OUT in axes[kind]:
                axis = axes[kind].index(OUT)
                count = stored.get_shape()[axis]
                start, stop = (count * output // total for output in (first, first + size))
                if start * total != count * first or stop * total != count * (first + size):
                    raise WeightsError(f"{name} has shape {stored.get_shape()}, which has no part {part}")
                own = _Part(stored, axis, range(start, stop))
            yield f"{block}.{part}.{kind}", own
            first += size


def _experts_of(
    block: str, module: str, kind: str | None, stored: StoredTensor, config: ModelConfig
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors in a stack ``[num_experts, out, in]``, ``[num_experts, out]`` or of MXFP4. Gate is above up, but in
    gpt-oss their outputs alternate."""
    assert config.experts is not None
    hidden, ffn, experts = config.hidden_size, config.intermediate_size, config.experts.num_experts
    alternates, of_expert = config.has_swiglu_limit, {"down_proj": range(hidden)}
    outputs, inputs = hidden, ffn
    if module == "gate_up_proj":
        outputs, inputs = 2 * ffn, hidden
        of_gate, of_up = EVERY_OTHER if alternates else (slice(0, ffn), slice(ffn, None))
        of_expert = {"gate_proj": range(outputs)[of_gate], "up_proj": range(outputs)[of_up]}
    is_transposed = alternates and kind is None
    shapes = {
        None: [inputs, outputs] if is_transposed else [outputs, inputs],
        "bias": [outputs],
        "blocks": [outputs, inputs // MXFP4_GROUP, MXFP4_GROUP // 2],
        "scales": [outputs, inputs // MXFP4_GROUP],
    }
    shape = [experts, *shapes[kind]]
    if stored.get_shape() != shape:
        stack = f"{block}.{module}" + (f"_{kind}" if kind else "")
        raise WeightsError(f"{stack} has shape {stored.get_shape()}, config.json asks for {shape}")
    for expert in range(experts):
        own: StoredTensor = _OfExpert(stored, expert)
        for part, wanted in of_expert.items():
            rows = _Part(_Transposed(own) if is_transposed else own, 0, wanted)
            yield f"{block}.{expert}.{part}.{kind or 'weight'}", rows


@dataclass(frozen=True)
class _OfExpert:
    """A matrix of a stored stack."""

    stored: StoredTensor
    expert: int

    def get_shape(self) -> list[int]:
        return list(self.stored.get_shape()[1:])

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        return self.stored[(slice(self.expert, self.expert + 1), *slices)][0]


@dataclass(frozen=True)
class _Transposed:
    """A stored matrix ``[in, out]`` as ``[out, in]``."""

    stored: StoredTensor

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()[::-1]

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        rows, columns = (*slices, slice(None))[:2]
        return self.stored[columns, rows].t()


@dataclass(frozen=True)
class _Part:
    """Some rows or columns of a stored tensor; those in between may be of another part."""

    stored: StoredTensor
    axis: int
    wanted: range

    def get_shape(self) -> list[int]:
        shape = list(self.stored.get_shape())
        shape[self.axis] = len(self.wanted)
        return shape

    def get_dtype(self) -> str:
        return self.stored.get_dtype()

    def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
        whole = [*slices, *[slice(None)] * (self.axis + 1 - len(slices))]
        own = self.wanted[whole[self.axis]]
        whole[self.axis] = slice(own.start, own.stop, own.step)
        return self.stored[tuple(whole)]


class Folding:
    """What of a model is done to its tensors when they are read."""

    def __init__(self, config: ModelConfig) -> None:
        """``config``: of the part that is read."""
        self._order = rotary_order(config.head_dim, config.rotary_dim or config.head_dim, config.interleaved_rotary)
        self._residual_scale = config.residual_scale
        self._logits_multiplier = config.logits_multiplier
        self._whole_orders = {} if config.linear is None else whole_orders(config, config.linear, self._order)

    def rows(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Rows of tensor ``name``: whole heads of those that turn."""
        module = name.rsplit(".", 2)[-2]
        if name == FINAL_NORM and self._logits_multiplier != 1.0:
            rows = rows.float() * self._logits_multiplier
        return self._fold(module, rows)

    def matrix(self, module: str, matrix: torch.Tensor | StoredMatrix) -> torch.Tensor | StoredMatrix:
        """The same for a matrix that may be quantised."""
        return self._fold(module.rpartition(".")[-1], matrix)

    def _fold(self, module: str, rows: Rows) -> Rows:
        order = self._whole_orders.get(module, self._order if module in ROTATED else None)
        if order is not None:
            if isinstance(rows, StoredMatrix):
                return rows.with_heads_ordered(order)
            return rows.unflatten(0, (-1, len(order)))[:, order.to(rows.device)].flatten(0, 1)
        if module in TO_RESIDUAL and self._residual_scale != 1.0:
            return rows.scaled(self._residual_scale) if isinstance(rows, StoredMatrix) else rows * self._residual_scale
        return rows


def whole_orders(config: ModelConfig, linear: LinearSizes, of_head: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Modules whose outputs have another order here than in a checkpoint: int64, which of its outputs is the first, and
    so on. ``of_head``: the order of the elements of a head of Q.

    Gates of attention's output stand before all of Q; a checkpoint has them head by head behind Q. The outputs that it
    has :attr:`~LinearSizes.by_key_head` are those of all heads, part by part.
    """
    q, gates = torch.arange(2 * config.num_heads * config.head_dim).view(config.num_heads, 2, config.head_dim).unbind(1)
    orders = {"q_proj": torch.cat([gates, q if of_head is None else q[:, of_head]]).flatten()}
    if linear.by_key_head:
        per_key = linear.num_value_heads // linear.num_key_heads
        values = per_key * linear.value_dim
        for module, sizes in (
            ("in_proj_qkvz", (linear.key_dim, linear.key_dim, values, values)),
            ("in_proj_ba", (per_key, per_key)),
        ):
            of_heads = torch.arange(linear.num_key_heads * sum(sizes)).view(linear.num_key_heads, -1)
            orders[module] = torch.cat([part.flatten() for part in of_heads.split(sizes, 1)])
    return orders


# -- weights -----------------------------------------------------------------------------------------------------------

STD_OF_CODES = (255 / 12) ** 0.5  # of 0 to 15, equally likely
STD_OF_MXFP4 = (sum(number**2 for number in MXFP4_NUMBERS) / 16) ** 0.5
OnHost = Mapping[int | tuple[int, str], Allocate]
"""What allocates matrices in host memory: those of a stage, or a single one of it, by its name."""
NONE_ON_HOST: OnHost = MappingProxyType({})
EMBEDDING = -2  # among stages, of which it comes before the first
CACHE_SCALE = re.compile(  # the names that tools for quantising give them, as vLLM lists them
    r".*\.((q|k|v|kv|prob|prob_output)_(scale|zero_point)|(q|k|v|qkv)_proj\.output_scale|kv_cache_scaling_factor)"
)
DUMMY_PERIOD = (1 << 20) + 7  # elements; odd, so that no two rows of a matrix start alike

EXPERT_MATRICES = ("gate_up", "down")
"""Of a stage of a model with experts."""

BY_INPUTS = ("o", "down", "out_proj", "shared_down")
"""Matrices of which a rank has some of the inputs; of the others it has some of the outputs."""

LinearTensors = tuple[Matrix, torch.Tensor | None]
"""A matrix and its bias."""


class FusedMatrix(NamedTuple):
    """A matrix of a layer: the field of :class:`LayerWeights`, and the modules whose outputs it stacks."""

    name: str
    block: str
    modules: tuple[str, ...]
    out_features: tuple[int, ...]
    in_features: int
    has_bias: bool
    is_quantised: bool
    comes_before: bool = False
    """Whether it is used before the attention of its layer: QKV, and all matrices of the layers of linear attention
    before that."""

    def stage(self, layer: int) -> int:
        """The stage that uses the matrix of a layer."""
        return layer - 1 if self.comes_before else layer

    def on_host(self, layer: int, memory: OnHost) -> Allocate | None:
        """What allocates the matrix of a layer, if that is in host memory."""
        stage = self.stage(layer)
        return memory.get((stage, self.name)) or memory.get(stage)


def fused_matrices(config: ModelConfig) -> tuple[FusedMatrix, ...]:
    """The matrices of each layer, of those of full attention where there are others."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    qkv_sizes, hidden = (config.num_gates * config.head_dim + q_size, kv_size, kv_size), config.hidden_size
    of_attention = config.quantisation is not None and not config.quantisation.experts_only
    qkv = ("q_proj", "k_proj", "v_proj")
    return (
        FusedMatrix("qkv", "self_attn", qkv, qkv_sizes, hidden, config.qkv_bias, of_attention, comes_before=True),
        FusedMatrix("o", "self_attn", ("o_proj",), (hidden,), q_size, config.o_bias, of_attention),
        *_ffn_matrices(config),
    )


def linear_matrices(config: ModelConfig) -> tuple[FusedMatrix, ...]:
    """The matrices of each layer of linear attention."""
    linear, hidden, is_quantised = config.linear, config.hidden_size, config.quantisation is not None
    if linear is None:
        return ()
    quantises_decay = config.quantisation is not None and config.quantisation.quantises_decay
    heads, qkv, z = linear.num_value_heads, linear.qkv_sizes, linear.values_size
    projections: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
        ((*LINEAR_PARTS["in_proj_qkv"], "in_proj_z"), (*qkv, z)),
        (("in_proj_b", "in_proj_a"), (heads, heads)),
    )
    if linear.by_key_head:
        projections = (("in_proj_qkvz",), (sum(qkv) + z,)), (("in_proj_ba",), (2 * heads,))
    (of_qkvz, qkvz), (of_ba, ba) = projections
    block = "linear_attn"
    matrices = (
        FusedMatrix("in_proj", block, of_qkvz, qkvz, hidden, False, is_quantised),
        FusedMatrix("in_proj_ba", block, of_ba, ba, hidden, False, quantises_decay),
        FusedMatrix("out_proj", block, ("out_proj",), (hidden,), z, False, is_quantised),
        *_ffn_matrices(config),
    )
    return tuple(matrix._replace(comes_before=True) for matrix in matrices)


def _ffn_matrices(config: ModelConfig) -> list[FusedMatrix]:
    hidden, ffn, is_quantised = config.hidden_size, config.intermediate_size, config.quantisation is not None
    gate_up, down, of_ffn = ("gate_proj", "up_proj"), ("down_proj",), 1
    shared = None
    if config.experts is not None:  # expert below expert
        of_ffn, shared = config.experts.num_experts, config.experts.shared_size
        gate_up, down = (
            tuple(f"experts.{expert}.{module}" for expert in range(of_ffn) for module in modules)
            for modules in (gate_up, down)
        )
    matrices = [
        FusedMatrix("gate_up", "mlp", gate_up, (ffn, ffn) * of_ffn, hidden, config.mlp_bias, is_quantised),
        FusedMatrix("down", "mlp", down, (hidden,) * of_ffn, ffn, config.mlp_bias, is_quantised),
    ]
    if shared is not None:
        of_shared = ("shared_expert.gate_proj", "shared_expert.up_proj")
        matrices += [
            FusedMatrix("shared_gate_up", "mlp", of_shared, (shared, shared), hidden, False, is_quantised),
            FusedMatrix("shared_down", "mlp", ("shared_expert.down_proj",), (hidden,), shared, False, is_quantised),
        ]
    return matrices


class ModelPart:
    """What one rank holds of each tensor of a checkpoint; as it is here, all of a model that is not divided.

    Attributes:
        sizes: of the matrices of the part.
    """

    def __init__(self, sizes: ModelConfig) -> None:
        self.sizes = sizes

    def slices(self, name: str, shape: Sequence[int], axes: Sequence[Axis] = (OUT, IN)) -> tuple[slice, ...]:
        """The part of tensor ``name``, whose whole shape is ``shape``; where it has fewer rows than the matrix of the
        part, the other rows are zero. ``axes``: those of a linear module's tensor."""
        return (slice(None),)


@dataclass
class LayerWeights:
    """One layer. Matrices are ``[out, in]``; ``qkv`` stacks Q, K, V rows, ``gate_up`` stacks gate and up rows.

    The matrices of a quantised model are None until they are loaded, and all are once they are taken.
    """

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_norm: torch.Tensor | None = None
    """Of attention's output, and ``down_norm`` of the FFN's, in models that norm these before they add them."""
    down_norm: torch.Tensor | None = None
    router: torch.Tensor | None = None
    """``[num_experts, hidden_size]``, in models with experts; it stays on the device, as its bias does."""
    router_bias: torch.Tensor | None = None
    shared_gate: torch.Tensor | None = None
    """``[1, hidden_size]`` of the expert that all rows go to, in models that have one."""
    sinks: torch.Tensor | None = None
    """float32 ``[num_heads]``, in models that have them."""
    qkv: Matrix | PackedTensor | None = None
    o: Matrix | PackedTensor | None = None
    gate_up: Matrix | PackedTensor | None = None
    down: Matrix | PackedTensor | None = None
    qkv_bias: torch.Tensor | PackedTensor | None = None
    o_bias: torch.Tensor | PackedTensor | None = None
    gate_up_bias: torch.Tensor | PackedTensor | None = None
    down_bias: torch.Tensor | PackedTensor | None = None

    shared_gate_up: Matrix | PackedTensor | None = None
    """Of the expert that all rows go to, and ``shared_down``."""
    shared_down: Matrix | PackedTensor | None = None

    def take(self, name: str) -> LinearTensors:
        """A matrix and its bias, which the layer lets go."""
        taken = getattr(self, name), getattr(self, f"{name}_bias", None)
        setattr(self, name, None)
        setattr(self, f"{name}_bias", None)
        return taken

    def take_ffn(self) -> dict[str, LinearTensors]:
        """Those of the FFN."""
        shared = () if self.shared_gate is None else ("shared_gate_up", "shared_down")
        return {name: self.take(name) for name in ("gate_up", "down", *shared)}


@dataclass
class LinearLayerWeights(LayerWeights):
    """A layer of linear attention. Of the fields above it has norms and FFN; heads are value heads."""

    conv: torch.Tensor | None = None
    """``[conv_channels, 1, conv_width]``"""
    a_log: torch.Tensor | None = None
    """float32 ``[num_value_heads]``, as ``dt_bias`` is: how fast a state decays."""
    dt_bias: torch.Tensor | None = None
    head_norm: torch.Tensor | None = None
    """``[value_dim]``"""
    in_proj: Matrix | PackedTensor | None = None
    """Rows of queries, keys, values and gates."""
    in_proj_ba: Matrix | PackedTensor | None = None
    """Two rows of each head: first all that tell how much of a value is written, then all that tell the decay."""
    out_proj: Matrix | PackedTensor | None = None

    def take_all(self) -> dict[str, LinearTensors]:
        """All matrices, in the order of their use."""
        return {name: self.take(name) for name in ("in_proj", "in_proj_ba", "out_proj")} | self.take_ffn()


@dataclass
class LlamaWeights:
    """All weights; ``lm_head`` is ``embedding`` itself where the model ties them."""

    embedding: torch.Tensor
    lm_head: torch.Tensor
    final_norm: torch.Tensor
    layers: list[LayerWeights]
    linear_layers: list[list[LinearLayerWeights]]
    """Those of linear attention before each of the others."""

    @classmethod
    def empty(
        cls,
        config: ModelConfig,
        device: torch.device | str,
        dtype: torch.dtype,
        on_host: OnHost = NONE_ON_HOST,
    ) -> LlamaWeights:
        """Allocate without filling; not the layers' matrices of a quantised model.

        ``on_host``: stages whose linears are in host memory, and what allocates it; see :class:`FusedMatrix`. At
        :data:`EMBEDDING` what allocates the embedding, unless the vocabulary's matrix is tied to it.
        """
        new = partial(torch.empty, device=device, dtype=dtype)
        hidden, vocabulary = config.hidden_size, config.vocab_size
        allocate = new if config.tie_word_embeddings else on_host.get(EMBEDDING, new)
        embedding = allocate((vocabulary, hidden), dtype=dtype)
        lm_head = embedding if config.tie_word_embeddings else new((vocabulary, hidden))
        layers, linear_layers = [], []
        for _ in range(config.num_layers):
            of_heads = [new(config.head_dim) if config.norms_heads else None for _ in "qk"]
            of_outputs = [new(hidden) if config.norms_outputs else None for _ in ("o", "down")]
            layers.append(LayerWeights(new(hidden), new(hidden), *of_heads, *of_outputs))
            if config.has_sinks:
                layers[-1].sinks = new((config.num_heads,), dtype=torch.float32)
            linear_layers.append([])
            if (linear := config.linear) is not None:
                for _ in range(linear.layers_before):
                    layer = LinearLayerWeights(new(hidden), new(hidden), None, None)
                    layer.conv = new((linear.conv_channels, 1, linear.conv_width))
                    layer.a_log, layer.dt_bias = (new(linear.num_value_heads, dtype=torch.float32) for _ in range(2))
                    layer.head_norm = new(linear.value_dim)
                    linear_layers[-1].append(layer)
        assert isinstance(embedding, torch.Tensor) and isinstance(lm_head, torch.Tensor)  # never in chunks
        weights = cls(embedding, lm_head, new(hidden), layers, linear_layers)
        for _, index, layer, matrices in weights.numbered_layers(config):
            if config.experts is not None:
                layer.router = new((config.experts.num_experts, hidden))
                if config.has_swiglu_limit:
                    layer.router_bias = new((config.experts.num_experts,))
                if config.experts.shared_size is not None:
                    layer.shared_gate = new((1, hidden))
            for matrix in matrices:
                allocate, rows = matrix.on_host(index, on_host) or new, sum(matrix.out_features)
                if not matrix.is_quantised:
                    setattr(layer, matrix.name, allocate((rows, matrix.in_features), dtype=dtype))
                if matrix.has_bias:
                    setattr(layer, f"{matrix.name}_bias", allocate((rows,), dtype=dtype))
        return weights

    def numbered_layers(self, config: ModelConfig) -> Iterator[tuple[int, int, LayerWeights, tuple[FusedMatrix, ...]]]:
        """Each layer in the order of a checkpoint, with its number there; the layer of full attention that it is or
        comes before; and its matrices."""
        number, of_linear, of_full = 0, linear_matrices(config), fused_matrices(config)
        for index, (before, layer) in enumerate(zip(self.linear_layers, self.layers, strict=True)):
            for linear in before:
                yield number, index, linear, of_linear
                number += 1
            yield number, index, layer, of_full
            number += 1

    def take_linears(self, stage: int) -> dict[str, LinearTensors]:
        """Matrices and biases of a stage by name, in the order of their use, but for the vocabulary's. The layers
        let them go."""
        taken = {}
        if stage >= 0:
            taken = {"o": self.layers[stage].take("o"), **self.layers[stage].take_ffn()}
        if stage + 1 < len(self.layers):
            for number, layer in enumerate(self.linear_layers[stage + 1]):
                taken |= {f"linear.{number}.{name}": linear for name, linear in layer.take_all().items()}
            taken["qkv"] = self.layers[stage + 1].take("qkv")
        return taken

    def by_checkpoint_name(self, config: ModelConfig) -> dict[str, torch.Tensor | PackedTensor]:
        """The place of each tensor of a Hugging Face checkpoint, as a view of the fused matrices."""
        places: dict[str, torch.Tensor | PackedTensor] = {
            EMBEDDING_NAME: self.embedding,
            FINAL_NORM: self.final_norm,
        }
        if not config.tie_word_embeddings:
            places[HEAD_NAME] = self.lm_head
        for number, _, layer, matrices in self.numbered_layers(config):
            prefix = f"model.layers.{number}."
            places[prefix + "input_layernorm.weight"] = layer.input_norm
            places[prefix + "post_attention_layernorm.weight"] = layer.post_norm
            if layer.q_norm is not None and layer.k_norm is not None:
                places[prefix + "self_attn.q_norm.weight"] = layer.q_norm
                places[prefix + "self_attn.k_norm.weight"] = layer.k_norm
            if layer.o_norm is not None and layer.down_norm is not None:
                places[prefix + "post_self_attn_layernorm.weight"] = layer.o_norm
                places[prefix + "post_mlp_layernorm.weight"] = layer.down_norm
            if layer.router is not None:
                places[prefix + "mlp.gate.weight"] = layer.router
            if layer.router_bias is not None:
                places[prefix + "mlp.gate.bias"] = layer.router_bias
            if layer.sinks is not None:
                places[prefix + "self_attn.sinks"] = layer.sinks
            if layer.shared_gate is not None:
                places[prefix + "mlp.shared_expert_gate.weight"] = layer.shared_gate
            if isinstance(layer, LinearLayerWeights):
                assert config.linear is not None and layer.conv is not None
                parts = zip(LINEAR_PARTS["conv1d"], layer.conv.split(config.linear.qkv_sizes), strict=True)
                of_linear = {f"{module}.weight": part for module, part in parts}
                of_heads = {"A_log": layer.a_log, "dt_bias": layer.dt_bias, "norm.weight": layer.head_norm}
                for name, tensor in {**of_linear, **of_heads}.items():
                    assert tensor is not None
                    places[f"{prefix}linear_attn.{name}"] = tensor
            for matrix in matrices:
                for kind, name in (("weight", matrix.name), ("bias", f"{matrix.name}_bias")):
                    tensor = getattr(layer, name, None)
                    if isinstance(tensor, torch.Tensor | PackedTensor):
                        parts = zip(matrix.modules, tensor.split(matrix.out_features), strict=True)
                        places |= {f"{prefix}{matrix.block}.{module}.{kind}": part for module, part in parts}
        return places

    def empty_quantised(
        self, config: ModelConfig, device: torch.device | str, dtype: torch.dtype
    ) -> list[torch.Tensor | QuantisedMatrix]:
        """Allocate the matrices of a quantised model without filling them, scales in 16 bits; those that the checkpoint
        has in 16 bits in ``dtype``."""
        matrices = []
        for target in self.fused_targets(config, device):
            assert config.quantisation is not None  # else there are no targets
            made = target.empty(config.quantisation, dtype, torch.float16)
            matrices += made if isinstance(made, tuple) else [made]
            target.put(made)
        return matrices

    def fused_targets(
        self, config: ModelConfig, device: torch.device | str, on_host: OnHost = NONE_ON_HOST
    ) -> list[FusedTarget]:
        """Where the layers' matrices go that come quantised; ``on_host``: see :meth:`empty`."""
        if config.quantisation is None:
            return []
        targets = []
        for number, index, layer, matrices in self.numbered_layers(config):
            for matrix in filter(lambda matrix: matrix.is_quantised, matrices):
                modules = [f"model.layers.{number}.{matrix.block}.{module}" for module in matrix.modules]
                allocate = matrix.on_host(index, on_host)
                target = FusedTarget(
                    dict(zip(modules, matrix.out_features, strict=True)),
                    matrix.in_features,
                    matrix.in_features * (config.quantisation.parts if matrix.name in BY_INPUTS else 1),
                    allocate or partial(torch.empty, device=device),
                    partial(setattr, layer, matrix.name),
                    device if allocate is None else "cpu",
                )
                targets.append(target)
        return targets


def load_weights(
    folder: str | Path,
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    on_host: OnHost = NONE_ON_HOST,
) -> LlamaWeights:
    """Read a folder's safetensors, converting to ``dtype``; one tensor at a time beside the result.

    Quantised matrices stay packed, with the dtype of their scales.

    Of each tensor only ``part`` is read, by default all. ``on_host``: see :meth:`LlamaWeights.empty`.

    Raises:
        FileNotFoundError: no safetensors in the folder, or a shard of the index is missing.
        WeightsError: a tensor is missing, unknown, or of the wrong shape, or a file is damaged.
    """
    part = part or ModelPart(config)
    weights = LlamaWeights.empty(part.sizes, device, dtype, on_host)
    places, shapes = weights.by_checkpoint_name(part.sizes), _whole_shapes(config)
    quantised, folding = None, Folding(part.sizes)
    if config.quantisation is not None:
        targets = weights.fused_targets(part.sizes, device, on_host)
        quantised = QuantisedCollector(config.quantisation, targets, dtype, part.slices, folding.matrix)
        for name, tensor in as_llama(config, read_tensors(Path(folder))):
            quantised.look_ahead(name, tensor)
    seen: set[str] = set()
    unknown: list[str] = []
    for name, tensor in as_llama(config, read_tensors(Path(folder))):
        if name.endswith("rotary_emb.inv_freq"):  # in old checkpoints, a buffer that is computed anew
            continue
        try:
            if name in places:
                shape = tensor.get_shape()
                if shape != shapes[name]:
                    raise ValueError(f"{name} has shape {shape}, config.json asks for {shapes[name]}")
                rows = folding.rows(name, tensor[part.slices(name, shape)])
                write_rows(places[name], 0, rows)
                _zero(places[name], len(rows))
                seen.add(name)
            elif quantised is None or not quantised.take(name, tensor):
                unknown.append(name)
        except ValueError as error:
            raise WeightsError(f"{folder}: {error}") from None
    scales = [name for name in unknown if CACHE_SCALE.fullmatch(name)]
    if scales:
        tell(f"{folder}: {scales[0]} and other scales of a KV cache in 8 bits are left out: the cache here has its own")
        unknown = [name for name in unknown if name not in scales]
    missing = sorted((places.keys() - seen) | set(quantised.missing() if quantised else ()))
    for problem, names in (("lacks", missing), ("has unknown", sorted(unknown))):
        if names:
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise WeightsError(f"{folder}: the checkpoint {problem} tensors {', '.join(names[:5])}{more}")
    return weights


def dummy_weights(
    config: ModelConfig,
    device: torch.device | str,
    dtype: torch.dtype,
    seed: int = 0,
    part: ModelPart | None = None,
    on_host: OnHost = NONE_ON_HOST,
) -> LlamaWeights:
    """Normal random weights with the model's initial standard deviation, norms 1, biases and sinks 0.

    They are equal for equal seeds. All tensors repeat one sequence of random numbers, each from another offset. So
    filling takes no longer than writing the memory: seconds for billions of parameters. The numbers of a ``part`` are
    those that the whole model has there; not so in quantised matrices, whose words hold inputs of several parts.
    """
    part = part or ModelPart(config)
    generator = torch.Generator().manual_seed(seed)

    def draw_offset() -> int:
        return int(torch.randint(DUMMY_PERIOD, (), generator=generator))

    own_noise = torch.randn(DUMMY_PERIOD, generator=generator).mul_(config.initializer_range).to(dtype)
    noise = {True: own_noise, False: own_noise.to(device)}  # by whether it is in host memory
    weights, shapes = LlamaWeights.empty(part.sizes, device, dtype, on_host), _whole_shapes(config)
    for name, tensor in weights.by_checkpoint_name(part.sizes).items():
        if name.endswith("norm.weight"):
            assert isinstance(tensor, torch.Tensor)
            tensor.fill_(1.0 if name.endswith(".linear_attn.norm.weight") else 1.0 - config.norm_offset)
        elif name.endswith(("bias", "sinks", "A_log")):
            _zero(tensor, 0)
        else:
            slices = part.slices(name, shapes[name])
            _fill(tensor, noise[tensor.device.type == "cpu"], draw_offset(), shapes[name], slices)
    if (scheme := part.sizes.quantisation) is not None:
        own_words = torch.randint(-(2**31), 2**31, (DUMMY_PERIOD,), dtype=torch.int32, generator=generator)
        words = {True: own_words, False: own_words.to(device)}
        for target in weights.fused_targets(part.sizes, device, on_host):
            made = target.empty(scheme, dtype, dtype)
            for matrix in made if isinstance(made, tuple) else (made,):
                is_packed = isinstance(matrix, QuantisedMatrix)
                codes, numbers = (matrix.codes, words) if is_packed else (matrix, noise)
                _fill(codes, numbers[codes.device.type == "cpu"], draw_offset(), codes.shape, (slice(None),))
                if not is_packed:
                    continue
                scale = config.initializer_range / STD_OF_CODES
                if matrix.is_mxfp4:
                    scale = 127 + round(math.log2(config.initializer_range / STD_OF_MXFP4))
                for tensor, value in ((matrix.scales, scale), (matrix.zeros, 8)):
                    if tensor is not None:
                        write_rows(tensor, 0, torch.full(tensor.shape, value, dtype=tensor.dtype))
            target.put(made)
    return weights


def _fill(
    target: torch.Tensor | PackedTensor,
    noise: torch.Tensor,
    offset: int,
    shape: Sequence[int],
    slices: Sequence[slice],
) -> None:
    """Fill a matrix with the ``slices`` of one of ``shape``, which repeats ``noise`` from ``offset`` on row by row."""
    period, height, width = len(noise), shape[0], math.prod(shape[1:])
    rows, columns = (range(height)[slices[0]], slices[1] if len(slices) > 1 else slice(None))
    step = max(1, period // width)
    for first in range(0, len(rows), step):
        count = min(step, len(rows) - first)
        numbers = noise.roll(offset - (rows.start + first) * width)[: count * width]
        write_rows(target, first, numbers.view(count, *shape[1:])[:, columns])
    _zero(target, len(rows))


def _zero(place: torch.Tensor | PackedTensor, first: int) -> None:
    """From row ``first`` on; packed memory is zero from the start."""
    if isinstance(place, torch.Tensor):
        place[first:].zero_()


def _whole_shapes(config: ModelConfig) -> dict[str, list[int]]:
    """The shape of each tensor of a checkpoint."""
    whole = LlamaWeights.empty(config, "meta", torch.float32).by_checkpoint_name(config)
    return {name: list(tensor.shape) for name, tensor in whole.items()}
