"""The matrices of each stage, wherever a placement has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from swiftllm.config import EngineConfig
from swiftllm.device import Device
from swiftllm.model.architectures import SWIGLU_ALPHA
from swiftllm.model.config import ExpertSizes, ModelConfig
from swiftllm.model.placement import Place, Placement, all_resident
from swiftllm.model.weight_memory import (
    CHUNK_BYTES,
    WeightSlots,
    chunks_of,
    in_chunks,
    lay_out,
    map_tensors,
    packed_bytes,
)
from swiftllm.model.weights import (
    EMBEDDING,
    EXPERT_MATRICES,
    NONE_ON_HOST,
    LayerWeights,
    LinearLayerWeights,
    LinearTensors,
    LlamaWeights,
    ModelPart,
    OnHost,
    dummy_weights,
    load_weights,
)
from swiftllm.ops.cpu import CodedExperts, CpuOps, copy_panels
from swiftllm.ops.interface import Crossing, CrossingParts, Linear, Ops
from swiftllm.ops.matrices import (
    ClampedSwiGLU,
    ExpertByExpert,
    Experts,
    ExpertWeights,
    Matrix,
    QuantisedMatrix,
    Router,
)

# -- providers of matrices ---------------------------------------------------------------------------------------------
# Where the matrices of a model come from, stage by stage.

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
class LinearAttentionWeights:
    """A layer of linear attention; :class:`~swiftllm.model.weights.LinearLayerWeights` has the shapes."""

    norm: torch.Tensor
    in_proj: Linear
    in_proj_ba: Linear
    conv: torch.Tensor
    """``[conv_channels, conv_width]``"""
    decay: torch.Tensor
    """float32 ``[num_value_heads]``: what a state loses a token, as a logarithm, times a number of the token."""
    dt_bias: torch.Tensor
    head_norm: torch.Tensor
    out_proj: Linear
    ffn_norm: torch.Tensor
    mlp: Experts


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
    linear_layers: tuple[LinearAttentionWeights, ...] = ()
    """Layers of linear attention, which come before ``norm``."""


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

    def make_mlp(layer: LayerWeights, prefix: str = "") -> Experts:
        if layer.router is None or config.experts is None:
            return partial(_dense, ops, take(f"{prefix}gate_up"), take(f"{prefix}down"))
        experts = make_experts(_take_experts(layer, layer.router, config.experts, linears, prefix))
        if layer.shared_gate is None:
            return experts
        shared = partial(_dense, ops, take(f"{prefix}shared_gate_up"), take(f"{prefix}shared_down"))
        return partial(_with_shared, experts, shared, layer.shared_gate)

    def make_linear_attention(layer: LinearLayerWeights, prefix: str) -> LinearAttentionWeights:
        in_proj, in_proj_ba, out_proj = (take(f"{prefix}{name}") for name in ("in_proj", "in_proj_ba", "out_proj"))
        conv, a_log, dt_bias, head_norm = layer.conv, layer.a_log, layer.dt_bias, layer.head_norm
        assert conv is not None and a_log is not None and dt_bias is not None and head_norm is not None
        own = conv.squeeze(1), -a_log.exp(), dt_bias, head_norm, out_proj
        return LinearAttentionWeights(
            layer.input_norm, in_proj, in_proj_ba, *own, layer.post_norm, make_mlp(layer, prefix)
        )

    layers, ffn, dense = weights.layers, None, None
    if stage >= 0:
        layer = layers[stage]
        o = take("o")
        if layer.router is None:
            dense = take("gate_up"), take("down")
            mlp = partial(_dense, ops, *dense)
        else:
            mlp = make_mlp(layer)
        ffn = FfnWeights(o, layer.post_norm, mlp, layer.o_norm, layer.down_norm)
    following = weights.linear_layers[stage + 1] if stage + 1 < len(layers) else ()
    linear_layers = tuple(make_linear_attention(layer, f"linear.{n}.") for n, layer in enumerate(following))
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
    has_one_eps = head_norms is None or config.head_norm_eps == config.rms_norm_eps
    if ffn is not None and dense is not None and has_one_eps and not config.norms_outputs and config.linear is None:
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
    return StageWeights(embed, ffn, norm, projection, head_norms, rotates, sinks, in_one_call, linear_layers)


def _dense(
    ops: Ops, gate_up: Linear, down: Linear, rows: torch.Tensor, num_rows: torch.Tensor | None = None
) -> torch.Tensor:
    return down(ops.silu_and_mul(gate_up(rows)))


def _with_shared(
    experts: Experts,
    shared: Callable[[torch.Tensor], torch.Tensor],
    gate: torch.Tensor,
    rows: torch.Tensor,
    num_rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The experts of rows, and one more that all rows go to, times its gate."""
    return experts(rows, num_rows).addcmul_(torch.sigmoid(F.linear(rows, gate)), shared(rows))


