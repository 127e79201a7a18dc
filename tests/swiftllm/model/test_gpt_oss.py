"""gpt-oss: logits beside transformers, its checkpoints, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftllm.model import weights as llama_tensors
from swiftllm.model.checkpoint import WeightsError
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.quantisation import MXFP4
from swiftllm.model.weight_memory import PackedTensor, in_chunks
from swiftllm.model.weights import LlamaWeights, dummy_weights, load_weights
from swiftllm.ops import matrices as experts
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from swiftllm.ops.matrices import QuantisedMatrix
from swiftllm.parallel.shards import BY_COLUMNS, Shard
from swiftllm.runtime.memory import WeightSizes, stage_bytes, weight_bytes
from tests.reference.tiny_gpt_oss import make_folders
from tests.swiftllm.model.test_llama import resident_model, whole_prompt_logits

TOKENS = torch.randint(3, 128, (150,), generator=torch.Generator().manual_seed(1)).tolist()
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0,
    "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
    "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
    "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
    "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
    },
    "rms_norm_eps": 1e-5, "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 201088,
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory.mktemp("gpt-oss"))


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    """transformers' logits of :data:`TOKENS`."""
    logits = {name: judged(folders[name]) for name in ("plain", "dense")}
    return logits | {"packed": logits["dense"]}


