"""A workload in a file of one's own: every form is read, and a bad line is refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from apex.workloads.catalogue import load_trace
from apex.workloads.files import TraceRow
from apex.workloads.formats import read_file
from apex.workloads.requests import WorkloadSpec, make_lengths
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

ROWS = (TraceRow(374, 44, 0.0), TraceRow(396, 109, 4.5), TraceRow(879, 55, 6.25))
LENGTHS = tuple(TraceRow(row.input_tokens, row.output_tokens) for row in ROWS)


def json_lines(*entries: object) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


OWN = [{"arrival_s": r.arrival_s, "input_tokens": r.input_tokens, "output_tokens": r.output_tokens} for r in ROWS]
MOONCAKE = [
    {"timestamp": 1000 * r.arrival_s, "input_length": r.input_tokens, "output_length": r.output_tokens, "hash_ids": []}
    for r in ROWS
]
RESULT = {
    "backend": "vllm",
    "start_times": [100.0 + row.arrival_s for row in ROWS],
    "input_lens": [row.input_tokens for row in ROWS],
    "output_lens": [row.output_tokens for row in ROWS],
}
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:51.1805900,396,109\n2023-11-16 18:15:52.9305900,879,55\n"
)
READ = {
    "own.csv": "arrival_s,input_tokens,output_tokens\n0,374,44\n4.5,396,109\n6.25,879,55\n",
    "azure.csv": AZURE,
    "azure-not-sorted.csv": "".join(AZURE.splitlines(keepends=True)[i] for i in (0, 3, 1, 2)),
    "azure-with-a-failed-request.csv": AZURE + "2023-11-16 18:15:53.9305900,879,0\n",
    "own.jsonl": json_lines(*OWN),
    "late.jsonl": json_lines(*({**entry, "arrival_s": 50 + entry["arrival_s"]} for entry in OWN)),
    "mooncake.jsonl": json_lines(*MOONCAKE),
    "one-value.json": json.dumps(OWN),
    "blank-lines.jsonl": "\n" + json_lines(*MOONCAKE) + "\n",
    "result-of-vllm-bench.json": json.dumps(RESULT, indent=2),
}


@pytest.mark.parametrize("name", READ)
def test_lengths_and_arrivals_are_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(READ[name])
    rows, _ = read_file(path)
    assert [(row.input_tokens, row.output_tokens) for row in rows] == [(r.input_tokens, r.output_tokens) for r in ROWS]
    assert [row.arrival_s for row in rows] == pytest.approx([row.arrival_s for row in ROWS], abs=1e-6)


def test_a_result_of_vllm_bench_without_times_has_lengths_only_and_leaves_failed_requests_out(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    lens = {"input_lens": [374, 9, 396, 879], "output_lens": [44, 0, 109, 55]}
    path.write_text(json.dumps(lens))
    assert read_file(path) == (LENGTHS, "1 of 4 entries left out, without a prompt or an output")


def test_ids_of_shared_blocks_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text(json_lines({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}))
    (row,), _ = read_file(path)
    assert row.segments == ((1, 512), (8, 512)) and len(row.prompt) == 600


def test_texts_are_counted_by_a_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny_tokenizer(tmp_path / "my-model")
    conversations = [
        {"id": "a", "conversations": [{"from": "human", "value": "abc"}, {"from": "gpt", "value": "n" * 7}]},
        {"id": "unanswered", "conversations": [{"from": "human", "value": "abc"}]},
    ]
    share_gpt, custom = tmp_path / "share_gpt.json", tmp_path / "custom.jsonl"
    share_gpt.write_text(json.dumps(conversations))
    custom.write_text(json_lines({"prompt": "abc", "output_tokens": 9}, {"prompt": "n" * 5, "output_tokens": 2}))
    rows, note = read_file(share_gpt, folder)
    assert rows == (TraceRow(3, 7),)
    assert note == "1 of 2 entries left out, without a prompt or an output; tokens counted by the tokenizer of my-model"
    assert read_file(custom, folder)[0] == (TraceRow(3, 9), TraceRow(5, 2))
    with pytest.raises(ValueError, match=r"custom.jsonl has texts, .* --tokenizer"):
        read_file(custom)
    with pytest.raises(ValueError, match="no tokenizer at"):
        read_file(custom, tmp_path / "nothing")


REFUSED = {
    "half a line": ("a.jsonl", json_lines(*OWN) + '{"arrival_s": 7,', "a.jsonl:4: Expecting"),
    "another form": ("a.jsonl", json_lines(OWN[0], {"tokens": 5}), "a.jsonl:2: it has none of the known forms"),
    "no object": ("a.jsonl", "\n" + json_lines(OWN[0], 5), "a.jsonl:3: it is no JSON object"),
    "a missing length": (
        "a.jsonl",
        json_lines(MOONCAKE[0], {"input_length": 5}),
        "a.jsonl:2: it lacks 'output_length'",
    ),
    "a part of a token": ("a.jsonl", json_lines({**OWN[0], "input_tokens": 1.5}), "a.jsonl:1: input_tokens=1.5"),
    "no token": (
        "a.jsonl",
        json_lines(OWN[0], {**OWN[1], "output_tokens": 0}),
        "a.jsonl:2: lengths must be at least 1",
    ),
    "letters for a time": ("a.jsonl", json_lines({**MOONCAKE[0], "timestamp": "soon"}), "a.jsonl:1: could not convert"),
    "an endless time": (
        "a.jsonl",
        json_lines(OWN[0], {**OWN[1], "arrival_s": float("inf")}),
        "a.jsonl:2: arrival_s=inf",
    ),
    "below no tokens": ("a.json", json.dumps({**RESULT, "output_lens": [44, -1, 55]}), "a.json:request 2: lengths"),
    "columns of two lengths": ("a.json", json.dumps({**RESULT, "output_lens": [44]}), "are not of one length"),
    "a result without lengths": ("a.json", json.dumps({"total_input_tokens": 9}), "save it with --save-detailed"),
    "no conversations": ("a.json", json.dumps([{"id": 1}]), "a.json:entry 1: it has none of the known forms"),
    "a conversation without text": (
        "a.json",
        json.dumps([{"conversations": [{"from": "x"}]}]),
        "entry 1: it lacks 'value'",
    ),
    "nothing": ("a.jsonl", "\n", "a.jsonl: no request"),
    "no date": ("a.csv", AZURE + "yesterday,5,5\n", "a.csv:5: Invalid isoformat"),
    "no number in Azure's": ("a.csv", AZURE + "2023-11-16 18:15:59,5,x\n", "a.csv:5: output_tokens='x' is no whole"),
    "another header": ("a.csv", "when,how\n1,2\n", "a.csv:1: it needs columns"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_line_is_refused_with_file_and_line(tmp_path: Path, name: str) -> None:
    file, text, why = REFUSED[name]
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError) as refused:
        read_file(tmp_path / file, make_tiny_tokenizer(tmp_path / "model"))
    assert str(tmp_path / file) in str(refused.value) and why in str(refused.value)


def test_a_file_is_a_workload_like_those_with_a_name(tmp_path: Path) -> None:
    path = tmp_path / "monday.jsonl"
    path.write_text(READ["mooncake.jsonl"])
    trace = load_trace(str(path))
    assert (trace.name, trace.origin.kind, trace.origin.file) == ("monday", "measured", "monday.jsonl")
    assert trace.origin.note == "3 requests of the file monday.jsonl"
    assert make_lengths(WorkloadSpec("monday", 3, arrivals="trace"), trace).rows == ROWS
    assert make_lengths(WorkloadSpec("monday", 7), trace).total_output_tokens > 7 * 44
    with pytest.raises(ValueError, match=r"'sharegtp', and no such file is here; .* did you mean sharegpt"):
        load_trace("sharegtp")


def test_turns_follow_answers_share_what_was_said_and_cannot_be_scaled() -> None:
    trace = load_trace("multi-turn")
    lengths = make_lengths(WorkloadSpec("multi-turn", 8, arrivals="trace"), trace)
    assert list(lengths.rows) == trace.window(8, seed=0) and lengths.are_shared and lengths.span_s == 0.0
    with pytest.raises(ValueError, match="multi-turn has conversations, whose lengths cannot be changed"):
        make_lengths(WorkloadSpec("multi-turn", 8, scale=0.5, arrivals="trace"), trace)
    assert not make_lengths(WorkloadSpec("multi-turn", 8), trace).are_shared
