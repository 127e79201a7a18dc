"""The plans of every system are those recorded."""

import pytest

from tests.golden import record
from tests.golden.plans import SYSTEMS, WORKLOADS, applies, digests

CASES = [(system, name) for system in SYSTEMS for name, workload in WORKLOADS.items() if applies(system, workload)]


@pytest.mark.parametrize(("system", "workload"), CASES)
def test_plans_are_those_recorded(system: str, workload: str) -> None:
    assert digests(system, WORKLOADS[workload]) == record.read("plans")[system][workload]
