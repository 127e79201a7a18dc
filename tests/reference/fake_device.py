"""A CUDA made of Python, on which the engine's own CUDA code runs: late, out of order, and with poison wherever nothing
has been written yet.

Inside ``with FakeCuda(seed)`` the device "meta" is a GPU. Every operation torch is asked for on it is put into the
queue of the current stream and done later. Whenever the host does anything, some streams move on, as the seed will
have it; all that holds is what CUDA promises: a stream works in order, waits for the events it was told to wait for,
and a host that waits for an event finds it passed. Whoever forgets to wait reads poison: NaN, or numbers far out of
range. Memory that is given back is poisoned as soon as the stream it belongs to gets there, or, as torch promises,
after the streams it was recorded on.

There are two GPUs, and each thread works on the first until it chooses another (``cards``). Memory ends where the GPU's
does. From :meth:`FakeCuda.hang` on the GPU answers no more. A kernel that :meth:`FakeCuda.fail_after` names fails when
its turn comes, which may be long after its launch. As on CUDA, no work is done from then on, and from the next one on
every call of the process raises.

``ignored`` names a place in the code whose waits are not carried out: what a test does to see that it would notice.
"""

from __future__ import annotations

import itertools
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from tests.reference import fake_attention
from tests.reference.fake_cards import CARDS, FakeCards, FakeNccl, FakeRuntime, properties
from tests.reference.fake_kernels import CAPABILITY, Kernels
from tests.reference.fake_memory import DeviceTensor, Memory, poison
from tests.reference.fake_streams import DEVICE, FakeEvent, FakeGraph, FakeStream, FakeWorker, Hazard
from tests.reference.trees import key_of, leaves_of, replaced, shape_of

PACKAGE = str(Path(__file__).parents[2] / "swiftllm")
FAULT = "CUDA error: an illegal memory access was encountered"
REDRAW = 40  # host actions after which the streams' speeds change
MOVES = ("to.", "_to_copy", "cpu")
ONLY_ON_GPUS = {
    "aten::_flash_attention_forward": fake_attention.flash,
    "aten::_efficient_attention_forward": fake_attention.efficient,
}
SHAPES_OF: dict[object, Any] = {}  # results without content, of every fake: torch takes long to find them


