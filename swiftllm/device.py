"""The device of the linear layers, a host or a CUDA GPU, behind one interface."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from swiftllm.machine import GIB, InsufficientMemory, available_host_bytes, card_share
from swiftllm.processes import wake_on_time

# -- the interface -----------------------------------------------------------------------------------------------------
# The device of the linear layers as the backend sees it: streams, events, copies between memories, captured graphs.
#
# A GPU does the work of one stream in order, and that of different streams in any order that events and waits allow. On
# a host all work is done when the call returns, and there is one memory: the same backend then waits for nothing and
# copies nothing.


class Event(Protocol):
    """A mark on a stream."""

    def done(self) -> bool:
        """Whether all work before the mark is done; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block until then; the calling thread sleeps, without the GIL.

        Raises:
            DeviceHung: it takes too long; see :mod:`swiftllm.device`.
        """


class Stream(Protocol):
    """Work that is done in order. Calls return before the work is done."""

    def running(self) -> AbstractContextManager[object]:
        """Inside, torch works on this stream, and its allocations belong to it."""
        ...

    def mark(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """Later work on this stream starts after ``event``; the host does not wait."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between host memory (``pinned``) and the device, both contiguous. Device memory is not reused before the copy
        is done, even if its last reference is dropped; its content must not change meanwhile."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory that holds ``tensor`` once the stream has reached this point."""
        ...

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of this stream on the device that holds ``tensor``, of host memory, for later work on the stream."""
        ...


class Graph(Protocol):
    def replay(self) -> None:
        """Repeat the captured work on the compute stream and the same memory."""


class Device(Protocol):
    """``compute`` is torch's default stream; the others carry K, V, Q and attention results to
    the host and back, and blocks between the tiers."""

    torch_device: torch.device
    can_capture: bool
    graph_bytes: int
    """Device memory that captured graphs may take."""

    @property
    def compute(self) -> Stream: ...

    @property
    def to_host(self) -> Stream: ...

    @property
    def to_device(self) -> Stream: ...

    @property
    def swap(self) -> Stream: ...

    def new_stream(self) -> Stream:
        """Another stream, for copies that must not wait for those of the others."""
        ...

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory for ``Stream.copy``; may be dropped while a copy is under way."""
        ...

    def mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised host memory that kernels of the device can read; it takes no more than its bytes, whereas
        ``pinned`` memory is rounded up."""
        ...

    def mirror(self, host: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of the same shape on the device: on a host, ``host`` itself."""
        ...

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy, made on the compute stream, for other streams to read: later writes to ``tensor`` do not
        show. On a host, which reads at once, ``tensor`` itself."""
        ...

    def capture(self, work: Callable[[], object]) -> Graph:
        """Capture what ``work`` does on the compute stream without doing it. It must have run before, with the same
        shapes.

        Raises:
            RuntimeError: it cannot be captured. No graph of this device may be replayed afterwards.
        """
        ...

    def free_bytes(self) -> int:
        """Free memory of the device."""
        ...

    def left_free(self, work: Callable[[], object]) -> int | None:
        """Bytes that remain for permanent use beside what ``work`` needs, which is run to measure that. None: the
        device's memory is the host's."""


# -- how long the host waits -------------------------------------------------------------------------------------------
# How long the host waits for a device.

ANSWER_S = 60.0  # that a device gets to finish what the host waits for


class DeviceHung(RuntimeError):
    """The device has not finished its work within ``ANSWER_S``, and may never do so."""


# -- the NVIDIA driver -------------------------------------------------------------------------------------------------
# The NVIDIA driver of this machine, and why torch sees no GPU beside it.

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version to the oldest branch of Linux drivers that runs it, by NVIDIA's compatibility table."""


@dataclass(frozen=True)
class NvidiaDriver:
    """``control`` exists where the driver is loaded; ``version_file`` is what its kernel module says of itself."""

    control: Path = Path("/dev/nvidiactl")
    version_file: Path = Path("/proc/driver/nvidia/version")

    def version(self) -> str | None:
        """Such as 535.183.01; None where there is no driver, or it does not say."""
        try:
            first_line = self.version_file.read_text().partition("\n")[0]
        except OSError:
            return None
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", first_line)
        return found and found.group()

    def why_no_gpu(self) -> str | None:
        """Why torch sees no GPU, with the versions and the remedy. None where torch sees one, where no driver is
        loaded, and where CUDA_VISIBLE_DEVICES hides all GPUs on purpose."""
        if torch.cuda.is_available() or not self.control.exists():
            return None
        if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
            return None
        version, cuda = self.version(), torch.version.cuda
        driver = f"NVIDIA driver {version}" if version else "an NVIDIA driver of unknown version"
        if cuda is None:
            problem = f"torch {torch.__version__} is a build without CUDA"
            remedy = "install torch's CUDA build (`make setup` takes it from the package index)"
        else:
            problem = f"torch {torch.__version__} is built for CUDA {cuda}"
            oldest = OLDEST_DRIVERS.get(int(cuda.partition(".")[0]))
            if oldest is None:
                remedy = "install the driver that this CUDA needs, or a torch built for an older CUDA"
            elif version is None or int(version.partition(".")[0]) < oldest:
                problem += f", which needs driver {oldest} or later"
                remedy = f"install driver {oldest} or later, or a torch built for an older CUDA"
            else:
                remedy = "the driver is new enough, and no GPU answers: see `nvidia-smi`"
        return f"torch sees no GPU although this machine has {driver}: {problem}; {remedy}"


