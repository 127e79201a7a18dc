"""Conversions of the request traces, on small samples written here in the sources' own formats."""

import csv
import json
from pathlib import Path

import download_traces as traces
import pandas as pd
import pytest

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.6805900,879,55
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-12 00:00:00+00:00,1452,3
2024-05-12 00:00:00.041000+00:00,584,3
2024-05-12 00:00:00.157000+00:00,862,38
2024-05-12 00:01:00+00:00,1569,3
2024-05-12 00:01:00.500000+00:00,617,104
"""


def count_words(texts: list[str]) -> list[int]:
    return [len(text.split()) for text in texts]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(traces, "CACHE_DIR", tmp_path / "cache")
    return tmp_path / "cache"


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_azure_rows_are_ordered_by_arrival_and_start_at_zero(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE_2023)
    rows = traces.convert_azure(path)
    assert [row[1:] for row in rows] == [(374, 44), (879, 55), (396, 109)]
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 2.0, 4.314579])


def test_azure_timestamps_with_and_without_fraction(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE_2024)
    arrivals = [row.arrival_s for row in traces.convert_azure(path)]
    assert arrivals == pytest.approx([0.0, 0.041, 0.157, 60.0, 60.5])


@pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
def test_azure_stride_counts_across_chunks(tmp_path, monkeypatch, chunk):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE_2024)
    read = pd.read_csv
    monkeypatch.setattr(pd, "read_csv", lambda file, chunksize: read(file, chunksize=chunk))
    assert [row.input_tokens for row in traces.convert_azure(path, stride=2)] == [1452, 862, 617]


def test_dolphin_output_is_reasoning_and_answer():
    record = {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why is it so"}],
        "reasoning": "let me think about it",
        "answer": "because",
        "model": "r1",
    }
    lines = [json.dumps(record).encode(), b"\n", json.dumps(record | {"reasoning": None}).encode()]
    rows = traces.convert_texts(traces.dolphin_pairs(lines), count_words, max_rows=10)
    assert rows == [(None, 6, 6), (None, 6, 1)]


def test_text_sources_stop_at_max_rows():
    endless = (("one two", "three") for _ in iter(int, 1))
    assert len(traces.convert_texts(endless, count_words, max_rows=300)) == 300


def test_livebench_joins_questions_with_one_models_answers():
    questions = pd.DataFrame({"question_id": ["a", "b", "c"], "turns": [["x y"], ["x", "y z"], ["never asked"]]})
    answers = pd.DataFrame(
        {
            "question_id": ["b", "a", "a", "gone"],
            "model_id": ["small-8b", "small-8b", "other", "small-8b"],
            "choices": [[{"turns": ["1", "2 3"]}], [{"turns": ["1"]}], [{"turns": ["9 9 9"]}], [{"turns": ["0"]}]],
        }
    )
    pairs = traces.livebench_pairs(questions, answers, "small-8b")
    assert traces.convert_texts(pairs, count_words, 10) == [(None, 3, 3), (None, 2, 1)]
    with pytest.raises(RuntimeError, match="small-8b"):
        list(traces.livebench_pairs(questions, answers, "absent"))


def test_a_fetched_trace_is_written_with_its_provenance(tmp_path, cache, monkeypatch, capsys):
    """The whole command, with the source's address replaced by a local file."""
    original = tmp_path / "original.csv"
    original.write_text(AZURE_2023 + "2023-11-16 18:16:00.0000000,0,5\n")
    monkeypatch.setattr(traces, "AZURE_2023", original.as_uri())
    assert traces.main(["azure2023-conv"]) == 0
    path = cache / "traces" / "azure2023_conv.csv"
    assert capsys.readouterr().out.strip() == str(path)
    assert read_csv(path)[1] == {"arrival_s": "2.000000", "input_tokens": "879", "output_tokens": "55"}
    provenance = json.loads(path.with_suffix(".json").read_text())
    assert (provenance["rows"], provenance["rows_left_out"], provenance["licence"]) == (3, 1, "CC-BY-4.0")


def test_text_trace_has_no_arrivals_and_names_its_tokenizer(tmp_path, cache, monkeypatch):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    source = tmp_path / "dolphin.jsonl"
    record = {"messages": [{"role": "user", "content": "a b c"}], "reasoning": "d e", "answer": "f"}
    source.write_text((json.dumps(record) + "\n") * 5)
    monkeypatch.setattr(traces, "DOLPHIN", source.as_uri())
    assert traces.main(["dolphin-r1", "--tokenizer", str(tmp_path), "--max-rows", "4"]) == 0
    path = cache / "traces" / "dolphin_r1.csv"
    assert read_csv(path) == [{"arrival_s": "", "input_tokens": "3", "output_tokens": "3"}] * 4
    assert json.loads(path.with_suffix(".json").read_text())["tokens_counted_by"] == str(tmp_path)


def test_a_failing_source_is_reported_and_the_next_one_still_fetched(tmp_path, cache, monkeypatch, capsys):
    original = tmp_path / "original.csv"
    original.write_text(AZURE_2024)
    monkeypatch.setattr(traces, "AZURE_2023", (tmp_path / "absent.csv").as_uri())
    monkeypatch.setattr(traces, "AZURE_2024", original.as_uri())
    assert traces.main(["azure2023-conv", "azure2024-conv"]) == 1
    assert "azure2023-conv: failed" in capsys.readouterr().err
    assert [row["input_tokens"] for row in read_csv(cache / "traces" / "azure2024_conv.csv")] == ["1452"]
    assert not (cache / "traces" / "azure2023_conv.csv").exists()


def test_missing_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(RuntimeError, match=r"prepare_model\.py"):
        traces.load_counter(tmp_path)(["text"])


def test_list_names_every_source_with_its_licence(capsys):
    assert traces.main(["--list"]) == 0
    listed = capsys.readouterr().out
    for source in traces.SOURCES:
        assert source.name in listed and source.origin in listed and source.licence in listed
