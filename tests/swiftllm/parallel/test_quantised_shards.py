"""What each rank holds of a 4-bit model: together the whole one, to the bit, each its share of the bytes."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from quantise import write_folder
from safetensors.torch import load_file, save_file

from swiftllm.model import weights as loading
from swiftllm.model.config import ModelConfig
from swiftllm.model.quantisation import AWQ, GPTQ, QuantisationScheme
from swiftllm.model.quantised_weights import sort_into_runs
from swiftllm.model.weights import LlamaWeights, WeightsError, dummy_weights, load_weights
from swiftllm.ops.matrices import Matrix, QuantisedMatrix
from swiftllm.parallel.shards import Shard
from tests.reference.counted_reads import counted_reads
from tests.swiftllm.model.weights.quantised.test_loading import dense

AT_MOST = 1.02
LAYOUTS = {  # name: layout, group size, symmetric, act-order
    "awq": ("awq", 16, False, False),
    "gptq": ("gptq", 16, True, False),
    "gptq-v2": ("gptq-v2", 16, False, False),
    "gptq act-order": ("gptq", 32, False, True),
    "compressed-tensors": ("compressed-tensors", 16, False, False),
    "compressed-tensors symmetric": ("compressed-tensors", 16, True, False),
    "compressed-tensors act-order": ("compressed-tensors", 16, False, True),
}


@pytest.fixture
def quantised(tiny_model_dir, tmp_path):
    def write(name: str, **overrides) -> Path:
        write_folder(tiny_model_dir(**overrides), tmp_path / name, *LAYOUTS[name])
        return tmp_path / name

    return write


def joined(parts: list[Matrix], rows: tuple[int, ...], by_inputs: bool) -> torch.Tensor:
    """The whole matrix; ``rows``: of each module that a part stacks."""
    whole = [dense(part) for part in parts]
    if by_inputs:
        return torch.cat(whole, 1)
    modules = zip(*(matrix.split(rows) for matrix in whole), strict=True)
    return torch.cat([torch.cat(module) for module in modules])


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_make_up_the_whole(quantised, name: str, size: int) -> None:
    heads = {} if size == 2 else {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    folder = quantised(name, mlp_bias=True, attention_bias=True, **heads)
    model = ModelConfig.from_folder(folder)
    whole = load_weights(folder, model, "cpu", torch.float32)
    shards = [Shard(model, rank, size) for rank in range(size)]
    parts = [load_weights(folder, model, "cpu", torch.float32, shard) for shard in shards]
    for layer, *own in zip(whole.layers, *(part.layers for part in parts), strict=True):
        for matrix in loading.fused_matrices(shards[0].sizes):
            pieces = [getattr(part, matrix.name) for part in own]
            found = joined(pieces, matrix.out_features, matrix.name in ("o", "down"))
            assert torch.equal(found, dense(getattr(layer, matrix.name))), matrix.name
        assert torch.equal(sum(part.down_bias for part in own), layer.down_bias)


def test_one_group_of_all_inputs_has_one_scale_on_every_rank(tiny_model_dir, tmp_path) -> None:
    folder = tmp_path / "model"
    write_folder(tiny_model_dir(num_hidden_layers=1, intermediate_size=64), folder, "awq", 64)
    whole = ModelConfig.from_folder(folder)
    one_group = replace(whole, quantisation=replace(whole.quantisation, group_size=None))
    expected = load_weights(folder, one_group, "cpu", torch.float32).layers[0].down
    parts = [
        load_weights(folder, one_group, "cpu", torch.float32, Shard(one_group, rank, 2)).layers[0].down
        for rank in range(2)
    ]
    assert torch.equal(torch.cat([part.dequantise() for part in parts], 1), expected.dequantise())
    assert all(torch.equal(part.scales, expected.scales) for part in parts)


def num_bytes(sizes: ModelConfig) -> int:
    weights = LlamaWeights.empty(sizes, "meta", torch.float16)
    matrices = weights.empty_quantised(sizes, "meta", torch.float16)
    others = weights.by_checkpoint_name(sizes).values()
    return sum(matrix.nbytes for matrix in matrices) + sum(tensor.nbytes for tensor in others)


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("group_size", [128, None])
def test_a_ranks_weights_are_its_share(size: int, group_size: int | None) -> None:
    scheme = QuantisationScheme(AWQ, group_size)
    model = replace(ModelConfig.from_folder("configs/models/llama-3.1-8b"), quantisation=scheme)
    assert num_bytes(Shard(model, 0, size).sizes) <= AT_MOST / size * num_bytes(model)


@pytest.mark.parametrize("size, at_most", [(2, 1.07), (4, 1.2)])
def test_act_order_takes_more(size: int, at_most: float) -> None:
    """Bytes of a layer of Llama-3.1-8B: a rank has the scales of all groups, and its part of each is filled up."""
    print("seed", torch.seed())
    model = ModelConfig.from_folder("configs/models/llama-3.1-8b")
    total = {1: 0, size: 0}
    for ranks in total:
        scheme = QuantisationScheme(GPTQ, 128, ordered=True)
        sizes = Shard(replace(model, quantisation=scheme), 0, ranks).sizes
        for matrix in loading.fused_matrices(sizes):
            inputs, outputs = matrix.in_features, sum(matrix.out_features)
            if matrix.name in ("o", "down"):
                whole = inputs * ranks
                groups = (torch.arange(whole) // 128)[torch.randperm(whole)][:inputs]
                zeros = torch.zeros(whole // 128, 1, dtype=torch.uint8)
                codes, order, runs = sort_into_runs(torch.zeros(inputs, 1, dtype=torch.uint8), zeros, groups)
                part = QuantisedMatrix.from_codes(codes, zeros.half(), zeros, 128, torch.float16, order, runs)
                once = order.nbytes + runs.nbytes
                total[ranks] += (part.nbytes - once) * outputs + once
            else:
                new, half = partial(torch.empty, device="meta"), torch.float16
                total[ranks] += QuantisedMatrix.allocate(new, outputs, inputs, inputs // 128, 128, half, half).nbytes
    print(f"{total[size] * size / total[1]:.3f} of an equal part")
    assert AT_MOST / size * total[1] < total[size] <= at_most / size * total[1]


@pytest.mark.parametrize("size", [4, 8])
def test_ranks_of_llama_2_7b_with_act_order_start_and_their_memory_is_known(size: int) -> None:
    """Their inputs of ``down`` are no multiple of the group. Counted is what a random order takes."""
    print("seed", torch.seed())
    scheme = QuantisationScheme(GPTQ, 128, ordered=True)
    model = replace(ModelConfig.from_folder("configs/models/llama-2-7b"), quantisation=scheme, num_layers=1)
    inputs = model.intermediate_size // size
    groups = (torch.arange(model.intermediate_size) // 128)[torch.randperm(model.intermediate_size)][:inputs]
    zeros = torch.zeros(model.intermediate_size // 128, 1, dtype=torch.uint8)
    padded = len(sort_into_runs(torch.zeros(inputs, 1, dtype=torch.uint8), zeros, groups)[0])
    sizes = Shard(model, 0, size).sizes
    down = LlamaWeights.empty(sizes, "meta", torch.float16).empty_quantised(sizes, "meta", torch.float16)[-1]
    assert down.scales.shape == (86, model.hidden_size)
    assert down.in_features == pytest.approx(padded, rel=0.2)  # 86 groups filled up at random: 4% is usual


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_with_act_order_have_dummy_weights(quantised, size: int) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 160}
    model = ModelConfig.from_folder(quantised("gptq act-order", **heads))
    shard = Shard(model, 0, size)
    layer = dummy_weights(model, "cpu", torch.float32, part=shard).layers[0]
    assert layer.down.dequantise().shape == (model.hidden_size, model.intermediate_size // size)
    assert layer.o.dequantise().shape == (model.hidden_size, model.hidden_size // size)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["awq", "gptq", "compressed-tensors"])
def test_a_scale_that_is_no_finite_number_is_refused_by_name(quantised, name: str, value: float) -> None:
    folder = quantised(name)
    path, kind = folder / "model.safetensors", "weight_scale" if name == "compressed-tensors" else "scales"
    tensor, whole = f"model.layers.1.mlp.up_proj.{kind}", load_file(folder / "model.safetensors")
    whole[tensor][1, 2] = value
    save_file(whole, path)
    model = ModelConfig.from_folder(folder)
    for part in (None, Shard(model, 0, 2)):
        with pytest.raises(WeightsError, match=rf"{tensor} holds NaN or infinity"):
            load_weights(folder, model, "cpu", torch.float32, part)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_reads_no_more_than_its_part(quantised, monkeypatch, name: str) -> None:
    folder = quantised(name)
    model, read = ModelConfig.from_folder(folder), counted_reads(monkeypatch)
    load_weights(folder, model, "cpu", torch.float32)
    whole = dict(read)
    read.clear()
    load_weights(folder, model, "cpu", torch.float32, Shard(model, 1, 2))
    assert read.keys() == whole.keys()
    ordered = "act-order" in name
    shared = [
        n
        for n in whole
        if n.endswith(("norm.weight", "weight_shape"))
        or (n.endswith("g_idx") and "o_proj" not in n and "down_proj" not in n)
        or (ordered and ("o_proj" in n or "down_proj" in n) and n.endswith(("zeros", "scales", "scale", "zero_point")))
    ]
    for tensor, count in whole.items():
        assert read[tensor] == (count if tensor in shared else math.ceil(count / 2)), tensor
    assert ordered or sum(read.values()) <= AT_MOST / 2 * sum(whole.values()) + sum(whole[n] for n in shared)


@pytest.mark.parametrize(
    "model, group_size, ordered, ranks, works",
    [
        ("llama-2-7b", 128, False, 4, "1, 2"),
        ("llama-2-7b", 128, True, 3, "1, 2, 4, 8, 16, 32"),
        ("llama-2-7b", 64, False, 8, "1, 2, 4"),
        ("llama-2-7b", None, False, 32, "1, 2, 4, 8, 16"),
        ("llama-3.1-8b", 128, False, 16, "1, 2, 4, 8"),
    ],
)
def test_ranks_that_would_cut_groups_are_refused(model, group_size, ordered, ranks, works) -> None:
    scheme = QuantisationScheme(GPTQ, group_size, ordered=ordered)
    config = replace(ModelConfig.from_folder(Path("configs/models") / model), quantisation=scheme)
    with pytest.raises(ValueError, match=rf"tensor_parallel={ranks} .* whole groups \(4-bit GPTQ.*one of {works}$"):
        config.shard(ranks)
    for number in map(int, works.split(", ")):
        config.shard(number)


def test_damaged_checkpoints_are_refused(quantised) -> None:
    folder = quantised("gptq act-order")
    path, module = folder / "model.safetensors", "model.layers.1.mlp.down_proj"
    model, whole = ModelConfig.from_folder(folder), load_file(path)
    for changed, message in (
        ({f"{module}.g_idx": whole[f"{module}.g_idx"] + 1}, "g_idx names a group beyond the 3 that there are"),
        ({f"{module}.qweight": whole[f"{module}.qweight"][:9].clone()}, r"shape \[9, 64\], which 2 ranks cannot"),
        (
            {f"{module}.scales": whole[f"{module}.scales"][:2].clone()},
            r"scales has shape \[2, 64\].*asks for \[3, 64\]",
        ),
    ):
        save_file(whole | changed, path)
        with pytest.raises(WeightsError, match=message):
            load_weights(folder, model, "cpu", torch.float32, Shard(model, 1, 2))
