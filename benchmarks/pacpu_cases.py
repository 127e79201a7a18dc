"""The cases of decode attention in bench_pacpu.py, the memory that they read, and the kernels that compute them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch

import pacpu
from pacpu import _pacpu, int8
from swiftllm.kv.pools import host_tensor

HEAD_DIM = 128
BLOCK_SIZE = 16
HEADS = {"GQA": (32, 8), "MHA": (32, 32)}  # query heads, KV heads
ALL_WAYS = pacpu.prefetches("int8", "MHA")
ISAS = ("amx", "avx512bf16", "avx512", "avx2")
INT8 = "int8"
BF16_ISAS = ISAS[:2]  # these differ from AVX-512 only in the native kernel for bfloat16
BF16_AND_FP16_BITS = 0x3800, 0x4000  # numbers from 0.5 to 2 as float16, from 2^-15 to 2 as bfloat16


@dataclass(frozen=True)
class Shape:
    """A batch of contexts: all equal, or (`ragged`) between 1 and twice the mean `context` (tokens).

    With the first `shared` tokens they are the same: the full blocks of these are.
    """

    batch: int
    context: int
    ragged: bool = False
    shared: int = 0

    def __str__(self) -> str:
        return f"{self.batch}x{'~' if self.ragged else ''}{self.context}" + (
            f" ({self.shared} shared)" if self.shared else ""
        )

    @property
    def shared_blocks(self) -> int:
        return self.shared // BLOCK_SIZE

    def seq_lens(self) -> list[int]:
        if not self.ragged:
            return [self.context] * self.batch
        step = (2 * self.context - 1) / max(1, self.batch - 1)
        lengths = [1 + round(i * step) for i in range(self.batch)]
        order = torch.randperm(self.batch, generator=torch.Generator().manual_seed(0)).tolist()
        return [lengths[i] for i in order]


@dataclass(frozen=True)
class Case:
    heads: str  # a key of HEADS
    dtype: str  # of the KV cache; with "int8" queries are float16
    shape: Shape
    threads: int

    @property
    def num_bytes(self) -> int:
        """Bytes of K and V that one call must read: all cached tokens, once per KV head."""
        shared = (self.shape.batch - 1) * self.shape.shared_blocks * BLOCK_SIZE
        return (sum(self.shape.seq_lens()) - shared) * self.bytes_per_token

    @property
    def bytes_per_token(self) -> int:
        codes = int8.head_bytes(BLOCK_SIZE, HEAD_DIM) // BLOCK_SIZE
        return HEADS[self.heads][1] * (codes if self.dtype == INT8 else 2 * HEAD_DIM * 2)

    @property
    def query_dtype(self) -> torch.dtype:
        return torch.float16 if self.dtype == INT8 else getattr(torch, self.dtype)

    @property
    def bytes_held(self) -> int:
        """Bytes of the blocks that hold one layer of the case."""
        blocks = sum(-(-n // BLOCK_SIZE) for n in self.shape.seq_lens())
        shared = (self.shape.batch - 1) * self.shape.shared_blocks
        return (blocks - shared) * BLOCK_SIZE * self.bytes_per_token


class Memory:
    """One range of host memory, which holds the caches of as many layers of a case as fit."""

    def __init__(self, num_bytes: int) -> None:
        self.bits = host_tensor((num_bytes // 2,), torch.int16)
        # Random bits that are moderate numbers in both 16-bit types; a prime period makes blocks differ.
        self.pattern = torch.randint(*BF16_AND_FP16_BITS, (999_983,), dtype=torch.int16)
        self.pattern[torch.rand(self.pattern.shape) < 0.5] |= -0x8000
        for at in range(0, self.bits.numel(), self.pattern.numel()):
            part = self.bits[at : at + self.pattern.numel()]
            part.copy_(self.pattern[: part.numel()])

    @property
    def num_bytes(self) -> int:
        return self.bits.numel() * 2

    def elements(self, dtype: str) -> torch.Tensor:
        return self.codes if dtype == INT8 else self.bits.view(getattr(torch, dtype))

    @cached_property
    def codes(self) -> torch.Tensor:
        """Memory of its own for int8 caches: as many blocks as the other has. Scales are equal."""
        tile = int8.tile_bytes(HEAD_DIM)
        codes = host_tensor((self.num_bytes // (4 * HEAD_DIM * int8.TILE_TOKENS) * tile,), torch.uint8)
        tiles = codes.view(-1, tile)
        pattern = torch.randint(1, 256, (9973, tile), dtype=torch.uint8)
        pattern[:, -2 * 4 * int8.TILE_TOKENS :] = torch.full((2 * int8.TILE_TOKENS,), 2.0**-6).view(torch.uint8)
        for at in range(0, len(tiles), len(pattern)):
            part = tiles[at : at + len(pattern)]
            part.copy_(pattern[: len(part)])
        return codes

    def new_tokens(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V `[batch, num_kv_heads, head_dim]` for every call to store.

        They stay in the memory and are later read as the other type, so their bits are moderate numbers in both. The
        bits of 3 in float16 would be a number in the hundreds in bfloat16.
        """
        shape = (case.shape.batch, HEADS[case.heads][1], HEAD_DIM)
        count = math.prod(shape)
        k, v = self.pattern[:count], self.pattern[-count:]
        return tuple(bits.view(case.query_dtype).view(shape) for bits in (k, v))

    def paged(
        self, case: Case, num_layers: int, block_size: int, *, as_bytes: bool = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A cache `[num_blocks, num_kv_heads, 2, block_size, head_dim]`, or an int8 one, and each layer's block table.

        The blocks are scattered over the memory, as in a cache that has been in use. With `as_bytes` an int8 case's
        cache has the first shape, in uint8.
        """
        num_kv_heads = HEADS[case.heads][1]
        elements = self.elements(case.dtype)
        is_int8 = case.dtype == INT8 and not as_bytes
        shape = (int8.head_bytes(block_size, HEAD_DIM),) if is_int8 else (2, block_size, HEAD_DIM)
        block_elements = num_kv_heads * math.prod(shape)
        num_blocks = elements.numel() // block_elements
        cache = elements[: num_blocks * block_elements]
        counts = -(-torch.tensor(case.shape.seq_lens()) // block_size)
        shared = case.shape.shared // block_size
        own = counts - shared
        per_layer = shared + int(own.sum())
        num_layers = min(num_layers, num_blocks // per_layer)
        ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))[: num_layers * per_layer]
        ids = ids.int().view(num_layers, per_layer)
        tables = torch.zeros(num_layers, case.shape.batch, int(counts.max()), dtype=torch.int32)
        tables[:, :, :shared] = ids[:, None, :shared]
        tables[:, :, shared:][:, torch.arange(int(own.max())) < own[:, None]] = ids[:, shared:]
        return cache.view(num_blocks, num_kv_heads, *shape), list(tables)


@dataclass(frozen=True)
class Contender:
    """What computes a case: a kernel of pacpu with an instruction set, or a peer from another project.

    `prepare(case, memory, num_layers)` returns a function that computes attention over a layer by its number, or None
    if the contender does not support the case.
    """

    kernel: str
    isa: str
    prepare: Callable[[Case, Memory, int], Callable[[int], torch.Tensor] | None]

    @property
    def label(self) -> str:
        return f"{self.kernel} {self.isa}"

    @contextmanager
    def selected(self) -> Iterator[None]:
        """Context in which pacpu uses the contender's instruction set."""
        before = pacpu.isa()
        if self.isa in ISAS:
            _pacpu.select_isa(self.isa)
        try:
            yield
        finally:
            _pacpu.select_isa(before)


def usable_isas() -> list[str]:
    """Instruction sets of this CPU that have their own kernels, best first."""
    before, usable = pacpu.isa(), []
    for isa in ISAS:
        try:
            _pacpu.select_isa(isa)
        except ValueError:
            continue
        usable.append(isa)
    _pacpu.select_isa(before)
    return usable


def kernel_contenders() -> list[Contender]:
    """Every kernel of pacpu with every instruction set of this CPU."""
    found = []
    for isa in usable_isas():
        with Contender("", isa, lambda *_: None).selected():
            names = ["native"] if isa in BF16_ISAS else pacpu.kernels()
        found += [Contender(kernel, isa, partial(prepare_pacpu, kernel, isa)) for kernel in names]
    return found


def prepare_pacpu(
    kernel: str, isa: str, case: Case, memory: Memory, num_layers: int
) -> Callable[[int], torch.Tensor] | None:
    is_computed = kernel == "native" if case.dtype == INT8 else kernel in pacpu.kernels(case.dtype)
    if not is_computed or (isa in BF16_ISAS and case.dtype != "bfloat16"):
        return None
    seq_lens = torch.tensor(case.shape.seq_lens(), dtype=torch.int32)
    cache, layers = memory.paged(case, num_layers, BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(case.shape.batch, HEADS[case.heads][0], HEAD_DIM, generator=generator).to(case.query_dtype)
    k, v = memory.new_tokens(case)
    out = torch.empty_like(q)
    scale = HEAD_DIM**-0.5

    def attend(layer: int) -> torch.Tensor:
        pacpu.paged_attention(
            q, k, v, cache, layers[layer], seq_lens, out, scale, num_threads=case.threads, kernel=kernel
        )
        return out

    return attend


def make_cases(shapes: Sequence[Shape], threads: Sequence[int], dtypes: Sequence[str]) -> list[Case]:
    return [
        Case(heads, dtype, shape, count)
        for heads in ("GQA", "MHA")
        for dtype in dtypes
        for count in threads
        for shape in shapes
    ]
