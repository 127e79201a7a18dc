"""The driver's backend: makes each call on all ranks.

The driver alone decides which CPU batches join. It learns from each rank how many CPU attentions are over, and an
attention task is ready when it is on all ranks. Ranks that looked for themselves would disagree, and run a stage with
unequal rows.
"""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem, StateCopy, Swap
from swiftllm.core.request import Request
from swiftllm.device import open_device
from swiftllm.engine.backend import AttentionFuture, AttentionTimes, RankFailed
from swiftllm.kv.tensors import check_kv
from swiftllm.model.config import ModelConfig
from swiftllm.parallel.communication import Group
from swiftllm.parallel.shards import Shard, load_rank
from swiftllm.parallel.team import Peer, SpawnedRanks, Team
from swiftllm.runtime.cpu_tier import InlineWorker, MakeWorker
from swiftllm.runtime.execution_context import CoreDivision
from swiftllm.runtime.memory import plan_blocks
from swiftllm.runtime.model_input import CpuBatchTensors, GpuBatchTensors, Rows, cpu_batch_input, gpu_batch_input
from swiftllm.runtime.torch_backend import TorchBackend, serve_loaded

logger = logging.getLogger(__name__)

REGROUP_TRIES = 3  # a rank may also die while it loads


@dataclass(frozen=True)
class ShardedFuture:
    """A CPU attention that every rank computes for its own heads.

    ``number``: how many the ranks have had by then. ``under_way`` surrounds what may wait for a rank.
    """

    own: AttentionFuture
    peers: Sequence[Peer]
    number: int
    under_way: Callable[[], AbstractContextManager[None]]

    def ready(self) -> bool:
        return self.own.ready() and all(peer.has_finished(self.number) for peer in self.peers)

    def wait(self) -> float:
        """See :class:`~swiftllm.engine.backend.AttentionFuture`; the seconds are those of the driver's own part."""
        with self.under_way():
            seconds = self.own.wait()
            for peer in self.peers:
                peer.wait_until_finished(self.number)
        return seconds

    def times(self) -> AttentionTimes:
        return self.own.times()


Batch = TypeVar("Batch", bound=Rows)


