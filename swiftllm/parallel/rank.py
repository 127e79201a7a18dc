"""The process of a rank other than the driver: carries out the driver's commands, and decides nothing itself."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from typing import NamedTuple

from swiftllm.config import EngineConfig
from swiftllm.core.plan import StateCopy
from swiftllm.core.request import Tier
from swiftllm.device import open_device
from swiftllm.engine.backend import AttentionFuture
from swiftllm.kv.tensors import KVPlan
from swiftllm.machine import InsufficientMemory
from swiftllm.parallel.communication import Group, Pipe, PipeClosed
from swiftllm.parallel.shards import load_rank
from swiftllm.runtime.cpu_tier import AttentionTask, CpuTask, CpuWorker, InlineWorker, RunsTasks
from swiftllm.runtime.cpu_tuning import use_fastest_attention
from swiftllm.runtime.execution_context import CoreDivision
from swiftllm.runtime.model_input import CpuBatchInput, CpuBatchTensors, GpuBatchInput, GpuBatchTensors, Rows
from swiftllm.runtime.torch_backend import TorchBackend, serve_loaded

AFTER_FAILURE = ("reset", "rejoin")  # the commands that a rank still obeys after one that failed


class BlockMove(NamedTuple):
    """What a transfer of blocks reads of a :class:`swiftllm.core.plan.Swap`."""

    source: Tier
    source_blocks: tuple[int, ...]
    target_blocks: tuple[int, ...]


class ReportingRunner:
    """Tells the driver of each CPU attention that is over; else the runner behind it."""

    def __init__(self, runner: RunsTasks, pipe: Pipe) -> None:
        self._runner = runner
        self._pipe = pipe

    def run_task(self, task: CpuTask) -> None:
        try:
            self._runner.run_task(task)
        except BaseException as error:
            self._pipe.send("failed", _text(error))
            raise
        if isinstance(task, AttentionTask):
            self._pipe.send("attention")


class Rank:
    """The driver's commands, by name. Batches have the numbers that the driver gives them.

    A command that fails breaks the rank: it leaves the group, so that no other rank waits for it, and ignores all
    commands until it is reset.
    """

    def __init__(self, backend: TorchBackend, group: Group, pipe: Pipe) -> None:
        self.backend = backend
        self._group = group
        self._pipe = pipe
        self._batches: dict[int, Rows] = {}
        self._futures: dict[int, AttentionFuture] = {}
        self._is_broken = False

    def serve(self) -> None:
        """Obey until the driver says ``finish``."""
        while (message := self._pipe.receive())[0] != "finish":
            name, *arguments = message
            if self._is_broken and name not in AFTER_FAILURE:
                continue
            try:
                getattr(self, name)(*arguments)
            except PipeClosed:
                raise
            except Exception as error:
                self._is_broken = True
                self._pipe.send("failed", _text(error))
                self._group.leave()

    # -- batches -------------------------------------------------------------------------------------------------------

    def open_gpu_batch(self, number: int, description: tuple) -> None:
        self._batches[number] = self.backend.build_gpu_batch(GpuBatchInput(*description))

    def open_cpu_batch(self, number: int, description: tuple) -> None:
        self._batches[number] = self.backend.build_cpu_batch(CpuBatchInput(*description))

    def keep_rows(self, number: int, of_number: int, kept: Sequence[int]) -> None:
        self.wait_for_future(of_number)
        self._batches[number] = self.backend.keep_rows(self._cpu_batch(of_number), kept)

    def forget(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._batches.pop(number, None)
            self._futures.pop(number, None)

    def _gpu_batch(self, number: int) -> GpuBatchTensors:
        batch = self._batches[number]
        assert isinstance(batch, GpuBatchTensors)
        return batch

    def _cpu_batch(self, number: int) -> CpuBatchTensors:
        batch = self._batches[number]
        assert isinstance(batch, CpuBatchTensors)
        return batch

    # -- the work of an iteration --------------------------------------------------------------------------------------

    def swap(self, moves: Sequence[tuple[str, tuple[int, ...], tuple[int, ...]]]) -> None:
        self.backend.swap([BlockMove(Tier(source), *blocks) for source, *blocks in moves])

    def copy_states(self, copies: Sequence[tuple[int, int, bool]]) -> None:
        self.backend.copy_states([StateCopy(*copy) for copy in copies])

    def run_stage(self, layer: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.wait_for_future(number)
        self.backend.run_stage(layer, [self._batches[number] for number in numbers])

    def gpu_attention(self, layer: int, number: int) -> None:
        self.backend.gpu_attention(layer, self._gpu_batch(number))

    def run_full_graph(self, number: int) -> None:
        self.backend.run_full_graph(self._gpu_batch(number))

    def submit_cpu_attention(self, layer: int, number: int) -> None:
        self._futures[number] = self.backend.submit_cpu_attention(layer, self._cpu_batch(number))

    def wait_for_future(self, number: int) -> None:
        """The driver has chosen this CPU batch, whether or not this rank is done with it."""
        future = self._futures.pop(number, None)
        if future is not None:
            future.wait()

    # -- between iterations --------------------------------------------------------------------------------------------

    def use_cores(self, gpu_batch_threads: int, cpu_threads: int) -> None:
        self.backend.use_cores(CoreDivision(gpu_batch_threads, cpu_threads, "as the driver has it"))

    def write_blocks(self, num_blocks: int) -> None:
        self.backend.write_blocks(num_blocks, lambda done, what: None)

    def draw_states(self) -> None:
        self.backend.draw_states()

    def reset(self, epoch: int, leaves: bool) -> None:
        """Drop all work under way. The answer says whether the rank is still in the group, which it may have to leave:
        its device may wait for a rank that has left."""
        if leaves:
            self._is_broken = True
            self._group.leave()
        for future in self._futures.values():
            with contextlib.suppress(Exception):  # reported when it happened
                future.wait()
        self._futures.clear()
        self._batches.clear()
        self.backend.recover()
        self._pipe.send("done", epoch, not self._is_broken)

    def rejoin(self, epoch: int) -> None:
        self._group.leave()
        self._group.join(epoch)
        self.backend.capture_graphs()
        self._is_broken = False
        self._pipe.send("done", epoch, True)


def open_rank(
    config: EngineConfig, pipe: Pipe, *, rank: int, size: int, port: int, threaded: bool
) -> tuple[TorchBackend, Group]:
    """The backend of a rank, which computes without requests, and its access to the others.

    ``port`` of the ranks' store; ``threaded``: whether CPU attention has a thread of its own.
    """
    hardware = open_device(config.device, rank, in_group=True)
    group = Group(rank, size, hardware, port)
    loaded = load_rank(config, hardware, group)
    pipe.send("loaded", loaded.free_bytes)
    _, num_gpu_blocks, num_cpu_blocks, num_snapshots, epoch = pipe.receive()
    group.join(epoch)
    num_blocks = {Tier.GPU: num_gpu_blocks, Tier.CPU: num_cpu_blocks}
    plan = KVPlan(num_blocks, config.block_size, loaded.bytes_per_block, num_snapshots)
    worker = CpuWorker if threaded else InlineWorker
    return serve_loaded(loaded, plan, lambda runner: worker(ReportingRunner(runner, pipe))), group


def rank_main(pipe: Pipe, rank_class: type[Rank] = Rank) -> None:
    """Body of the process: set up as the first message says, then serve."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the driver finishes its requests first, and then this process
        signal.signal(number, signal.SIG_IGN)
    pipe.exit_when_closed()
    try:
        _, epoch, settings, place = pipe.receive()
        try:
            use_fastest_attention()  # the driver has measured it
            backend, group = open_rank(EngineConfig(**settings), pipe, **place)
        except Exception as error:
            pipe.send("failed", _text(error))
            if isinstance(error, (ValueError, OSError, InsufficientMemory)):
                return  # the driver's user can correct it, and needs no traceback
            raise
        pipe.send("done", epoch, True)
        rank_class(backend, group, pipe).serve()
        backend.close()
        group.leave()
    except PipeClosed:  # the driver is gone
        pass


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
