"""The simulated ablation: every setting has a workload that it takes, and rows differ in their strategy alone."""

from __future__ import annotations

import pytest

from apex.simulator.paper_settings import load_setting, setting_names
from evaluation.experiments.ablation.options import Options
from evaluation.experiments.ablation.rows import ROWS
from evaluation.experiments.ablation.simulated import make_points


@pytest.mark.parametrize("setting", setting_names())
def test_every_setting_has_rows_of_one_workload_that_it_takes(setting):
    points = make_points(Options(backend="simulated", setting=setting, num_requests=12))
    paper = load_setting(setting)
    assert [point.key for point in points] == [name for name, row in ROWS.items() if not row.synchronous]
    assert len({point.task.lengths.digest() for point in points}) == 1
    for point in points:
        row = ROWS[point.key]
        assert (point.task.system, point.task.strategy) == (row.system, row.strategy)
        assert point.task.values["num_clipped"] == 0 and len(point.task.lengths.rows) == 12
        assert point.task.num_gpu_blocks == paper.num_gpu_blocks and point.concurrent


def test_defaults_are_long_outputs_on_an_a10():
    lengths = make_points(Options(backend="simulated", rows=("swiftllm",)))[0].task.lengths
    assert lengths.spec.num_requests == 300
    assert lengths.mean_input_tokens == pytest.approx(1000, rel=0.02)
    assert lengths.mean_output_tokens == pytest.approx(500, rel=0.02)


def test_requests_too_long_for_the_setting_are_refused():
    with pytest.raises(ValueError, match="apex-t4 takes at most 832 tokens a request, and the longest has"):
        make_points(Options(backend="simulated", setting="apex-t4", input_len=800, output_len=100))
    with pytest.raises(ValueError, match="no setting 'apex-h100'"):
        make_points(Options(backend="simulated", setting="apex-h100"))
