"""The engine in a process of its own, whose parent is the front end.

The parent keeps signals, logs and the exit status. The engine's process ignores the signals of a terminal; it ends when
the connection closes, however the parent has ended.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from swiftllm.runtime.cores import serve_from_here
from swiftllm.server.service.client import EngineClient, EngineGone
from swiftllm.server.service.front_end_link import FrontEndLink
from swiftllm.server.service.messages import Ends, NotBuilt, make_ends
from swiftllm.server.service.service import EngineService
from swiftllm.threads import DeviceThread

LOOK_EVERY_S = 0.2
END_GRACE_S = 5.0
EXIT_ALONE = 1
YOUNG_OBJECTS = 20_000  # net of those freed, before Python looks for garbage; a step of 64 streams has some 700


class EngineProcess:
    """Starts the process. ``build`` makes the service there, so it must be importable; it may raise ValueError or
    OSError for what the user can mend."""

    def __init__(self, build: Callable[[], EngineService]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._ends, theirs = make_ends()
        # A fresh Python: CUDA does not survive a fork.
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine, args=(self._build, theirs.messages, theirs.served), name="engine"
        )
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def connect(self) -> EngineClient:
        """Wait until the engine is ready.

        Raises:
            EngineNotBuilt, EngineGone: it never will be.
        """
        return EngineClient(self._ends, self._how_it_ended, self._start_again)

    def _start_again(self) -> Ends:
        """Start another process, when this one has ended or has failed. From any thread."""
        with self._lock:
            if self._is_closed:
                raise EngineGone("the server ends")
            self._end(END_GRACE_S)
            self._start()
            return self._ends

    def _how_it_ended(self) -> str:
        self._process.join(1.0)
        status = self._process.exitcode
        if status is None:
            return "it has closed the connection"
        return f"it was ended by {signal.Signals(-status).name}" if status < 0 else f"it exited with {status}"

    def close(self, timeout_s: float) -> None:
        """Wait until the process has ended, at most ``timeout_s``; then kill it. The connection is closed first."""
        with self._lock:
            self._is_closed = True
            self._end(timeout_s)

    def _end(self, timeout_s: float) -> None:
        self._ends.close()
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def run_engine(build: Callable[[], EngineService], *sockets: object) -> None:
    """The engine's process: serve until the front end has gone."""
    for ignored in (signal.SIGINT, signal.SIGTERM):  # the front end drains, and then closes the connection
        signal.signal(ignored, signal.SIG_IGN)
    link = FrontEndLink(Ends(*sockets))
    is_built = threading.Event()
    DeviceThread(end_if_alone, link, is_built, name="while building").start()
    serve_from_here()
    try:
        service = build()
    except (ValueError, OSError) as error:
        is_built.set()
        link.send(NotBuilt(str(error)))
        return
    calm_garbage_collection()
    is_built.set()
    service.start(link)
    service.wait_until_left()
    DeviceThread(exit_after, service.limits.drain_timeout_s + END_GRACE_S, name="end").start()
    service.close()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # the disk may be full
            stream.flush()
    os._exit(0)  # Python's own clean-up takes a second, and waits for what hangs


def calm_garbage_collection() -> None:
    """Call it once all is built: what there is now is never looked at again, and what is new seldom. Otherwise one step
    of thirty waits 1 to 2 ms for a collection, and some wait 100 ms."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS)


def exit_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(EXIT_ALONE)


def end_if_alone(link: FrontEndLink, is_built: threading.Event) -> None:
    """End this process if the front end ends before the engine is built."""
    while not is_built.is_set():
        if link.has_hung_up(LOOK_EVERY_S) and not is_built.is_set():  # once built, the service ends it
            os._exit(EXIT_ALONE)
