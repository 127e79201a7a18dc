"""Quantised folders become the matrices that the packer rounded to, in any split into files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from quantise import write_folder
from safetensors.torch import load_file, save_file
from transformers import Qwen2Config

from swiftllm.model.config import ModelConfig
from swiftllm.model.folder import WEIGHT_FILES
from swiftllm.model.weights import WeightsError, dummy_weights, load_weights
from swiftllm.ops.matrices import QuantisedMatrix
from tests.reference.tiny_model import make_tiny_llama

LAYOUTS = {  # name: layout, symmetric, act-order
    "awq": ("awq", False, False),
    "gptq": ("gptq", True, False),
    "gptq-v2 act-order": ("gptq-v2", False, True),
    "compressed-tensors": ("compressed-tensors", True, False),
    "compressed-tensors act-order": ("compressed-tensors", False, True),
}


def load(folder: Path, device: str = "cpu"):
    return load_weights(folder, ModelConfig.from_folder(folder), device, torch.float32)


def dense(matrix) -> torch.Tensor:
    if isinstance(matrix, tuple):
        return torch.cat([dense(part) for part in matrix])
    return matrix.dequantise() if isinstance(matrix, QuantisedMatrix) else matrix


@pytest.fixture
def quantised(tiny_model_dir, tmp_path):
    def write(name: str = "awq", **overrides) -> Path:
        write_folder(tiny_model_dir(**overrides), tmp_path / name, LAYOUTS[name][0], 32, *LAYOUTS[name][1:])
        return tmp_path / name

    return write


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("overrides", [{}, {"kind": Qwen2Config, "max_shard_size": "20KB"}], ids=["one", "shards"])
def test_a_folder_holds_the_rounded_matrices(quantised, tiny_model_dir, tmp_path, name, overrides) -> None:
    _, symmetric, act_order = LAYOUTS[name]
    write_folder(tiny_model_dir(**overrides), tmp_path / "dense", "dequantised", 32, symmetric, act_order)
    folder = quantised(name, **overrides)
    assert len(list(folder.glob("*.safetensors"))) == len(list((tmp_path / "dense").glob("*.safetensors")))
    ours, expected = load(folder), load(tmp_path / "dense")
    for layer, other in zip(ours.layers, expected.layers, strict=True):
        for field in ("qkv", "o", "gate_up", "down"):
            assert torch.equal(dense(getattr(layer, field)), getattr(other, field)), field
            assert act_order or isinstance(getattr(layer, field), QuantisedMatrix)
        assert overrides == {} or torch.equal(layer.qkv_bias, other.qkv_bias)
    assert torch.equal(ours.embedding, expected.embedding)


def move(source: Path, target: Path, names: set[str]) -> None:
    """Move tensors from one file to another."""
    tensors, others = load_file(source), load_file(target) if target.exists() else {}
    others |= {name: tensors.pop(name) for name in names}
    save_file(tensors, source)
    save_file(others, target)


def test_a_module_may_be_split_between_files(quantised) -> None:
    folder = quantised("gptq-v2 act-order")
    whole = load(folder)
    source = folder / "model.safetensors"
    names = load_file(source).keys()
    move(source, folder / "model-2.safetensors", {name for name in names if name.endswith(("g_idx", "qweight"))})
    source.rename(folder / "model-1.safetensors")  # a file without a number would be all
    places = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    for layer, other in zip(load(folder).layers, whole.layers, strict=True):
        assert torch.equal(dense(layer.qkv), dense(other.qkv)) and torch.equal(dense(layer.down), dense(other.down))


def test_a_module_that_is_not_quantised_lies_beside_the_others(quantised, tiny_model_dir) -> None:
    folder = quantised()
    path, module = folder / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors, plain = load_file(path), load_file(tiny_model_dir() / "model.safetensors")[f"{module}.weight"]
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(module)}
    save_file(tensors | {f"{module}.weight": plain}, path)
    assert torch.equal(load(folder).layers[1].qkv[1], plain)


def test_the_name_that_autogptq_gives_its_file(quantised) -> None:
    folder = quantised("gptq")
    name = "gptq_model-4bit-32g.safetensors"
    (folder / "model.safetensors").rename(folder / name)
    assert isinstance(load(folder).layers[0].o, QuantisedMatrix)
    assert any(Path(name).match(pattern) for pattern in WEIGHT_FILES)


def test_missing_unknown_and_misshapen_tensors_are_named(quantised) -> None:
    folder = quantised("gptq")
    path, module = folder / "model.safetensors", "model.layers.1.mlp.up_proj"
    whole = load_file(path)
    for changed, message in (
        ({name: tensor for name, tensor in whole.items() if name != f"{module}.scales"}, rf"lacks.*{module}\.scales"),
        (whole | {f"{module}.extra": torch.ones(2)}, rf"unknown.*{module}\.extra"),
        (whole | {f"{module}.qzeros": whole[f"{module}.qzeros"][:1].clone()}, rf"{module}: qzeros has shape \[1, 12\]"),
        (whole | {f"{module}.weight": torch.ones(96, 64)}, rf"unknown.*{module}\.weight"),
    ):
        save_file(changed, path)
        with pytest.raises(WeightsError, match=message):
            load(folder)


def test_dummy_weights_are_seeded_and_spread_like_fresh_ones(quantised) -> None:
    model = ModelConfig.from_folder(quantised())
    one, again, other = (dummy_weights(model, "cpu", torch.float32, seed) for seed in (1, 1, 2))
    matrix = one.layers[0].gate_up.dequantise()
    assert torch.equal(matrix, again.layers[0].gate_up.dequantise())
    assert not torch.equal(matrix, other.layers[0].gate_up.dequantise())
    assert matrix.std().item() == pytest.approx(model.initializer_range, rel=0.1)


def test_loading_to_a_device_holds_one_tensor_of_the_file_in_host_memory(tmp_path, monkeypatch) -> None:
    """The tensors that a device has got are not kept in host memory: at most two are there at a time."""
    import weakref

    from swiftllm.model import weights

    source = make_tiny_llama(tmp_path / "source", num_hidden_layers=2)
    write_folder(source, tmp_path / "gptq", "gptq", 32)
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    read_tensors = weights.read_tensors

    class Watched:
        def __init__(self, stored) -> None:
            self.get_shape, self.get_dtype, self.stored = stored.get_shape, stored.get_dtype, stored

        def __getitem__(self, slices: tuple[slice, ...]) -> torch.Tensor:
            nonlocal most
            tensor = self.stored[slices]
            alive.add(tensor)
            most = max(most, len(alive))
            return tensor

    monkeypatch.setattr(
        weights, "read_tensors", lambda path: ((name, Watched(stored)) for name, stored in read_tensors(path))
    )
    config = ModelConfig.from_folder(tmp_path / "gptq")
    monkeypatch.setattr(torch, "equal", lambda *_: True)  # nothing can be compared on the device "meta"
    monkeypatch.setattr("swiftllm.model.quantised_weights.zero_offset", lambda *_: 1)
    load_weights(tmp_path / "gptq", config, "meta", torch.float16)
    assert 1 <= most <= 2
    shutil.rmtree(tmp_path / "gptq")
