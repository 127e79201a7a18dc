"""Throughput and latency of every system on predicted machines are those recorded."""

import pytest

from tests.golden import record
from tests.golden.plans import SYSTEMS
from tests.golden.settings import SETTINGS, row


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_are_those_recorded(system: str, setting: str) -> None:
    assert row(system, setting) == record.read("settings")[system][setting]
