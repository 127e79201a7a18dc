"""Messages arrive whole and in order, and the end of a process shows at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from swiftllm.parallel.communication import Pipe, PipeClosed


@pytest.fixture
def ends():
    first, second = map(Pipe, socket.socketpair())
    yield first, second
    first.close()
    second.close()


def test_messages_of_any_size_arrive_in_order(ends) -> None:
    first, second = ends
    messages = [("a", 1), ("b", list(range(100_000))), ("c", b"x" * 300_000, None, 1.5), ("d", [(1, 2), ()])]
    sender = threading.Thread(target=lambda: [first.send(*message) for message in messages])
    sender.start()
    assert [second.receive() for _ in messages] == messages
    sender.join()


def test_receiving_waits_as_long_as_asked(ends) -> None:
    first, second = ends
    assert second.receive(0.0) is None
    start_s = time.monotonic()
    assert second.receive(0.1) is None
    assert time.monotonic() - start_s >= 0.09
    first.send("late")
    assert second.receive(0.0) == ("late",)


def test_what_was_sent_before_the_end_is_received(ends) -> None:
    first, second = ends
    first.send("last")
    first.close()
    second.wait_until_closed()
    assert second.receive() == ("last",)
    with pytest.raises(PipeClosed):
        second.receive()
    with pytest.raises(PipeClosed):
        for _ in range(2):
            second.send("too late")


DRIVER = """
import sys, time
from swiftllm.parallel.team import SpawnedRanks
process, pipe = SpawnedRanks("tests.swiftllm.parallel.test_pipe:wait_for_the_driver").start(1, 1)
assert pipe.receive() == ("there",)
print(process.pid, flush=True)
time.sleep(100)
"""


def wait_for_the_driver(pipe: Pipe) -> None:
    """A rank that never looks at its pipe again, as one that hangs in a collective."""
    pipe.exit_when_closed()
    pipe.send("there")
    time.sleep(100)


def test_no_rank_outlives_its_driver() -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    pid = int(driver.stdout.readline())
    driver.kill()
    driver.wait()
    end_s = time.monotonic() + 60.0
    while os.path.exists(f"/proc/{pid}") and _state(pid) != "Z":  # nobody may be left to collect it
        assert time.monotonic() < end_s, "the rank goes on"
        time.sleep(0.01)


def _state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(") ")[2][0]
    except FileNotFoundError:
        return "Z"
