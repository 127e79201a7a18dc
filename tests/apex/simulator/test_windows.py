"""Predictions of a model whose layers have windows: gpt-oss-20b on a T4."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from apex.simulator.hardware_files import LayerShape, load_gpu, load_host, load_model_config
from apex.simulator.predicted_machine import predict_machine
from apex.simulator.predicted_profile import bits_per_element, gpu_attention_s, hardware_profile
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.kv.tensors import KVFormat


def test_attention_counts_the_tokens_that_each_layer_reaches() -> None:
    """The mean of layers with a window of 128 and without, on both sides of it, on GPU and CPU and in prompts."""
    gpu, host, model = load_gpu("t4"), load_host("g4dn-4xlarge"), load_model_config("gpt-oss-20b")
    table = hardware_profile(gpu, host, model)
    full = hardware_profile(gpu, host, replace(model, windows=None))
    for requests in (1, 40):
        for context in (64, 128, 1000, 8000):
            reached = min(context, 128)
            for name in ("gpu_attention", "cpu_attention"):
                wanted = (getattr(full, name)(requests, context) + getattr(full, name)(requests, reached)) / 2
                assert getattr(table, name)(requests, context) == pytest.approx(wanted), (name, context)
    shape = LayerShape.from_config(model)
    assert table.gpu_attention(8, 8000) < 0.6 * gpu_attention_s(gpu, shape, 2, 8, 8000)
    assert table.prefill_attention(200, 8000) < 0.6 * full.prefill_attention(200, 8000)


def test_a_dense_models_table_is_what_it_was() -> None:
    gpu, host, model = load_gpu("a10"), load_host("dual-xeon-6342"), load_model_config("llama-3.1-8b")
    table, shape = hardware_profile(gpu, host, model), LayerShape.from_config(model)
    for requests, context in ((1, 1), (4096, 1 << 17)):  # the corners of the grid, to the bit
        assert table.gpu_attention(requests, context) == gpu_attention_s(gpu, shape, 2, requests, context)


def test_bytes_of_weights_and_of_k_and_v() -> None:
    machine = predict_machine("t4", "g4dn-4xlarge", "gpt-oss-20b", "float16")
    assert machine.weight_bytes == pytest.approx(13.97e9, rel=1e-3)
    assert bits_per_element(machine.model.quantisation, 2880) == 4.25
    block_bytes = KVFormat.exact(torch.float16).block_bytes
    groups, whole = (LayerGroups.of(model, 16) for model in (machine.model, replace(machine.model, windows=None)))
    windowed = groups.blocks_for(8000) * block_bytes(machine.model, 16)
    assert windowed <= 0.52 * whole.blocks_for(8000) * block_bytes(replace(machine.model, windows=None), 16)