class ShardedBackend:
    """See :class:`swiftllm.engine.backend.Backend`. This process is rank 0. :func:`open_sharded_backend` makes one.

    Attributes:
        own: the backend of this rank. What is not defined here is its: sizes, names, the KV cache, log-probabilities.
        team: the other ranks.
        block_tables, state_slots: see :class:`~swiftllm.runtime.torch_backend.TorchBackend`.
    """

    def __init__(self, own: TorchBackend, team: Team) -> None:
        self.own = own
        self.team = team
        self.block_tables: Mapping[str, Sequence[int]] = {}
        self.state_slots: Mapping[str, int] | None = None
        self._batch_numbers = itertools.count()
        self._numbers: weakref.WeakKeyDictionary[Rows, int] = weakref.WeakKeyDictionary()
        self._forgotten: deque[int] = deque()
        self._num_futures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    # -- batches: the other ranks know them by numbers -----------------------------------------------------------------

    def open_gpu_batch(self, items: Sequence[GpuBatchItem]) -> GpuBatchTensors:
        described = gpu_batch_input(items, self.block_tables, self.own.layer_groups, self.state_slots)
        return self._open(partial(self.own.build_gpu_batch, *described), "open_gpu_batch", tuple(described[0]))

    def open_cpu_batch(self, requests: Sequence[Request]) -> CpuBatchTensors:
        described = cpu_batch_input(requests, self.block_tables, self.own.layer_groups, self.state_slots)
        return self._open(partial(self.own.build_cpu_batch, described, requests), "open_cpu_batch", tuple(described))

    def drop_rows(self, cpu_batch: CpuBatchTensors, request_ids: frozenset[str]) -> CpuBatchTensors:
        kept = cpu_batch.rows_without(request_ids)
        return self._open(partial(self.own.keep_rows, cpu_batch, kept), "keep_rows", self._numbers[cpu_batch], kept)

    def _open(self, own: Callable[[], Batch], name: str, *arguments: Any) -> Batch:
        """Number what ``own`` makes. The other ranks forget it when it is no longer used here."""
        if self._forgotten:
            numbers = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
            self.team.on_all(lambda: None, "forget", numbers)
        number = next(self._batch_numbers)
        batch = self.team.on_all(own, name, number, *arguments)
        self._numbers[batch] = number
        weakref.finalize(batch, self._forgotten.append, number).atexit = False
        return batch

    # -- the work of an iteration --------------------------------------------------------------------------------------

    def swap(self, swaps: Sequence[Swap]) -> None:
        if swaps:
            moves = [(swap.source.value, swap.source_blocks, swap.target_blocks) for swap in swaps]
            self.team.on_all(partial(self.own.swap, swaps), "swap", moves)

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        described = [(copy.slot, copy.snapshot, copy.saves) for copy in copies]
        self.team.on_all(partial(self.own.copy_states, copies), "copy_states", described)

    def run_stage(self, layer: int, batches: Sequence[Rows]) -> Mapping[str, int]:
        numbers = [self._numbers[batch] for batch in batches]
        return self.team.on_all(partial(self.own.run_stage, layer, batches), "run_stage", layer, numbers)

    def gpu_attention(self, layer: int, gpu_batch: GpuBatchTensors) -> None:
        own = partial(self.own.gpu_attention, layer, gpu_batch)
        self.team.on_all(own, "gpu_attention", layer, self._numbers[gpu_batch])

    def run_full_graph(self, gpu_batch: GpuBatchTensors) -> Mapping[str, int] | None:
        if self.own.graphs is None:
            return None
        return self.team.on_all(partial(self.own.run_full_graph, gpu_batch), "run_full_graph", self._numbers[gpu_batch])

    def submit_cpu_attention(self, layer: int, cpu_batch: CpuBatchTensors) -> ShardedFuture:
        own = partial(self.own.submit_cpu_attention, layer, cpu_batch)
        future = self.team.on_all(own, "submit_cpu_attention", layer, self._numbers[cpu_batch])
        self._num_futures += 1
        return ShardedFuture(future, tuple(self.team.peers), self._num_futures, self.team.under_way)

    # -- between iterations --------------------------------------------------------------------------------------------

    def use_cores(self, division: CoreDivision) -> None:
        own = partial(self.own.use_cores, division)
        self.team.on_all(own, "use_cores", division.gpu_batch_threads, division.cpu_threads)
        self.team.use_cores(division)

    def write_blocks(self, num_blocks: int, progress: Callable[[float, str], None]) -> None:
        self.team.on_all(partial(self.own.write_blocks, num_blocks, progress), "write_blocks", num_blocks)

    def draw_states(self) -> None:
        self.team.on_all(self.own.draw_states, "draw_states")

    @property
    def worker_restarts(self) -> int:
        """How often the CPU worker of this rank was restarted, or another rank replaced."""
        return self.own.worker_restarts + self.team.num_replaced

    def recover(self) -> None:
        """See :meth:`swiftllm.engine.backend.Backend.recover`. Ranks that have died, or do not answer, are replaced.

        Raises:
            RankFailed: a rank could not be replaced in ``REGROUP_TRIES`` tries; the message says why.
        """
        if not self.team.is_whole:
            self.team.group.leave()  # the device may wait for a rank, and the host for the device
        self.own.recover()
        if not (self.team.is_whole and self.team.reset()):
            for left in reversed(range(REGROUP_TRIES)):
                try:
                    self.regroup()
                    break
                except RankFailed as failure:
                    if not left:
                        raise
                    logger.warning("the ranks did not meet, they try again: %s", failure)
        self._num_futures, self.team.is_whole = 0, True

    def regroup(self) -> None:
        """See :meth:`Team.regroup`. Captured graphs hold the communicator, so they are captured again."""
        self.team.regroup(self.own.kv_plan, self.own.capture_graphs)

    def close(self) -> None:
        try:
            self.team.group.leave()  # an interrupted call may have left ranks in a collective
        except Exception as error:  # the GPU has failed: each call raises
            logger.warning("the group of ranks was not given up: %s", error)
        self.team.end()
        self.own.close()


def open_sharded_backend(
    config: EngineConfig, make_worker: MakeWorker = InlineWorker, launcher: SpawnedRanks | None = None
) -> ShardedBackend:
    """A backend of ``config.tensor_parallel`` ranks. ``launcher`` starts the others, by default in this machine.

    Raises:
        ValueError: the model does not divide, or there are fewer GPUs than ranks; and what
            :func:`~swiftllm.runtime.torch_backend.open_torch_backend` raises.
        RankFailed: a rank could not start; the message says why.
    """
    size, hardware = config.tensor_parallel, open_device(config.device, in_group=True)
    if hardware.torch_device.type != "cpu" and torch.cuda.device_count() < size:
        raise ValueError(
            f"tensor_parallel={size} needs as many GPUs and torch sees {torch.cuda.device_count()}: lower it, or "
            "take device='cpu'"
        )
    model = ModelConfig.from_folder(config.model)
    check_kv(config, model)  # before processes start
    Shard(model, 0, size)
    group = Group(0, size, hardware)
    team = Team(config, group, launcher or SpawnedRanks(), threaded=make_worker is not InlineWorker)
    try:
        team.start()
        loaded = load_rank(config, hardware, group)
        free_bytes = team.least_free_bytes(loaded.free_bytes)
        plan = plan_blocks(config, loaded.bytes_per_block, loaded.host_bytes(size), free_bytes, loaded.state_bytes)
        team.admit(plan)
        group.join(0)
        own = serve_loaded(loaded, plan, make_worker)
        team.await_done()
    except BaseException as error:
        why = team.explained(error)
        group.leave()
        team.end(at_once=True)
        raise why from error
    return ShardedBackend(own, team)