INSTALLED = NvidiaDriver()


# -- a host ------------------------------------------------------------------------------------------------------------
# A host as a device: the calling thread does all work, and there is one memory.


class _Done:
    """Stream and event of work that is done when the call returns."""

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def running(self) -> AbstractContextManager[object]:
        return contextlib.nullcontext()

    def mark(self) -> Event:
        return self

    def wait(self, event: Event) -> None:
        pass

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target is not source:
            target.copy_(source)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class HostDevice:
    """See :class:`Device`: the calling thread does all work."""

    torch_device = torch.device("cpu")
    compute = to_host = to_device = swap = _Done()
    can_capture = False
    graph_bytes = 0

    def new_stream(self) -> Stream:
        return self.compute

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def mirror(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def capture(self, work: Callable[[], object]) -> Graph:
        raise NotImplementedError("a host has no graphs to capture")

    def free_bytes(self) -> int:
        return available_host_bytes()

    def left_free(self, work: Callable[[], object]) -> int | None:
        return None


# -- a CUDA GPU --------------------------------------------------------------------------------------------------------
# A CUDA GPU as a device: a thin layer over torch.cuda.

logger = logging.getLogger(__name__)

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CONTEXT_BYTES = 400 << 20  # of a CUDA context with torch's and Triton's kernels, and of cuBLAS's workspace; an estimate
DEVICE_HEADROOM = 0.05  # share of a GPU's memory left to captured graphs, libraries and fragmentation
LARGE_WORKSPACE_BYTES = 32 << 20
GRAPHS_SHARE = 0.03  # of a GPU's memory, out of the headroom
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2e-5, 1e-4  # between two looks at an event; in between, by what was waited so far
LATE = 1 / 32  # of the wait
AGAIN_S = 0.1  # instead of ANSWER_S, while a device that was waited for in vain has not gone on


def cublas_workspace_bytes(major: int) -> int:
    """What torch allocates for each thread and stream that multiplies matrices, by the major number of the GPU's
    compute capability."""
    return LARGE_WORKSPACE_BYTES if major >= 9 else (8 << 20) + (128 << 10)


def _grow_segments(wanted: bool) -> None:
    """Whether segments of torch's allocator grow. Otherwise memory is lost between blocks of different sizes. A user's
    own settings stay. Call it before anything is allocated."""
    if os.environ.keys() & set(ALLOCATOR_VARIABLES):
        return
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{wanted}")
    if not wanted:
        return
    try:
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(1))
    except torch.cuda.OutOfMemoryError:
        pass  # told where weights are compared with free memory
    except RuntimeError as error:  # as on some virtual GPUs, whose driver maps no memory
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        logger.warning("segments of GPU memory do not grow, so that more of it may be lost between blocks: %s", error)


class Silence:
    """The event of a device that was waited for in vain, if there is one. Later waits then end soon: a recovery has
    many of them."""

    event: CudaEvent | None = None

    def limit_s(self) -> float:
        if self.event is not None and self.event.done():
            self.event = None
        return ANSWER_S if self.event is None else AGAIN_S


