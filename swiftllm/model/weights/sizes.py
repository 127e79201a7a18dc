"""Bytes of a model's weights, before any is read: all, those of each stage, and all in 4 bits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.config.quantisation import AWQ, MXFP4, QuantisationScheme
from swiftllm.model.weights.llama_weights import LlamaWeights, fused_matrices
from swiftllm.model.weights.packed_tensor import packed_bytes
from swiftllm.ops.quantised_matrix import MXFP4_GROUP

GROUP_SIZES = (128, 64, 32, 16)  # of 4-bit weights, the usual one first


def weight_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of the weights on the device in ``dtype``, whatever dtype the checkpoint has.

    Quantised matrices stay packed, with scales of 16 bits. That a checkpoint leaves single modules of a layer in 16
    bits is not known before it is read.
    """
    weights = LlamaWeights.empty(model, "meta", dtype)
    total = sum(tensor.nbytes for tensor in weights.by_checkpoint_name(model).values())
    if model.quantisation is None:
        return total
    packed = weights.empty_quantised(model, "meta", torch.float16)
    orders = sum(4 * matrix.in_features for matrix in packed) if model.quantisation.ordered else 0
    return total + orders + sum(matrix.nbytes for matrix in packed)


def stage_bytes(model: ModelConfig, dtype: torch.dtype) -> list[int]:
    """Bytes of what may be elsewhere than on the device, for each stage from -1 on; see :func:`weight_bytes`."""
    weights = LlamaWeights.empty(model, "meta", dtype)
    if model.quantisation is not None:
        weights.empty_quantised(model, "meta", torch.float16)
    return [packed_bytes(weights.take_linears(stage)) for stage in range(-1, model.num_layers)]


def embedding_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of an embedding that may be in host memory: none where it is the vocabulary's matrix too."""
    return 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size * dtype.itemsize


@dataclass(frozen=True)
class WeightSizes:
    """Bytes of a model's weights: all, those that stay on a GPU in every placement, and all of them in 4 bits.

    ``four_bit`` is None where they are quantised already, or no size of groups divides the matrices.
    """

    total: int
    staying: int
    four_bit: int | None

    @classmethod
    def of(cls, model: ModelConfig, dtype: torch.dtype) -> WeightSizes:
        total = weight_bytes(model, dtype)
        if model.has_swiglu_limit:
            scheme: QuantisationScheme | None = QuantisationScheme(MXFP4, MXFP4_GROUP)
        else:
            inputs = [matrix.in_features for matrix in fused_matrices(model)]
            group_size = next((size for size in GROUP_SIZES if all(n % size == 0 for n in inputs)), None)
            scheme = None if group_size is None else QuantisationScheme(AWQ, group_size)
        four_bit = None
        if model.quantisation is None and scheme is not None:
            four_bit = weight_bytes(replace(model, quantisation=scheme), dtype)
        elsewhere = sum(stage_bytes(model, dtype)) + embedding_bytes(model, dtype)
        return cls(total, total - elsewhere, four_bit)
