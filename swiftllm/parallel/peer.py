"""Another rank as the driver sees it: its process, what it reports, and how it ends."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Callable, Collection
from typing import Any, NoReturn

from swiftllm.device import limits
from swiftllm.engine.backend import RankFailed
from swiftllm.parallel.launch import SpawnedRanks
from swiftllm.parallel.pipe import Message, PipeClosed
from swiftllm.threads import DeviceThread

logger = logging.getLogger(__name__)

FINISH_S = 5.0  # that a rank gets to end by itself
LAST_WORDS_S = 0.2  # after a collective has failed: for the reports of the ranks, which say why


class Peer:
    """Another rank.

    Attributes:
        finished: CPU attentions that it has finished since it was last reset.
        failure: why it cannot go on; None if it can.
        is_dead: its process has ended.
    """

    def __init__(
        self,
        rank: int,
        launcher: SpawnedRanks,
        threads: int,
        cores: Collection[int],
        on_death: Callable[[], None],
    ) -> None:
        """See :meth:`SpawnedRanks.start`. A thread of its own calls ``on_death`` if the process ends unasked."""
        self.rank = rank
        self.finished = 0
        self.failure: str | None = None
        self.is_dead = threading.Event()
        self._answers: list[Message] = []
        self._is_ending = False
        self._on_death = on_death
        self.process, self.pipe = launcher.start(rank, threads, cores)
        DeviceThread(self._watch, name=f"rank-{rank}").start()

    def _watch(self) -> None:
        status = self.process.wait()
        self.is_dead.set()
        if not self._is_ending:
            logger.error("rank %d (process %d) has ended with status %d", self.rank, self.process.pid, status)
            self._on_death()

    def send(self, *message: Any) -> None:
        """
        Raises:
            RankFailed: the rank is gone.
        """
        try:
            self.pipe.send(*message)
        except PipeClosed:
            self._fail("has died")

    def take_in(self, timeout_s: float | None = 0.0) -> bool:
        """Take in the next report; see :meth:`Pipe.receive`. Returns whether there was one.

        Raises:
            RankFailed: the rank is gone, or reports a failure.
        """
        try:
            message = self.pipe.receive(timeout_s)
        except PipeClosed:
            self._fail("has died")
        match message:
            case None:
                return False
            case ("attention",):
                self.finished += 1
            case ("failed", why):
                self._fail(f"failed: {why}")
            case _:
                self._answers.append(message)
        return True

    def _fail(self, why: str) -> NoReturn:
        self.failure = self.failure or f"rank {self.rank} {why}"
        raise RankFailed(self.failure)

    def has_finished(self, count: int) -> bool:
        """Whether it has finished so many CPU attentions; never blocks."""
        while self.finished < count and self.take_in():
            pass
        return self.finished >= count

    def wait_until_finished(self, count: int) -> None:
        """
        Raises:
            RankFailed: it is gone, reports a failure, or finishes nothing for ``ANSWER_S``.
        """
        while self.finished < count:
            if self.failure is not None:
                raise RankFailed(self.failure)
            if not self.take_in(limits.ANSWER_S):
                self._fail(f"has finished no CPU attention for {limits.ANSWER_S:g} s")

    def answer(self, name: str, timeout_s: float | None = None) -> Message:
        """What it answers by this name, without the name.

        Raises:
            RankFailed: it is gone, reports a failure, or does not answer in time.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._answers:
            if not self.take_in(None if end_s is None else max(0.0, end_s - time.monotonic())):
                self._fail(f"does not answer within {timeout_s:g} s")
        found, *values = self._answers.pop(0)
        if found != name:
            self._fail(f"answers {found} instead of {name}")
        return tuple(values)

    def reset(self, epoch: int, timeout_s: float, *, leaves: bool = False) -> bool:
        """Have it drop all work, and leave the group if it ``leaves``. Returns whether it is still in the group.

        Raises:
            RankFailed: it is gone, or does not answer in time.
        """
        self.send("reset", epoch, leaves)
        end_s = time.monotonic() + timeout_s
        while True:
            self.failure = None  # of before the reset
            try:
                answered, is_well = self.answer("done", max(0.0, end_s - time.monotonic()))
            except RankFailed:
                if self.is_gone() or time.monotonic() >= end_s:
                    raise
                continue
            if answered == epoch:
                self.finished = 0
                return is_well

    def is_gone(self) -> bool:
        """Whether it has died, or has no way to answer any more."""
        return self.is_dead.is_set() or (self.failure or "").endswith("has died")

    def end(self, *, at_once: bool = False) -> None:
        """End the process; returns when it has ended."""
        self._is_ending = True
        if not at_once:
            try:
                self.pipe.send("finish")
                self.process.wait(FINISH_S)
            except (PipeClosed, subprocess.TimeoutExpired):
                pass
        if not self.is_dead.wait(0.0 if at_once else 0.1):
            self.process.kill()
            self.is_dead.wait()
        self.pipe.close()
