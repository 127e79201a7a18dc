"""The CPU tier: its tasks, the workers that carry them out, and what the backend may do with its blocks."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch

import pacpu
from pacpu import rows
from swiftllm.device import Event
from swiftllm.engine.backend import AttentionFuture, AttentionTimes, WorkerDied
from swiftllm.processes import DeviceThread

# -- tasks and workers -------------------------------------------------------------------------------------------------
# The work of the CPU tier: tasks that are plain data, and the workers that carry them out.
#
# A task names blocks and layers of the tier instead of holding its memory, so that it can be sent to another process.

logger = logging.getLogger(__name__)

ALIVE_CHECK_S = 1.0  # between two looks at the thread while its attention task is waited for
FINISH, CRASH = "finish", "crash"  # queued instead of an attention task


# -- tasks: all tensors are in host memory, blocks are int64, layers those of the pool ---------------------------------


class OpenedRows(NamedTuple):
    """Rows of decode attention in the memory of this process; see :meth:`swiftllm.runtime.cpu_tier.CpuTier.open`."""

    block_tables: torch.Tensor  # int32 [rows, max_blocks]
    seq_lens: torch.Tensor  # int32 [rows]
    window: int | None


@dataclass(frozen=True, eq=False)
class AttentionTask:
    """Decode attention of a CPU batch in one layer, one row per request; K and V of the rows are stored first."""

    layer: int
    rows: Any  # what the tier made of them: OpenedRows in this process
    qkv: torch.Tensor  # [rows, num_heads + 2 num_kv_heads, head_dim]
    out: torch.Tensor  # [rows, num_heads, head_dim]; overwritten
    sinks: torch.Tensor | None = None  # float32 [num_heads], of the layer


class OfOneLayer:
    layer: int

    @property
    def layers(self) -> range:
        return range(self.layer, self.layer + 1)


@dataclass(frozen=True, eq=False)
class RowsWrite(OfOneLayer):
    """K and V of prompt tokens for one layer: row i goes to slot ``offsets[i]`` of block ``blocks[i]``."""

    layer: int
    content: torch.Tensor  # [rows, 2 num_kv_heads, head_dim], the heads of K first
    blocks: torch.Tensor  # [rows]
    offsets: torch.Tensor  # int64 [rows]


@dataclass(frozen=True, eq=False)
class BlocksWrite:
    """Whole blocks of some layers."""

    layers: range
    content: torch.Tensor  # [layers, blocks, num_kv_heads, 2, block_size, head_dim] of elements, or as the tier's
    blocks: torch.Tensor  # [blocks]


@dataclass(frozen=True, eq=False)
class ContextRead(OfOneLayer):
    """K and V of a request's earlier tokens in one layer: the first ones of its ``blocks``."""

    layer: int
    blocks: torch.Tensor  # in order
    out: torch.Tensor  # [2, num_kv_heads, tokens, head_dim]; overwritten


@dataclass(frozen=True, eq=False)
class BlocksRead:
    """Whole blocks of some layers."""

    layers: range
    blocks: torch.Tensor  # [blocks]
    out: torch.Tensor  # [layers, blocks, num_kv_heads, 2, block_size, head_dim] of elements; overwritten


HostWrite = RowsWrite | BlocksWrite
HostRead = ContextRead | BlocksRead
CpuTask = AttentionTask | HostWrite | HostRead


class RunsTasks(Protocol):
    """What a worker gives its tasks to."""

    def run_task(self, task: CpuTask) -> None: ...


class TaskRunner:
    """Carries tasks out on blocks in the memory of this process.

    Attributes:
        num_threads: of each task; may be changed between tasks.
    """

    def __init__(self, pool: torch.Tensor, *, kernel: str, num_threads: int) -> None:
        """``pool``: see :meth:`~swiftllm.kv.tensors.KVFormat.pool_shape`. ``kernel``: one of pacpu's."""
        self.num_threads = num_threads
        self._pool = pool
        self._layers = pool.unbind(0)
        self._kernel = kernel
        self._num_kv_heads = pool.shape[2]

    def run_task(self, task: CpuTask) -> None:
        """Raises ValueError where a task names blocks or shapes that the pool does not have."""
        threads = {"num_threads": self.num_threads}
        match task:
            case AttentionTask():
                heads = task.out.shape[1], self._num_kv_heads, self._num_kv_heads
                tables, lens, window = task.rows
                addressed = self._layers[task.layer], tables, lens, task.out
                q, k, v = task.qkv.split(heads, dim=1)
                scale = task.out.shape[-1] ** -0.5
                which = {"window": window, "sinks": task.sinks}
                pacpu.paged_attention(q, k, v, *addressed, scale, **which, kernel=self._kernel, **threads)
            case RowsWrite():
                k, v = task.content.chunk(2, 1)
                rows.store_kv(k, v, self._layers[task.layer], task.blocks, task.offsets, **threads)
            case BlocksWrite():
                rows.scatter_blocks(task.content, self._part(task.layers), task.blocks, **threads)
            case ContextRead():
                rows.gather_kv(self._layers[task.layer], task.blocks, task.out, **threads)
            case BlocksRead():
                rows.gather_blocks(self._part(task.layers), task.blocks, task.out, **threads)

    def _part(self, layers: range) -> torch.Tensor:
        return self._pool[layers.start : layers.stop]


