"""The harness makes the same points as before."""

import pytest

from tests.golden import record, tasks


@pytest.mark.parametrize("command", tasks.QUICK)
def test_a_command_makes_the_same_points(command):
    assert tasks.digests(command) == record.read("tasks")[command]
