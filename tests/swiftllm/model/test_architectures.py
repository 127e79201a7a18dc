"""Every architecture of the table against transformers on the same files, in 4 bits too, and what each row adds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quantise import write_folder
from safetensors.torch import load_file, save_file

from swiftllm.model import weights as llama_tensors
from swiftllm.model.config import ModelConfig
from swiftllm.model.weights import LlamaWeights, WeightsError, load_weights
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from swiftllm.ops.matrices import QuantisedMatrix
from swiftllm.parallel.shards import BY_COLUMNS, Shard
from tests.reference.tiny_architectures import ARCHITECTURES, WRAPPED, make_tiny, tiny_judge
from tests.swiftllm.model.test_llama import resident_model, whole_prompt_logits

TOKENS = torch.randint(3, 128, (150,), generator=torch.Generator().manual_seed(1)).tolist()
LAYOUTS = (("awq", False, False), ("gptq", True, False), ("gptq-v2", False, True), ("compressed-tensors", False, False))
MATRICES = ("qkv", "o", "gate_up", "down")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny(tmp_path_factory.mktemp("tiny"), name) for name in ARCHITECTURES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, torch.Tensor]:
    """transformers' logits of :data:`TOKENS`."""
    with torch.inference_mode():
        return {
            name: tiny_judge(folder, name)(input_ids=torch.tensor([TOKENS])).logits[0]
            for name, folder in folders.items()
        }


