"""What compute-sanitizer tells on a GPU, told of Triton's interpreter: ``watch_memory`` before any kernel runs.

The interpreter runs one program after the other on the host, where a stray address finds some memory or other and
nothing runs at the same time. Here every load and store of a launch is held against what a GPU would make of it:

- an address that belongs to no element of the tensors the kernel was given, or lies between two elements;
- two programs one of which writes what the other reads or writes: they run at the same time, in any order;
- within a program, a read of what it has written, a write of what another of its lanes has read, and two lanes
  that write to one place: its threads do not wait for one another;
- lanes that are masked out of a load and given no value: they hold whatever was in the register, here all bits set.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle, _get_np_dtype

from tests.reference.reserved_memory import reserved

NOBODY, SEVERAL = 0, -1  # programs have numbers from 1 on


LARGE = 1 << 26  # elements of a storage


class MemoryFault(AssertionError):
    pass


class Region:
    """One storage a launch was given: which of its elements are in a tensor, and which program has touched each.

    It may be larger than memory. Then a tensor in it is contiguous, and what is not touched takes none here either.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.names: list[str] = []
        self.start, self.stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        self.itemsize = tensor.dtype.itemsize
        self.num_elements = storage.nbytes() // self.itemsize
        self.given = torch.zeros(self.num_elements if self.num_elements < LARGE else 0, dtype=torch.bool)
        self.large: list[range] = []
        self.writer, self.reader, self.reading_lane = (_zeros(self.num_elements) for _ in range(3))

    def add(self, name: str, tensor: torch.Tensor) -> None:
        assert tensor.dtype.itemsize == self.itemsize, f"{name} is seen with another size of elements as well"
        self.names.append(name)
        if self.num_elements < LARGE:
            self.given.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).fill_(True)
        else:
            assert tensor.is_contiguous()
            self.large.append(range(tensor.storage_offset(), tensor.storage_offset() + tensor.numel()))

    def elements(self, addresses: np.ndarray) -> np.ndarray:
        """Their numbers in the storage."""
        bytes_in = addresses - self.start
        elements = bytes_in // self.itemsize
        inside = (elements >= 0) & (elements < self.num_elements)
        if not inside.all() or not self.are_given(elements):
            raise MemoryFault(f"outside {self}")
        if (bytes_in % self.itemsize).any():
            raise MemoryFault(f"between two elements of {self}")
        return elements

    def are_given(self, elements: np.ndarray) -> bool:
        if self.num_elements < LARGE:
            return bool(self.given.numpy()[elements].all())
        return any(part.start <= elements.min() and elements.max() < part.stop for part in self.large)

    def __str__(self) -> str:
        return " and ".join(self.names)


def _zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.int64) if count < LARGE else reserved(count, dtype=torch.int64).numpy()


class Launch:
    """The memory of one launch, and the program that runs just now."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.program = 0
        regions: dict[int, Region] = {}
        for name, tensor in tensors.items():
            regions.setdefault(tensor.untyped_storage().data_ptr(), Region(tensor)).add(name, tensor)
        self.regions = list(regions.values())

    def accessed(self, handle: TensorHandle, mask: TensorHandle) -> Iterator[tuple[Region, np.ndarray, np.ndarray]]:
        """The region, its elements and the lanes of an access, unless all lanes are masked out."""
        addresses, active = np.broadcast_arrays(handle.data, mask.data)
        addresses, lanes = addresses[active].astype(np.int64), np.flatnonzero(active)
        if len(addresses):
            for region in self.regions:
                if region.start <= addresses[0] < region.stop:
                    yield region, region.elements(addresses), lanes
                    return
            raise MemoryFault("outside every tensor")

    def load(self, region: Region, elements: np.ndarray, lanes: np.ndarray) -> None:
        if (region.writer[elements] == self.program).any():
            raise MemoryFault(f"a program reads what it has written to {region}")
        if (region.writer[elements] != NOBODY).any():
            raise MemoryFault(f"a program reads what another writes to {region}")
        before = region.reader[elements]
        region.reader[elements] = np.where((before == NOBODY) | (before == self.program), self.program, SEVERAL)
        region.reading_lane[elements] = lanes

    def store(self, region: Region, elements: np.ndarray, lanes: np.ndarray) -> None:
        if len(np.unique(elements)) < len(elements):
            raise MemoryFault(f"two lanes write to one place of {region}")
        writer, reader = region.writer[elements], region.reader[elements]
        if ((writer != NOBODY) & (writer != self.program)).any():
            raise MemoryFault(f"two programs write to one place of {region}")
        if ((reader != NOBODY) & (reader != self.program)).any():
            raise MemoryFault(f"a program writes what another reads of {region}")
        if ((reader == self.program) & (region.reading_lane[elements] != lanes)).any():
            raise MemoryFault(f"a lane writes what another lane of its program has read of {region}")
        region.writer[elements] = self.program


@cache
def watch_memory() -> None:
    """Have every launch from now on raise at its first fault; the message names the kernel's argument."""
    launches: list[Launch] = []
    execute, set_grid_idx = GridExecutor.__call__, InterpreterBuilder.set_grid_idx
    masked_load, masked_store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def watched_execute(self: Any, *args: Any, **kwargs: Any) -> None:
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        launches.append(Launch({name: arg for name, arg in named.items() if isinstance(arg, torch.Tensor)}))
        try:
            execute(self, *args, **kwargs)
        finally:
            launches.pop()

    def next_program(self: Any, *index: int) -> None:
        launches[-1].program += 1
        set_grid_idx(self, *index)

    def watched_load(self: Any, ptrs: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *rest: Any) -> Any:
        for access in launches[-1].accessed(ptrs, mask):
            launches[-1].load(*access)
        if other is None:
            dtype = _get_np_dtype(ptrs.get_element_ty())
            bits = np.full((*ptrs.data.shape, dtype.itemsize), 0xFF, np.uint8)
            other = TensorHandle(bits.view(dtype)[..., 0], ptrs.get_element_ty())
        return masked_load(self, ptrs, mask, other, *rest)

    def watched_store(self: Any, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *rest: Any) -> None:
        for access in launches[-1].accessed(ptrs, mask):
            launches[-1].store(*access)
        masked_store(self, ptrs, value, mask, *rest)

    GridExecutor.__call__, InterpreterBuilder.set_grid_idx = watched_execute, next_program
    # It would copy each storage onto itself: host tensors are computed on where they are.
    GridExecutor._restore_args_dev = lambda *_: None
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = watched_load, watched_store
