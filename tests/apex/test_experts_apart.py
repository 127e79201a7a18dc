"""4-bit models with experts whose work is divided: CPU attention on another host, four ranks that share each expert."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from quantise import write_folder

from swiftllm.model.config import ModelConfig
from swiftllm.model.weights import LayerWeights, load_weights
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.matrices import ExpertWeights, QuantisedMatrix
from swiftllm.parallel.shards import Shard
from tests.apex.test_end_to_end import judge
from tests.reference.tiny_experts import make_tiny_experts
from tests.reference.tolerances import assert_close
from tests.swiftllm.remote.hosts import SECRET, host_in_thread
from tests.swiftllm.remote.test_tokens import BLOCK_BYTES, MAX_TOKENS, add_all, open_engine, run_to_end

RANKS = 4


def write(folder: Path, group_size: int, layout: str = "awq", **more: int) -> Path:
    """A tiny model in 4 bits, whose heads four ranks can divide."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    source = make_tiny_experts(folder / "source", "Qwen3Moe normalising", **heads, **more)
    for written in (layout, "dequantised"):
        write_folder(source, folder / written, written, group_size)
    return folder / layout


def test_an_attention_host_does_not_change_tokens(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    folder, draw = write(tmp_path, 16), random.Random(5)
    prompts = [[draw.randrange(3, 128) for _ in range(draw.randint(1, 60))] for _ in range(5)]
    expected = judge(tmp_path / "dequantised", prompts, MAX_TOKENS)
    for variant in ("neo", "apex-overlap"):
        with host_in_thread(60 * BLOCK_BYTES) as host:
            engine = open_engine(folder, variant, [host.address])
            requests = add_all(engine, prompts)
            run_to_end(engine)
            assert [tuple(request.output_token_ids) for request in requests] == expected, variant
            (remote,) = engine.backend.attention_hosts.hosts
            assert remote.channel.bytes_received > 0
            engine.close()


def experts_of(layer: LayerWeights, model: ModelConfig) -> ExpertWeights:
    return ExpertWeights(layer.router, layer.gate_up, layer.down, model.experts.per_token, model.experts.normalises)


def test_four_ranks_divide_each_expert_or_refuse_by_name(tmp_path) -> None:
    """What the ranks' experts give adds up to what all of each gives."""
    folder = write(tmp_path / "fits", 16, moe_intermediate_size=64)
    model = ModelConfig.from_folder(folder)
    whole = load_weights(folder, model, "cpu", torch.float32).layers
    shards = [Shard(model, rank, RANKS) for rank in range(RANKS)]
    parts = [load_weights(folder, model, "cpu", torch.float32, shard).layers for shard in shards]
    x = torch.randn(9, model.hidden_size)
    for layer, *own in zip(whole, *parts, strict=True):
        assert all(isinstance(part.down, QuantisedMatrix) and part.down.in_features == 16 for part in own)
        expected = CpuOps().make_experts(experts_of(layer, model))(x)
        assert_close(sum(CpuOps().make_experts(experts_of(part, model))(x) for part in own), expected)

    model = ModelConfig.from_folder(write(tmp_path / "cut", 32, moe_intermediate_size=64))
    with pytest.raises(ValueError, match=r"FFN of 64 in whole groups \(4-bit AWQ, groups of 32\): take one of 1, 2"):
        Shard(model, 1, RANKS)
