"""The judge of the simulator: real runs beside their predictions. An error that grows by more than a point fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apex.replay.records import RequestRecord
from apex.simulator.hardware_files import known_models, load_link, load_model_config
from evaluation.validation.judge import (
    Judged,
    Outcome,
    all_terms,
    draw_run,
    judge,
    ladder,
    link_of,
    load_at,
    recorded_errors,
    remarks,
    shard_terms,
    table_of_operators,
    worse_than_recorded,
)
from evaluation.validation.runs import MODELS, RunModel, find_model, read_run
from tests.evaluation.validation.folders import change_meta, write_run


@pytest.mark.parametrize("name", recorded_errors())
def test_no_error_of_a_real_run_grows_by_more_than_a_point(name: str) -> None:
    """Where it fails, a change of the simulator made it worse. configs/groundtruth/errors.yaml holds the errors."""
    judged = judge(name)
    assert not worse_than_recorded(judged)
    assert all(np.isfinite(list(judged.errors.values())))


def test_a_worse_prediction_is_told() -> None:
    name = "rtx4090-llama-3.1-8b"
    times = np.array([1.0, 2.0])
    measured = Outcome(times * 0, times, times + 10, np.array([11, 11]), running=times, waiting=times)
    slower = replace(measured, first_token_s=times * 2, last_token_s=times * 2 + 10)
    told = worse_than_recorded(Judged(run=_named(name), model=None, measured=measured, predicted=slower))
    assert any(line.startswith("ttft_mean_s: +100.0%, recorded") for line in told)
    assert not worse_than_recorded(Judged(run=_named(name), model=None, measured=measured, predicted=measured))


class _named:
    def __init__(self, name: str) -> None:
        self.name = name


def test_metrics_are_those_of_vllm() -> None:
    outcome = Outcome(np.array([0.0, 1.0]), np.array([2.0, 2.0]), np.array([4.0, 7.0]), np.array([3, 6]))
    metrics = outcome.metrics()
    assert metrics["tokens_per_s"] == pytest.approx(9 / 7)
    assert metrics["ttft_mean_s"] == pytest.approx(1.5)
    assert metrics["tpot_mean_s"] == pytest.approx(1.0)
    assert metrics["ttft_p99_s"] == pytest.approx(1.99)


def test_the_load_is_that_of_each_moment() -> None:
    history = ((0.0, "waiting"), (1.0, "gpu"), (2.0, "waiting"), (3.0, "gpu"))
    record = RequestRecord("a", 0.0, 1, 1, finish_s=4.0, tier_history=history)
    running, waiting = load_at([0.5, 1.5, 2.5, 3.5, 4.5], (record,))
    assert list(running) == [0, 1, 0, 1, 0]
    assert list(waiting) == [1, 0, 1, 0, 0]


def test_a_run_of_an_unknown_card_is_predicted_from_its_own_tables(tmp_path: Path) -> None:
    judged = judge(write_run(tmp_path / "run", num_gpu_blocks=None))
    assert len(judged.predicted.first_token_s) == 5
    assert list(ladder(judged)) == []
    # A step of one decode: 33 operators of a layer at 10 us, and attention of 5 us, as the tables say.
    layer_s = (4 + 2 + 2) * 10.1e-6 + 5e-6
    tpot_s = judged.predicted.metrics()["tpot_p50_s"]
    assert tpot_s == pytest.approx(32 * layer_s + 4 * 10.1e-6, rel=0.05)
    draw_run(judged.run, judged.measured, judged.predicted)


def test_a_model_is_known_by_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 64}')
    assert find_model("someone/Unknown-9B", tmp_path) == RunModel(3, 8, 64)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match=r"config.json lacks num_hidden_layers"):
        find_model("someone/Unknown-9B", tmp_path)
    assert find_model("Qwen/Qwen3-30B-A3B-Instruct-2507").num_layers == 48
    assert find_model("Qwen/Qwen3-4B").num_layers == 36
    for name in set(known_models()) & set(MODELS):
        config = load_model_config(name)
        assert find_model(name) == RunModel(config.num_layers, config.hidden_size, config.vocab_size)


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "meta.json").write_text((folder / "meta.json").read_text().replace("Llama-3.1-8B", "Unknown-9B"))
    with pytest.raises(ValueError, match="the layers of 'meta-llama/Unknown-9B' are not known"):
        judge(folder)


def test_a_request_beyond_the_pool_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a request of 20 tokens is not served: refused: .*KV cache"):
        judge(write_run(tmp_path / "run", num_gpu_blocks=2))


# -- several GPUs for a layer -----------------------------------------------------------------------------------------

LLAMA = find_model("Llama-3.1-8B")


@pytest.mark.parametrize(("tokens", "latency_us", "gb_s"), [(1, 6, 43), (64, 6, 43), (1023, 6, 43), (1024, 16, 35),
                                                           (2048, 16, 35)])  # fmt: skip
def test_a_layer_of_shards_has_exactly_two_all_reduces(tmp_path: Path, tokens: int, latency_us, gb_s) -> None:
    run = read_run(change_meta(write_run(tmp_path / "run"), tensor_parallel_size=2, link="pcie-5"))
    alone, layers, ends = shard_terms(run, LLAMA)
    assert [setup.term for setup in (alone, layers, ends)][1] == "all-reduces"
    added_s = layers.table.linear(tokens) - alone.table.linear(tokens)
    all_reduce_s = latency_us * 1e-6 + tokens * 4096 * 2 / (gb_s * 1e9)
    assert added_s == pytest.approx(2 * all_reduce_s)
    assert replace(layers.table, linear=alone.table.linear) == alone.table
    # Once a step: one of the embedding, and the logits of half of the vocabulary from the other card.
    assert ends.table.token_ends(tokens) - alone.table.token_ends(tokens) == pytest.approx(all_reduce_s)
    rows = min(tokens, 128)
    gathered_s = ends.table.ends(rows) - alone.table.ends(rows)
    assert gathered_s == pytest.approx(16e-6 + rows * 128256 / 2 * 2 / 35e9)
    assert ends.table.linear == layers.table.linear
    assert all_terms(run, LLAMA) == ends


def test_a_step_of_shards_is_longer_by_the_all_reduces_of_all_layers(tmp_path: Path) -> None:
    folder = change_meta(write_run(tmp_path / "run"), tensor_parallel_size=2)
    unknown = judge(folder)
    known = judge(change_meta(folder, link="pcie-5"))
    slower_s = known.predicted.metrics()["tpot_p50_s"] - unknown.predicted.metrics()["tpot_p50_s"]
    all_reduce_s, gather_s = 6e-6 + 4096 * 2 / 43e9, 16e-6 + 128256 / 35e9
    assert slower_s == pytest.approx((2 * 32 + 1) * all_reduce_s + gather_s, rel=0.02)
    assert [term for term, _ in ladder(unknown)] == ["operators of a shard"]
    assert [term for term, _ in ladder(known)] == [
        "operators of a shard",
        "all-reduces",
        "embedding and logits exchanged",
    ]
    assert any("it is left out" in line for line in remarks(unknown))
    assert any("by the figures of PCIe 5.0" in line for line in remarks(known))


@pytest.mark.parametrize("ranks", [{}, {"data_parallel_size": 2}])
def test_a_run_whose_layers_are_whole_has_no_all_reduces(tmp_path: Path, ranks: dict) -> None:
    """Not even where its card's link is known."""
    run = read_run(change_meta(write_run(tmp_path / "rtxpro6000-two"), **ranks))
    assert link_of(run) == load_link("pcie-5")
    assert all_terms(run, LLAMA).table == table_of_operators(run, LLAMA)


