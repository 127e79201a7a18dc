"""Checkpoints that store other tensors than config.json makes expect: transformers 5 loads them, and is the judge."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantise import write_folder
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, MixtralConfig

from swiftllm.model.config import ModelConfig
from swiftllm.model.weights import LlamaWeights, WeightsError, load_weights
from swiftllm.parallel.shards import Shard
from tests.reference.tiny_architectures import make_tiny, tiny_judge
from tests.reference.tiny_model import make_tiny_llama

Tensors = dict[str, torch.Tensor]
NAMES = ("Llama", "Granite", "Mistral3", "Mixtral")
EXPERTS = {"kind": MixtralConfig, "num_local_experts": 4, "intermediate_size": 32, "sliding_window": None}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With both matrices of the vocabulary."""
    base, untied = tmp_path_factory.mktemp("original"), {"tie_word_embeddings": False}
    return {
        "Llama": make_tiny_llama(base / "Llama"),
        "Granite": make_tiny(base / "Granite", "Granite", **untied),
        "Mistral3": make_tiny(base / "Mistral3", "Mistral3", **untied),
        "Mixtral": make_tiny_llama(base / "Mixtral", **EXPERTS),
    }


@pytest.fixture
def folder_of(originals: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    def copy(name: str, change: Callable[[Tensors], Tensors], **fields: object) -> Path:
        """A folder with other tensors, and other fields of its config.json."""
        folder = shutil.copytree(originals[name], tmp_path / "model")
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | fields))
        return folder

    return copy


def named(tensors: Tensors, end: str) -> str:
    (name,) = (name for name in tensors if name.endswith(end))
    return name


def without(end: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if not name.endswith(end)}


def only_as_head(tensors: Tensors) -> Tensors:
    embedding = named(tensors, "embed_tokens.weight")
    return {**without("embed_tokens.weight")(tensors), named(tensors, "lm_head.weight"): tensors[embedding]}


def twice(tensors: Tensors) -> Tensors:
    return only_as_head(tensors) | {(name := named(tensors, "embed_tokens.weight")): tensors[name].clone()}


def one_number_more(tensors: Tensors) -> Tensors:
    twice_there = twice(tensors)
    twice_there[named(tensors, "lm_head.weight")][-1, -1] += 1
    return twice_there


def load(folder: Path) -> LlamaWeights:
    return load_weights(folder, ModelConfig.from_folder(folder), "cpu", torch.float32)


CASES = {
    "both": (lambda tensors: tensors, False),
    "both, one number differs": (one_number_more, False),
    "both are equal": (twice, True),
    "the embedding": (without("lm_head.weight"), True),
    "the head": (only_as_head, True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_tied_matrices_are_those_of_transformers(folder_of, caplog, name, case) -> None:
    change, are_one = CASES[case]
    folder = folder_of(name, change, tie_word_embeddings=True)
    weights, judge = load(folder), tiny_judge(folder, name)
    assert torch.equal(weights.embedding, judge.get_input_embeddings().weight)
    assert torch.equal(weights.lm_head, judge.get_output_embeddings().weight)
    assert (weights.lm_head is weights.embedding) == are_one
    told = [text for text in caplog.messages if "tie_word_embeddings is not followed" in text and "config.json" in text]
    assert len(told) == (0 if are_one else 1)


def test_the_vocabulary_of_a_rank_is_its_part_whatever_its_name(folder_of) -> None:
    folder = folder_of("Llama", only_as_head, tie_word_embeddings=True)
    config, whole = ModelConfig.from_folder(folder), load(folder)
    parts = [load_weights(folder, config, "cpu", torch.float32, Shard(config, rank, 2)) for rank in (0, 1)]
    assert torch.equal(torch.cat([part.lm_head for part in parts]), whole.lm_head)


def test_a_matrix_that_is_not_tied_must_be_there(folder_of) -> None:
    with pytest.raises(WeightsError, match=r"lacks tensors lm_head\.weight"):
        load(folder_of("Llama", without("lm_head.weight")))


def test_names_of_the_model_without_its_vocabulary(originals, tmp_path) -> None:
    """As ``AutoModel.from_pretrained(folder).save_pretrained(other)`` writes them."""
    for name in NAMES:
        source = originals[name]
        bare = tmp_path / name
        tied = {"tie_word_embeddings": True}
        judge = tiny_judge(source, name)
        judge.model.save_pretrained(bare)
        raw = json.loads((source / "config.json").read_text())
        (bare / "config.json").write_text(json.dumps(raw | tied))
        assert not any(key.startswith("model.") for key in load_file(bare / "model.safetensors"))
        ours, whole = load(bare), load(source)
        for layer, other in zip(ours.layers, whole.layers, strict=True):
            assert torch.equal(layer.qkv, other.qkv) and torch.equal(layer.down, other.down), name
        assert ours.lm_head is ours.embedding and torch.equal(ours.embedding, whole.embedding)
        assert torch.equal(ours.final_norm, whole.final_norm)


SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "attn.k_scale", "k_proj.output_scale", "v_proj.v_scale")


@pytest.mark.parametrize("scale", SCALES)
def test_scales_of_a_cache_are_left_out_with_a_word(folder_of, caplog, scale) -> None:
    """The names are those of vLLM's ``maybe_remap_kv_scale_name``; transformers leaves them out."""
    added = {f"model.layers.{layer}.self_attn.{scale}": torch.tensor(0.5) for layer in range(3)}
    folder = folder_of("Llama", lambda tensors: tensors | added)
    load(folder)
    (told,) = caplog.messages
    assert str(folder) in told and f"self_attn.{scale}" in told and "left out" in told
    other = "model.layers.0.self_attn.k_proj.weight_scale"  # without it the weights would be others
    save_file(load_file(folder / "model.safetensors") | {other: torch.ones(1)}, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"unknown tensors model\.layers\.0\.self_attn\.k_proj\.weight_scale"):
        load(folder)


@pytest.mark.parametrize("layout", ["awq", "gptq", "compressed-tensors"])
def test_so_are_they_beside_4_bit_weights_without_a_prefix(originals, tmp_path, layout) -> None:
    folder = tmp_path / layout
    write_folder(originals["Llama"], folder, layout, 32)
    expected = load(folder)
    tensors = load_file(folder / "model.safetensors")
    scales = {f"layers.{layer}.self_attn.k_scale": torch.ones(1) for layer in range(3)}
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare | scales, folder / "model.safetensors", {"format": "pt"})
    for layer, other in zip(load(folder).layers, expected.layers, strict=True):
        assert torch.equal(layer.qkv.dequantise(), other.qkv.dequantise())
        assert torch.equal(layer.down.dequantise(), other.down.dequantise())


def test_transformers_reads_the_bare_names(originals, tmp_path) -> None:
    """So the judge of the test of these names is right."""
    source = originals["Llama"]
    judge = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    judge.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(again.model.layers[0].mlp.up_proj.weight, judge.model.layers[0].mlp.up_proj.weight)
