"""Throughput and latency of every system on predicted machines are those recorded."""

import pytest

from tests.golden import record
from tests.golden.plans import SYSTEMS
from tests.golden.settings import SETTINGS, applies, row

RECORDED = record.read("settings")
CASES = [(system, setting) for system in SYSTEMS for setting in SETTINGS if applies(system, setting)]


@pytest.mark.parametrize(("system", "setting"), CASES)
def test_rows_are_those_recorded(system: str, setting: str) -> None:
    assert row(system, setting) == RECORDED[system][setting]
