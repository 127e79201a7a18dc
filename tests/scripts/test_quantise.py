"""The packer's command: what it writes beside the weights, and what it refuses. Its layouts: tests/swiftllm/model."""

from __future__ import annotations

import json
import sys

import pytest
import quantise
import torch
from perplexity import perplexity
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from swiftllm.model.tokenizer import Tokenizer
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["quantise.py", *map(str, arguments)])
    quantise.main()


def test_a_folder_is_written_whole(tmp_path, monkeypatch) -> None:
    source = make_tiny_llama(tmp_path / "source", max_shard_size="50KB")
    further = ("tokenizer_config.json", "vocab.json", "merges.txt", "additional_chat_templates/tool_use.jinja")
    (source / "additional_chat_templates").mkdir()
    for name in further:
        (source / name).write_text("{}")
    run(monkeypatch, source, tmp_path / "out", "--format", "compressed-tensors", "--group-size", 32, "--symmetric")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in source.iterdir()} and all(
        (tmp_path / "out" / name).is_file() for name in further
    )
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    for name, file in index.items():
        assert name in load_file(tmp_path / "out" / file)
    assert not any("weight_zero_point" in name for name in index) and "model.norm.weight" in index


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--group-size", "64"], "groups of 64 do not divide 96 inputs: take a --group-size that does"),
        (["--group-size", "32", "--act-order"], "AWQ has no act-order"),
    ],
)
def test_what_cannot_be_written_is_said(tmp_path, monkeypatch, arguments, message) -> None:
    source = make_tiny_llama(tmp_path / "source")
    with pytest.raises(SystemExit, match=message):
        run(monkeypatch, source, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()  # so that the next try can write it


def test_folders_that_are_quantised_or_no_models_are_refused(tmp_path, monkeypatch) -> None:
    with pytest.raises(SystemExit, match="no model folder"):
        run(monkeypatch, tmp_path, tmp_path / "out")
    source = make_tiny_llama(tmp_path / "source")
    run(monkeypatch, source, tmp_path / "once", "--group-size", 32)
    with pytest.raises(SystemExit, match="is quantised: give a folder"):
        run(monkeypatch, tmp_path / "once", tmp_path / "twice", "--group-size", 32)
    with pytest.raises(SystemExit, match="once is there already: remove it"):
        run(monkeypatch, source, tmp_path / "once", "--group-size", 32)


def test_perplexity_is_that_of_transformers(tmp_path) -> None:
    source = make_tiny_tokenizer(make_tiny_llama(tmp_path / "source"))
    text = "all the things that are to be read, one after the other; " * 4
    found = perplexity(source, text, window=20, num_windows=3, dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    windows = torch.tensor(Tokenizer.from_folder(source).encode(text)[:60]).view(3, 20)
    with torch.inference_mode():
        loss = model(windows, labels=windows).loss
    assert found == pytest.approx(loss.exp().item(), rel=1e-3)
    with pytest.raises(ValueError, match="tokens, and 2000 are wanted"):
        perplexity(source, text, window=20, num_windows=100, dtype="float32")


@pytest.mark.parametrize("size", [0, 200, -1])
def test_a_damaged_file_is_named_and_nothing_is_left(tmp_path, monkeypatch, size) -> None:
    source = make_tiny_llama(tmp_path / "source", max_shard_size="50KB")
    shard = max(source.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:size])
    with pytest.raises(SystemExit, match=f"quantise: .*{shard.name} is no readable safetensors file"):
        run(monkeypatch, source, tmp_path / "out", "--group-size", 32)
    shard.unlink()
    with pytest.raises(SystemExit, match=f"quantise: .*{shard.name} is not there"):
        run(monkeypatch, source, tmp_path / "out", "--group-size", 32)
    (source / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"quantise: .*model\.safetensors\.index\.json has no weight_map"):
        run(monkeypatch, source, tmp_path / "out", "--group-size", 32)
    assert not (tmp_path / "out").exists()
