"""The CPU time of other work during a measurement, and the notes about it."""

from __future__ import annotations

import os
import time

import pytest

from evaluation.plots.notes import repeat_notes
from evaluation.results import provenance
from evaluation.results.provenance import OtherWork, used_by_others_s


def test_busy_cores_are_seconds_of_others_over_seconds_passed(monkeypatch):
    monkeypatch.setattr(provenance, "used_by_others_s", iter([10.0, 13.0]).__next__)
    monkeypatch.setattr(time, "monotonic", iter([100.0, 102.0]).__next__)
    assert OtherWork().busy_cores() == pytest.approx(1.5)


def test_a_system_that_does_not_tell_is_not_quiet(monkeypatch):
    monkeypatch.setattr(provenance, "used_by_others_s", lambda: None)
    assert OtherWork().busy_cores() is None


def test_own_work_is_not_that_of_others(monkeypatch):
    found = used_by_others_s()
    if found is None:
        pytest.skip("this system has no /proc/stat")
    real = os.times()
    monkeypatch.setattr(os, "times", lambda: os.times_result((real.user + 1e6, *tuple(real)[1:])))
    assert used_by_others_s() < found - 0.9e6


def test_figures_tell_of_a_machine_that_was_busy():
    row = {"backend": "torch-cpu", "repeats": 1}
    assert repeat_notes([row | {"others_busy_cores": 0.02}]) == ["Measured once."]
    found = repeat_notes([row | {"others_busy_cores": 0.3}, row | {"others_busy_cores": 1.24}])
    assert found[-1] == "Other work kept up to 1.2 cores busy meanwhile."
