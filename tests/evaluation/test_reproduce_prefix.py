"""Prefix caches: what they find of shared beginnings, simulated and with a tiny model on this machine."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from apex.build import build_system
from evaluation.options import experiment_settings
from evaluation.studies import prefix
from evaluation.studies.prefix import requests_of, run_prefix_point
from tests.apex.test_end_to_end import MADE_UP_PROFILE
from tests.reference.tiny_model import make_tiny_llama

SECTIONS = experiment_settings("prefix")
VARIANTS = [
    {"system": system, "cache": cache}
    for system, cache in (("adaptive", "off"), ("vllm", "gpu"), ("adaptive", "tiers"))
]


def rows_of(folder: Path, section: str, changes: dict, **options: object) -> list[dict]:
    config = folder / "prefix.yaml"
    config.write_text(yaml.safe_dump({section: SECTIONS[section] | changes}))
    chosen = prefix.Options(jobs=1, config=config, results_dir=folder, part=(section,), **options)
    assert prefix.main(chosen) == 0
    (summary,) = folder.glob("prefix*/[0-9a-f]*/summary.json")
    return json.loads(summary.read_text())


def test_a_cache_over_both_tiers_finds_most_and_answers_first(tmp_path, capsys) -> None:
    panel = {"setting": "apex-a10", "workload": "multi-turn", "num_requests": 12}
    rows = rows_of(tmp_path, "simulated", {"panels": [panel], "pool": 0.3, "variant": VARIANTS})
    printed = capsys.readouterr().out
    assert "SIMULATED" in printed and "vllm, gpu" in printed
    assert (next(tmp_path.glob("prefix/[0-9a-f]*")) / "figure.png").stat().st_size > 10_000
    by_variant = {(row["system"], row["cache"]): row for row in rows}
    assert all(row["failed"] == 0 and row["backend"] == "simulated" for row in rows)
    off, gpu, tiers = (by_variant[variant] for variant in (("adaptive", "off"), ("vllm", "gpu"), ("adaptive", "tiers")))
    assert off["found_on_gpu"] == off["found_on_cpu"] == 0 < gpu["found_on_gpu"] and gpu["found_on_cpu"] == 0
    assert tiers["found_on_gpu"] + tiers["found_on_cpu"] > 0.6
    assert tiers["over_off"] >= 1
    assert tiers["over_gpu_only"] == pytest.approx(tiers["output_tokens_per_s"] / gpu["output_tokens_per_s"])
    assert tiers["ttft_s_turn_4"] < 0.5 * off["ttft_s_turn_4"]


def test_an_agent_of_a_model_with_linear_attention_finds_its_turns(tmp_path, capsys) -> None:
    """Up to the last snapshot of the turn before: at its prompt's last block, or after 512 tokens of its output."""
    panel = {"model": "qwen3.5-9b", "gpu": "t4", "host": "g4dn-4xlarge", "num_requests": 8, "max_num_seqs": 2}
    rows = rows_of(tmp_path, "agents", {"panels": [panel]})
    turns = requests_of("agents", 8, 0, 1 << 18, None)[0].rows
    prompts, ends = [turn.input_tokens for turn in turns], [turn.input_tokens + turn.output_tokens for turn in turns]
    last = [max((prompt - 2) // 16 * 16, (end - 1) // 512 * 512) for prompt, end in zip(prompts, ends, strict=True)]
    found = sum(last[:-1])
    assert "qwen3.5-9b" in capsys.readouterr().out
    assert [(row["system"], row["cache"]) for row in rows] == [
        ("vllm", "gpu"),
        ("swiftllm", "store"),
        ("adaptive", "tiers"),
    ]
    for row in rows:
        assert row["failed"] == 0 and row["num_snapshots"] > 0
        assert row["found_on_gpu"] * sum(prompts) == pytest.approx(found) and row["found_on_cpu"] == 0
        assert row["ttft_s_turn_8"] < 0.6 * row["ttft_s_turn_1"]
        assert row["over_gpu_only"] == pytest.approx(row["output_tokens_per_s"] / rows[0]["output_tokens_per_s"])
        assert row["turn_s_p50"] > row["ttft_s_p50"]


def test_a_row_of_the_record_comes_out_again() -> None:
    rows = json.loads((Path(__file__).parents[2] / "docs/records/prefix/summary.json").read_text())
    chosen = {"gpu": "T4", "system": "vllm", "cache": "gpu", "pool": 1.0}
    (row,) = (row for row in rows if chosen.items() <= row.items())
    points = prefix.PARTS["simulated"].points_of(prefix.Options(only=("setting=apex-t4", "cache=gpu", "pool=1.0")))
    (point,) = (point for point in points if point.key == "apex-t4-multi-turn-pool 1-gpu-vllm")
    now = run_prefix_point(point, "", Console(file=io.StringIO())).values
    compared = (row.keys() & now.keys()) - {"wall_s"}
    assert len(compared) > 40
    assert {name: now[name] for name in compared} == {name: row[name] for name in compared}


def test_the_working_set_counts_each_block_once(tmp_path) -> None:
    """Two requests of one block in common and one of their own each; their outputs fill a block, and less than one."""
    lines = ["arrival_s,input_tokens,output_tokens,prefix_ids", "0,1024,16,0 1", "1,1024,15,0 2"]
    (tmp_path / "mooncake_conversation_prefixes.csv").write_text("\n".join(lines) + "\n")
    lengths, in_all = requests_of("mooncake", 2, 0, 4096, tmp_path)
    assert in_all == 3 * 512 // 16 + 1
    first, second = (row.prompt for row in lengths.rows)
    assert first[:512] == second[:512] and first[512] != second[512] and len(first) == len(second) == 1024


@pytest.mark.parametrize("system", ["vllm", "apex", "adaptive"])
def test_the_second_turn_and_sharers_compute_only_what_is_new(tmp_path, monkeypatch, system: str) -> None:
    build = partial(build_system, profile=MADE_UP_PROFILE)
    monkeypatch.setattr(prefix, "build_engine", build)
    make_tiny_llama(tmp_path / "model")
    sizes = {"history": 100, "message": 10, "answer": 4, "repeats": 1, "sharers": 8, "shared": 100, "prompt": 110}
    (row,) = rows_of(tmp_path, "torch", sizes | {"system": [system]}, model=tmp_path / "model")
    assert row["found_tokens"] == 96, "the full blocks of 103 tokens with K and V"
    assert row["computed_over_fewest"] == 1.0
    assert row["turn_2_over_1"] > 0 and row["no_hits_on_over_off"] > 0
