"""The CPU worker: order, errors, and a thread that dies."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import pytest

from swiftllm.engine.backend import WorkerDied
from swiftllm.runtime.workers.thread import CpuWorker, WorkerTicket


@pytest.fixture
def worker():
    worker = CpuWorker()
    yield worker
    worker.close()


def raising(error: BaseException) -> Callable[[], None]:
    def task() -> None:
        raise error

    return task


def died(ticket: WorkerTicket) -> bool:
    with pytest.raises(WorkerDied):
        ticket.wait()
    return ticket.ready()


def test_tasks_run_in_order_on_one_other_thread(worker: CpuWorker) -> None:
    ran: list[tuple[int, int]] = []
    tickets = [worker.submit(lambda i=i: ran.append((i, threading.get_ident()))) for i in range(100)]
    assert all(ticket.wait() >= 0.0 for ticket in reversed(tickets))
    assert [i for i, _ in ran] == list(range(100))
    assert {thread for _, thread in ran} == {worker._thread.ident} != {threading.get_ident()}
    times = tickets[0].times()
    assert times.start_s <= times.done_s == times.ready_s


def test_a_task_that_raises_fails_its_own_ticket(worker: CpuWorker) -> None:
    tickets = [worker.submit(task) for task in (int, raising(ValueError("no")), int)]
    tickets[0].wait()
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            tickets[1].wait()
    tickets[2].wait()


def test_nothing_goes_on_after_a_death_until_it_is_told_to(worker: CpuWorker) -> None:
    gate = threading.Event()
    before = worker.submit(lambda: gate.wait(60.0))
    tickets = [worker.submit(task) for task in (raising(SystemExit(1)), int, int)]
    gate.set()
    before.wait()
    assert all(map(died, tickets))
    worker._thread.join()
    with pytest.raises(WorkerDied):
        worker.submit(int)
    assert worker.restarts == 0
    worker.start_again()
    worker.start_again()
    assert worker.restarts == 1
    worker.submit(int).wait()


def test_killing_it(worker: CpuWorker) -> None:
    last = worker.submit(int)
    worker.kill()
    last.wait()
    worker._thread.join()
    worker.start_again()
    worker.submit(int).wait()
    assert worker.restarts == 1


def test_a_thread_killed_from_outside_leaves_nobody_waiting(worker: CpuWorker) -> None:
    """Between two tasks, where it can fulfil no ticket any more."""
    worker.submit(int).wait()
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker._thread.ident), ctypes.py_object(SystemExit))
    assert died(worker.submit(int))


def test_a_worker_that_died_can_be_closed() -> None:
    worker = CpuWorker()
    worker.kill()
    worker.close()
    assert not worker._thread.is_alive()