@torch.inference_mode()
def judged(folder: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return model(input_ids=torch.tensor([TOKENS])).logits[0].float()


def logits_of(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    ops: Ops | None = None,
    residual_dtype: torch.dtype | None = None,
    **change: object,
) -> torch.Tensor:
    config = replace(ModelConfig.from_folder(folder), **change)
    return whole_prompt_logits(resident_model(folder, config, dtype, ops or Ops(), residual_dtype), TOKENS).float()


def test_logits_equal_transformers(folders, expected) -> None:
    for name, folder in folders.items():
        assert expected[name].std() > 0.5, name  # else the tolerance would say nothing
        for ops in (Ops(), CpuOps()):
            assert (logits_of(folder, ops=ops) - expected[name]).abs().max() < 5e-5, name


def test_without_any_one_part_the_logits_are_others(folders, expected, monkeypatch) -> None:
    """So each part is used, and the test above would notice if it were not."""

    def differ(name: str = "plain", **change: object) -> bool:
        return (logits_of(folders[name], **change) - expected[name]).abs().max() > 1e-3

    config = ModelConfig.from_folder(folders["plain"])
    sizes, rope = config.experts, config.rope_scaling
    changes = {
        "no normalising": {"experts": replace(sizes, normalises=False)},
        "not clamped": {"experts": replace(sizes, swiglu_limit=7.0)},
        "window off by one": {"windows": (9, None, 9, None)},
        "window on a full layer": {"windows": (8, 8, 8, 8)},
        "window on the other layers": {"windows": (None, 8, None, 8)},
        "no window": {"windows": None},
        "whole pairs": {"rope_scaling": replace(rope, whole_pairs=True)},
        "no YaRN": {"rope_scaling": replace(rope, kind="default")},
        "amplitude": {"rope_scaling": replace(rope, amplitude=1.0)},
        "eps": {"rms_norm_eps": 1e-5},
    }
    for what, change in changes.items():
        assert differ(**change), what
    choose = experts.choose_experts

    def before_top_k(logits: torch.Tensor, per_token: int, normalises: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return choose(logits.softmax(-1), per_token, normalises)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaModel, "sinks", lambda *_: None)
        assert differ()
    with monkeypatch.context() as patch:
        patch.setattr(experts, "choose_experts", before_top_k)
        assert differ()
    alternating = llama_tensors.EVERY_OTHER
    for faulty in (alternating[::-1], (slice(0, 128), slice(128, None))):  # exchanged, and one above the other
        with monkeypatch.context() as patch:
            patch.setattr(llama_tensors, "EVERY_OTHER", faulty)
            assert differ() and differ("packed")
    places = LlamaWeights.by_checkpoint_name
    for kind in ("mlp.gate.bias", "gate_proj.bias", "down_proj.bias", "o_proj.bias", "q_proj.bias"):

        def without(*given: object, kind: str = kind) -> dict[str, torch.Tensor]:
            found = places(*given)
            for name in [name for name in found if name.endswith(kind)]:
                found[name].zero_()
                found[name] = torch.empty_like(found[name])
            return found

        with monkeypatch.context() as patch:
            patch.setattr(LlamaWeights, "by_checkpoint_name", without)
            assert differ(), kind


def test_scaled_residuals_change_no_logit_in_float32_and_hold_in_float16(folders, tmp_path) -> None:
    """In a model whose residuals are some 100,000, as gpt-oss' are, float16 without the scale is NaN. Residuals in
    float32 are not enough: outputs of ``o`` and ``down`` are beyond float16 themselves."""
    unscaled = {"residual_scale": 1.0, "embedding_multiplier": 1.0, "rms_norm_eps": 1e-5}
    scaled = logits_of(folders["plain"])
    assert (logits_of(folders["plain"], **unscaled) - scaled).abs().max() < 1e-5
    (tmp_path / "config.json").write_text((folders["plain"] / "config.json").read_text())
    tensors = load_file(folders["plain"] / "model.safetensors")
    large = {name: t * 2.0**15 if name.endswith("embed_tokens.weight") else t for name, t in tensors.items()}
    for layer in range(4):  # outputs as large, so that they count
        for name in (
            "self_attn.o_proj.weight",
            "self_attn.o_proj.bias",
            "mlp.experts.down_proj",
            "mlp.experts.down_proj_bias",
        ):
            large[f"model.layers.{layer}.{name}"] = large[f"model.layers.{layer}.{name}"] * 2.0**15
    save_file(large, tmp_path / "model.safetensors", metadata={"format": "pt"})
    exact = judged(tmp_path)
    assert (logits_of(tmp_path) - exact).abs().max() < 1e-3
    errors = {
        dtype: (logits_of(tmp_path, dtype) - exact).square().mean().sqrt() for dtype in (torch.float16, torch.bfloat16)
    }
    assert errors[torch.float16] < 0.5 * errors[torch.bfloat16]
    for residual_dtype in (torch.float16, torch.float32):
        in_float16 = {"dtype": torch.float16, "residual_dtype": residual_dtype}
        assert not logits_of(tmp_path, **in_float16, **unscaled).isfinite().all()
    both = logits_of(tmp_path, torch.float16, residual_dtype=torch.float32) - exact
    assert both.square().mean().sqrt() < 0.5 * errors[torch.bfloat16]


def test_mxfp4_is_read_to_the_bit_by_every_rank_and_into_chunks_to_be_streamed(folders) -> None:
    model, plain = (ModelConfig.from_folder(folders[name]) for name in ("packed", "dense"))
    in_chunks_of_4k = dict.fromkeys(range(-1, 4), in_chunks(lambda size: torch.empty(size, dtype=torch.uint8), 1 << 12))
    for rank, on_host in ((None, {}), (0, {}), (1, {}), (None, in_chunks_of_4k)):
        parts = [None if rank is None else Shard(config, rank, 2) for config in (model, plain)]
        ours = load_weights(folders["packed"], model, "cpu", torch.float32, parts[0], on_host)
        wanted = load_weights(folders["dense"], plain, "cpu", torch.float32, parts[1], on_host)
        for layer, other in zip(ours.layers, wanted.layers, strict=True):
            for matrix in ("qkv", "o", "gate_up", "down"):
                found, dense = whole(getattr(layer, matrix)), whole(getattr(other, matrix))
                is_quantised = isinstance(found, QuantisedMatrix)
                assert is_quantised == (matrix in ("gate_up", "down"))
                assert torch.equal(found.dequantise() if is_quantised else found, dense), (rank, matrix)


def whole(matrix: torch.Tensor | PackedTensor | QuantisedMatrix) -> torch.Tensor | QuantisedMatrix:
    """The same with tensors in one piece."""
    if isinstance(matrix, QuantisedMatrix):
        return replace(matrix, codes=whole(matrix.codes), scales=whole(matrix.scales))
    if isinstance(matrix, torch.Tensor):
        return matrix
    return torch.cat(list(matrix.chunks))[: matrix.nbytes].view(matrix.dtype).view(matrix.shape)


def test_the_parts_of_two_ranks_are_the_whole(folders) -> None:
    """Sinks by heads, experts by their inner size; biases of outputs on the first rank alone."""
    model = ModelConfig.from_folder(folders["plain"])
    places = load_weights(folders["plain"], model, "cpu", torch.float32).by_checkpoint_name(model)
    shards = [Shard(model, rank, 2) for rank in range(2)]
    first, second = (
        load_weights(folders["plain"], model, "cpu", torch.float32, shard).by_checkpoint_name(shard.sizes)
        for shard in shards
    )
    for name, tensor in places.items():
        module, kind = name.split(".")[-2:]
        if module in BY_COLUMNS and kind == "bias":
            assert torch.equal(first[name], tensor) and not second[name].any(), name
        elif not torch.equal(first[name], tensor):
            axis = 1 if module in BY_COLUMNS else 0
            assert torch.equal(torch.cat((first[name], second[name]), axis), tensor), name
    assert first["model.layers.0.self_attn.sinks"].tolist() == places["model.layers.0.self_attn.sinks"][:2].tolist()
    with pytest.raises(
        ValueError, match=r"tensor_parallel=2 .* whole groups \(4-bit MXFP4, groups of 32\): take one of 1"
    ):
        replace(ModelConfig.from_folder(folders["packed"]), intermediate_size=32).shard(2)


def test_gpt_oss_20b_is_read_and_counted(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS_20B))
    config = ModelConfig.from_folder(tmp_path)
    assert config.windows == (128, None) * 12 and config.quantisation.method == MXFP4
    assert (config.experts.num_experts, config.experts.per_token, config.experts.swiglu_limit) == (32, 4, 7.0)
    assert config.rope_scaling.amplitude == pytest.approx(1.3465735902799727) and not config.rope_scaling.whole_pairs
    assert config.num_parameters == pytest.approx(20.9e9, rel=1e-3)
    # Attention, embedding and vocabulary in 16 bits, experts in 4.25 bits with inputs filled up to 23 blocks of 128.
    of_experts = 24 * 32 * (5760 + 2880) * (23 * 64 + 90)
    assert weight_bytes(config, torch.float16) == pytest.approx(of_experts + 3.6e9, rel=1e-2)
    unpacked = replace(config, quantisation=None)
    assert WeightSizes.of(unpacked, torch.float16).four_bit == weight_bytes(config, torch.float16)


