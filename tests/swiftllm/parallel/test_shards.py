"""What each rank holds: together the whole model, each its share of the bytes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swiftllm.config import EngineConfig
from swiftllm.model.config import ModelConfig
from swiftllm.model.weights import LlamaWeights, WeightsError, dummy_weights, load_weights
from swiftllm.parallel.shards import BY_COLUMNS, BY_ROWS, BY_TOKENS, Shard, ShardedWeights
from tests.reference.counted_reads import counted_reads

BIASES = {"attention_bias": True, "mlp_bias": True, "vocab_size": 129}
AT_MOST = 1.02


def parts(model: ModelConfig, size: int, load) -> list[dict[str, torch.Tensor]]:
    shards = [Shard(model, rank, size) for rank in range(size)]
    return [load(shard).by_checkpoint_name(shard.sizes) for shard in shards]


@pytest.mark.parametrize("kind", ["checkpoint", "dummy"])
@pytest.mark.parametrize("overrides", [{}, BIASES, {"tie_word_embeddings": True}], ids=["plain", "biases", "tied"])
def test_the_parts_make_up_the_whole(tiny_model_dir, monkeypatch, kind: str, overrides: dict) -> None:
    monkeypatch.setattr("swiftllm.model.weights.DUMMY_PERIOD", 1009)
    folder = tiny_model_dir(**overrides)
    model = ModelConfig.from_folder(folder)

    def load(part: Shard | None) -> LlamaWeights:
        if kind == "dummy":
            return dummy_weights(model, "cpu", torch.float32, 3, part)
        return load_weights(folder, model, "cpu", torch.float32, part)

    whole, (first, second) = load(None).by_checkpoint_name(model), parts(model, 2, load)
    assert whole.keys() == first.keys() == second.keys()
    for name, tensor in whole.items():
        module, kind_of = name.rsplit(".", 2)[-2:]
        if module in BY_TOKENS:
            joined = torch.cat([first[name], second[name]])
            assert not joined[len(tensor) :].any()  # the padding
            joined = joined[: len(tensor)]
        elif module in BY_ROWS:
            joined = torch.cat([first[name], second[name]])
        elif module in BY_COLUMNS and kind_of == "weight":
            joined = torch.cat([first[name], second[name]], dim=1)
        elif module in BY_COLUMNS:
            joined = first[name] + second[name]
            assert not second[name].any()
        else:
            joined = first[name]
            assert torch.equal(first[name], second[name])
        assert torch.equal(joined, tensor), name


@pytest.mark.parametrize(("name", "size"), [("llama-3.1-8b", 2), ("llama-3.1-8b", 8), ("llama-2-70b", 4)])
def test_a_ranks_weights_and_kv_cache_are_its_share(name: str, size: int) -> None:
    """All weights count, norms too."""
    model = ModelConfig.from_folder(Path("configs/models") / name)

    def num_bytes(sizes: ModelConfig) -> int:
        weights = LlamaWeights.empty(sizes, "meta", torch.float16)
        return sum(tensor.nbytes for tensor in weights.by_checkpoint_name(sizes).values())

    part = Shard(model, 0, size).sizes
    assert num_bytes(part) <= AT_MOST / size * num_bytes(model)
    assert part.kv_bytes_per_token(2) <= AT_MOST / size * model.kv_bytes_per_token(2)


def test_a_rank_reads_no_more_than_its_part(tiny_model_dir, monkeypatch) -> None:
    folder = tiny_model_dir()
    model, read = ModelConfig.from_folder(folder), counted_reads(monkeypatch)
    load_weights(folder, model, "cpu", torch.float32)
    whole = sum(read.values())
    read.clear()
    load_weights(folder, model, "cpu", torch.float32, Shard(model, 1, 2))
    assert 0 < sum(read.values()) <= AT_MOST / 2 * whole


def test_a_damaged_checkpoint_is_refused_by_the_shape_of_the_whole(tiny_model_dir) -> None:
    folder = tiny_model_dir()
    model = replace(ModelConfig.from_folder(folder), intermediate_size=64)
    with pytest.raises(WeightsError, match=r"has shape \[96, 64\], config.json asks for \[64, 64\]|down_proj"):
        load_weights(folder, model, "cpu", torch.float32, Shard(model, 0, 2))


def test_models_that_do_not_divide_are_refused_with_the_numbers_that_do() -> None:
    model = ModelConfig.from_folder("configs/models/llama-3.1-8b")
    with pytest.raises(ValueError, match=r"tensor_parallel=3 does not divide .* 8 KV heads .* take one of 1, 2, 4, 8$"):
        model.shard(3)
    for wrong in (0, -1):
        with pytest.raises(ValueError, match=f"tensor_parallel={wrong} must be at least 1"):
            EngineConfig("model", tensor_parallel=wrong)


def test_each_token_is_embedded_by_the_rank_that_has_its_row() -> None:
    """The sum over ranks is the whole table's row, for the first and the last token of each part too."""
    table, ids = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 3, 4, 7, 8, 11, 5, 4])
    found = torch.zeros(len(ids), 5)
    for rank in range(3):
        group = SimpleNamespace(rank=rank, all_reduce=lambda hidden: hidden)
        own = table[4 * rank : 4 * rank + 4]
        weights = SimpleNamespace(_group=group, _part_size=4, _embed_own=lambda places, own=own: own[places])
        found += ShardedWeights._embed(weights, ids)
    assert torch.equal(found, table[ids])
