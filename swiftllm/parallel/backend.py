"""The driver's backend: makes each call on all ranks.

A call goes to the other ranks first, one way and without an answer, and is then made here. So a call that fails here
leaves no other rank waiting for its command; whoever waits in a collective is released by :meth:`Group.leave`.

The driver alone decides which cohorts board. It learns from each rank how many CPU attentions are over, and a ticket is
ready when it is on all ranks. Ranks that looked for themselves would disagree, and cross a boundary with unequal rows.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.plan import Swap
from swiftllm.core.request import Tier
from swiftllm.device import open_device
from swiftllm.engine.backend import RankFailed, Ticket, TicketTimes
from swiftllm.kv.budget import KVPlan, plan_blocks
from swiftllm.machine import allowed_cores, available_host_bytes, bind_to, unbind, usable_cores
from swiftllm.model.config import ModelConfig
from swiftllm.parallel.group import Group
from swiftllm.parallel.launch import RankLauncher, SpawnedRanks
from swiftllm.parallel.rank_backend import RankBackend
from swiftllm.parallel.shards import Shard
from swiftllm.parallel.team import LAST_WORDS_S, Peer
from swiftllm.runtime.batch import CohortBatch, LaneBatch, Rows
from swiftllm.runtime.cores import CoreDivision, core_divisions, most_lane_threads
from swiftllm.runtime.description import CohortDescription, LaneDescription
from swiftllm.runtime.workers.inline import InlineWorker
from swiftllm.runtime.workers.interface import MakeWorker
from swiftllm.topology import cores_of_ranks, describe_cores, node_of_device, numa_nodes

logger = logging.getLogger(__name__)

REGROUP_TRIES = 3  # a rank may also die while it loads
RESET_S = 5.0  # that a rank gets to drop its work before it is replaced
RESTART_S = 600.0  # that a rank gets to load its weights again, and to capture its graphs
RELEASE_S = 10.0  # that a GPU gets to give up a collective with a rank that has died
EXIT_STUCK = 70

CAN_BIND = hasattr(os, "sched_setaffinity")

Result = TypeVar("Result")


@dataclass(frozen=True)
class ShardedTicket:
    """A CPU attention that every rank computes for its own heads.

    ``number``: how many the ranks have had by then. ``under_way`` surrounds what may wait for a rank.
    """

    own: Ticket
    peers: Sequence[Peer]
    number: int
    under_way: Callable[[], AbstractContextManager[None]]

    def ready(self) -> bool:
        return self.own.ready() and all(peer.has_finished(self.number) for peer in self.peers)

    def wait(self) -> float:
        """See :class:`~swiftllm.engine.backend.Ticket`; the seconds are those of the driver's own part."""
        with self.under_way():
            seconds = self.own.wait()
            for peer in self.peers:
                peer.wait_until_finished(self.number)
        return seconds

    def times(self) -> TicketTimes:
        return self.own.times()


