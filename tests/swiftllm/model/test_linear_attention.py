"""Models with linear attention: what is read of a folder, what is refused, and what is computed in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from apex.placement.measured import time_stage
from swiftllm.device import HostDevice
from swiftllm.llm import LLM
from swiftllm.machine import InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.placement import Place, Placement
from swiftllm.model.stages import LoadedWeights, host_memory
from swiftllm.model.weights import dummy_weights, load_weights
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops, StateRows
from swiftllm.runtime.memory import WeightSizes, check_weights
from tests.reference.tiny_linear import KINDS, linear_judge, make_tiny_linear
from tests.swiftllm.model.test_llama import resident_model, whole_prompt_logits

OF_27B = {
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 24,
    "linear_num_value_heads": 48,
}


def read(folder: Path, config: PreTrainedConfig, name: str, **more: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [name]} | more))
    return ModelConfig.from_folder(folder)


def test_sizes_are_those_of_the_published_models(tmp_path) -> None:
    """Parameters in 10^9, bytes of a request's state with activations in 16 bits, and of K and V of a token."""
    for config, name, parameters, state_mb, kv_kib in (
        (Qwen3_5TextConfig(**OF_27B), "Qwen3_5ForCausalLM", 26.9, 153.9, 64),
        (Qwen3_5MoeTextConfig(), "Qwen3_5MoeForCausalLM", 34.7, 64.4, 20),
        (Qwen3NextConfig(), "Qwen3NextForCausalLM", 79.7, 77.3, 24),
    ):
        model = read(tmp_path, config, name)
        assert model.num_parameters / 1e9 == pytest.approx(parameters, abs=0.05)
        assert WeightSizes.of(model, torch.float16).total == pytest.approx(2 * model.num_parameters, rel=1e-4)
        assert model.state_bytes(2) / 1e6 == pytest.approx(state_mb, abs=0.05)
        assert model.kv_bytes_per_token(2) == kv_kib * 1024


def test_what_is_not_supported_is_refused_in_a_sentence(tmp_path) -> None:
    full, linear = "full_attention", "linear_attention"
    config = Qwen3_5TextConfig(**{**OF_27B, "num_hidden_layers": 8})
    for types in ([linear] * 8, [full] * 8, [linear, full] * 2 + [linear, linear, linear, full], [full, linear] * 4):
        with pytest.raises(ValueError, match=r"layer_types=.* is not supported"):
            read(tmp_path, config, "Qwen3_5ForCausalLM", layer_types=types)
    with pytest.raises(ValueError, match="attn_output_gate=False is not supported"):
        read(tmp_path, config, "Qwen3_5ForCausalLM", attn_output_gate=False)
    with pytest.raises(ValueError, match="5 value heads on 2 key heads"):
        read(tmp_path, config, "Qwen3_5ForCausalLM", linear_num_key_heads=2, linear_num_value_heads=5)
    model = read(tmp_path, config, "Qwen3_5ForCausalLM", layer_types=[linear, full] * 4)
    assert model.linear is not None and (model.num_layers, model.linear.layers_before) == (4, 1)


def test_states_that_do_not_fit_are_refused_with_a_number_that_does(tmp_path) -> None:
    model = read(tmp_path, Qwen3_5TextConfig(**OF_27B), "Qwen3_5ForCausalLM")
    sizes, each = WeightSizes.of(model, torch.float16), model.state_bytes(2)
    free = sizes.total + 28 * each + 1
    check_weights(model, torch.float16, free, max_num_seqs=28)
    with pytest.raises(InsufficientMemory, match=r"states of max_num_seqs = 29 .* set max_num_seqs to 28 or less"):
        check_weights(model, torch.float16, free, max_num_seqs=29)


@pytest.mark.parametrize("name", KINDS)
def test_dummy_weights_have_all_that_a_checkpoint_has(name: str, tmp_path) -> None:
    """And norms of 1, to which 1 is added when they are used, except for those of heads of linear attention."""
    folder = make_tiny_linear(tmp_path, name)
    model = ModelConfig.from_folder(folder)
    read_ones = load_weights(folder, model, "cpu", torch.float32).by_checkpoint_name(model)
    drawn = dummy_weights(model, "cpu", torch.float32).by_checkpoint_name(model)
    assert drawn.keys() == read_ones.keys()
    for place, tensor in drawn.items():
        assert tensor.isfinite().all(), place
        if place.endswith("norm.weight"):
            assert (tensor == (1 if place.endswith("linear_attn.norm.weight") else 0)).all(), place
    weights = LoadedWeights(model, dummy_weights(model, "cpu", torch.float32), Ops())
    assert [len(stage.linear_layers) for stage in weights.stages] == [3] * model.num_layers + [0]


