"""Conversions of the request traces, on small samples in the sources' formats."""

from __future__ import annotations

import itertools
import json

import pandas as pd
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from apex.workloads.files import TraceRow
from apex.workloads.formats import (
    azure_rows,
    dolphin_pairs,
    livebench_pairs,
    mooncake_rows,
    neo_rows,
    text_rows,
    token_counter,
)
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

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


def test_azure_rows_are_ordered_by_arrival_and_start_at_zero(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE_2023)
    rows = azure_rows(path)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(374, 44), (879, 55), (396, 109)]
    assert [row.arrival_s for row in rows] == pytest.approx([0.0, 2.0, 4.314579])


def test_azure_timestamps_with_and_without_fraction(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE_2024)
    assert [row.arrival_s for row in azure_rows(path)] == pytest.approx([0.0, 0.041, 0.157, 60.0, 60.5])


@pytest.mark.parametrize("chunk", [1, 2, 3, 1000])
def test_azure_stride_counts_across_chunks(tmp_path, monkeypatch, chunk):
    path = tmp_path / "azure.csv"
    path.write_text(AZURE_2024)
    read = pd.read_csv
    monkeypatch.setattr(pd, "read_csv", lambda file, **options: read(file, **options | {"chunksize": chunk}))
    assert [row.input_tokens for row in azure_rows(path, stride=2)] == [1452, 862, 617]


def test_azure_file_of_another_form_is_refused(tmp_path):
    path = tmp_path / "azure.csv"
    path.write_text("time,tokens\n1,2\n")
    with pytest.raises(ValueError, match="ContextTokens"):
        azure_rows(path)


def test_dolphin_output_is_reasoning_and_answer():
    record = {
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why is it so"}],
        "reasoning": "let me think about it",
        "answer": "because",
        "model": "r1",
    }
    lines = [json.dumps(record).encode(), b"\n", json.dumps(record | {"reasoning": None}).encode()]
    assert text_rows(dolphin_pairs(lines), count_words, max_rows=10) == [TraceRow(6, 6), TraceRow(6, 1)]


def test_text_sources_stop_at_max_rows():
    endless = ((f"one {number}", "three") for number in itertools.count())
    assert text_rows(endless, count_words, max_rows=300) == [TraceRow(2, 1)] * 300
    assert next(endless)[0] == "one 300"


def test_what_a_tokenizer_was_trained_to_cut_or_fill_up_is_counted_whole(tmp_path):
    """As by transformers, where a call without arguments does neither."""
    file = make_tiny_tokenizer(tmp_path) / "tokenizer.json"
    raw = Tokenizer.from_file(str(file))
    raw.enable_truncation(16)
    raw.enable_padding(length=16)
    raw.save(str(file))
    assert token_counter(tmp_path)(["n" * 101, "abc"]) == token_counter(file)(["n" * 101, "abc"]) == [101, 3]


def test_livebench_joins_questions_with_one_models_answers():
    questions = pd.DataFrame({"question_id": ["a", "b", "c"], "turns": [["x y"], ["x", "y z"], ["never asked"]]})
    answers = pd.DataFrame(
        {
            "question_id": ["b", "a", "a", "gone"],
            "model_id": ["small-8b", "small-8b", "other", "small-8b"],
            "choices": [[{"turns": ["1", "2 3"]}], [{"turns": ["1"]}], [{"turns": ["9 9 9"]}], [{"turns": ["0"]}]],
        }
    )
    pairs = livebench_pairs(questions, answers, "small-8b")
    assert text_rows(pairs, count_words, 10) == [TraceRow(3, 3), TraceRow(2, 1)]
    with pytest.raises(RuntimeError, match="small-8b"):
        list(livebench_pairs(questions, answers, "absent"))


MOONCAKE = '{"timestamp": %s, "input_length": %s, "output_length": 5, "hash_ids": [0, 7]}\n'


def test_mooncake_rows_are_ordered_by_arrival_and_blank_lines_and_a_mark_do_not_count(tmp_path):
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\ufeff" + MOONCAKE % (3000, 30) + "\n" + MOONCAKE % (0, 10) + MOONCAKE % (1000, 20) + "\n")
    rows = mooncake_rows(path)
    assert [(row.arrival_s, row.input_tokens) for row in rows] == [(0.0, 10), (1.0, 20), (3.0, 30)]
    assert rows[0].segments == ((1, 512), (8, 512))


