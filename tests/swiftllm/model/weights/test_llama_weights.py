import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from swiftllm.model.config import ModelConfig
from swiftllm.model.weights import WeightsError, dummy_weights, load_weights


def load(folder, dtype=torch.float32):
    return load_weights(folder, ModelConfig.from_folder(folder), "cpu", dtype)


@pytest.fixture
def copy_of(tiny_model_dir, tmp_path):
    def copy(**overrides):
        return shutil.copytree(tiny_model_dir(**overrides), tmp_path / "model")

    return copy


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_fused_matrices_hold_the_checkpoint(tiny_model_dir):
    folder = tiny_model_dir(attention_bias=True, mlp_bias=True)
    tensors = load_file(folder / "model.safetensors")
    weights = load(folder)
    for index, layer in enumerate(weights.layers):
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            qkv = [tensors[f"model.layers.{index}.self_attn.{n}_proj.{kind}"] for n in "qkv"]
            gate_up = [tensors[f"model.layers.{index}.mlp.{n}_proj.{kind}"] for n in ("gate", "up")]
            assert torch.equal(getattr(layer, "qkv" + suffix), torch.cat(qkv))
            assert torch.equal(getattr(layer, "gate_up" + suffix), torch.cat(gate_up))
            assert torch.equal(getattr(layer, "o" + suffix), tensors[f"model.layers.{index}.self_attn.o_proj.{kind}"])
            assert torch.equal(getattr(layer, "down" + suffix), tensors[f"model.layers.{index}.mlp.down_proj.{kind}"])


def test_shards_equal_one_file(tiny_model_dir):
    sharded = tiny_model_dir(max_shard_size="100KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 1
    one, many = (load(f).by_checkpoint_name(ModelConfig.from_folder(f)) for f in (tiny_model_dir(), sharded))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)


def test_missing_unknown_and_misshapen_tensors_are_named(copy_of):
    folder = copy_of()
    whole = load_file(folder / "model.safetensors")
    edit(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightsError, match=r"lacks.*model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)
    edit(folder, lambda t: t.update({**whole, "model.layers.0.extra.weight": torch.ones(2)}))
    with pytest.raises(WeightsError, match=r"unknown.*model\.layers\.0\.extra\.weight"):
        load(folder)
    edit(folder, lambda t: (t.pop("model.layers.0.extra.weight"), t.update({"model.norm.weight": torch.ones(3)})))
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has shape \[3\].*\[64\]"):
        load(folder)


def test_harmless_leftovers_of_old_checkpoints_are_ignored(copy_of):
    folder = copy_of(tie_word_embeddings=True)
    edit(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    edit(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    weights = load(folder)
    assert weights.lm_head is weights.embedding


def test_absent_and_damaged_files_say_what_to_do(copy_of):
    folder = copy_of(max_shard_size="100KB")
    shard = max(folder.glob("model-*.safetensors"))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name}.*finish the download"):
        load(folder)
    shard.write_bytes(b"no safetensors")
    with pytest.raises(WeightsError, match=f"{shard.name} is no readable"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match="load_format='dummy'"):
        load(folder)


def test_dummy_weights_are_seeded_and_spread_like_fresh_ones(tiny_model_dir):
    config = ModelConfig.from_folder(tiny_model_dir(attention_bias=True))
    first, again, other = (dummy_weights(config, "cpu", torch.float32, seed) for seed in (1, 1, 2))
    assert torch.equal(first.embedding, again.embedding)
    assert not torch.equal(first.embedding, other.embedding)
    assert not torch.equal(first.layers[0].qkv, first.layers[1].qkv)
    assert first.layers[0].qkv.std().item() == pytest.approx(config.initializer_range, rel=0.05)
    assert torch.all(first.layers[0].input_norm == 1) and torch.all(first.layers[0].qkv_bias == 0)


def test_dummy_weights_of_a_large_layer_take_a_fraction_of_drawing_them(tiny_model_dir):
    config = ModelConfig.from_folder(
        tiny_model_dir(num_hidden_layers=1, hidden_size=1024, intermediate_size=4096, head_dim=16)
    )
    start = time.thread_time()
    drawn = torch.empty(config.num_parameters, dtype=torch.float32).normal_()
    drawing_s = time.thread_time() - start
    start = time.thread_time()
    weights = dummy_weights(config, "cpu", torch.bfloat16, 0)
    assert time.thread_time() - start < drawing_s
    assert sum(p.numel() for p in weights.by_checkpoint_name(config).values()) == config.num_parameters == len(drawn)
