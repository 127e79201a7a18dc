"""The plans of every system are those recorded."""

import pytest

from tests.golden import record
from tests.golden.plans import SYSTEMS, WORKLOADS, applies, digests

RECORDED = record.read("plans")
CASES = [(system, name) for system in SYSTEMS for name in WORKLOADS if applies(system, name)]


@pytest.mark.parametrize(("system", "workload"), CASES)
def test_plans_are_those_recorded(system: str, workload: str) -> None:
    assert digests(system, WORKLOADS[workload]) == RECORDED[system][workload]