# -- attention tasks ---------------------------------------------------------------------------------------------------


class WorkFuture:
    """See :class:`swiftllm.engine.backend.AttentionFuture`: work that another thread computes, and ends once.

    Attributes:
        over: set when the result is in host memory and its way to the device has begun, or the work has failed.
    """

    def __init__(self, send_back: Callable[[], None] | None = None) -> None:
        """``send_back`` begins the result's way to the device; called where the work ends."""
        self.over = threading.Event()
        self.submitted_s = self.start_s = self.done_s = time.perf_counter()
        self.waits = True  # for its inputs, before it computes
        self._send_back = send_back
        self._error: BaseException | None = None

    def ready(self) -> bool:
        return self.over.is_set()

    def wait(self) -> float:
        self.over.wait()
        if self._error is not None:  # here, on the thread that asked, not on the one where it happened
            raise self._error
        return self.done_s - self.start_s

    def times(self) -> AttentionTimes:
        to_host = (self.submitted_s, self.start_s) if self.waits else None
        return AttentionTimes(self.start_s, self.done_s, ready_s=self.done_s, to_host=to_host)

    # Inference mode belongs to a thread, and tensors made in it are not written outside it.
    @torch.inference_mode()
    def finish(self) -> None:
        """The result is there."""
        try:
            if self._send_back is not None:
                self._send_back()
        except Exception as error:
            self._error = error
        self._end()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._end()

    def _end(self) -> None:
        self._send_back = None  # it holds tensors, and the attention task may outlive them
        self.over.set()


class TaskFuture(WorkFuture):
    """A task submitted to a worker of this process."""

    def __init__(
        self,
        task: CpuTask,
        arrived: Event,
        send_back: Callable[[], None] | None,
        worker_lives: Callable[[], bool] = lambda: True,
    ) -> None:
        super().__init__(send_back)
        self._task: CpuTask | None = task
        self._arrived = arrived
        self._worker_lives = worker_lives
        self.waits = not arrived.done()

    def ready(self) -> bool:
        return super().ready() or not self._worker_lives()  # :meth:`wait` then raises at once, and must be called

    def wait(self) -> float:
        # A thread that ends fails the attention tasks it has left. It cannot if an exception hits it between two tasks.
        while not self.over.wait(ALIVE_CHECK_S):
            if not self._worker_lives():
                self.fail(WorkerDied("the CPU attention worker is gone"))
        return super().wait()

    @torch.inference_mode()
    def run(self, runner: RunsTasks) -> None:
        """Wait for the inputs, compute, send the result back. Exceptions come out of :meth:`wait`; what is none, such
        as SystemExit, is raised here too and ends the worker."""
        try:
            # The worker waits, not whoever submits: the main thread launches other work while Q, K and V are under way.
            self._arrived.synchronize()
            self.start_s = time.perf_counter()
            assert self._task is not None  # it runs once
            runner.run_task(self._task)
            self.done_s = time.perf_counter()
            self.finish()
        except Exception as error:
            self.fail(error)
        except BaseException as error:
            self.fail(WorkerDied(f"the CPU attention worker ended in the middle of its work: {error!r}"))
            raise

    def _end(self) -> None:
        self._task = None
        super()._end()


# -- workers -----------------------------------------------------------------------------------------------------------