class ShardedBackend(RankBackend):
    """See :class:`swiftllm.engine.backend.Backend`. This process is rank 0."""

    def __init__(
        self, config: EngineConfig, make_worker: MakeWorker = InlineWorker, launcher: RankLauncher | None = None
    ) -> None:
        """``launcher`` starts the other ranks, by default in this machine.

        Raises:
            ValueError: the model does not divide, or there are fewer GPUs than ranks; and what
                :class:`~swiftllm.runtime.torch_backend.TorchBackend` raises.
            RankFailed: a rank could not start; the message says why.
        """
        size, hardware = config.tensor_parallel, open_device(config.device)
        on_gpu = hardware.torch_device.type != "cpu"
        if on_gpu and torch.cuda.device_count() < size:
            raise ValueError(
                f"tensor_parallel={size} needs as many GPUs and torch sees {torch.cuda.device_count()}: lower it, or "
                "take device='cpu'"
            )
        shard = Shard(ModelConfig.from_folder(config.model), 0, size)
        self.group = group = Group(0, size, hardware)
        division = core_divisions(config, lane_on_cpu=not on_gpu)[0]
        self._threads = most_lane_threads(max(1, usable_cores() // size))
        self._settings = asdict(replace(config, lane_threads=division.lane_threads, cpu_threads=division.cpu_threads))
        self._place = {"size": size, "port": group.port, "threaded": make_worker is not InlineWorker}
        self._launcher = launcher or SpawnedRanks()
        nodes = [_node_of_card(rank) if on_gpu else None for rank in range(size)]
        self.rank_cores = cores_of_ranks(allowed_cores(), numa_nodes(), nodes) if CAN_BIND else []
        self._is_bound = bool(self.rank_cores) and bind_to(self.rank_cores[0])
        self._epochs = itertools.count(1)
        self._calls = itertools.count(1)
        self._call = 0  # the one under way; 0: none
        self._is_whole = True  # all ranks have carried out all commands, as far as this one knows
        self._batch_numbers = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[Rows, int] = weakref.WeakKeyDictionary()
        self._forgotten: deque[int] = deque()
        self._num_tickets = self._num_replaced = 0
        self._peers: list[Peer] = []
        try:
            epoch = next(self._epochs)
            for rank in range(1, size):
                self._peers.append(self._start(rank, epoch))
            super().__init__(config, shard, group, make_worker, hardware)
            for peer in self._peers:
                peer.answer("done")
        except BaseException as error:
            why = self._explained(error)
            self.leave()
            for peer in self._peers:
                peer.end(at_once=True)
            self._unbind()
            raise why from error

    def _unbind(self) -> None:
        if self._is_bound:
            unbind()

    def describe_cores(self) -> str:
        """Which cores the ranks have, for people."""
        if not self.rank_cores:
            return "all ranks share them"
        return ", ".join(f"rank {rank}: {describe_cores(own)}" for rank, own in enumerate(self.rank_cores))

    def _start(self, rank: int, epoch: int) -> Peer:
        cores = self.rank_cores[rank] if self.rank_cores else ()
        peer = Peer(rank, self._launcher, self._threads, cores, self._release)
        peer.send("set up", epoch, self._settings, {"rank": rank, **self._place})
        return peer

    def _plan_blocks(self, config: EngineConfig, device_bytes: int | None) -> KVPlan:
        """As many blocks as fit on every rank. All have loaded their weights by then, so what is left is shared."""
        loaded = [peer.answer("loaded")[0] for peer in self._peers]
        if device_bytes is not None:
            device_bytes = min([device_bytes, *loaded])
        host_bytes = available_host_bytes() // self.group.size
        plan = plan_blocks(config, self.kv_bytes_per_block, host_bytes, device_bytes)
        self._admit(self._peers, plan, epoch=0)
        self.group.join(0)
        return plan

    @staticmethod
    def _admit(peers: Sequence[Peer], plan: KVPlan, epoch: int) -> None:
        """Give loaded ranks their KV blocks and let them join."""
        for peer in peers:
            peer.send("blocks", plan.num_blocks[Tier.GPU], plan.num_blocks[Tier.CPU], epoch)

    # -- calls on all ranks --------------------------------------------------------------------------------------------

    def _on_all(self, own: Callable[[], Result], *command: Any) -> Result:
        """Have the other ranks carry out a command, and call ``own`` here.

        Raises:
            RankFailed: another rank is the reason why the call failed.
        """
        self._is_whole = False
        with self._under_way():
            try:
                if self._forgotten:
                    numbers = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
                    for peer in self._peers:
                        peer.send("forget", numbers)
                for peer in self._peers:
                    peer.send(*command)
                result = own()
            except Exception as error:
                raise self._explained(error) from error
        self._is_whole = True
        return result

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        self._call = next(self._calls)
        try:
            yield
        finally:
            self._call = 0

    def _explained(self, error: BaseException) -> BaseException:
        """The failure of another rank, if there is one behind the error."""
        if isinstance(error, RankFailed) or not isinstance(error, Exception):
            return error
        for peer in self._peers:
            try:
                while peer.take_in(LAST_WORDS_S):
                    pass
            except RankFailed as failure:
                return failure
        return error

    # -- the backend's calls -------------------------------------------------------------------------------------------

    def build_lane(self, description: LaneDescription) -> LaneBatch:
        number = next(self._batch_numbers)
        own = partial(super().build_lane, description)
        return self._numbered(self._on_all(own, "open_lane", number, tuple(description)), number)

    def build_cohort(self, description: CohortDescription) -> CohortBatch:
        number = next(self._batch_numbers)
        own = partial(super().build_cohort, description)
        return self._numbered(self._on_all(own, "open_cohort", number, tuple(description)), number)

    def keep_rows(self, cohort: CohortBatch, kept: Sequence[int]) -> CohortBatch:
        number = next(self._batch_numbers)
        own = partial(super().keep_rows, cohort, kept)
        return self._numbered(self._on_all(own, "keep_rows", self._numbers[cohort], number, list(kept)), number)

    def _numbered(self, batch: Rows, number: int) -> Rows:
        """The other ranks know the batch by this number, and forget it when it is no longer used here."""
        self._numbers[batch] = number
        weakref.finalize(batch, self._forgotten.append, number).atexit = False
        return batch

    def swap(self, swaps: Sequence[Swap]) -> None:
        if swaps:
            moves = [(swap.source.value, swap.source_blocks, swap.target_blocks) for swap in swaps]
            self._on_all(partial(super().swap, swaps), "swap", moves)

    def boundary(self, layer: int, batches: Sequence[Rows]) -> Mapping[str, int]:
        numbers = [self._numbers[batch] for batch in batches]
        return self._on_all(partial(super().boundary, layer, batches), "boundary", layer, numbers)

    def gpu_attention(self, layer: int, lane: LaneBatch) -> None:
        self._on_all(partial(super().gpu_attention, layer, lane), "gpu_attention", layer, self._numbers[lane])

    def whole_iteration(self, lane: LaneBatch) -> Mapping[str, int] | None:
        if self.graphs is None:
            return None
        return self._on_all(partial(super().whole_iteration, lane), "whole_iteration", self._numbers[lane])

    def submit_cpu_attention(self, layer: int, cohort: CohortBatch) -> ShardedTicket:
        own = partial(super().submit_cpu_attention, layer, cohort)
        ticket = self._on_all(own, "submit_cpu_attention", layer, self._numbers[cohort])
        self._num_tickets += 1
        return ShardedTicket(ticket, tuple(self._peers), self._num_tickets, self._under_way)

    def use_cores(self, division: CoreDivision) -> None:
        own = partial(super().use_cores, division)
        self._on_all(own, "use_cores", division.lane_threads, division.cpu_threads)
        self._settings |= {"lane_threads": division.lane_threads, "cpu_threads": division.cpu_threads}

    def write_blocks(self, num_blocks: int, progress: Callable[[float, str], None]) -> None:
        self._on_all(partial(super().write_blocks, num_blocks, progress), "write_blocks", num_blocks)

    # -- failures ------------------------------------------------------------------------------------------------------

    @property
    def worker_restarts(self) -> int:
        """How often the CPU worker of this rank was restarted, or another rank replaced."""
        return super().worker_restarts + self._num_replaced

    def recover(self) -> None:
        """See :meth:`swiftllm.engine.backend.Backend.recover`. Ranks that have died, or do not answer, are replaced.

        Raises:
            RankFailed: a rank could not be replaced in ``REGROUP_TRIES`` tries; the message says why.
        """
        if not self._is_whole:
            self.leave()  # the device may wait for a rank, and the host for the device
        super().recover()
        if not (self._is_whole and self._reset()):
            for left in reversed(range(REGROUP_TRIES)):
                try:
                    self._regroup()
                    break
                except RankFailed as failure:
                    if not left:
                        raise
                    logger.warning("the ranks did not meet, they try again: %s", failure)
        self._num_tickets, self._is_whole = 0, True

    def _reset(self) -> bool:
        """Have the other ranks drop their work. Returns whether all are still in the group."""
        epoch = next(self._epochs)
        try:
            return all([peer.reset(epoch, RESET_S) for peer in self._peers])
        except RankFailed:
            return False

    def _regroup(self) -> None:
        """Meet anew, with new processes in place of the ranks that are gone. Those that live keep their weights.

        Raises:
            RankFailed: a rank failed meanwhile. Those that were new have ended, as they may not have begun to serve.
        """
        self.leave()  # releases ranks that wait for this one
        epoch = next(self._epochs)
        stayed: list[Peer] = []
        for index, peer in enumerate(self._peers):
            try:
                peer.reset(epoch, RESET_S, leaves=True)
                stayed.append(peer)
            except RankFailed as failure:
                logger.warning("starting rank %d again: %s", peer.rank, failure)
                peer.end(at_once=True)
                self._peers[index] = self._start(peer.rank, epoch)
                self._num_replaced += 1
        fresh = [peer for peer in self._peers if peer not in stayed]
        try:
            for peer in fresh:
                peer.answer("loaded", RESTART_S)
            self._admit(fresh, self.kv_plan, epoch)
            for peer in stayed:
                peer.send("rejoin", epoch)
            self.rejoin(epoch)
            for peer in self._peers:
                peer.answer("done", RESTART_S)
        except Exception as error:
            why = self._explained(error)
            for peer in fresh:
                peer.end(at_once=True)
            raise why from error

    def _release(self) -> None:
        """Called when a rank has died, on a thread of its own: nothing here may wait for it for ever.

        A gloo collective raises by itself. NCCL's must be aborted. If the call under way does not end then, the process
        cannot be saved: it exits, and whoever watches it starts it again.
        """
        if self.group.fails_by_itself:
            return
        call = self._call
        self.leave()
        if not call:  # the next one fails, as it cannot be sent
            return
        time.sleep(RELEASE_S)
        if self._call == call:
            logger.critical("the GPU waits for a rank that has died, and cannot be released: this process exits")
            os._exit(EXIT_STUCK)

    def close(self) -> None:
        self.leave()  # an interrupted call may have left ranks in a collective
        for peer in self._peers:
            peer.end()
        super().close()
        self._unbind()


def _node_of_card(index: int) -> int | None:
    card = torch.cuda.get_device_properties(index)
    return node_of_device(f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0")
