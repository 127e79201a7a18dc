"""The weights of a model where a placement has them: on the device, on their way to it in each iteration, or with the
CPU, which then computes their products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from swiftllm.config import EngineConfig
from swiftllm.device.device import Device
from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.stages.placement import Place, Placement, all_resident
from swiftllm.model.stages.providers import StageWeights, make_linear, make_stage
from swiftllm.model.stages.weight_slots import CHUNK_BYTES, WeightSlots
from swiftllm.model.weights.llama_weights import (
    EMBEDDING,
    NONE_ON_HOST,
    LlamaWeights,
    ModelPart,
    dummy_weights,
    load_weights,
)
from swiftllm.model.weights.packed_tensor import Allocate, chunks_of, in_chunks, lay_out
from swiftllm.ops.experts import Experts, ExpertWeights
from swiftllm.ops.interface import Linear, Ops
from swiftllm.ops.quantised_matrix import Matrix


class LoadedWeights:
    """The stages of a model. Norms and vocabulary stay on the device.

    Attributes:
        num_logits: columns of the last stage's projection.
        stages: from -1 on, as :meth:`stage` gives them.
        slots: of the streamed stages; None if there are none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        ops: Ops,
        placement: Placement | None = None,
        device: Device | None = None,
        host_ops: Ops | None = None,
    ) -> None:
        """``weights`` are taken over: matrices that are packed anew go one by one, so there is a second copy of one at
        a time. Where not all are resident, which is the default, they were loaded to :func:`host_memory`.

        ``ops`` compute on ``device``; ``host_ops`` multiply the CPU's stages.
        """
        self.num_logits = config.vocab_size
        places = (placement or all_resident(len(weights.layers))).places
        streamed = {i: weights.take_linears(i) for i, place in enumerate(places, -1) if place is Place.STREAMED}
        chunks = {stage: chunks_of(linears) for stage, linears in streamed.items()}
        self.slots: WeightSlots | None = None
        if chunks:
            assert device is not None
            self.slots = WeightSlots(device, chunks)
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
            self.stages.append(make_stage(ops, config, weights, stage, linears, *make))

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


def host_memory(placement: Placement, device: Device) -> dict[int, Allocate]:
    """By stage, what allocates its matrices in host memory: pinned chunks to stream, or one piece for the CPU; and
    what allocates the embedding."""
    pinned = in_chunks(lambda size: device.pinned((size,), torch.uint8), CHUNK_BYTES)
    where = {Place.STREAMED: pinned, Place.CPU: torch.empty}
    memory = {stage: where[place] for stage, place in enumerate(placement.places, -1) if place in where}
    return {**memory, EMBEDDING: device.mapped} if placement.embedding_on_host else memory


def read_weights(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    part: ModelPart | None = None,
    on_host: Mapping[int, Allocate] = NONE_ON_HOST,
) -> LlamaWeights:
    """The tensors that a configuration names; see :func:`~swiftllm.model.weights.llama_weights.load_weights`."""
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
    host_ops: Ops,
) -> LoadedWeights:
    """The weights that a configuration names, where ``placement`` has them; see :class:`LoadedWeights`.

    Raises what :func:`~swiftllm.model.weights.llama_weights.load_weights` does.
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