@pytest.mark.parametrize("bad", ["NaN, 10", "Infinity, 10", "-1, 10", "1, NaN", '1, "ten"', "1, Infinity", "null, 5"])
def test_a_damaged_line_of_mooncake_is_named(tmp_path, bad):
    path = tmp_path / "mooncake.jsonl"
    path.write_text(MOONCAKE % (0, 10) + MOONCAKE % tuple(bad.split(", ")))
    with pytest.raises(ValueError, match=r"mooncake.jsonl:2: "):
        mooncake_rows(path)


def test_a_damaged_object_of_neo_is_named(tmp_path):
    path = tmp_path / "neo.json"
    path.write_text('\ufeff[{"prompt": 3, "max_tokens": 4}, {"prompt": NaN, "max_tokens": 4}]')
    with pytest.raises(ValueError, match=r"neo.json:2: "):
        neo_rows(path)


@pytest.mark.parametrize("bad", ["nat,3,4", "2024-05-12 00:00:00,,4", "2024-05-12 00:00:00,inf,4", "soon,3,4"])
def test_a_damaged_row_of_azure_is_named(tmp_path, bad):
    path = tmp_path / "azure.csv"
    path.write_text("\ufeff" + AZURE_2024 + "\n" + bad + "\n")
    with pytest.raises(ValueError, match=r"azure.csv: row 6 after the header"):
        azure_rows(path)


def test_a_request_of_mooncake_is_as_long_as_prompt_and_answer_together(tmp_path):
    """At most 8,192 tokens; times are in milliseconds, and block 0 of a prompt is a text as any other."""
    lengths = [(8000, 300), (7892, 300), (8192, 1), (100, 8000), (9000, 10)]
    lines = [
        json.dumps({"timestamp": 1500 * i, "input_length": n, "output_length": m, "hash_ids": [0, 10 + i]})
        for i, (n, m) in enumerate(lengths)
    ]
    path = tmp_path / "mooncake.jsonl"
    path.write_text("\n".join(lines))
    rows = mooncake_rows(path)
    assert [(row.input_tokens, row.output_tokens, row.arrival_s) for row in rows] == [
        (7892, 300, 1.5),
        (100, 8000, 4.5),
    ]
    assert rows[0].segments == ((1, 512), (12, 512)) and rows[1].segments == ((1, 512), (14, 512))
    assert mooncake_rows(path, stride=3) == rows[1:]


def test_every_so_many_requests_of_neo_are_kept(tmp_path):
    path = tmp_path / "neo.json"
    path.write_text(json.dumps([{"prompt": 10 + i, "max_tokens": i} for i in range(1, 6)]))
    assert neo_rows(path) == [TraceRow(10 + i, i) for i in range(1, 6)]
    assert neo_rows(path, stride=2) == [TraceRow(10 + i, i) for i in (1, 3, 5)]


def test_azure_rows_are_every_so_many_of_the_file_however_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "azure.csv"
    lines = [f"2024-05-12 00:00:{second:02d}+00:00,{100 + second},{1 + second}" for second in range(30)]
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]) + "\n")
    read = pd.read_csv
    for chunk in (4, 5, 7, 1000):
        monkeypatch.setattr(
            pd, "read_csv", lambda file, chunk=chunk, **options: read(file, **options | {"chunksize": chunk})
        )
        rows = azure_rows(path, stride=3)
        assert [row.input_tokens for row in rows] == list(range(100, 130, 3))
        assert [row.arrival_s for row in rows] == list(range(0, 30, 3))


def test_azure_seconds_count_from_the_first_arrival_and_not_from_the_first_line(tmp_path):
    path = tmp_path / "azure.csv"
    lines = AZURE_2023.splitlines()
    path.write_text("\n".join([lines[0], *lines[:0:-1]]) + "\n")
    assert [row.arrival_s for row in azure_rows(path)] == pytest.approx([0.0, 2.0, 4.314579])


def test_special_tokens_are_no_part_of_a_texts_length(tmp_path):
    """Neither of a prompt nor of an answer: an engine adds them once, and not to answers."""
    raw = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2}, unk_token="<s>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    raw.save(str(tmp_path / "tokenizer.json"))
    for given in (tmp_path, tmp_path / "tokenizer.json"):
        assert token_counter(given)(["a b a", "b", ""]) == [3, 1, 0]
    with pytest.raises(RuntimeError, match="no tokenizer at"):
        token_counter(tmp_path / "absent")