class _Again(TorchDispatchMode):
    """The fake within itself: a mode is off while it handles an operation."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self.cuda = cuda

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.cuda.dispatch(func, types, args, kwargs)


class FakeCuda(TorchDispatchMode):
    """Attributes: ``sites``, the places where waits were asked for; ``replays``, of graphs; ``attended``, rows
    and blocks of each decode attention that was computed; ``peak`` and ``allocated`` bytes of memory; ``kernels``."""

    def __init__(
        self, seed: int, *, ignored: str | None = None, total_bytes: int = 1 << 30, capability: int = CAPABILITY
    ) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.ignored = ignored
        self.sites: set[str] = set()
        self.attended: list[tuple[int, ...]] = []
        self.compute = self.current = FakeStream(self)
        self.streams = [self.compute]
        self.workers: list[FakeWorker] = []
        self.kernels = Kernels(self, capability)
        self.capturing = False
        self.random_state: torch.Tensor | None = None
        self.cards, self.runtime = FakeCards(), FakeRuntime(self)
        self.graphs: weakref.WeakSet[FakeGraph] = weakref.WeakSet()
        self.pools, self.pool_uses = itertools.count(1), Counter()  # of graphs: their ids, and the graphs of each
        self.captured_in: set[FakeNccl] = set()  # communicators of the capture under way
        self.is_hung = self.has_failed = False
        self.kernels_left: int | None = None  # until one fails
        self.actions = self.replays = self.synchronisations = self.captures = self.lost_graphs = 0
        self.total_bytes, self.allocated, self.peak = total_bytes, 0, 0
        self.gaps = 0  # bytes that the allocator has reserved between those allocated, until its cache is emptied
        self.reserved_peak, self.has_virtual_memory = 0, True
        self._pinned: dict[int, torch.Tensor] = {}  # kept, so that no other memory comes to lie there
        self._advancing = False

    # -- what torch.cuda is inside ----------------------------------------------------------------------------------

    def __enter__(self) -> FakeCuda:
        self._patches = pytest.MonkeyPatch()
        for name in ("Stream", "default_stream", "stream", "Event", "CUDAGraph", "synchronize", "mem_get_info"):
            self._patches.setattr(torch.cuda, name, getattr(self, f"_{name}"))
        simple = {
            "cudart": lambda: self.runtime,
            "check_error": lambda error: None,
            "current_device": self.cards.current,
            "set_device": self._set_device,
            "device_count": lambda: CARDS,
            "get_device_properties": properties,
            "is_initialized": lambda: True,
            "graph_pool_handle": lambda: (0, next(self.pools)),
            "empty_cache": lambda: setattr(self, "gaps", 0),
            "caching_allocator_alloc": self._allocate_address,
            "caching_allocator_delete": lambda address: None,
            "memory_allocated": lambda device: self.allocated,
            "max_memory_allocated": lambda device: self.peak,
            "memory_reserved": lambda device: self.allocated + self.gaps,
            "max_memory_reserved": lambda device: self.reserved_peak,
            "reset_peak_memory_stats": self._reset_peaks,
        }
        for name, function in simple.items():
            self._patches.setattr(torch.cuda, name, function)
        nccl = type("ProcessGroupNCCL", (FakeNccl,), {"__init__": lambda group, *_: FakeNccl.__init__(group, self)})
        self._patches.setattr(torch.distributed, "ProcessGroupNCCL", nccl, raising=False)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.undo()

    def _set_device(self, card: int | torch.device) -> None:
        self.raise_failure()
        self.cards.choose(card)

    def _Stream(self, device: object = None) -> FakeStream:
        self.raise_failure()
        self.cards.touch()
        self.streams.append(FakeStream(self))
        return self.streams[-1]

    def _default_stream(self, device: object = None) -> FakeStream:
        return self.compute

    @contextmanager
    def _stream(self, stream: FakeStream) -> Iterator[None]:
        self.cards.touch()
        outer, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = outer

    @contextmanager
    def another_thread(self, card: int) -> Iterator[None]:
        """What a thread finds that has just started: no inference mode, and the default stream of a GPU."""
        is_off = not any(isinstance(mode, (FakeCuda, _Again)) for mode in _get_current_dispatch_mode_stack())
        watched = _Again(self) if is_off else nullcontext()
        with self.cards.working_on(card), self._stream(self.compute), torch.inference_mode(False), watched:
            yield

    def hang(self) -> None:
        """From now on no work on the GPU is ever done, and no event passes."""
        self.is_hung = True

    def fail_after(self, num_kernels: int) -> None:
        """So many more kernels and copies are carried out; the next one fails."""
        self.kernels_left = num_kernels

    def raise_failure(self) -> None:
        """Called by whatever CUDA tells of an earlier failure."""
        if self.has_failed:
            raise torch.AcceleratorError(FAULT)

    def fails_now(self) -> bool:
        """A kernel begins, on its stream."""
        if self.kernels_left is not None:
            self.has_failed |= self.kernels_left == 0
            self.kernels_left -= 1
        return self.has_failed

    def _Event(self, blocking: bool = False) -> FakeEvent:
        return FakeEvent()

    def _CUDAGraph(self) -> FakeGraph:
        return FakeGraph(self)

    def _synchronize(self, device: object = None) -> None:
        self.raise_failure()
        for stream in self.streams:
            self._drain(stream)

    def _mem_get_info(self, device: object = None) -> tuple[int, int]:
        self.raise_failure()
        return self.total_bytes - self.allocated - self.gaps, self.total_bytes

    def _allocate_address(self, num_bytes: int) -> int:
        self.raise_failure()
        if "expandable_segments:True" in torch._C._accelerator_getAllocatorSettings() and not self.has_virtual_memory:
            raise RuntimeError("CUDA driver error: operation not supported")
        return 0

    def _reset_peaks(self, device: object) -> None:
        self.peak, self.reserved_peak = self.allocated, self.allocated + self.gaps

    # -- time -------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """The host has done something: meanwhile others have, too."""
        self.cards.touch()
        if self._advancing or self.capturing:
            return
        self._advancing = True
        try:
            everyone = [*([] if self.is_hung or self.has_failed else self.streams), *self.workers]
            if self.actions % REDRAW == 0:
                for one in everyone:
                    one.speed = self.random.choice((0.0, 0.0, 0.5, 3.0, 1000.0))
            self.actions += 1
            for one in self.random.sample(everyone, len(everyone)):
                steps = one.speed
                while steps > self.random.random() and one.step():
                    steps -= 1.0
        finally:
            self._advancing = False

    def force(self, event: FakeEvent) -> None:
        while not event.passed and not self.is_hung:
            self.raise_failure()
            self._pull(event.stream)

    def _pull(self, stream: FakeStream) -> None:
        """One step of a stream, after what it waits for."""
        head = stream.queue[0]
        if isinstance(head, FakeEvent):
            self.force(head)
        stream.step()

    def _drain(self, stream: FakeStream) -> None:
        if self.is_hung:
            raise Hazard("the host waits for ever: CUDA itself has no limit")
        while stream.queue:
            self._pull(stream)
            self.raise_failure()

    def ignores(self, what: str) -> bool:
        """Notes the place in the engine that waits, and tells whether this place is the one to be left out."""
        if what == "record_stream":  # one promise of the allocator, wherever it is used
            self.sites.add(what)
            return what == self.ignored
        frame = sys._getframe(1)
        while frame and not _waits_on_its_own(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return False
        lines = frame.f_lineno - frame.f_code.co_firstlineno
        site = f"{what} in {frame.f_code.co_qualname}, line {lines}, from {frame.f_back.f_code.co_qualname}"
        self.sites.add(site)
        return site == self.ignored

    # -- operations -------------------------------------------------------------------------------------------------

    def launch(self, kernel: Callable[..., None], *tensors: torch.Tensor) -> None:
        """A kernel that torch does not know: ``kernel`` gets what the tensors hold when its time has come."""
        inners = [tensor.inner for tensor in tensors]
        self._enqueue(lambda: kernel(*inners))

    def refuse_while_capturing(self, what: str) -> None:
        if self.capturing:
            raise Hazard(f"the host {what} in the middle of a capture")

    def lose_graph(self) -> None:
        self.lost_graphs += 1

    def read(self, tensor: DeviceTensor) -> torch.Tensor:
        """What the host gets that asks for values: the stream is waited for."""
        self.raise_failure()
        self.refuse_while_capturing("reads")
        self.synchronisations += 1
        self._drain(self.current)
        return tensor.inner

    def give_back(self, home: FakeStream, readers: set[FakeStream], inner: torch.Tensor) -> None:
        if self.has_failed:
            return
        others = readers - {home}
        if not others:
            self.allocated -= inner.nbytes
        still_reading = set(others)

        def passed(stream: FakeStream) -> None:
            still_reading.remove(stream)
            self.allocated -= 0 if still_reading else inner.nbytes

        for stream in others:
            stream.put(partial(passed, stream))
            event = FakeEvent()
            event.record(stream)
            home.put(event)
        home.put(lambda: poison(inner))

    def _allocate(self, like: torch.Tensor) -> DeviceTensor:
        self.raise_failure()
        inner = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        if self.allocated + inner.nbytes > self.total_bytes and not self.capturing:
            self._synchronize()  # as torch: streams may be done with memory that was given back
        if self.allocated + inner.nbytes > self.total_bytes:
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory: no {inner.nbytes} beside {self.allocated} bytes")
        poison(inner)
        if not self.capturing:  # earlier work of the stream may still write to memory that is used again
            self.current.put(partial(poison, inner))
        self.allocated += inner.nbytes
        self.peak = max(self.peak, self.allocated)
        self.reserved_peak = max(self.reserved_peak, self.allocated + self.gaps)
        return DeviceTensor(self, inner, Memory(self, inner))

    def _enqueue(self, work: Callable[[], object]) -> None:
        self.raise_failure()
        inference = torch.is_inference_mode_enabled()

        def later() -> object:
            if self.fails_now():
                return None
            if torch.is_inference_mode_enabled() is inference:
                return work()
            with torch.inference_mode(inference):
                return work()

        self.current.put(later)
        self.advance()

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = _name_of(func)
        on_device = [leaf for leaf in leaves_of((args, kwargs)) if isinstance(leaf, DeviceTensor)]
        target = kwargs.get("device")
        if kwargs.pop("pin_memory", None) or name.startswith(("pin_memory", "_pin_memory")):
            self.raise_failure()
            self.refuse_while_capturing("allocates pinned memory, which asks for events,")
            host = args[0].clone() if name.startswith(("pin_memory", "_pin_memory")) else func(*args, **kwargs)
            if not name.startswith(("pin_memory", "_pin_memory")):
                poison(host)
            self._pinned[host.untyped_storage().data_ptr()] = host
            return host
        if name.startswith("is_pinned"):
            return self._is_page_locked(args[0])
        if name.startswith(MOVES) and not isinstance(args[0], DeviceTensor):
            to_device = target is not None and torch.device(target).type == DEVICE.type
            return self._upload(args[0], kwargs) if to_device else func(*args, **kwargs)
        if name.startswith(MOVES) and target is not None and torch.device(target).type == "cpu":
            return self.read(args[0]).to(kwargs.get("dtype")).clone()
        if name.startswith("to.") and not self._changes_dtype(args, kwargs):
            return args[0]
        if name == "copy_.default" and len(on_device) == 1:
            return self._cross(*args, **kwargs)
        if not on_device and (target is None or torch.device(target).type != DEVICE.type):
            return func(*args, **kwargs)
        if name == "empty_like.default" and not on_device:
            return self._allocate(args[0])
        if name.startswith(("_local_scalar_dense", "item", "is_nonzero", "equal")):
            return func(*replaced(DeviceTensor, self.read, args))
        view = self._view(func, args, kwargs)
        return self._compute(func, args, kwargs) if view is None else view

    def _is_page_locked(self, host: torch.Tensor) -> bool:
        return host.untyped_storage().data_ptr() in self._pinned.keys() | self.runtime.mapped

    @staticmethod
    def _changes_dtype(args: Any, kwargs: dict[str, Any]) -> bool:
        wanted = [x for x in (*args[1:], kwargs.get("dtype")) if isinstance(x, torch.dtype)]
        return bool(wanted) and wanted[0] is not args[0].dtype

    def _upload(self, host: torch.Tensor, kwargs: dict[str, Any]) -> DeviceTensor:
        out = self._allocate(host.to(kwargs["dtype"]) if kwargs.get("dtype") else host)
        return self._cross(out, host, kwargs.get("non_blocking", False))

    def _cross(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """A copy between the memories."""
        host = source if isinstance(target, DeviceTensor) else target
        into, out_of = (tensor.inner if isinstance(tensor, DeviceTensor) else tensor for tensor in (target, source))
        if not non_blocking:
            self._enqueue(lambda: into.copy_(out_of))
            self.synchronisations += 1
            self._drain(self.current)
        elif not self._is_page_locked(host):
            raise Hazard("an asynchronous copy from or to memory that is not pinned")
        elif not (target.is_contiguous() and source.is_contiguous()):
            raise Hazard("a copy between the memories of rows that lie apart takes a buffer in between")
        else:
            self._enqueue(lambda: into.copy_(out_of))
        return target

    def _view(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result if it is nothing but another way to look at an argument."""
        returns = func._schema.returns
        if not returns or returns[0].alias_info is None or returns[0].alias_info.is_write:
            return None
        base = next(leaf for leaf in leaves_of(args) if isinstance(leaf, DeviceTensor))
        result = func(*replaced(DeviceTensor, lambda t: t.inner, args), **kwargs)
        storage = base.inner.untyped_storage().data_ptr()
        if any(leaf.untyped_storage().data_ptr() != storage for leaf in leaves_of(result)):
            return None  # a reshape that had to copy
        with torch.inference_mode(base.is_inference()):  # a view is what its base is
            return replaced(torch.Tensor, lambda inner: DeviceTensor(self, inner, base.memory), result)

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        schema = func._schema
        stray = [x for x in leaves_of((args, kwargs)) if type(x) is torch.Tensor and x.dim()]
        if stray and not schema.name.startswith("aten::index"):  # torch uploads indexes by itself
            raise Hazard(f"{func} computes with device and host memory at once")
        inner_args, inner_kwargs = replaced(DeviceTensor, lambda t: t.inner, (args, kwargs))
        if "device" in kwargs:
            inner_kwargs["device"] = "cpu"
        if not schema.name.startswith("aten::empty"):
            self.kernels.load(schema.name, [x for x in leaves_of((args, kwargs)) if isinstance(x, torch.Tensor)])
        if not schema.returns:  # it writes to all of a list
            return self._enqueue(lambda: func(*inner_args, **inner_kwargs))
        if any(result.alias_info is not None and result.alias_info.is_write for result in schema.returns):
            self._enqueue(lambda: func(*inner_args, **inner_kwargs))
            return kwargs["out"] if "out" in kwargs else args[0]
        out = replaced(torch.Tensor, self._allocate, self._shapes(func, inner_args, inner_kwargs))
        places = [leaf.inner if isinstance(leaf, DeviceTensor) else None for leaf in leaves_of(out)]
        compute = ONLY_ON_GPUS.get(schema.name, func)

        def work() -> None:
            for place, value in zip(places, leaves_of(compute(*inner_args, **inner_kwargs)), strict=True):
                if place is not None:
                    place.copy_(value)

        if schema.name.startswith("aten::empty"):
            return out  # memory as it is: poison
        self._enqueue(work)
        return out

    def _shapes(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Tensors without content, like those that an operation will return."""
        key = (func, key_of(args), key_of(kwargs))
        if key not in SHAPES_OF:
            args, kwargs = replaced(torch.Tensor, shape_of, (args, kwargs))
            SHAPES_OF[key] = func(*args, **({**kwargs, "device": "meta"} if "device" in kwargs else kwargs))
        return SHAPES_OF[key]


# Torch would wrap a method of that name, at a cost above that of most operations.
for _mode in (FakeCuda, _Again):
    _mode.__torch_dispatch__ = _mode.dispatch


@cache
def _name_of(func: Any) -> str:
    return str(func).removeprefix("aten.")


def _waits_on_its_own(filename: str) -> bool:
    """Whether a file is the engine's and not the thin layer over torch.cuda, which waits for others."""
    return filename.startswith(PACKAGE) and not filename.endswith("/device.py")