class CudaEvent:
    def __init__(self, stream: torch.cuda.Stream, silence: Silence) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)
        self._silence = silence

    def done(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        # CUDA's own wait has no limit, and a thread in it cannot be interrupted.
        start_s, limit_s = time.monotonic(), None
        while not self._event.query():
            waited_s = time.monotonic() - start_s
            limit_s = self._silence.limit_s() if limit_s is None else limit_s
            if waited_s > limit_s:
                self._silence.event = self._silence.event or self
                within = f"within {ANSWER_S:g} s"
                raise DeviceHung(f"the GPU has not finished its work {within}: it hangs, or waits for another GPU")
            time.sleep(min(max(FIRST_PAUSE_S, LATE * waited_s), LONGEST_PAUSE_S))


class CudaStream:
    """See :class:`Stream`. Torch's allocators, for the device and for pinned host memory, reuse freed memory only after
    the streams recorded on it have passed."""

    def __init__(self, stream: torch.cuda.Stream, silence: Silence) -> None:
        self._stream = stream
        self._silence = silence

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> CudaEvent:
        return CudaEvent(self._stream, self._silence)

    def wait(self, event: CudaEvent) -> None:
        self._stream.wait_event(event._event)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        (target if target.is_cuda else source).record_stream(self._stream)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.copy(host, tensor)
        return host

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            if not tensor.numel():
                return torch.empty_like(tensor, device=self._stream.device)
            # A copy from memory that is not pinned or not contiguous would wait for all work on the stream.
            tensor = tensor.contiguous()
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            return pinned.to(self._stream.device, non_blocking=True)


class CudaDevice:
    """See :class:`Device`. Threads may use it at the same time, each for its own work."""

    def __init__(self, index: int | None = None, *, can_capture: bool = True, in_group: bool = False) -> None:
        """The GPU with this index, on which the calling thread works from now on; by default the one it works on.

        ``can_capture=False`` launches every kernel on its own, for debugging and comparisons. ``in_group``: of several
        ranks, whose graphs hold collectives. NCCL registers the memory of those, and hangs in a replay where segments
        grow.
        """
        if index is not None:
            torch.cuda.set_device(index)
        _grow_segments(not in_group)
        # Else cuBLAS may add the parts of a sum in 16 bits.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        wake_on_time()
        self._silence = Silence()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.can_capture = can_capture
        self.compute = CudaStream(torch.cuda.default_stream(self.torch_device), self._silence)
        self.to_host, self.to_device, self.swap = (self.new_stream() for _ in range(3))
        self._captured: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self.graph_bytes = int(GRAPHS_SHARE * card_share() * torch.cuda.mem_get_info(self.torch_device)[1])

    def new_stream(self) -> CudaStream:
        return CudaStream(torch.cuda.Stream(self.torch_device), self._silence)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor, runtime = torch.empty(shape, dtype=dtype), torch.cuda.cudart()
        assert runtime is not None
        torch.cuda.check_error(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        # As long as there is a view: under torch.inference_mode views do not keep the tensor.
        weakref.finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, tensor.data_ptr())
        return tensor

    def mirror(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(host, device=self.torch_device)

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def capture(self, work: Callable[[], object]) -> Graph:
        if not self._captured:  # torch refuses a pool whose graphs are all destroyed, as after a recovery
            self._capture_stream = torch.cuda.Stream(self.torch_device)
            self._graph_memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would collect garbage and empty the allocator's cache for each of thousands of graphs.
        # "thread_local": CUDA calls of the process's other threads do not end the capture.
        with torch.cuda.stream(self._capture_stream):
            try:
                graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
                work()
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # raised again for the failed capture
                    graph.capture_end()
                # Up to torch 2.12 the allocator waits for the end of a failed capture, and meanwhile frees no memory
                # that was recorded on a stream. Later versions raise here.
                with contextlib.suppress(Exception):
                    torch._C._cuda_endAllocateToPool(self.torch_device.index, self._graph_memory)
                raise
        self._captured.add(graph)
        return graph

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        if (share := card_share()) < 1.0:  # others may not have taken theirs yet
            free = min(free, int(share * total) - torch.cuda.memory_reserved(self.torch_device) - CONTEXT_BYTES)
        return free

    def left_free(self, work: Callable[[], object]) -> int | None:
        device = self.torch_device
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        try:
            work()
        except torch.cuda.OutOfMemoryError as error:
            raise InsufficientMemory(
                f"the widest iteration does not fit into the {self.free_bytes() / GIB:.2f} GiB that the weights leave "
                "free: lower max_num_batched_tokens, max_num_seqs or max_model_len"
            ) from error
        torch.cuda.synchronize(device)
        free_bytes = self.free_bytes()  # what was cached is given back
        allocated = torch.cuda.max_memory_allocated(device) - before
        reserved = torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device)
        headroom = DEVICE_HEADROOM * card_share() * torch.cuda.mem_get_info(device)[1]
        # The thread that serves is not this one, and has a handle of cuBLAS of its own.
        workspace = cublas_workspace_bytes(torch.cuda.get_device_properties(device).major)
        return int(free_bytes - max(allocated, reserved) - headroom) - workspace


# -- opening a device --------------------------------------------------------------------------------------------------
# The device of the linear layers: a host or a CUDA GPU, behind one interface.


def open_device(
    name: str, index: int | None = None, *, in_group: bool = False, driver: NvidiaDriver = INSTALLED
) -> Device:
    """``name``: cpu, cuda, or auto: CUDA where torch sees a GPU, the host where there is none.

    ``index`` and ``in_group``: see :class:`CudaDevice`.

    Raises:
        ValueError: there is no such device here. Also for auto where the machine has a driver and torch sees no GPU:
            the CPU would be taken for it in silence.
    """
    if name == "cpu":
        return HostDevice()
    if torch.cuda.is_available():
        return CudaDevice(index, in_group=in_group)
    if (reason := driver.why_no_gpu()) is not None:
        raise ValueError(f"{reason}; --device cpu computes without it")
    if name == "cuda":
        raise ValueError("device='cuda' and torch sees no GPU; use device='cpu', or check the driver and torch build")
    return HostDevice()
