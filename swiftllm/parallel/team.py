"""The driver's view of all other ranks: they carry out each command, and are replaced when they fail.

A command goes to the other ranks first, one way and without an answer, and is then carried out here. So a call that
fails here leaves no other rank waiting for its command; whoever waits in a collective is released by
:meth:`Group.leave`.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.engine.backend import RankFailed
from swiftllm.kv.pools import KVPlan
from swiftllm.machine import allowed_cores, bind_to, unbind, usable_cores
from swiftllm.parallel.group import Group
from swiftllm.parallel.launch import SpawnedRanks
from swiftllm.parallel.peer import LAST_WORDS_S, Peer
from swiftllm.runtime.cores import CoreDivision, core_divisions, most_gpu_batch_threads
from swiftllm.topology import cores_of_ranks, describe_cores, node_of_device, numa_nodes

logger = logging.getLogger(__name__)

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
            peer.send("blocks", plan.num_blocks[Tier.GPU], plan.num_blocks[Tier.CPU], epoch)

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
