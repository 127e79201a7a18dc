"""The model against transformers on the same files."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.model import llama
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.stages import LoadedWeights
from swiftllm.model.weights import load_weights
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops, StateChunk, StateRows
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.paged_attention import attend_chunk

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    "gqa": {},
    "mha": {"num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim given": {"head_dim": 32},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    "sharded": {"max_shard_size": "100KB"},
    "mistral": {"kind": MistralConfig, "sliding_window": None},
    "qwen2": {"kind": Qwen2Config, "hidden_size": 112, "num_attention_heads": 14, "sliding_window": 64},  # not used
    "qwen3": {"kind": Qwen3Config, "head_dim": 32},
}


def resident_model(
    folder: Path, config: ModelConfig, dtype: torch.dtype, ops: Ops, residual_dtype: torch.dtype | None = None
) -> LlamaModel:
    weights = LoadedWeights(config, load_weights(folder, config, "cpu", dtype), ops)
    return LlamaModel(config, weights, ops, residual_dtype=residual_dtype, num_slots=1)


@torch.inference_mode()
def whole_prompt_logits(model: LlamaModel, token_ids: list[int]) -> torch.Tensor:
    config = model.config
    rotary_rows = model.rotary_table[: len(token_ids)]
    residual = model.embed(torch.tensor(token_ids))
    first = StateChunk(0, len(token_ids), is_first=True)
    states = None if config.linear is None else StateRows((first,), torch.zeros(0, dtype=torch.int64))
    qkv = model.first_stage(residual, rotary_rows, state_rows=states)
    for layer in range(config.num_layers):
        q, k, v = model.split_qkv(qkv)
        which = None if config.windows is None else config.windows[layer], model.sinks(layer)
        out = attend_chunk(model.ops, q, k.transpose(0, 1), v.transpose(0, 1), config.head_dim**-0.5, *which)
        out = model.gated(out, qkv)
        if layer < config.num_layers - 1:
            qkv = model.stage(layer, out, residual, rotary_rows, state_rows=states)
    return model.last_stage(out, residual)


@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["reference", "cpu"])
@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_transformers(tiny_model_dir, overrides, ops):
    folder = tiny_model_dir(**overrides)
    config = ModelConfig.from_folder(folder)
    model = resident_model(folder, config, torch.float32, ops)
    token_ids = torch.randint(3, 128, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = judge(torch.tensor([token_ids])).logits[0]
    assert expected.std() > 0.5  # else the tolerance would say nothing
    torch.testing.assert_close(whole_prompt_logits(model, token_ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_less_exact_than_transformers(tiny_model_dir, dtype):
    folder = tiny_model_dir()
    config = ModelConfig.from_folder(folder)
    token_ids = list(range(3, 60))

    def ours(dtype: torch.dtype) -> torch.Tensor:
        return whole_prompt_logits(resident_model(folder, config, dtype, CpuOps()), token_ids)

    exact, logits = ours(torch.float32), ours(dtype)
    with torch.inference_mode():
        judge = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(torch.tensor([token_ids])).logits[0]
    assert logits.dtype is judge.dtype is dtype
    error, error_of_judge = ((x.float() - exact).square().mean().sqrt() for x in (logits, judge))
    assert 0 < error < 1.2 * error_of_judge


@pytest.mark.parametrize("rows_at_once", [50, 7, 1])
def test_many_rows_cross_in_pieces(tiny_model_dir, monkeypatch, rows_at_once):
    """The same logits, and no operation of the FFN has more rows than a piece."""
    folder = tiny_model_dir()
    config = ModelConfig.from_folder(folder)
    ops, widths = Ops(), []
    model = resident_model(folder, config, torch.float32, ops)
    token_ids = torch.randint(3, 128, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    whole = whole_prompt_logits(model, token_ids)
    silu_and_mul = ops.silu_and_mul
    monkeypatch.setattr(ops, "silu_and_mul", lambda x: widths.append(len(x)) or silu_and_mul(x))
    monkeypatch.setattr(llama, "FFN_ELEMENTS_AT_ONCE", rows_at_once * 2 * config.intermediate_size)
    torch.testing.assert_close(whole_prompt_logits(model, token_ids), whole, rtol=1e-5, atol=1e-5)
    assert max(widths) <= rows_at_once and sum(widths) == 150 * config.num_layers


def test_smollm2_greedy_tokens_equal_transformers(smollm2_dir):
    judge = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    backend = open_torch_backend(
        EngineConfig(str(smollm2_dir), device="cpu", dtype="float32", num_gpu_blocks=16, num_cpu_blocks=0)
    )
    driver = BackendDriver(backend)
    # "The capital of France is", and the same question put to the assistant.
    prompts = (
        [504, 3575, 282, 4649, 314],
        [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198],
    )
    requests = [
        driver.admit(f"r{i}", p, Tier.GPU, SamplingParams(max_tokens=8, ignore_eos=True)) for i, p in enumerate(prompts)
    ]
    driver.prefill(requests)
    for _ in range(7):
        driver.decode(requests)
    for request, prompt in zip(requests, prompts, strict=True):
        generated = judge.generate(
            torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert request.output_token_ids == generated[0, len(prompt) :].tolist()
