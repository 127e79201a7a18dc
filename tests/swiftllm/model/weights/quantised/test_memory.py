"""What a 4-bit model holds in memory once its matrices are ready to multiply."""

import gc
from dataclasses import replace

import pytest
import torch

from swiftllm.model.config import ModelConfig
from swiftllm.model.quantisation import AWQ, QuantisationScheme
from swiftllm.model.stages import LoadedWeights
from swiftllm.model.weights import dummy_weights
from swiftllm.ops.cpu import CpuOps
from swiftllm.runtime.memory import weight_bytes

PLAIN = ModelConfig(  # outputs are whole panels of all layouts
    num_layers=3,
    hidden_size=384,
    num_heads=6,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=768,
    vocab_size=48,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    rope_scaling=None,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    norms_heads=False,
    initializer_range=0.02,
    eos_token_ids=(),
)
CODED = replace(PLAIN, quantisation=QuantisationScheme(AWQ, 128))


def live_tensors() -> dict[int, int]:
    """Bytes of every tensor that anything holds, by its address."""
    gc.collect()
    found = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return {x.untyped_storage().data_ptr() if x.layout is torch.strided else id(x): x.nbytes for x in found}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_cpu_holds_4_bit_matrices_packed_alone(dtype):
    held = {}
    for model in (CODED, PLAIN):
        before = live_tensors()
        weights = LoadedWeights(model, dummy_weights(model, "cpu", dtype), CpuOps())
        held[model] = sum(size for address, size in live_tensors().items() if address not in before)
        assert held[model] == pytest.approx(weight_bytes(model, dtype), rel=0.05)
        del weights
    assert held[CODED] < held[PLAIN] * 1.1 * 4.19 / (8 * dtype.itemsize)
