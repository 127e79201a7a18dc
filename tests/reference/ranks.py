"""A rank's process for tests: it can be told to be slow, to decide for itself, and to fail."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch

from swiftllm.device import HostDevice
from swiftllm.machine import InsufficientMemory
from swiftllm.parallel.backend import ShardedBackend
from swiftllm.parallel.communication import Group, Pipe
from swiftllm.parallel.rank import Rank, rank_main
from swiftllm.parallel.team import SpawnedRanks
from swiftllm.runtime.cpu_tier import AttentionTask
from swiftllm.runtime.torch_backend import TorchBackend
from tests.reference.int8_tier import poison_of


class TestedRank(Rank):
    """Its pools are full of NaN at first, so whoever reads a slot that nobody wrote gets no tokens."""

    def __init__(self, backend: TorchBackend, group: Group, pipe: Pipe) -> None:
        super().__init__(backend, group, pipe)
        self.fill_with_nan()
        self._polls = False
        self._good_stages = -1

    def fill_with_nan(self) -> None:
        fill_with_nan(self.backend)

    def delay_attention(self, most_s: float, seed: int) -> None:
        delay_attention(self.backend, most_s, seed)

    def decide_alone(self, polls: bool) -> None:
        """The planted fault: CPU batches that this rank has not finished stay behind, whatever the driver says."""
        self._polls = polls

    def fail_after(self, good_stages: int) -> None:
        self._good_stages = good_stages

    def lose_gpu(self) -> None:
        """From now on each call of the rank's GPU raises, as CUDA has it for a process in which a kernel has failed."""

        def fail(*_: object) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        self.backend.run_stage = self.backend.recover = self.backend.capture_graphs = fail

    def run_stage(self, layer: int, numbers: Sequence[int]) -> None:
        if self._good_stages == 0:
            self._good_stages = -1
            raise ValueError("cannot digest this stage")
        self._good_stages -= 1
        if self._polls:  # never without rows, so that it is this rank that gloo ends
            numbers = [n for n in numbers if n not in self._futures or self._futures[n].ready()] or numbers
        super().run_stage(layer, numbers)


def tested_rank(pipe: Pipe) -> None:
    rank_main(pipe, TestedRank)


def rank_without_memory(pipe: Pipe) -> None:
    def refuse(*_: object) -> None:
        raise InsufficientMemory("no room for me")

    HostDevice.free_bytes = refuse
    rank_main(pipe)


LAUNCHER = SpawnedRanks("tests.reference.ranks:tested_rank")


def tell_ranks(backend: ShardedBackend, name: str, *arguments: Any) -> None:
    """Have all ranks but the driver call one of the methods above."""
    backend.team.on_all(lambda: None, name, *arguments)


def fill_with_nan(backend: TorchBackend) -> None:
    """Blocks, and states of linear attention."""
    for pool in backend.kv_pools.tensors.values():
        pool.fill_(poison_of(pool))
    if (states := backend.model.states) is not None:
        for pool in (states.recurrent, states.conv):
            pool.fill_(torch.nan)


def delay_attention(backend: TorchBackend, most_s: float, seed: int) -> None:
    """Each CPU attention of this process takes up to so many seconds longer; 0 ends that."""
    runner, draw = backend.cpu_tier.runner, random.Random(seed)

    def run_task(task: Any) -> None:
        if isinstance(task, AttentionTask):
            time.sleep(draw.uniform(0.0, most_s))
        type(runner).run_task(runner, task)

    runner.run_task = run_task
