"""The driver's view of all other ranks: they carry out each command, and are replaced when they fail.

A command goes to the other ranks first, one way and without an answer, and is then carried out here. So a call that
fails here leaves no other rank waiting for its command; whoever waits in a collective is released by
:meth:`Group.leave`.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, NoReturn, TypeVar

import torch

from swiftllm import device
from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.engine.backend import RankFailed
from swiftllm.kv.tensors import KVPlan
from swiftllm.machine import (
    allowed_cores,
    bind_to,
    cores_of_ranks,
    describe_cores,
    node_of_device,
    numa_nodes,
    unbind,
    usable_cores,
)
from swiftllm.parallel.communication import Group, Message, Pipe, PipeClosed
from swiftllm.processes import DeviceThread
from swiftllm.runtime.execution_context import CoreDivision, core_divisions, most_gpu_batch_threads

# -- start and end of a rank's process ---------------------------------------------------------------------------------
# How the processes of the other ranks begin and end.

STANDARD_ERROR = 2  # also for what ranks print: a command's output is the driver's alone
ENTRY = "swiftllm.parallel.rank:rank_main"


class SpawnedRanks:
    """Starts each rank as a fresh Python of this machine, which ends when its end of the pipe closes."""

    def __init__(self, entry: str = ENTRY) -> None:
        """``entry``: the function that the process runs, ``module:name``, called with the pipe."""
        self._entry = entry

    def start(self, rank: int, threads: int, cores: Collection[int] = ()) -> tuple[subprocess.Popen[bytes], Pipe]:
        """Start rank ``rank``, which computes with ``threads`` threads, and connect to it.

        ``cores``: those that it is bound to; without any, to none.
        """
        module, _, name = self._entry.partition(":")
        own, its = socket.socketpair()
        bind = f"os.sched_setaffinity(0, {set(cores)}); " if cores else ""  # before torch starts threads
        program = (  # ends without Python's clean-up, which takes a second
            f"import os, socket; {bind}from swiftllm.parallel.communication import Pipe; from {module} import {name}; "
            f"{name}(Pipe(socket.socket(fileno={its.fileno()}))); os._exit(0)"
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": str(threads),  # read when torch is imported
        }
        with its:
            process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[its.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=STANDARD_ERROR,
            )
        return process, Pipe(own)


# -- a rank as the driver sees it --------------------------------------------------------------------------------------
# Another rank as the driver sees it: its process, what it reports, and how it ends.

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
            if not self.take_in(device.ANSWER_S):
                self._fail(f"has finished no CPU attention for {device.ANSWER_S:g} s")

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


# -- all other ranks ---------------------------------------------------------------------------------------------------

RESET_S = 5.0  # that a rank gets to drop its work before it is replaced
RESTART_S = 600.0  # that a rank gets to load its weights again, and to capture its graphs
RELEASE_S = 10.0  # that a GPU gets to give up a collective with a rank that has died
EXIT_STUCK = 70

CAN_BIND = hasattr(os, "sched_setaffinity")

Result = TypeVar("Result")


class Team:
    """All ranks but the driver, which is rank 0.

    Attributes:
        group: the driver's access to the collectives.
        peers: the other ranks, in order.
        is_whole: all ranks have carried out all commands, as far as the driver knows.
        num_replaced: ranks that were started again.
        rank_cores: the cores of each rank, the driver's included; empty: all ranks share them.
    """

    def __init__(self, config: EngineConfig, group: Group, launcher: SpawnedRanks, *, threaded: bool) -> None:
        """Bind this process to its cores. ``threaded``: whether CPU attention has threads of its own."""
        size, on_gpu = group.size, not group.fails_by_itself
        self.group = group
        self.peers: list[Peer] = []
        self.is_whole, self.num_replaced = True, 0
        self._launcher = launcher
        self._settings = asdict(config)
        self._place = {"size": size, "port": group.port, "threaded": threaded}
        self._threads = most_gpu_batch_threads(max(1, usable_cores() // size))
        self.use_cores(core_divisions(config, without_gpu=not on_gpu)[0])
        nodes = [_node_of_card(rank) if on_gpu else None for rank in range(size)]
        self.rank_cores = cores_of_ranks(allowed_cores(), numa_nodes(), nodes) if CAN_BIND else []
        self._is_bound = bool(self.rank_cores) and bind_to(self.rank_cores[0])
        self._epochs, self._calls = itertools.count(), itertools.count(1)
        self._call = 0  # the one under way; 0: none

    def describe_cores(self) -> str:
        """Which cores the ranks have, for people."""
        if not self.rank_cores:
            return "all ranks share them"
        return ", ".join(f"rank {rank}: {describe_cores(own)}" for rank, own in enumerate(self.rank_cores))

    def use_cores(self, division: CoreDivision) -> None:
        """Ranks that start from now on compute with these numbers of threads."""
        self._settings |= {"gpu_batch_threads": division.gpu_batch_threads, "cpu_threads": division.cpu_threads}

    # -- coming and going ----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all, which begin to load their weights."""
        epoch = next(self._epochs)
        for rank in range(1, self.group.size):
            self.peers.append(self._start(rank, epoch))

    def _start(self, rank: int, epoch: int) -> Peer:
        cores = self.rank_cores[rank] if self.rank_cores else ()
        peer = Peer(rank, self._launcher, self._threads, cores, self.release)
        peer.send("set up", epoch, self._settings, {"rank": rank, **self._place})
        return peer

    def least_free_bytes(self, own: int | None) -> int | None:
        """Memory of the GPU that has least left, once all have loaded their weights; None: all share the host's."""
        others = [peer.answer("loaded")[0] for peer in self.peers]
        return own if own is None else min([own, *others])

    def admit(self, plan: KVPlan, peers: Sequence[Peer] | None = None, epoch: int = 0) -> None:
        """Give loaded ranks, by default all, their KV blocks and let them join the group."""
        for peer in self.peers if peers is None else peers:
            peer.send("blocks", plan.num_blocks[Tier.GPU], plan.num_blocks[Tier.CPU], plan.num_snapshots, epoch)

    def await_done(self, timeout_s: float | None = None) -> None:
        for peer in self.peers:
            peer.answer("done", timeout_s)

    def end(self, *, at_once: bool = False) -> None:
        """End all processes, and give this one its cores back."""
        for peer in self.peers:
            peer.end(at_once=at_once)
        if self._is_bound:
            unbind()

    # -- commands ------------------------------------------------------------------------------------------------------

    def on_all(self, own: Callable[[], Result], *command: Any) -> Result:
        """Have the other ranks carry out a command, and call ``own`` here.

        Raises:
            RankFailed: another rank is the reason why the call failed.
        """
        self.is_whole = False
        with self.under_way():
            try:
                for peer in self.peers:
                    peer.send(*command)
                result = own()
            except Exception as error:
                raise self.explained(error) from error
        self.is_whole = True
        return result

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Surrounds what may wait for a rank."""
        self._call = next(self._calls)
        try:
            yield
        finally:
            self._call = 0

    def explained(self, error: BaseException) -> BaseException:
        """The failure of another rank, if there is one behind the error."""
        if isinstance(error, RankFailed) or not isinstance(error, Exception):
            return error
        for peer in self.peers:
            try:
                while peer.take_in(LAST_WORDS_S):
                    pass
            except RankFailed as failure:
                return failure
        return error

    # -- failures ------------------------------------------------------------------------------------------------------

    def reset(self) -> bool:
        """Have the other ranks drop their work. Returns whether all are still in the group."""
        epoch = next(self._epochs)
        try:
            return all([peer.reset(epoch, RESET_S) for peer in self.peers])
        except RankFailed:
            return False

    def regroup(self, plan: KVPlan, rejoin: Callable[[], None]) -> None:
        """Meet anew, with new processes in place of the ranks that are gone. Those that live keep their weights.
        ``rejoin`` is called once the driver is in the group again.

        Raises:
            RankFailed: a rank failed meanwhile. Those that were new have ended, as they may not have begun to serve.
        """
        self.group.leave()  # releases ranks that wait for this one
        epoch = next(self._epochs)
        stayed: list[Peer] = []
        for index, peer in enumerate(self.peers):
            try:
                peer.reset(epoch, RESET_S, leaves=True)
                stayed.append(peer)
            except RankFailed as failure:
                logger.warning("starting rank %d again: %s", peer.rank, failure)
                peer.end(at_once=True)
                self.peers[index] = self._start(peer.rank, epoch)
                self.num_replaced += 1
        fresh = [peer for peer in self.peers if peer not in stayed]
        try:
            for peer in fresh:
                peer.answer("loaded", RESTART_S)
            self.admit(plan, fresh, epoch)
            for peer in stayed:
                peer.send("rejoin", epoch)
            self.group.join(epoch)
            rejoin()
            self.await_done(RESTART_S)
        except Exception as error:
            why = self.explained(error)
            for peer in fresh:
                peer.end(at_once=True)
            raise why from error

    def release(self) -> None:
        """Called when a rank has died, on a thread of its own: nothing here may wait for it for ever.

        A gloo collective raises by itself. NCCL's must be aborted. If the call under way does not end then, the process
        cannot be saved: it exits, and whoever watches it starts it again.
        """
        if self.group.fails_by_itself:
            return
        call = self._call
        self.group.leave()
        if not call:  # the next one fails, as it cannot be sent
            return
        time.sleep(RELEASE_S)
        if self._call == call:
            logger.critical("the GPU waits for a rank that has died, and cannot be released: this process exits")
            os._exit(EXIT_STUCK)


def _node_of_card(index: int) -> int | None:
    card = torch.cuda.get_device_properties(index)
    return node_of_device(f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0")
