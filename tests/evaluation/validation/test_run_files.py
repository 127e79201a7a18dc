"""Folders of real runs: what is read of them, and what is said of a folder that lacks something."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from apex.simulator.hardware_files import read_operators
from evaluation.validation.runs import find_run, known_runs, read_run
from tests.evaluation.validation.folders import write_run


def read(folder: Path) -> None:
    read_run(folder)
    read_operators(folder)


def test_a_run_is_read(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert (run.model, run.num_gpu_blocks, run.block_size, run.max_num_seqs) == ("meta-llama/Llama-3.1-8B", 200, 16, 8)
    request = run.requests[1]
    assert (request.prompt_len, request.output_len) == (21, 5)
    times = (request.arrival_s, request.queued_s, request.first_token_s, request.last_token_s)
    assert times == pytest.approx((0.1, 0.1, 0.3, 1.1), abs=1e-6)
    assert [sample.time_s for sample in run.load] == [1, 2, 3]


def test_compressed_files_are_read_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    plain = read_run(folder), read_operators(folder).gemm
    for name in ("requests.jsonl", "dense.csv", "meta.json"):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / f"{name}.gz").write_bytes(gzip.compress(data))
    assert (read_run(folder), read_operators(folder).gemm) == plain


@pytest.mark.parametrize(
    "name", ["requests.jsonl", "timeseries.csv", "meta.json", "dense.csv", "attention.csv", "per_sequence.csv"]
)
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        read(folder)


def drop_column(text: str) -> str:
    return "\n".join(line.rsplit(",", 1)[0] for line in text.splitlines())


def without_key(key: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        first, *others = text.splitlines()
        row = json.loads(first)
        del row[key]
        return "\n".join([json.dumps(row), *others])

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dense.csv", drop_column, "dense.csv lacks the columns time_us; it has layer, tokens"),
        ("dense.csv", lambda text: text.replace("o_proj", "x_proj"), "dense.csv: unknown layers x_proj"),
        ("dense.csv", lambda text: "\n".join(t for t in text.splitlines() if "down_proj" not in t),
         "dense.csv lacks the layers down_proj"),
        ("dense.csv", lambda text: text.replace("10.1", "fast", 1), "dense.csv, line 2: time_us='fast' must be"),
        ("dense.csv", lambda text: text.replace("10.1", "nan", 1), "dense.csv, line 2: time_us='nan' must be"),
        ("dense.csv", lambda text: text.splitlines()[0], "dense.csv has no row"),
        ("attention.csv", lambda text: "\n".join(text.splitlines()[:3]), "attention.csv needs at least two"),
        ("per_sequence.csv", lambda text: text.replace("sampler", "sample"), "lacks the layers sampler"),
        ("timeseries.csv", lambda text: text.replace("running", "run"), "timeseries.csv lacks the columns running"),
        ("requests.jsonl", without_key("queued_ts"), "requests.jsonl, line 1: queued_ts=None must be a number"),
        ("requests.jsonl", lambda text: "{" + text, "requests.jsonl, line 1 is not JSON"),
        ("requests.jsonl", lambda text: "", "requests.jsonl has no request"),
        ("requests.jsonl", lambda text: text.replace("51.0", "50.1", 1), "line 1: it needs a prompt, an output"),
        ("meta.json", lambda text: text[:-1], "meta.json is not JSON"),
        ("meta.json", without_key("model"), 'meta.json lacks "model"'),
        ("meta.json", without_key("engine_kwargs"), 'meta.json lacks "engine_kwargs"'),
        ("meta.json", lambda text: text.replace('"max_num_seqs": 8', '"max_num_seqs": 0'),
         "meta.json: max_num_seqs=0 must be a whole number"),
    ],
)  # fmt: skip
def test_a_malformed_file_is_named_with_what_it_lacks(
    tmp_path: Path, name: str, change: Callable[[str], str], message: str
) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        read(folder)


def test_a_broken_compressed_file_is_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "dense.csv").unlink()
    (folder / "dense.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"dense.csv.gz cannot be read"):
        read(folder)


def test_runs_have_names(tmp_path: Path) -> None:
    assert find_run(tmp_path) == tmp_path
    assert known_runs() == ["rtx4090-llama-3.1-8b", "rtxpro6000-llama-3.1-8b", "rtxpro6000-qwen3-30b-a3b"]
    assert all(len(read_run(find_run(name)).requests) == 300 for name in known_runs())
    with pytest.raises(ValueError, match="no run 'h100': give its folder, or one of rtx4090"):
        find_run("h100")