def test_states_and_their_decay_are_float32_beside_weights_of_16_bits(tmp_path, monkeypatch) -> None:
    """Rounded to bfloat16, a decay near 1 would be one of 256 numbers, and the error grows with each token."""
    decays, inner = [], CpuOps.delta_rule

    def noted(ops, q, k, v, log_decay, beta, states, rows):
        assert log_decay.dtype is beta.dtype is states.dtype is torch.float32
        decays.append(log_decay.clone())
        return inner(ops, q, k, v, log_decay, beta, states, rows)

    monkeypatch.setattr(CpuOps, "delta_rule", noted)
    folder = make_tiny_linear(tmp_path, "Qwen3_5Moe")
    sizes = {"num_gpu_blocks": 20, "num_cpu_blocks": 2, "max_num_seqs": 2}
    llm = LLM(str(folder), system="vllm", device="cpu", dtype="bfloat16", **sizes)
    llm.generate([[5, 6, 7, 8]])
    llm.close()
    told = torch.cat([decay.flatten() for decay in decays[-60:]])
    assert (told != told.bfloat16().float()).float().mean() > 0.9


@pytest.mark.parametrize("name", KINDS)
def test_the_scale_of_residuals_changes_no_logits(name: str, tmp_path) -> None:
    """Also with an epsilon of norms so large that a factor of it shows."""
    folder = make_tiny_linear(tmp_path, name, rms_norm_eps=0.02)
    config = ModelConfig.from_folder(folder)
    token_ids = torch.randint(3, 128, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = linear_judge(folder)(torch.tensor([token_ids])).logits[0]
    for read_as in (config, config.with_residual_scale(2.0**-8)):
        logits = whole_prompt_logits(resident_model(folder, read_as, torch.float32, Ops()), token_ids)
        torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)


def test_experts_of_several_layers_in_a_stage_have_no_place_in_host_memory(tmp_path) -> None:
    config = ModelConfig.from_folder(make_tiny_linear(tmp_path, "Qwen3Next"))
    placement = Placement((Place.RESIDENT, Place.EXPERTS, Place.RESIDENT), most_cpu_rows=4)
    tensors = dummy_weights(config, "cpu", torch.float32, on_host=host_memory(placement, HostDevice()))
    with pytest.raises(ValueError, match="experts in host memory are not supported for models with linear attention"):
        LoadedWeights(config, tensors, Ops(), placement, HostDevice(), CpuOps())


def test_a_stage_is_timed_in_each_place(tmp_path) -> None:
    config = ModelConfig.from_folder(make_tiny_linear(tmp_path, "Qwen3_5Moe"))
    times = time_stage(config, torch.float32, torch.float32, HostDevice(), CpuOps(), (1, 2))
    assert times.experts is None and times.weight_bytes > 0


def test_where_a_stage_is_timed_only_decodes_have_states_of_their_own(tmp_path, monkeypatch) -> None:
    """Of a prompt's rows, which are far more than requests, all continue one: memory holds no state for each."""
    config, seen = ModelConfig.from_folder(make_tiny_linear(tmp_path, "Qwen3_5Moe")), []

    def stage(self: LlamaModel, *arguments, state_rows: StateRows):
        states = self.states.recurrent
        assert states.isfinite().all(), "experts of no meaning"
        slots = [*state_rows.decode_slots.tolist(), *(chunk.slot for chunk in state_rows.chunks)]
        assert len(set(slots)) == len(slots) and max(slots) < states.shape[1]
        seen.append((states.shape[1], len(state_rows.decode_slots), sum(c.num_rows for c in state_rows.chunks)))

    monkeypatch.setattr(LlamaModel, "stage", stage)
    time_stage(config, torch.float32, torch.float32, HostDevice(), CpuOps(), (1, 3, 40), most_decodes=3)
    assert set(seen) == {(4, 1, 0), (4, 3, 0), (4, 3, 37)}


@pytest.mark.parametrize("ops", [Ops(), CpuOps()], ids=["torch", "pacpu"])
def test_norms_add_1_to_weights_without_rounding_the_sum(ops: Ops) -> None:
    """As transformers does. The sum in bfloat16 would be wrong by up to 0.4%, and the result by more than its own
    rounding."""
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 96).bfloat16(), torch.randn(5, 96).bfloat16(), torch.randn(96).bfloat16() / 4
    judge, judge_of_heads = Qwen3NextRMSNorm(96), Qwen3NextRMSNorm(32)
    judge.weight.data, judge_of_heads.weight.data = weight, weight[:32]
    made = [ops.rms_norm(x, weight, judge.eps, 1.0), ops.add_rms_norm_(residual, x, weight, judge.eps, 1.0)]
    made.append(x.view(5, 3, 32).clone())
    ops.norm_heads_(made[2], weight[:32].repeat(3, 1), judge.eps, 1.0)
    expected = judge(x), judge(residual), judge_of_heads(x.view(5, 3, 32))
    for normed, wanted in zip(made, expected, strict=True):
        assert normed.dtype is torch.bfloat16
        assert (normed != wanted).float().mean() < 0.01  # the order of a sum decides