def _take_experts(
    layer: LayerWeights, router: torch.Tensor, sizes: ExpertSizes, linears: dict[str, LinearTensors], prefix: str
) -> ExpertWeights:
    (gate_up, gate_up_bias), (down, down_bias) = (linears.pop(f"{prefix}{name}") for name in ("gate_up", "down"))
    activation = None if sizes.swiglu_limit is None else ClampedSwiGLU(sizes.swiglu_limit, SWIGLU_ALPHA)
    how = sizes.per_token, sizes.normalises, layer.router_bias, gate_up_bias, down_bias, activation
    return ExpertWeights(router, gate_up, down, *how)


def _head_norms(layer: LayerWeights, config: ModelConfig) -> torch.Tensor | None:
    if layer.q_norm is None or layer.k_norm is None:
        return None
    norms = ((layer.q_norm, config.num_heads), (layer.k_norm, config.num_kv_heads))
    return torch.cat([norm.expand(heads, -1) for norm, heads in norms])


# -- experts in host memory --------------------------------------------------------------------------------------------
# The experts of stages whose other matrices are on the device.


@dataclass
class StoredExperts:
    """Of a stage: ``in_host_memory`` are both matrices and their biases, ``shapes`` the same as the device has them."""

    router: Router
    weights: ExpertWeights
    """Without memory of matrices and biases."""
    on_host: CodedExperts | ExpertByExpert
    in_host_memory: tuple[Any, ...]
    chunks: Sequence[torch.Tensor]


