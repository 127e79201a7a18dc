"""Promises of both classes on small machines drawn at random; 90 of them with APEX_SLOW_TESTS."""

from __future__ import annotations

import os

import pytest

from tests.apex.schedulers.omniserve.random_machines import BE, LS, PASS, PATIENCE, Machine, run

MACHINES = range(90) if os.environ.get("APEX_SLOW_TESTS") else (3, 35, 36, 52)
"""35, 36 and 52 are machines on which requests once waited too long, or best effort cost more."""


@pytest.mark.parametrize("system", ["omniserve", "omniserve-stepping"])
def test_nobody_starves_and_best_effort_costs_others_next_to_nothing(system: str) -> None:
    """All machines together: every token is accounted for, and at most one point of attainment is lost."""
    alone = beside = offered = 0
    for seed in MACHINES:
        machine = Machine.draw(seed)
        without, both = run(machine, system, alone=True), run(machine, system)
        assert both.longest_wait[LS] <= PATIENCE and both.longest_wait[BE] <= PATIENCE + PASS, seed
        alone, beside, offered = alone + without.kept, beside + both.kept, offered + both.offered
    assert beside >= alone - 0.01 * offered
