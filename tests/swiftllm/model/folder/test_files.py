"""Which files of a folder count: those of transformers 5 (``_get_resolved_checkpoint_files``)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from swiftllm.model.checkpoint import read_tensors
from swiftllm.model.config import ModelConfig
from swiftllm.model.folder import DamagedFile, read_object, sampling_defaults, tell, weight_files
from swiftllm.model.tokenizer import Tokenizer


@pytest.fixture
def write(tmp_path):
    """Write files whose content is their name, and indices that name the given files."""

    def write(*names: str, **indices: list[str]) -> Path:
        for name in names:
            (tmp_path / name).write_text(name)
        for stem, files in indices.items():
            places = {f"tensor {number}": file for number, file in enumerate(files)}
            (tmp_path / f"{stem}.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        return tmp_path

    return write


def names_of(folder: Path) -> list[str]:
    return [path.name for path in weight_files(folder)]


def test_a_single_file_comes_before_an_index_and_consolidated_ones_never_count(write):
    others = "consolidated.safetensors", "consolidated-1.safetensors", "model-1.safetensors", "model-2.safetensors"
    folder = write(*others, consolidated=["consolidated-1.safetensors"], model=["model-2.safetensors"] * 2)
    assert names_of(folder) == ["model-2.safetensors"]
    write("gptq_model-4bit.safetensors")
    assert names_of(folder) == ["model-2.safetensors"]
    write("model.safetensors")
    assert names_of(folder) == ["model.safetensors"]


def test_autogptqs_names_count_where_there_are_no_others(write):
    folder = write("gptq_model-4bit.safetensors")
    assert names_of(folder) == ["gptq_model-4bit.safetensors"]
    write("gptq_model-4bit-1.safetensors", **{"gptq_model-4bit": ["gptq_model-4bit-1.safetensors"]})
    assert names_of(folder) == ["gptq_model-4bit-1.safetensors"]


def test_a_folder_with_other_formats_alone_says_what_to_do(write):
    folder = write("consolidated.safetensors", "pytorch_model.bin", consolidated=["consolidated.safetensors"])
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .*index\.json; convert"):
        weight_files(folder)


@pytest.mark.parametrize(
    "text", ['{"metadata": {"tot', "", "[]", "null", "\0", '{"metadata": {}}', '{"weight_map": {}}']
)
@pytest.mark.parametrize("more", [b"", b"\xff"], ids=["text", "no text"])
def test_a_damaged_index_is_named(write, text, more):
    folder = write()
    (folder / "model.safetensors.index.json").write_bytes(text.encode() + more)
    with pytest.raises(DamagedFile, match=r"model\.safetensors\.index\.json"):
        weight_files(folder)


@pytest.mark.parametrize("places", [["a"], "model.safetensors", {"a": 1}, {"a": None}, {"a": ["b"]}, None])
def test_an_index_must_map_tensors_to_files(write, places):
    folder = write()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(DamagedFile, match=r"model\.safetensors\.index\.json has no weight_map"):
        weight_files(folder)


def test_files_that_are_missing_are_named(write):
    folder = write("model-1.safetensors", model=["model-1.safetensors", "model-2.safetensors"])
    with pytest.raises(FileNotFoundError, match=r"model-2\.safetensors is not there, and .*finish the download"):
        weight_files(folder)
    (folder / "model-2.safetensors").symlink_to(folder / "blobs" / "0123")
    with pytest.raises(FileNotFoundError, match=r"model-2\.safetensors is a link to .*blobs/0123, which is not there"):
        weight_files(folder)
    (folder / "model-2.safetensors").unlink()
    (folder / "model-2.safetensors").mkdir()
    with pytest.raises(FileNotFoundError, match=r"model-2\.safetensors is no file"):
        weight_files(folder)


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("blobs/0123")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors is a link to .*blobs/0123, which is not there"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "chat_template.json"])
def test_so_is_one_of_the_tokenizer(tmp_path, name):
    """A server would have no text otherwise, or no chat."""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).symlink_to("blobs/0123")
    with pytest.raises(FileNotFoundError, match=rf"{name} is a link to .*blobs/0123, which is not there"):
        Tokenizer.from_folder(tmp_path)


def test_so_is_one_of_the_configuration(tmp_path, caplog):
    (tmp_path / "config.json").symlink_to("blobs/0123")
    with pytest.raises(FileNotFoundError, match=r"config\.json is a link to .*blobs/0123, which is not there"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "generation_config.json").symlink_to("blobs/4567")
    assert sampling_defaults(tmp_path) == {}
    assert "generation_config.json is a link to" in caplog.text and "left aside" in caplog.text


@pytest.mark.parametrize("size", [0, 4, 60, -1])
def test_a_file_that_is_cut_is_named(tmp_path, size):
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(9)}, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DamagedFile, match=r"model\.safetensors is no readable safetensors file"):
        list(read_tensors(tmp_path))


def test_json_of_editors_is_read(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": 1}')  # a byte-order mark
    assert read_object(path) == {"a": 1}
    path.write_text('{"a": ' + "[" * 100_000)
    with pytest.raises(DamagedFile, match=r"config\.json is not JSON"):
        read_object(path)


def test_what_is_not_followed_is_said_once(tmp_path, caplog):
    first, second = f"{tmp_path}: field a", f"{tmp_path}: field b"  # of this run of the test alone
    for message in (first, second, first):
        tell(message)
    assert caplog.messages == [first, second]