class HostExperts:
    """The experts of all stages at :attr:`~swiftllm.model.placement.Place.EXPERTS`.

    Of few rows the CPU computes them: rows cross to it with what a router on the device has chosen for them, and their
    results cross back. For many rows a stage's experts are copied to a slot on the device, and from there into the
    layout of its operations, in memory that all stages share. Meanwhile those of the next stage arrive.

    Attributes:
        slots: what is copied to the device.
    """

    slots: WeightSlots

    def __init__(self, device: Device, ops: Ops, host_ops: CpuOps, most_cpu_rows: int) -> None:
        self._device, self._ops, self._host_ops, self._most_cpu_rows = device, ops.in_place, host_ops, most_cpu_rows
        self._stages: dict[int, StoredExperts] = {}
        self._on_device: dict[int, tuple[Experts, tuple[Any, ...], tuple[Any, ...]]] = {}
        self._held: int | None = None  # the stage whose experts the device's operations find

    def add(self, stage: int, weights: ExpertWeights) -> Experts:
        """The experts of a stage, which move to page-locked memory; to be called after :meth:`open`."""
        chunks: list[torch.Tensor] = []

        def store(parts: Any) -> Any:
            memory = self._device.mapped((packed_bytes(parts),), torch.uint8)
            chunks.extend(memory.split(CHUNK_BYTES))
            stored = lay_out(parts, memory)
            copies: list[torch.Tensor] = []
            map_tensors(stored, copies.append)
            map_tensors(parts, lambda tensor: copies.pop(0).copy_(tensor))
            return stored

        bias = None if weights.router_bias is None else weights.router_bias.cpu()
        of_host = replace(weights, router=weights.router.cpu(), router_bias=bias)
        stored, on_host = self._host_ops.store_experts(of_host, store)
        shapes = {name: map_tensors(getattr(weights, name), lambda t: t.to("meta")) for name in STREAMED_PARTS}
        self._stages[stage] = StoredExperts(Router(weights), replace(weights, **shapes), on_host, stored, chunks)
        return partial(self._compute, stage)

    def open(self) -> None:
        """Take memory on the device once all stages are added."""
        self.slots = WeightSlots(self._device, {stage: own.chunks for stage, own in self._stages.items()}, num_slots=1)
        size = max(packed_bytes(own.in_host_memory) for own in self._stages.values())
        memory = torch.empty(size, dtype=torch.uint8, device=self._device.torch_device)
        for stage, own in self._stages.items():
            arriving = lay_out(own.in_host_memory, self.slots.slot_of(stage))
            parts = lay_out({name: getattr(own.weights, name) for name in STREAMED_PARTS}, memory)
            experts = self._ops.make_experts(replace(own.weights, **parts))
            self._on_device[stage] = experts, arriving, tuple(parts.values())

    def _compute(self, stage: int, x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        if len(x) > self._most_cpu_rows:
            self._bring(stage)
            return self._on_device[stage][0](x, num_rows)
        own = self._stages[stage]
        ids, likelihoods, rows = self._fetch(*own.router(x, num_rows), x)
        return self._device.compute.send(own.on_host.compute(rows, ids, likelihoods))

    def _fetch(self, *parts: torch.Tensor) -> list[torch.Tensor]:
        """The same tensors in host memory, by one copy for which the host waits; the longest element comes first."""
        stream = self._device.compute
        together = stream.fetch(torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts]))
        stream.mark().synchronize()
        pieces = zip(together.split([part.nbytes for part in parts]), parts, strict=True)
        return [piece.view(part.dtype).view(part.shape) for piece, part in pieces]

    def _bring(self, stage: int) -> None:
        if self._held == stage:
            return
        self.slots.enter(stage)
        _, arriving, parts = self._on_device[stage]
        for source, target in zip(arriving, parts, strict=True):
            if isinstance(target, QuantisedMatrix):
                copy_panels(source, target)
            elif target is not None:
                target.copy_(source)
        self.slots.launched()
        self.slots.leave()
        self._held = stage


STREAMED_PARTS = ("gate_up", "down", "gate_up_bias", "down_bias")
"""Of :class:`~swiftllm.ops.matrices.ExpertWeights`, in the order of :meth:`CpuOps.store_experts`."""


# -- loaded weights ----------------------------------------------------------------------------------------------------
# The weights of a model where a placement has them: on the device, on their way to it in each iteration, or with the
# CPU, which then computes their products.


