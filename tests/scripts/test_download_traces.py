"""The command, from the sources' own formats to trace files; the answers of the sources' servers are written here."""

import importlib.util
import io
import json
import os
import subprocess
import sys
from email.message import Message
from pathlib import Path
from urllib.error import URLError
from urllib.response import addinfourl

import pandas as pd
import pytest
import tyro
from download_traces import Options, main
from tokenizers import Tokenizer, models, pre_tokenizers

from apex.workloads import sources as trace_sources
from apex.workloads.files import TraceRow, read_rows
from apex.workloads.sources import SOURCES
from evaluation.results.paths import REPO_ROOT

ORIGINS = {source.name: source.origin for source in SOURCES}
AZURE_2023 = b"""TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.6805900,879,55
2023-11-16 18:16:00.0000000,0,5
"""
AZURE_2024 = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"".join(
    b"2024-05-12 00:%02d:%02d+00:00,%d,3\n" % (*divmod(number, 60), number + 1) for number in range(1500)
)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


@pytest.fixture
def web(monkeypatch) -> dict[str, bytes]:
    """What the addresses answer; whatever is not in here cannot be reached."""
    answers: dict[str, bytes] = {}

    def open_url(url: str) -> addinfourl:
        if url not in answers:
            raise URLError(f"{url} not reachable")
        headers = Message()
        headers["Content-Length"] = str(len(answers[url]))
        return addinfourl(io.BytesIO(answers[url]), headers, url)

    for module in (trace_sources, trace_sources):
        monkeypatch.setattr(module, "open_url", open_url)
    return answers


@pytest.fixture
def hub(web, monkeypatch):
    """Puts a split of a dataset onto the Hugging Face hub. Its parts are pickled, since parquet needs pyarrow."""
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "pyarrow" or find_spec(name))
    monkeypatch.setattr(pd, "read_parquet", lambda path, columns: pd.read_pickle(path)[columns])

    def publish(dataset: str, split: str, *parts: dict[str, list]) -> None:
        urls = []
        for number, part in enumerate(parts):
            buffer = io.BytesIO()
            pd.DataFrame(part).assign(unread="").to_pickle(buffer)
            urls.append(f"https://hub/{dataset}/{number}")
            web[urls[-1]] = buffer.getvalue()
        web[f"https://huggingface.co/api/datasets/{dataset}/parquet"] = json.dumps({"default": {split: urls}}).encode()

    return publish


@pytest.fixture
def words(tmp_path) -> Path:
    """A tokenizer whose tokens are words."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("name", ["azure2023-conv", "azure2023-code"])
def test_a_fetched_trace_is_written_with_its_provenance(name, web, cache, capsys):
    web[ORIGINS[name]] = AZURE_2023
    assert main(Options(names=(name,))) == 0
    path = cache / f"{name.replace('-', '_')}.csv"
    assert capsys.readouterr().out.strip() == str(path)
    assert path.read_text().splitlines()[:3] == [
        "arrival_s,input_tokens,output_tokens",
        "0.000000,374,44",
        "2.000000,879,55",
    ]
    assert read_rows(path)[2] == TraceRow(396, 109, 4.314579)
    provenance = json.loads(path.with_suffix(".json").read_text())
    assert (provenance["rows"], provenance["rows_left_out"], provenance["licence"]) == (3, 1, "CC-BY-4.0")
    assert provenance["origin"].endswith(f"AzureLLMInferenceTrace_{name[-4:]}.csv")


def test_texts_have_no_arrivals_and_name_their_tokenizer(web, cache, words):
    record = {"messages": [{"role": "user", "content": "a b c"}], "reasoning": "d e", "answer": "f"}
    web[ORIGINS["dolphin-r1"]] = (json.dumps(record) + "\n").encode() * 5
    assert main(Options(names=("dolphin-r1",), tokenizer=words, max_rows=4)) == 0
    path = cache / "dolphin_r1.csv"
    assert read_rows(path) == (TraceRow(3, 3, None),) * 4
    assert json.loads(path.with_suffix(".json").read_text())["tokens_counted_by"] == f"tokenizer of {words.name}"


def test_livebench_is_put_together_from_its_datasets(hub, cache, words):
    for category in trace_sources.LIVEBENCH_CATEGORIES:
        hub(f"livebench/{category}", "test", {"question_id": [category], "turns": [["x y", category]]})
    answers = [
        {"question_id": [name], "model_id": [model], "choices": [[{"turns": ["1 2"]}]]}
        for name, model in (("math", "small"), ("coding", "small"), ("reasoning", "other"))
    ]
    hub("livebench/model_answer", "leaderboard", *answers)
    assert main(Options(names=("livebench",), tokenizer=words, livebench_model="small")) == 0
    assert read_rows(cache / "livebench.csv") == (TraceRow(3, 2), TraceRow(3, 2))
    assert json.loads((cache / "livebench.json").read_text())["livebench_model"] == "small"


def test_osc_is_fetched_as_text_and_as_neo_replays_it(hub, web, cache, words):
    hub("CarperAI/openai_summarize_comparisons", "test", {"prompt": ["a b c"], "chosen": ["d"]})
    web[ORIGINS["osc-neo-llama2"]] = b'[{"prompt": 269, "max_tokens": 42}, {"prompt": 270, "max_tokens": 52}]'
    assert main(Options(names=("osc", "osc-neo-llama2"), tokenizer=words)) == 0
    assert read_rows(cache / "osc.csv") == (TraceRow(3, 1),)
    assert read_rows(cache / "osc_neo_llama2.csv") == (TraceRow(269, 42), TraceRow(270, 52))


def test_a_failing_source_is_reported_and_the_next_one_still_fetched(web, cache, capsys):
    web[ORIGINS["azure2024-conv"]] = AZURE_2024
    assert main(Options(names=("azure2023-conv", "azure2024-conv"))) == 1
    assert "azure2023-conv: failed" in capsys.readouterr().err
    assert [row.input_tokens for row in read_rows(cache / "azure2024_conv.csv")] == [1, 1001]
    assert not (cache / "azure2023_conv.csv").exists()


def test_a_trace_without_usable_rows_is_no_trace(web, cache, capsys):
    web[ORIGINS["azure2023-conv"]] = AZURE_2023.splitlines(keepends=True)[0]
    assert main(Options(names=("azure2023-conv",))) == 1
    assert "no usable row in 0" in capsys.readouterr().err and not cache.exists()


def test_missing_tokenizer_says_what_to_do_before_anything_is_fetched(web, cache, tmp_path, capsys):
    assert main(Options(names=("dolphin-r1",), tokenizer=tmp_path)) == 1
    assert "prepare_model.py" in capsys.readouterr().err


def test_without_a_name_every_source_is_listed_with_its_licence(capsys):
    assert main(Options()) == 0
    listed = capsys.readouterr().out
    for source in SOURCES:
        assert source.name in listed and source.origin in listed and source.licence in listed


def test_a_list_that_nobody_reads_to_its_end_is_no_error():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "scripts/download_traces.py"]
    with os.fdopen(writing, "wb") as closed:
        result = subprocess.run(command, cwd=REPO_ROOT, stdout=closed, stderr=subprocess.PIPE, check=False)
    assert result.stderr == b""


def test_command_line_knows_the_sources(capsys):
    assert tyro.cli(Options, args=["osc", "azure2023-code", "--max-rows", "5"]) == Options(
        names=("osc", "azure2023-code"), max_rows=5
    )
    with pytest.raises(SystemExit):
        tyro.cli(Options, args=["sharegpt"])
    assert "azure2023-code" in capsys.readouterr().err
