"""The tensors of a model by boundary, and buffers that hold a boundary's matrices one behind the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from swiftllm.model.packed_tensor import PackedTensor, aligned, map_tensors
from swiftllm.model.weights import LayerWeights, LlamaWeights
from swiftllm.ops.quantised_matrix import Matrix

Matrices = tuple[Matrix | PackedTensor | None, ...]


@dataclass(frozen=True)
class FfnTensors:
    """A layer from its attention's output on."""

    o: Matrix
    norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
    o_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class BoundaryTensors:
    """See :class:`swiftllm.model.providers.BoundaryWeights`."""

    embedding: torch.Tensor | None
    ffn: FfnTensors | None
    norm: torch.Tensor
    projection: Matrix
    projection_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    projects_vocabulary: bool


def split_boundaries(weights: LlamaWeights) -> list[BoundaryTensors]:
    """The boundaries from -1 on. Takes ``weights`` over: its layers are gone afterwards."""
    boundaries: list[BoundaryTensors] = []
    embedding: torch.Tensor | None = weights.embedding
    ffn: FfnTensors | None = None
    for layer in weights.layers:
        qkv = layer.qkv, layer.qkv_bias, layer.q_norm, layer.k_norm
        boundaries.append(BoundaryTensors(embedding, ffn, layer.input_norm, *qkv, projects_vocabulary=False))
        embedding, ffn = None, _ffn_of(layer)
    vocabulary = weights.lm_head, None, None, None
    boundaries.append(BoundaryTensors(embedding, ffn, weights.final_norm, *vocabulary, projects_vocabulary=True))
    weights.layers.clear()
    return boundaries


def matrices_of(boundary: BoundaryTensors) -> Matrices:
    """What may be elsewhere than on the device: matrices and biases of layers, not norms, embedding and vocabulary."""
    ffn, own = boundary.ffn, (boundary.projection, boundary.projection_bias)
    of_ffn = (None,) * 6 if ffn is None else (ffn.o, ffn.o_bias, ffn.gate_up, ffn.gate_up_bias, ffn.down, ffn.down_bias)
    return (*of_ffn, *((None, None) if boundary.projects_vocabulary else own))


def with_matrices(boundary: BoundaryTensors, matrices: Matrices) -> BoundaryTensors:
    """The boundary with other :func:`matrices_of`."""
    o, o_bias, gate_up, gate_up_bias, down, down_bias, projection, projection_bias = matrices
    if boundary.ffn is not None:
        biases = {"o_bias": o_bias, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
        boundary = replace(boundary, ffn=replace(boundary.ffn, o=o, gate_up=gate_up, down=down, **biases))
    if boundary.projects_vocabulary:
        return boundary
    return replace(boundary, projection=projection, projection_bias=projection_bias)


def packed_bytes(matrices: Matrices) -> int:
    """Bytes of a buffer that holds the matrices."""
    sizes: list[int] = []
    map_tensors(matrices, lambda tensor: sizes.append(aligned(tensor.nbytes)))
    return sum(sizes)


def chunks_of(matrices: Matrices) -> list[torch.Tensor]:
    """The memory of packed matrices, in the order in which :func:`lay_out` expects them in one piece."""
    chunks: list[torch.Tensor] = []
    map_tensors(matrices, lambda packed: chunks.extend(packed.chunks))
    return chunks


def lay_out(matrices: Matrices, memory: torch.Tensor) -> Matrices:
    """Matrices of the same shapes in ``memory``, uint8 ``[bytes]``, one behind the other."""
    offset = 0

    def place(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal offset
        piece = memory[offset : offset + tensor.nbytes]
        offset += aligned(tensor.nbytes)
        return piece.view(tensor.dtype).view(tensor.shape)

    return map_tensors(matrices, place)


def _ffn_of(layer: LayerWeights) -> FfnTensors:
    biases = layer.o_bias, layer.gate_up_bias, layer.down_bias
    return FfnTensors(layer.o, layer.post_norm, layer.gate_up, layer.down, *biases)