class LoadedWeights:
    """The stages of a model. Norms and vocabulary stay on the device.

    Attributes:
        num_logits: columns of the last stage's projection.
        stages: from -1 on, as :meth:`stage` gives them.
        slots: of the streamed stages; None if there are none.
        host_experts: those in host memory; None if there are none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        ops: Ops,
        placement: Placement | None = None,
        device: Device | None = None,
        host_ops: CpuOps | None = None,
    ) -> None:
        """``weights`` are taken over: matrices that are packed anew go one by one, so there is a second copy of one at
        a time. Where not all are resident, which is the default, they were loaded to :func:`host_memory`.

        ``ops`` compute on ``device``; ``host_ops`` multiply the CPU's stages.
        """
        self.num_logits = config.vocab_size
        placement = placement or all_resident(len(weights.layers))
        places = placement.places
        streamed = {i: weights.take_linears(i) for i, place in enumerate(places, -1) if place is Place.STREAMED}
        chunks = {stage: chunks_of(linears) for stage, linears in streamed.items()}
        self.slots: WeightSlots | None = None
        if chunks:
            assert device is not None
            self.slots = WeightSlots(device, chunks)
        self.host_experts: HostExperts | None = None
        if Place.EXPERTS in places:
            if config.linear is not None:  # a stage has the experts of several layers
                raise ValueError("experts in host memory are not supported for models with linear attention")
            assert device is not None and host_ops is not None
            self.host_experts = HostExperts(device, ops, host_ops, placement.most_cpu_rows)
        self.stages: list[StageWeights] = []
        for stage, place in enumerate(places, -1):
            if self.slots is not None and place is Place.STREAMED:
                linears = lay_out(streamed[stage], self.slots.slot_of(stage))
                make = partial(make_linear, ops.in_place), ops.in_place.make_experts  # slots change
            else:
                linears = weights.take_linears(stage)
                make = partial(make_linear, ops), ops.make_experts
                if place is Place.CPU:
                    assert device is not None and host_ops is not None
                    make = partial(_cpu_linear, device, host_ops), partial(_cpu_experts, device, host_ops)
                elif self.host_experts is not None and place is Place.EXPERTS:
                    make = partial(make_linear, ops), partial(self.host_experts.add, stage)
            self.stages.append(make_stage(ops, config, weights, stage, linears, *make))
        if self.host_experts is not None:
            self.host_experts.open()

    def enter(self, layer: int) -> None:
        """Work launched from now on reads the matrices of this stage. Call it outside of captures."""
        if self.slots is not None:
            self.slots.enter(layer)

    def launched(self) -> None:
        """All that reads the stage entered last is launched, so far."""
        if self.slots is not None:
            self.slots.launched()

    def holds(self, layer: int) -> bool:
        """Whether a stage can be entered without a copy of its own."""
        return self.slots is None or self.slots.holds(layer)

    def stage(self, layer: int) -> StageWeights:
        """The matrices of a stage, for work on the compute stream once it is entered."""
        return self.stages[layer + 1]


def host_memory(placement: Placement, device: Device) -> OnHost:
    """By stage, what allocates its matrices in host memory: pinned chunks to stream, or one piece for the CPU; and
    what allocates the embedding. Experts alone are there in one piece until they are stored."""
    pinned = in_chunks(lambda size: device.pinned((size,), torch.uint8), CHUNK_BYTES)
    where = {Place.STREAMED: pinned, Place.CPU: torch.empty}
    stages = list(enumerate(placement.places, -1))
    memory: OnHost = {stage: where[place] for stage, place in stages if place in where}
    of_experts = [stage for stage, place in stages if place is Place.EXPERTS]
    memory = {**memory, **{(stage, name): torch.empty for stage in of_experts for name in EXPERT_MATRICES}}
    return {**memory, EMBEDDING: device.mapped} if placement.embedding_on_host else memory


def read_weights(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    on_host: OnHost = NONE_ON_HOST,
) -> LlamaWeights:
    """The tensors that a configuration names; see :func:`~swiftllm.model.weights.load_weights`."""
    if config.load_format == "dummy":
        return dummy_weights(model, device, dtype, config.seed, part, on_host)
    return load_weights(config.model, model, device, dtype, part, on_host)


def open_weights(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    ops: Ops,
    placement: Placement,
    device: Device,
    host_ops: CpuOps,
) -> LoadedWeights:
    """The weights that a configuration names, where ``placement`` has them; see :class:`LoadedWeights`.

    Raises what :func:`~swiftllm.model.weights.load_weights` does.
    """
    on_host = host_memory(placement, device)
    weights = read_weights(config, model, device.torch_device, dtype, on_host=on_host)
    return LoadedWeights(model, weights, ops, placement, device, host_ops)


def _cpu_linear(device: Device, host_ops: Ops, weight: Matrix, bias: torch.Tensor | None) -> Linear:
    """A linear of rows on the device that the CPU computes. It waits for the rows, and the device for the product."""
    linear, stream = make_linear(host_ops, weight, bias), device.compute

    def compute_on_cpu(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        rows = stream.fetch(x)
        stream.mark().synchronize()
        product = stream.send(linear(rows))
        return product if out is None else out.copy_(product)

    return compute_on_cpu


def _cpu_experts(device: Device, host_ops: Ops, weights: ExpertWeights) -> Experts:
    """The same for an FFN of experts."""
    bias = None if weights.router_bias is None else weights.router_bias.cpu()
    of_host = replace(weights, router=weights.router.cpu(), router_bias=bias)
    experts, stream = host_ops.make_experts(of_host), device.compute

    def compute_on_cpu(x: torch.Tensor, num_rows: torch.Tensor | None = None) -> torch.Tensor:
        rows, count = stream.fetch(x), None if num_rows is None else stream.fetch(num_rows)
        stream.mark().synchronize()
        return stream.send(experts(rows, count))

    return compute_on_cpu