def logits_of(folder: Path, config: ModelConfig, ops: Ops, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return whole_prompt_logits(resident_model(folder, config, dtype, ops), TOKENS)


def test_logits_equal_transformers(folders, expected) -> None:
    for name, folder in folders.items():
        assert expected[name].std() > 0.3, name  # else the tolerance would say nothing
        for ops in (Ops(), CpuOps()):
            logits = logits_of(folder, ModelConfig.from_folder(folder), ops)
            assert (logits - expected[name]).abs().max() < 5e-5, name


def test_without_any_one_part_of_a_row_the_logits_are_others(folders, expected, monkeypatch) -> None:
    """So each part is used, and the test above would notice if it were not."""
    missing = (
        ("Glm", {"interleaved_rotary": False}),
        ("Glm4", {"rotary_dim": None}),
        ("Phi3", {"rotary_dim": None}),
        (
            "Ministral3",
            {"rope_scaling": replace(ModelConfig.from_folder(folders["Ministral3"]).rope_scaling, factor=1)},
        ),
        (
            "Phi3 long",
            {"rope_scaling": replace(ModelConfig.from_folder(folders["Phi3 long"]).rope_scaling, amplitude=1.0)},
        ),
        ("Phi3 long", {"max_position_embeddings": 512}),  # the long factors
        ("SmolLM3", {"layers_without_rotary": frozenset()}),
        ("SmolLM3", {"layers_without_rotary": frozenset({0})}),
        *(("Granite", {part: 1.0}) for part in ("embedding_multiplier", "score_multiplier", "logits_multiplier")),
        ("Granite untied", {"residual_scale": 1.0}),
        ("Granite", {"rms_norm_eps": 0.02}),
    )

    def differ(name: str, config: ModelConfig) -> bool:
        return (logits_of(folders[name], config, Ops()) - expected[name]).abs().max() > 1e-3

    for name, change in missing:
        assert differ(name, replace(ModelConfig.from_folder(folders[name]), **change)), (name, change)
    glm4 = ModelConfig.from_folder(folders["Glm4"])
    places = LlamaWeights.by_checkpoint_name
    for norm in ("post_self_attn_layernorm", "post_mlp_layernorm"):
        with monkeypatch.context() as patch:
            patch.setattr(LlamaWeights, "by_checkpoint_name", lambda *a, norm=norm: norms_of_one(places(*a), norm))
            assert differ("Glm4", glm4), norm
    fused = llama_tensors.fused_modules(glm4)
    fused["gate_up_proj"] = dict(reversed(fused["gate_up_proj"].items()))
    with monkeypatch.context() as patch:
        patch.setattr(llama_tensors, "fused_modules", lambda _: fused)
        assert differ("Glm4", glm4)


def norms_of_one(places: dict[str, torch.Tensor], norm: str) -> dict[str, torch.Tensor]:
    """Places of which those of a norm are lost, so that its weights are 1."""
    for name in places:
        if norm in name:
            places[name].fill_(1.0)
            places[name] = torch.empty_like(places[name])
    return places


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_less_exact_than_transformers(folders, expected, dtype) -> None:
    """Whatever was folded into weights of these dtypes."""
    for name in ("Granite", "Granite untied", "Glm4", "Ministral3 alone"):
        folder = folders[name]
        logits = logits_of(folder, ModelConfig.from_folder(folder), CpuOps(), dtype)
        with torch.inference_mode():
            judge = tiny_judge(folder, name).to(dtype)(input_ids=torch.tensor([TOKENS])).logits[0]
        error, error_of_judge = ((x.float() - expected[name]).square().mean().sqrt() for x in (logits, judge))
        assert 0 < error < 1.2 * error_of_judge, name


def test_a_crossing_in_one_call_has_the_bits_of_the_separate_calls(folders) -> None:
    """In bfloat16, where pacpu multiplies."""

    class Separate(CpuOps):
        def make_crossing(self, parts) -> None:
            return None

    for name in ("SmolLM3", "Granite", "Glm4"):
        config = ModelConfig.from_folder(folders[name])
        one, other = (logits_of(folders[name], config, ops, torch.bfloat16) for ops in (CpuOps(), Separate()))
        assert torch.equal(one, other), name


def test_quantised_folders_hold_the_rounded_matrices(tmp_path) -> None:
    """Fused modules come apart, rows are permuted and factors enter scales, in every layout and rank."""
    for name, layouts in (("Phi3", LAYOUTS), ("Glm4", LAYOUTS), ("Granite", LAYOUTS[2:]), ("Mistral3", LAYOUTS[:1])):
        source = make_tiny(tmp_path / name, name, intermediate_size=128, num_hidden_layers=1)
        for layout, symmetric, act_order in layouts:
            dense, packed = tmp_path / f"{name} {layout} dense", tmp_path / f"{name} {layout}"
            write_folder(source, dense, "dequantised", 32, symmetric, act_order)
            write_folder(source, packed, layout, 32, symmetric, act_order)
            model, plain = ModelConfig.from_folder(packed), ModelConfig.from_folder(dense)
            for rank in (None, 0, 1):
                parts = [None if rank is None else Shard(config, rank, 2) for config in (model, plain)]
                if rank is not None and act_order:
                    continue  # a part of the inputs is in another order
                ours = load_weights(packed, model, "cpu", torch.float32, parts[0])
                wanted = load_weights(dense, plain, "cpu", torch.float32, parts[1])
                for layer, other in zip(ours.layers, wanted.layers, strict=True):
                    for matrix in MATRICES:
                        assert torch.equal(dense_of(getattr(layer, matrix)), getattr(other, matrix)), (packed, matrix)


def dense_of(matrix: QuantisedMatrix | tuple[QuantisedMatrix, ...]) -> torch.Tensor:
    return torch.cat([part.dequantise() for part in (matrix if isinstance(matrix, tuple) else (matrix,))])


def test_the_parts_of_two_ranks_are_the_whole(folders) -> None:
    for name, folder in folders.items():
        model = ModelConfig.from_folder(folder)
        whole = load_weights(folder, model, "cpu", torch.float32).by_checkpoint_name(model)
        shards = [Shard(model, rank, 2) for rank in range(2)]
        first, second = (
            load_weights(folder, model, "cpu", torch.float32, shard).by_checkpoint_name(shard.sizes) for shard in shards
        )
        for key, tensor in whole.items():
            if torch.equal(first[key], tensor):
                continue
            axis = 1 if key.split(".")[-2] in BY_COLUMNS else 0
            assert torch.equal(torch.cat((first[key], second[key]), axis), tensor), (name, key)
        assert not torch.equal(
            first["model.layers.0.self_attn.q_proj.weight"], second["model.layers.0.self_attn.q_proj.weight"]
        )


def test_a_wrapper_is_tied_if_it_has_no_vocabulary_of_its_own(folders, tmp_path) -> None:
    """Whatever its two configurations say of it."""
    folder = folders["Mistral3"]
    raw, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    for is_tied in (False, True):
        tied = {name: tensor for name, tensor in tensors.items() if not is_tied or "lm_head" not in name}
        save_file(tied, tmp_path / "model.safetensors")
        for top, own in ((False, True), (True, False)):
            text = raw["text_config"] | {"tie_word_embeddings": own}
            (tmp_path / "config.json").write_text(json.dumps(raw | {"text_config": text, "tie_word_embeddings": top}))
            config = ModelConfig.from_folder(tmp_path)
            weights = load_weights(tmp_path, config, "cpu", torch.float32)
            assert config.tie_word_embeddings is is_tied is (weights.lm_head is weights.embedding)


def test_a_wrapper_may_name_its_parts_in_two_ways(folders, tmp_path) -> None:
    """As checkpoints on the hub do, and as transformers 5 names modules."""
    folder = folders["Mistral3"]
    tensors = load_file(folder / "model.safetensors")
    renamed = {
        ("model." + name if name.startswith(("vision", "multi")) else name)
        .replace("language_model.model.", "model.language_model.")
        .replace("language_model.lm_head.", "lm_head."): tensor
        for name, tensor in tensors.items()
    }
    assert not renamed.keys() & tensors.keys()
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    one, other = (
        load_weights(path, ModelConfig.from_folder(path), "cpu", torch.float32) for path in (folder, tmp_path)
    )
    assert torch.equal(one.lm_head, other.lm_head) and torch.equal(one.layers[2].qkv, other.layers[2].qkv)


def test_other_tensors_than_those_of_images_are_not_passed_over(folders, tmp_path) -> None:
    """Nor are those of images in a model that should have none, or of a part that is not whole."""
    for name, change, message in (
        ("Mistral3", {"audio_tower.weight": torch.ones(2)}, "unknown tensors audio_tower.weight"),
        ("Phi3", {"vision_tower.weight": torch.ones(2)}, "unknown tensors vision_tower.weight"),
        ("Phi3", {"model.layers.0.self_attn.qkv_proj.weight": torch.ones(127, 64)}, "has no part q_proj"),
        ("Phi3", {"model.layers.0.mlp.gate_up_proj.weight": torch.ones(64, 64)}, "gate_proj.weight has shape"),
    ):
        folder = tmp_path / message.replace(" ", "-")
        folder.mkdir()
        (folder / "config.json").write_text((folders[name] / "config.json").read_text())
        save_file(load_file(folders[name] / "model.safetensors") | change, folder / "model.safetensors")
        with pytest.raises(WeightsError, match=message):
            load_weights(folder, ModelConfig.from_folder(folder), "cpu", torch.float32)
    assert set(WRAPPED) <= ARCHITECTURES.keys()
