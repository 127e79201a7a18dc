"""The performance model over arrays predicts what it predicts for one size at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex.perf.model import Curve, PerfModel, Surface
from apex.schedulers.adaptive import OperationTimes
from apex.simulator.hardware_files import load_gpu, load_host, load_model_config
from apex.simulator.predicted_profile import hardware_profile
from tests.reference.fake_engine import flat_table

CALIBRATED = hardware_profile(load_gpu("a10"), load_host("g5-4xlarge"), load_model_config("llama-3.1-8b"))
# As the profiler measures: other context lengths for many requests than for few, and a line that falls beyond its end.
UNEVEN = replace(
    flat_table(),
    cpu_attention=Surface(
        (1, 4, 16),
        (
            Curve((10, 100, 1000), (1e-5, 3e-5, 1e-4)),
            Curve((10, 50, 100), (2e-5, 3e-5, 4e-5)),
            Curve((10, 20), (5e-5, 9e-5)),
        ),
    ),
    hand_over=Curve((1, 8), (1e-5, 3e-5)),
    iteration=Curve((0, 10), (1e-4, 2e-4)),
)
SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=20)


@pytest.mark.parametrize("table", [CALIBRATED, UNEVEN], ids=["calibrated", "uneven"])
@given(sizes=SIZES, context=st.integers(1, 3000))
def test_times_are_those_of_the_model(table, sizes: list[int], context: int) -> None:
    model = PerfModel(table, num_layers=4)
    times = OperationTimes(model)
    for name in ("linear_s", "outside_layers_s", "hand_over_s"):
        expected = [getattr(model, name)(size) for size in sizes]
        assert getattr(times, name)(sizes) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    for name in ("gpu_attention_s", "cpu_attention_s"):
        expected = [getattr(model, name)(size, size * context) for size in sizes]
        assert getattr(times, name)(sizes, context) == pytest.approx(expected, rel=1e-9, abs=1e-15)
    steps = [model.linear_s(size) + model.hand_over_s(size) for size in sizes]
    assert times.alone_stage_s(sizes) == pytest.approx(steps, rel=1e-9, abs=1e-15)


def test_grids_keep_their_shape() -> None:
    times = OperationTimes(PerfModel(UNEVEN, num_layers=4))
    sizes = np.arange(12).reshape(3, 4)
    assert times.linear_s(sizes).shape == times.cpu_attention_s(sizes, 50.0).shape == (3, 4)
