"""What happens to a driver on a GPU, whose collectives with a dead rank do not raise by themselves."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from swiftllm.config import EngineConfig
from swiftllm.parallel import team
from swiftllm.parallel.team import EXIT_STUCK, Team


class StuckGroup:
    size, port, fails_by_itself = 1, 0, True

    def __init__(self) -> None:
        self.num_left = 0
        self.released = threading.Event()

    def leave(self) -> None:
        self.num_left += 1
        self.released.set()


@pytest.mark.parametrize(("is_called", "is_released"), [(False, False), (True, True), (True, False)])
def test_a_call_that_cannot_be_released_ends_the_process(monkeypatch, is_called: bool, is_released: bool) -> None:
    exits: list[int] = []
    monkeypatch.setattr(os, "_exit", exits.append)
    monkeypatch.setattr(team, "CAN_BIND", False)
    monkeypatch.setattr(team, "RELEASE_S", 0.2)
    group = StuckGroup()
    driver = Team(EngineConfig("model"), group, None, threaded=False)
    group.fails_by_itself = False  # from now on as on GPUs
    releasing = threading.Thread(target=driver.release)
    if is_called:
        with driver.under_way():
            releasing.start()
            assert group.released.wait(10.0)
            if not is_released:
                releasing.join()
    else:
        releasing.start()
    releasing.join()
    assert group.num_left == 1
    assert exits == ([EXIT_STUCK] if is_called and not is_released else [])


def test_the_gpu_with_least_memory_counts(monkeypatch) -> None:
    monkeypatch.setattr(team, "CAN_BIND", False)
    driver = Team(EngineConfig("model"), StuckGroup(), None, threaded=False)
    driver.peers += [SimpleNamespace(answer=lambda what, free=free: (free,)) for free in (700, 300)]
    assert driver.least_free_bytes(500) == 300 and driver.least_free_bytes(200) == 200
    assert driver.least_free_bytes(None) is None  # on a host they share its memory
