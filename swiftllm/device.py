"""Where the linear layers run, as the backend sees it: streams, events, copies between memories, captured graphs.

A GPU works through each stream in order and through different streams in any order; marks and waits are what orders
them. On a host everything has happened when the call returns, and memories are one: the same backend then waits for
nothing and copies nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from swiftllm.memory import DEVICE_HEADROOM, GIB, GRAPHS_SHARE, InsufficientMemory, available_host_bytes


class Event(Protocol):
    """A mark on a stream."""

    def done(self) -> bool:
        """Whether all work before the mark is done; never blocks."""

    def synchronize(self) -> None:
        """Block the calling thread until then: asleep, without the GIL."""


class Stream(Protocol):
    """Work that is done in order. Calls return before the work is done."""

    def running(self) -> AbstractContextManager[object]:
        """What torch is told to do inside runs on this stream, and what it allocates there belongs to it."""

    def mark(self) -> Event: ...

    def wait(self, event: Event) -> None:
        """Nothing that comes later on this stream starts before ``event``; the host goes on."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Between host memory (``pinned``) and the device, both contiguous. Memory of the device is not given to
        others before the copy is over, even if the last reference to it goes; what it holds must stay meanwhile."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in host memory that holds ``tensor`` once the stream has come here."""

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the device, belonging to this stream, that holds ``tensor`` of host memory from here on."""


class Graph(Protocol):
    def replay(self) -> None:
        """Do the captured work again on the compute stream, on the same memory."""


class Device(Protocol):
    """``compute`` is the stream torch uses unless told otherwise; the others carry K, V, Q and attention results to
    the host and back, and blocks between the tiers."""

    torch_device: torch.device
    compute: Stream
    to_host: Stream
    to_device: Stream
    swap: Stream
    can_capture: bool
    graph_bytes: int
    """Of the device's memory that captured graphs may take."""

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Host memory for ``Stream.copy``, uninitialised; may be dropped while a copy is under way."""

    def mirror(self, host: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of the same shape on the device: on a host, ``host`` itself."""

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` as the compute stream leaves it here, contiguous, for other streams to read: later writes do not
        show. On a host, which reads at once, ``tensor`` itself."""

    def capture(self, work: Callable[[], object]) -> Graph:
        """Capture what ``work`` does on the compute stream without doing it. It has run before with these shapes.

        Raises:
            RuntimeError: it cannot be captured. No graph of this device may be replayed any more.
        """

    def free_bytes(self) -> int:
        """Memory that can be had."""

    def left_free(self, work: Callable[[], object]) -> int | None:
        """Memory that can be given away for good so that ``work``, which is run to see, still finds what it needs
        beside it. None: what is there is the host's.

        Raises:
            InsufficientMemory: there is not even enough for ``work``.
        """


# -- a host -----------------------------------------------------------------------------------------------------------


class _Done:
    """The event of work that is done on return, and the stream of such work."""

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
    """See :class:`Device`: the calling thread does everything."""

    torch_device = torch.device("cpu")
    compute = to_host = to_device = swap = _Done()
    can_capture = False
    graph_bytes = 0

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
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


# -- a GPU ------------------------------------------------------------------------------------------------------------


class CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking: a thread that waits sleeps. It may be one of the cores that CPU attention counts on.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)

    def done(self) -> bool:
        return self._event.query()

    def synchronize(self) -> None:
        self._event.synchronize()


class CudaStream:
    """See :class:`Stream`. Memory is torch's: its allocators, one for the device and one for pinned host memory, keep
    freed memory back until the streams that were told to it have passed."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def running(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> CudaEvent:
        return CudaEvent(self._stream)

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
            # From memory that is not pinned, or in pieces, a copy would wait for all that is on the stream.
            tensor = tensor.contiguous()
            pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
            return pinned.to(self._stream.device, non_blocking=True)


class CudaDevice:
    """See :class:`Device`. Threads may use it at the same time, each for its own work."""

    def __init__(self, *, can_capture: bool = True) -> None:
        """``can_capture=False`` launches every kernel by itself, for debuggers and comparisons."""
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        self.can_capture = can_capture
        self.compute = CudaStream(torch.cuda.default_stream(self.torch_device))
        self.to_host, self.to_device, self.swap = (CudaStream(torch.cuda.Stream(self.torch_device)) for _ in range(3))
        self._capture_stream = torch.cuda.Stream(self.torch_device)
        self._graph_memory = torch.cuda.graph_pool_handle()
        self.graph_bytes = int(GRAPHS_SHARE * torch.cuda.mem_get_info(self.torch_device)[1])

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def mirror(self, host: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(host, device=self.torch_device)

    def snapshot(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone(memory_format=torch.contiguous_format)

    def capture(self, work: Callable[[], object]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph would collect garbage and empty the allocator's cache each time; there are thousands of
        # graphs. "thread_local": whatever other threads of the process do with CUDA does not end the capture.
        with torch.cuda.stream(self._capture_stream):
            graph.capture_begin(pool=self._graph_memory, capture_error_mode="thread_local")
            try:
                work()
                graph.capture_end()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it says once more that the capture has failed
                    graph.capture_end()
                # Up to torch 2.12 the allocator goes on waiting for the end of a capture that has failed, and so gives
                # no memory back that was recorded on a stream. Where it does not, it says so.
                with contextlib.suppress(Exception):
                    torch._C._cuda_endAllocateToPool(self.torch_device.index, self._graph_memory)
                raise
        return graph

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def left_free(self, work: Callable[[], object]) -> int | None:
        device = self.torch_device
        torch.cuda.synchronize(device)
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
        peak = torch.cuda.max_memory_allocated(device) - before
        headroom = DEVICE_HEADROOM * torch.cuda.mem_get_info(device)[1]
        return int(self.free_bytes() - peak - headroom)


def open_device(name: str) -> Device:
    """``name``: cpu, cuda or auto, which takes CUDA where torch sees a GPU.

    Raises:
        ValueError: there is no such device here.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda' and torch sees no GPU; use device='cpu', or check the driver and torch build")
    on_gpu = name == "cuda" or (name == "auto" and torch.cuda.is_available())
    return CudaDevice() if on_gpu else HostDevice()