@pytest.mark.parametrize(
    ("folder", "meta", "link"),
    [
        ("rtxpro6000-llama", {}, "pcie-5"),
        ("mine", {"hardware": {"device_name": "NVIDIA RTX PRO 6000 Blackwell Server Edition"}}, "pcie-5"),
        (
            "mine",
            {"hardware": {"device_name": "NVIDIA RTX PRO 6000 Blackwell Server Edition"}, "link": "pcie-4"},
            "pcie-4",
        ),
        ("rtxpro6000-llama", {"hardware": {"device_name": "NVIDIA A100-SXM4-80GB"}}, None),
        ("rtxpro60000", {}, None),
        ("rtx4090-llama", {}, None),  # known, but not what joins several of them
        ("mine", {}, None),
    ],
)
def test_what_joins_the_cards_is_named_or_known_by_the_card(
    tmp_path: Path, folder: str, meta: dict, link: str | None
) -> None:
    run = read_run(change_meta(write_run(tmp_path / folder), tensor_parallel_size=2, **meta))
    assert link_of(run) == (None if link is None else load_link(link))


def test_an_unknown_link_is_refused(tmp_path: Path) -> None:
    folder = change_meta(write_run(tmp_path / "run"), tensor_parallel_size=2, link="pcie-9")
    with pytest.raises(ValueError, match="no link 'pcie-9': known are nvlink-4, pcie-3, pcie-4, pcie-5"):
        judge(folder)
    with pytest.raises(ValueError, match=r"meta\.json: link=5 must be a name in configs/hardware"):
        judge(change_meta(folder, link=5))
