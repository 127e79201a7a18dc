"""The two streams: arrivals at a rate, at changing rates, and a backlog."""

from __future__ import annotations

import numpy as np
import pytest

from evaluation.studies.omniserve import best_effort, bursty, latency_sensitive, with_best_effort
from swiftllm.core.request import ServiceClass

BACKLOG = {"workload": "dailymails", "backlog": 3, "backlog_per_s": 0.5}


def test_arrivals_fill_the_duration_and_none_come_after_it() -> None:
    lengths = latency_sensitive("sharegpt", 5.0, 400.0, 0, None)
    arrivals = [row.arrival_s for row in lengths.rows]
    assert len(arrivals) == pytest.approx(2000, rel=0.1) == lengths.spec.num_requests
    assert arrivals[0] == 0.0 and 398 < arrivals[-1] < 400 and arrivals == sorted(arrivals)


def test_a_bursty_stream_has_other_rates_in_each_interval_and_the_mean_of_all() -> None:
    lengths = bursty("sharegpt", 1.0, 8.0, 10.0, 600.0, 0, None)
    arrivals = [row.arrival_s for row in lengths.rows]
    counts = np.histogram(arrivals, bins=np.arange(0.0, 601.0, 10.0))[0]
    assert arrivals == sorted(arrivals) and arrivals[-1] < 600.0
    assert counts.sum() / 600.0 == pytest.approx(lengths.spec.request_rate, rel=0.1)
    assert 1.0 < lengths.spec.request_rate < 8.0
    assert counts.std() > 2 * np.sqrt(counts.mean())  # a steady Poisson stream has the root of the mean
    assert lengths == bursty("sharegpt", 1.0, 8.0, 10.0, 600.0, 0, None)


def test_a_backlog_is_there_at_once_and_a_rate_is_not() -> None:
    backlog = best_effort(BACKLOG, 10.0, 0, None)
    assert len(backlog.rows) == 8 and {row.arrival_s for row in backlog.rows} == {0.0}
    stream = best_effort({"workload": "longbench-v2", "request_rate": 2.0}, 50.0, 0, None)
    assert len({row.arrival_s for row in stream.rows}) == len(stream.rows) > 50


def test_best_effort_outputs_can_be_made_short() -> None:
    """Their mean decides how much memory for more decodes is worth."""
    short = best_effort({**BACKLOG, "backlog": 200, "output_len": 50}, 10.0, 0, None)
    assert short.mean_output_tokens == pytest.approx(50, rel=0.02)
    assert short.mean_input_tokens == best_effort({**BACKLOG, "backlog": 200}, 10.0, 0, None).mean_input_tokens


def test_latency_sensitive_requests_are_the_same_with_and_without_best_effort() -> None:
    alone = latency_sensitive("sharegpt", 2.0, 20.0, 0, None)
    assert with_best_effort(alone, None, 20.0, 0, None) is alone
    both = with_best_effort(alone, BACKLOG, 20.0, 0, None)
    assert [row for row in both.rows if row.service_class is ServiceClass.LATENCY_SENSITIVE] == list(alone.rows)
    assert len(both.rows) == len(alone.rows) + 13
