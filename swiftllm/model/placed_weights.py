"""Weights of which only a part is on the device: others cross to it in each iteration, or are the CPU's to compute."""

from __future__ import annotations

import torch

from swiftllm.config import EngineConfig
from swiftllm.device.device import Device
from swiftllm.model.boundary_tensors import (
    Matrices,
    chunks_of,
    lay_out,
    matrices_of,
    split_boundaries,
    with_matrices,
)
from swiftllm.model.config import ModelConfig
from swiftllm.model.packed_tensor import InChunks, InOnePiece, PackedTensor, map_tensors
from swiftllm.model.placement import Place, Placement
from swiftllm.model.providers import BoundaryWeights, ResidentWeights, WeightProvider, make_boundary, read_weights
from swiftllm.model.weight_stream import CHUNK_BYTES, WeightStream
from swiftllm.model.weights import LlamaWeights
from swiftllm.ops.interface import Linear, Ops
from swiftllm.ops.quantised_matrix import QuantisedMatrix


class PlacedWeights:
    """See :class:`swiftllm.model.providers.WeightProvider`. Norms, embedding and vocabulary stay on the device.

    Attributes:
        stream: of the streamed boundaries; None if there are none.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: LlamaWeights,
        ops: Ops,
        device: Device,
        placement: Placement,
        host_linears: Ops,
    ) -> None:
        """``weights`` are taken over. The matrices of streamed and CPU boundaries are in host memory. Those of streamed
        boundaries stay there if they are packed. Of the others there is a second copy of one matrix at a time.

        ``ops`` compute on ``device``; ``host_linears`` compute the CPU's boundaries.
        """
        self.num_logits = config.vocab_size
        tensors = split_boundaries(weights)
        embedding, where = weights.embedding, device.torch_device
        moved = embedding.to(where)

        def to_device(tensor: torch.Tensor) -> torch.Tensor:
            return moved if tensor is embedding else tensor.to(where)  # which may be the vocabulary's matrix, too

        chunks: dict[int, list[torch.Tensor]] = {}
        layouts: dict[int, Matrices] = {}
        in_chunks = pinned_chunks(device)
        for layer, place in enumerate(placement.places, -1):
            if place is Place.STREAMED:
                packed = in_chunks.keep(matrices_of(tensors[layer + 1]))
                chunks[layer], layouts[layer] = chunks_of(packed), map_tensors(packed, PackedTensor.layout)
                tensors[layer + 1] = with_matrices(tensors[layer + 1], layouts[layer])
        self.stream = WeightStream(device, chunks) if chunks else None
        on_cpu = _OnCpu(device, host_linears)
        elsewhere = {Place.CPU: on_cpu, Place.STREAMED: ops.in_place}  # slots change
        self._boundaries: list[BoundaryWeights] = []
        for layer, place in enumerate(placement.places, -1):
            boundary, tensors[layer + 1] = tensors[layer + 1], None
            matrices = matrices_of(boundary)
            if place is Place.RESIDENT:
                matrices = map_tensors(matrices, to_device)
            elif place is Place.STREAMED:
                matrices = lay_out(layouts[layer], self.stream.slot_of(layer))
            else:
                matrices = on_cpu.take(matrices)
            rest = map_tensors(with_matrices(boundary, _none_of(matrices)), to_device)
            boundary = with_matrices(rest, matrices)
            del matrices, rest
            self._boundaries.append(make_boundary(ops, config, boundary, elsewhere.get(place)))

    def enter(self, layer: int) -> None:
        if self.stream is not None:
            self.stream.enter(layer)

    def launched(self) -> None:
        if self.stream is not None:
            self.stream.launched()

    def holds(self, layer: int) -> bool:
        return self.stream is None or self.stream.holds(layer)

    def boundary(self, layer: int) -> BoundaryWeights:
        return self._boundaries[layer + 1]


def open_placed_weights(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    ops: Ops,
    placement: Placement,
    device: Device,
    host_linears: Ops,
) -> WeightProvider:
    """The weights that a configuration names, where ``placement`` has them; see :class:`PlacedWeights`.

    Raises what :func:`~swiftllm.model.weights.load_weights` does.
    """
    if placement.is_all_resident:
        return ResidentWeights(model, read_weights(config, model, device.torch_device, dtype), ops)
    where = {Place.STREAMED: pinned_chunks(device), Place.CPU: InOnePiece()}
    on_host = {layer: where[place] for layer, place in enumerate(placement.places, -1) if place in where}
    weights = read_weights(config, model, device.torch_device, dtype, on_host=on_host)
    return PlacedWeights(model, weights, ops, device, placement, host_linears)


class _OnCpu:
    """Linears of rows on the device that the CPU computes. A product waits for the rows, and the device for it."""

    def __init__(self, device: Device, linears: Ops) -> None:
        self._stream = device.compute
        self._linears = linears
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, matrices: Matrices) -> Matrices:
        """Layouts to make linears of. A matrix is freed once it is packed, and not only when all of a boundary are."""
        biases = matrices[1::2]  # were loaded to the device
        pairs = zip(map_tensors(matrices[::2], self._layout_of), map_tensors(biases, torch.Tensor.cpu), strict=True)
        return tuple(part for pair in pairs for part in pair)

    def make_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self._there_and_back(self._linears.make_linear(self._given(weight), bias))

    def make_quantised_linear(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> Linear:
        matrix = map_tensors(matrix, self._given)
        return self._there_and_back(self._linears.make_quantised_linear(matrix, bias))

    def _layout_of(self, tensor: torch.Tensor) -> torch.Tensor:
        layout = torch.empty_like(tensor, device="meta")
        self._taken[id(layout)] = layout, tensor  # the layout too, so that no other gets its id
        return layout

    def _given(self, layout: torch.Tensor) -> torch.Tensor:
        return self._taken.pop(id(layout))[1]

    def _there_and_back(self, linear: Linear) -> Linear:
        def compute(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            rows = self._stream.fetch(x)
            self._stream.mark().synchronize()
            product = self._stream.send(linear(rows))
            return product if out is None else out.copy_(product)

        return compute


def pinned_chunks(device: Device) -> InChunks:
    """Memory to stream from."""
    return InChunks(lambda size: device.pinned((size,), torch.uint8), CHUNK_BYTES)


def _none_of(matrices: Matrices) -> Matrices:
    return (None,) * len(matrices)
