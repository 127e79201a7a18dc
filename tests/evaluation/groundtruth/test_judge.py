"""The judge of the simulator: real runs beside their predictions. An error that grows by more than a point fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from apex.replay.records import RequestRecord
from evaluation.groundtruth.judge import Judged, judge, ladder, recorded_errors, worse_than_recorded
from evaluation.groundtruth.models import RunModel, find_model
from evaluation.groundtruth.prediction import Outcome, load_at
from evaluation.groundtruth.report import draw_run
from tests.evaluation.groundtruth.folders import write_run


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
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 3, "hidden_size": 8}')
    assert find_model("someone/Unknown-9B", tmp_path) == RunModel(3, 8)
    (tmp_path / "config.json").write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match=r"config.json lacks num_hidden_layers"):
        find_model("someone/Unknown-9B", tmp_path)
    assert find_model("Qwen/Qwen3-30B-A3B-Instruct-2507").num_layers == 48
    assert find_model("Qwen/Qwen3-4B").num_layers == 36


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "meta.json").write_text((folder / "meta.json").read_text().replace("Llama-3.1-8B", "Unknown-9B"))
    with pytest.raises(ValueError, match="the layers of 'meta-llama/Unknown-9B' are not known"):
        judge(folder)


def test_a_request_beyond_the_pool_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a request of 20 tokens is not served: refused: .*KV cache"):
        judge(write_run(tmp_path / "run", num_gpu_blocks=2))
