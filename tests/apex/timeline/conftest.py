"""Timelines of three iterations, one for each way in which CPU batches go along."""

from __future__ import annotations

import pytest

from apex.strategy import StrategyConfig
from apex.timeline.spans import Timeline
from tests.apex.timeline.recorded import LINK, OVERLAP, record, simulated_engine


@pytest.fixture(scope="session")
def overlap() -> Timeline:
    return record(simulated_engine("apex", OVERLAP, LINK), num_iterations=3)


@pytest.fixture(scope="session")
def pipelining() -> Timeline:
    strategy = StrategyConfig(strategy="asymmetric-pipelining")
    return record(simulated_engine("neo", strategy), num_iterations=3)


@pytest.fixture(scope="session")
def free_running() -> Timeline:
    strategy = StrategyConfig(disable_asymmetric_pipelining=True)
    return record(simulated_engine("adaptive", strategy, LINK), num_iterations=3)
