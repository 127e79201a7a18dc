"""What happens to a driver on a GPU, whose collectives with a dead rank do not raise by themselves."""

from __future__ import annotations

import os
import threading

import pytest

from swiftllm.parallel import backend
from swiftllm.parallel.backend import EXIT_STUCK, ShardedBackend


class StuckGroup:
    fails_by_itself = False

    def __init__(self, driver: ShardedBackend, is_released: bool) -> None:
        self.driver, self.is_released = driver, is_released
        self.num_left = 0

    def leave(self) -> None:
        self.num_left += 1
        if self.is_released:
            threading.Timer(0.01, lambda: setattr(self.driver, "_call", 0)).start()


@pytest.mark.parametrize(("call", "is_released"), [(0, False), (7, True), (7, False)])
def test_a_call_that_cannot_be_released_ends_the_process(monkeypatch, call: int, is_released: bool) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(backend, "RELEASE_S", 0.2)
    driver = ShardedBackend.__new__(ShardedBackend)
    driver._call = call
    driver.group = StuckGroup(driver, is_released)
    driver._release()
    assert driver.group.num_left == 1
    assert exits == ([EXIT_STUCK] if call and not is_released else [])