class InlineWorker:
    """Runs each task at once on the calling thread: the synchronous twin of :class:`CpuWorker`."""

    restarts = 0
    """How often the worker ended by itself and was started again."""

    def __init__(self, runner: RunsTasks) -> None:
        self._runner = runner

    def submit(self, task: CpuTask, arrived: Event, send_back: Callable[[], None] | None = None) -> TaskFuture:
        """Run the task after those submitted before it.

        The task's inputs are in host memory after ``arrived``; the wait does not count as computing. Once the results
        are there, ``send_back`` begins their way to the device, on any thread. Then the attention task is ready.

        Raises:
            WorkerDied: the worker has ended.
        """
        future = TaskFuture(task, arrived, send_back)
        future.run(self._runner)
        return future

    def start_again(self) -> None:
        """Start the worker if it has ended. Tasks that were lost with it are not repeated."""

    def close(self) -> None:
        """Finish the tasks under way, then stop."""


class CpuWorker:
    """Runs tasks on a thread of its own, while the main thread drives the GPU batch (APEX section 4.2).

    Tasks are native calls that release the GIL, so the main thread goes on launching GPU batch work. A task that raises
    fails its own attention task. If the thread itself ends, every attention task under way fails with
    :class:`WorkerDied`. So does every submission until :meth:`start_again`: a lost task must not pass for a finished
    one.
    """

    def __init__(self, runner: RunsTasks) -> None:
        self.restarts = 0
        self._runner = runner
        self._lock = threading.Lock()
        self._start()

    def _start(self) -> None:
        self._queue: SimpleQueue[TaskFuture | str] = SimpleQueue()
        self._thread = DeviceThread(self._work, self._queue, name="cpu-attention")
        self._is_gone = False
        self._thread.start()

    def submit(self, task: CpuTask, arrived: Event, send_back: Callable[[], None] | None = None) -> TaskFuture:
        """See :class:`InlineWorker`."""
        # Under the lock, so that no task is queued behind the last look of a thread that ends (:meth:`_work`).
        with self._lock:
            if self._is_gone or not self._thread.is_alive():
                raise WorkerDied("the CPU attention worker has ended")
            future = TaskFuture(task, arrived, send_back, self._thread.is_alive)
            self._queue.put(future)
        return future

    def start_again(self) -> None:
        with self._lock:
            if self._is_gone or not self._thread.is_alive():
                # With a queue of its own: what was lost with the old thread must never run later, when its blocks may
                # belong to others.
                self.restarts += 1
                logger.warning("starting the CPU attention worker again")
                self._start()

    def _work(self, queue: SimpleQueue[TaskFuture | str]) -> None:
        try:
            while (future := queue.get()) != FINISH:
                if isinstance(future, str):  # CRASH
                    raise SystemExit("killed")
                future.run(self._runner)
        except BaseException as error:
            logger.error("the CPU attention worker ended: %r", error)
        finally:
            with self._lock:  # from here on nothing is submitted to this thread
                self._is_gone = True
                while not queue.empty():
                    if isinstance(left := queue.get(), TaskFuture):
                        left.fail(WorkerDied("the CPU attention worker ended before this work began"))

    def kill(self) -> None:
        """End the thread after the tasks submitted so far, as a crash would; to try the recovery."""
        self._queue.put(CRASH)

    def close(self) -> None:
        self._queue.put(FINISH)
        self._thread.join()


Worker = InlineWorker | CpuWorker
MakeWorker = Callable[[RunsTasks], Worker]
"""Makes a worker for the CPU tier that the runner holds."""


# -- the tier as the backend sees it -----------------------------------------------------------------------------------
# The CPU tier as the backend sees it: what may be done with its blocks, wherever they lie.
#
# :class:`LocalCpuTier` is the memory of this process. :mod:`swiftllm.remote` has tiers in other processes.

MAX_STAGED_BYTES = 256 << 20  # of pinned memory each way whose content is not yet copied


