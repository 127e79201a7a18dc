"""Calls of paged attention for the tests: random arguments, and which kernels and instruction sets there are."""

import threading
from dataclasses import dataclass, replace
from typing import Protocol

import pytest
import torch

import pacpu
from pacpu import _pacpu
from tests.reference import paged_attention as reference
from tests.reference.tolerances import TOLERANCES, assert_close

ISAS = ["portable", "avx2", "avx512", "avx512bf16", "amx"]
DTYPES = list(TOLERANCES)
HALF_DTYPES = [torch.float16, torch.bfloat16]
BEST_ISA = pacpu.isa()
USABLE_ISAS = [isa for isa in ISAS if isa not in pacpu.unavailable_isas()]


def use(isa: str, kernel: str, dtype: torch.dtype | None = None) -> None:
    """Switch to an instruction set; skip the test where the CPU, the build or the kernel cannot do it."""
    try:
        _pacpu.select_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))
    if kernel not in pacpu.kernels():
        pytest.skip(f"{kernel}: {pacpu.unavailable()[kernel]}")
    if kernel not in pacpu.kernels(dtype):
        pytest.skip(f"{kernel} does not compute in {dtype}")


VARIANTS = [("native", isa) for isa in ISAS] + [(kernel, isa) for kernel in ("llamafile", "ispc") for isa in ISAS[1:3]]
every_variant = pytest.mark.parametrize(("kernel", "isa"), VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@dataclass(frozen=True)
class Case:
    """Arguments of a call. Everything that the call should not read is NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    out: torch.Tensor
    scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None

    def run(self, **options) -> None:
        pacpu.paged_attention(
            self.q,
            self.k,
            self.v,
            self.kv_cache,
            self.block_tables,
            self.seq_lens,
            self.out,
            self.scale,
            window=self.window,
            sinks=self.sinks,
            **options,
        )

    def check(self, **options) -> None:
        """Run; the new tokens must be stored bit by bit, nothing else touched, the output be right."""
        expected_cache = self.kv_cache.clone()
        reference.store_new_tokens(self.k, self.v, expected_cache, self.block_tables, self.seq_lens)
        expected = self.expected(expected_cache)
        self.out.fill_(torch.nan)
        self.run(**options)
        assert torch.equal(bits(self.kv_cache), bits(expected_cache))
        assert_close(self.out, expected)

    def expected(self, kv_cache: torch.Tensor, q: torch.Tensor | None = None) -> torch.Tensor:
        """The output in float64, from a cache that holds the new tokens too."""
        how = self.scale, self.window, self.sinks
        return reference.paged_attention(self.q if q is None else q, kv_cache, self.block_tables, self.seq_lens, *how)


class Checked(Protocol):
    def check(self, **options) -> None: ...


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def make_case(
    dtype: torch.dtype,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    seq_lens: tuple[int, ...] = (1, 37, 16, 130, 65),
    spread: float = 1.0,
) -> Case:
    """Random arguments: shuffled block table, unused ids out of range, q, k, v slices of a fused QKV matrix."""
    batch = len(seq_lens)
    blocks_used = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(blocks_used) + 3
    max_blocks = max(blocks_used, default=0) + 2
    ids = iter(torch.randperm(num_blocks).tolist())
    block_tables = torch.full((batch, max_blocks), 2**31 - 1, dtype=torch.int32)
    kv_cache = torch.full((num_blocks, num_kv_heads, 2, block_size, head_dim), torch.nan, dtype=dtype)
    for request, seq_len in enumerate(seq_lens):
        for index in range(blocks_used[request]):
            block = next(ids)
            block_tables[request, index] = block
            cached = min(block_size, seq_len - 1 - index * block_size)
            kv_cache[block, :, :, :cached] = torch.randn(num_kv_heads, 2, cached, head_dim).to(dtype)
    heads = [num_heads, num_kv_heads, num_kv_heads]
    qkv = torch.randn(batch, sum(heads), head_dim).to(dtype)
    q, k, v = qkv.split(heads, dim=1)
    q *= spread
    out = torch.full((batch, num_heads + 1, head_dim), torch.nan, dtype=dtype)[:, :num_heads]
    return Case(q, k, v, kv_cache, block_tables, torch.tensor(seq_lens, dtype=torch.int32), out, head_dim**-0.5)


def windowed_case(dtype: torch.dtype, window: int, block_size: int = 16, **shape) -> Case:
    """What the window does not reach is NaN, and the ids of blocks before it are out of range."""
    case = make_case(dtype, block_size=block_size, **shape)
    for table, seq_len in zip(case.block_tables, case.seq_lens.tolist(), strict=True):
        first, slots = divmod(max(0, seq_len - window), block_size)
        case.kv_cache[table[:first].long()] = torch.nan
        case.kv_cache[table[first], :, :, :slots] = torch.nan
        table[:first] = 2**31 - 1
    return replace(case, window=window)


def share(case: Case, rows: list[int], num_blocks: int) -> None:
    """Have rows begin with the blocks of the first one, whose context is longer."""
    first, *others = rows
    for row in others:
        case.block_tables[row, :num_blocks] = case.block_tables[first, :num_blocks]


def shared_case(dtype: torch.dtype, block_size: int = 16, **shape) -> Case:
    """A tree: rows 0 to 6 share a run of blocks, all but row 5 a second one, rows 0 to 2 a third one, each of some 288
    tokens, in lengths of every kind. Row 7 has a block of its own and then shared ones, row 8 shares nothing."""
    run = -(-288 // block_size)
    lengths = (
        3 * run * block_size + 40,  # blocks of its own behind all runs
        3 * run * block_size,  # ends with the third run
        3 * run * block_size + 1,
        2 * run * block_size,  # ends with the second run
        2 * run * block_size - block_size + (block_size + 1) // 2,  # ends within the second run's last block
        run * block_size,
        2 * run * block_size + 70,
        run * block_size + 3,
        5,
    )
    case = make_case(dtype, block_size=block_size, seq_lens=lengths, **shape)
    share(case, [0, 1, 2], 3 * run)
    share(case, [0, 3, 4, 6], 2 * run)
    share(case, [0, 5], run)
    case.block_tables[7, 1:run] = case.block_tables[0, 1:run]
    order = [3, 7, 0, 5, 8, 2, 6, 1, 4]
    rows = {name: getattr(case, name)[order] for name in ("q", "k", "v", "block_tables", "seq_lens", "out")}
    return replace(case, **rows)


def check_at_the_same_time(first: Checked, second: Checked, rounds: int) -> None:
    """Check two cases again and again, each from a Python thread of its own with a team of another size."""
    failures = []

    def work(case: Checked, num_threads: int) -> None:
        try:
            for _ in range(rounds):
                case.check(num_threads=num_threads)
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=turn) for turn in ((first, 3), (second, 2))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