def test_dummy_weights_are_of_the_sizes_that_are_counted(folders) -> None:
    for name in ("plain", "packed"):
        config = ModelConfig.from_folder(folders[name])
        weights = dummy_weights(config, "cpu", torch.float16)
        total = sum(t.nbytes for t in weights.by_checkpoint_name(config).values())
        matrices = [getattr(layer, kind) for layer in weights.layers for kind in ("gate_up", "down")]
        packed = [matrix for matrix in matrices if isinstance(matrix, QuantisedMatrix)]
        assert total + sum(matrix.nbytes for matrix in packed) == weight_bytes(config, torch.float16)
        assert len(packed) == (8 if name == "packed" else 0)
        for matrix in packed:
            assert 0.5 < matrix.dequantise().float().std() / config.initializer_range < 2
        assert sum(stage_bytes(config, torch.float16)) < weight_bytes(config, torch.float16)


def test_what_there_is_no_code_for_is_refused(folders, tmp_path) -> None:
    raw = json.loads((folders["packed"] / "config.json").read_text())
    scheme = raw["quantization_config"]
    for change, words in (
        ({"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported"),
        ({"swiglu_limit": 0.0}, "swiglu_limit=0.0"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"attention_bias_scale": 2.0}, "attention_bias_scale=2.0 in GptOssForCausalLM is not supported"),
        ({"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"quantization_config": {**scheme, "modules_to_not_convert": ["model.layers.0.mlp.experts"]}}, "mlp.experts"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
            "gpt_oss in 4-bit AWQ.*for gpt-oss MXFP4",
        ),
        ({"intermediate_size": 80}, "groups of 32 do not divide 80 inputs"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(ValueError, match=words):
            ModelConfig.from_folder(tmp_path)
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "swiglu_limit": 7.0}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    with pytest.raises(ValueError, match=r"swiglu_limit=7\.0 in LlamaForCausalLM is not supported"):
        ModelConfig.from_folder(tmp_path)

    (tmp_path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folders["packed"] / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    for change, words in (
        ({name: torch.full_like(tensors[name], 255)}, r"layers\.1\.mlp\.experts\.0\.down_proj: scales hold NaN"),
        (
            {name: tensors[name][:, :, :2]},
            r"down_proj_scales has shape \[6, 64, 2\], config.json asks for \[6, 64, 4\]",
        ),
    ):
        save_file({key: t.contiguous() for key, t in (tensors | change).items()}, tmp_path / "model.safetensors")
        with pytest.raises(WeightsError, match=words):
            load_weights(tmp_path, ModelConfig.from_folder(tmp_path), "cpu", torch.float32)
    save_file({key: t for key, t in tensors.items() if "sinks" not in key}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"lacks tensors model\.layers\.0\.self_attn\.sinks"):
        load_weights(tmp_path, ModelConfig.from_folder(tmp_path), "cpu", torch.float32)