class CpuTier(Protocol):
    """Operations take effect in the order of the calls.

    ``arrived`` is when an input may be read; the caller does not change the input afterwards. Once an output is
    written, ``send_back`` is called on any thread; then the attention task is ready. On another host any call, and an
    attention task's ``wait``, may raise :class:`swiftllm.engine.backend.HostDied`.

    Attributes:
        may_die: whether blocks may be lost in that way.
    """

    may_die: bool

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, window: int | None = None) -> Any:
        """The ``rows`` of an :class:`AttentionTask`: of int32 ``[rows, max_blocks]`` and ``[rows]``. With a ``window``
        each attends to its last tokens only, and what the table tells of those before may be any block."""
        ...

    def attend(
        self, task: AttentionTask, arrived: Event, send_back: Callable[[], None] | None = None
    ) -> AttentionFuture:
        """Decode attention of opened rows."""
        ...

    def write(self, write: HostWrite, arrived: Event) -> None:
        """May raise what an earlier write raised."""

    def read(self, read: HostRead, send_back: Callable[[], None] | None = None) -> AttentionFuture: ...

    def recover(self) -> None:
        """Wait until no read or write is under way, ignore their errors, and make the tier usable again."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class AfterReads:
    """An event: ``arrived``, and the end of all reads up to ``last``."""

    last: AttentionFuture
    arrived: Event

    def done(self) -> bool:
        return self.last.ready() and self.arrived.done()

    def synchronize(self) -> None:
        with contextlib.suppress(Exception):  # told to whoever waits for the read
            self.last.wait()
        self.arrived.synchronize()


@dataclass(frozen=True)
class AfterWrites:
    """An event: the end of these writes. The error of a write is raised."""

    writes: Sequence[AttentionFuture]

    def done(self) -> bool:
        return all(write.ready() for write in self.writes)

    def synchronize(self) -> None:
        for write in self.writes:
            write.wait()


@dataclass(frozen=True)
class _Pending:
    layers: range
    num_bytes: int
    future: AttentionFuture


class LocalCpuTier:
    """See :class:`CpuTier`: blocks in the memory of this process, and two workers.

    One worker attends and writes. The other one reads for the device, which need not wait for attention. A read still
    finds what was written before it, and nothing that was written after. A task waits only for tasks that were
    submitted before it, so the workers cannot wait for each other in a circle.

    Attributes:
        runner: carries out the tasks.
        worker: the one that attends and writes.
    """

    may_die = False

    def __init__(self, runner: TaskRunner, make_worker: MakeWorker = InlineWorker) -> None:
        self.runner = runner
        self.worker, self._reader = make_worker(runner), make_worker(runner)
        self._writes: deque[_Pending] = deque()
        self._reads: deque[_Pending] = deque()

    @property
    def restarts(self) -> int:
        """How often a worker ended by itself and was started again."""
        return self.worker.restarts + self._reader.restarts

    def open(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, window: int | None = None) -> OpenedRows:
        return OpenedRows(block_tables, seq_lens, window)

    def attend(
        self, task: AttentionTask, arrived: Event, send_back: Callable[[], None] | None = None
    ) -> AttentionFuture:
        return self.worker.submit(task, self._after_reads(arrived), send_back)

    def write(self, write: HostWrite, arrived: Event) -> None:
        """On this thread at once if there is nothing to wait for, else by the worker."""
        while self._writes and self._writes[0].future.ready():
            self._finish_write()
        after = self._after_reads(arrived)
        # Not past writes that wait: operations take effect in the order of the calls.
        if not self._writes and after.done():
            self.runner.run_task(write)
            return
        self._writes.append(_Pending(write.layers, write.content.nbytes, self.worker.submit(write, after)))
        while _num_bytes(self._writes) > MAX_STAGED_BYTES:  # else pinned memory could grow with each layer
            self._finish_write()

    def read(self, read: HostRead, send_back: Callable[[], None] | None = None) -> AttentionFuture:
        """The attention task raises what earlier writes to these layers raised."""
        first, stop = read.layers.start, read.layers.stop
        writes = [write.future for write in self._writes if write.layers.start < stop and first < write.layers.stop]
        future = self._reader.submit(read, AfterWrites(writes), send_back)
        self._reads.append(_Pending(read.layers, read.out.nbytes, future))
        while _num_bytes(self._reads) > MAX_STAGED_BYTES:
            with contextlib.suppress(Exception):  # told to whoever waits for the read
                self._reads.popleft().future.wait()
        return future

    def _after_reads(self, arrived: Event) -> Event:
        """When the reads so far are over too: what writes to the tier may overwrite what they read."""
        while self._reads and self._reads[0].future.ready():
            self._reads.popleft()
        # The last one is enough: the reader runs them in order.
        return AfterReads(self._reads[-1].future, arrived) if self._reads else arrived

    def _finish_write(self) -> None:
        try:
            self._writes.popleft().future.wait()
        except BaseException:
            # The caller gives up all work under way: the other writes must not fail again afterwards.
            self._drop_all()
            raise

    def _drop_all(self) -> None:
        for pending in (self._reads, self._writes):
            while pending:
                with contextlib.suppress(Exception):
                    pending.popleft().future.wait()

    def recover(self) -> None:
        self._drop_all()
        self.worker.start_again()
        self._reader.start_again()

    def close(self) -> None:
        self._reader.close()
        self.worker.close()


def _num_bytes(pending: deque[_Pending]) -> int:
    return sum(part.num_bytes for part in pending)
