"""Every CPU kernel, in every element type and instruction set, against the float64 reference."""

import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import pacpu
from pacpu import _pacpu
from tests.reference import paged_attention as reference
from tests.reference.tolerances import TOLERANCES, assert_close

ISAS = ["portable", "avx2", "avx512", "avx512bf16", "amx"]
DOT_BF16_ISAS = ["avx512bf16", "amx"]  # native's arithmetic of bf16 takes subnormal numbers for zero there
DTYPES = list(TOLERANCES)
HALF_DTYPES = [torch.float16, torch.bfloat16]
BEST_ISA = pacpu.isa()


@pytest.fixture(autouse=True)
def restore_isa():
    yield
    _pacpu.select_isa(BEST_ISA)


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
            **options,
        )

    def check(self, **options) -> None:
        """Run; the new tokens must be stored bit by bit, nothing else touched, the output be right."""
        expected_cache = self.kv_cache.clone()
        reference.store_new_tokens(self.k, self.v, expected_cache, self.block_tables, self.seq_lens)
        expected = reference.paged_attention(self.q, expected_cache, self.block_tables, self.seq_lens, self.scale)
        self.out.fill_(torch.nan)
        self.run(**options)
        assert torch.equal(bits(self.kv_cache), bits(expected_cache))
        assert_close(self.out, expected)


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


SHAPES = {
    "smollm2": dict(num_heads=9, num_kv_heads=3, head_dim=64),
    "llama3": dict(num_heads=32, num_kv_heads=8, head_dim=128, seq_lens=(70, 1, 19)),
    "one-kv-head": dict(num_heads=4, num_kv_heads=1, head_dim=256, seq_lens=(33, 129)),
    "mha": dict(num_heads=4, num_kv_heads=4, head_dim=128, seq_lens=(64, 200, 3)),
    "qwen": dict(num_heads=14, num_kv_heads=2, head_dim=80, seq_lens=(5, 90)),
    "group-of-two": dict(num_heads=4, num_kv_heads=2, head_dim=72, seq_lens=(100, 7)),
    "tiny-head": dict(num_heads=5, num_kv_heads=1, head_dim=8, seq_lens=(100, 7)),
}


@every_variant
@every_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_matches_reference(kernel, isa, dtype, shape):
    use(isa, kernel, dtype)
    make_case(dtype, **SHAPES[shape]).check(kernel=kernel)


@every_variant
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_groups_and_head_dims(kernel, isa, dtype, head_dim):
    use(isa, kernel, dtype)
    for group in (1, 2, 3, 4, 5, 8):
        make_case(dtype, 2 * group, 2, head_dim, seq_lens=(1, 70)).check(kernel=kernel)


@every_variant
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 128])
def test_any_block_size(kernel, isa, dtype, block_size):
    use(isa, kernel, dtype)
    case = make_case(dtype, block_size=block_size, seq_lens=(1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129))
    case.check(kernel=kernel)
    case.check(kernel=kernel, num_threads=5)


@every_variant
@every_dtype
def test_any_number_of_threads(kernel, isa, dtype):
    use(isa, kernel, dtype)
    case = make_case(dtype, seq_lens=(1, 300, 16, 17, 90))
    for num_threads in (1, 2, 3, 7, 64, 300):
        case.check(kernel=kernel, num_threads=num_threads)


@pytest.mark.parametrize("num_kv_heads", [1, 4, 6, 7])
def test_few_blocks_for_many_threads(num_kv_heads):
    """KV heads are divided between the threads, in slices of any size."""
    case = make_case(torch.float16, num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, seq_lens=(40, 1, 9))
    for num_threads in (1, 2, 3, 4, 5, 16, 300):
        case.check(num_threads=num_threads)


@every_variant
@every_dtype
def test_peaked_scores(kernel, isa, dtype):
    """Scores far apart: weights vanish, and the running maximum moves."""
    use(isa, kernel, dtype)
    case = make_case(dtype, seq_lens=(400, 9), spread=12.0)
    expected_gap = (case.q.double().norm(dim=-1) * case.scale).max()
    assert expected_gap > 10
    case.check(kernel=kernel)
    case.check(kernel=kernel, num_threads=4)


@every_variant
@every_dtype
def test_long_context_of_far_scores(kernel, isa, dtype):
    """Scores below exp's range must weigh nothing, not overflow, and NaN in the context must show."""
    use(isa, kernel, dtype)
    case = make_case(dtype, num_heads=1, num_kv_heads=1, head_dim=8, seq_lens=(200,))
    case.q.fill_(1)
    case.k.fill_(1)
    case = replace(case, scale=1.0)
    blocks = case.block_tables[0, :13].long()
    case.kv_cache[blocks, :, 0] = -60.0  # scores of -480, the new token's is 8
    case.run(kernel=kernel)
    assert torch.equal(case.out, case.v)
    case.kv_cache[blocks[3], 0, 1, 5, 2] = torch.nan
    case.run(kernel=kernel)
    assert case.out[0, 0].isnan().tolist() == [False, False, True] + [False] * 5


@every_variant
@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_every_16_bit_number_survives(kernel, isa, dtype):
    """A context of one token returns its V: all 65,536 patterns are widened and narrowed, subnormals too."""
    use(isa, kernel, dtype)
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 8, 64)
    case = make_case(dtype, num_heads=8, num_kv_heads=8, seq_lens=(1,) * values.shape[0])
    replace(case, v=values).run(kernel=kernel)
    assert torch.equal(case.out.isnan(), values.isnan())
    if isa in DOT_BF16_ISAS and dtype == torch.bfloat16:
        values = torch.where(values.abs() < torch.finfo(dtype).tiny, 0, values)
    assert torch.equal(case.out.nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_output_is_rounded_to_nearest_even(dtype):
    """Equal scores average two values; many of the averages are ties."""
    pairs = torch.randint(-(2**15), 2**15, (2, 64, 8, 64)).to(torch.int16).view(dtype).nan_to_num(0.0, 0.0, 0.0)
    if dtype == torch.bfloat16:  # no subnormal numbers, which some instruction sets take for zero
        pairs = torch.where(pairs.abs() < 4 * torch.finfo(dtype).tiny, 0, pairs)
    case = make_case(dtype, num_heads=8, num_kv_heads=8, block_size=2, seq_lens=(2,) * 64)
    case = replace(case, q=torch.zeros(64, 8, 64, dtype=dtype), v=pairs[1])
    case.kv_cache[case.block_tables[:, 0].long(), :, 0] = 0
    case.kv_cache[case.block_tables[:, 0].long(), :, 1, 0] = pairs[0]
    case.run()
    assert torch.equal(case.out, ((pairs[0].float() + pairs[1].float()) / 2).to(dtype))


def test_random_problems():
    """Random shapes, kernels and thread counts, with the tolerance of their type."""
    generator = torch.Generator().manual_seed(torch.initial_seed() % 2**31)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    for _ in range(60):
        num_kv_heads = pick(1, 4)
        dtype = DTYPES[pick(0, 2)]
        case = make_case(
            dtype,
            num_heads=num_kv_heads * pick(1, 9),
            num_kv_heads=num_kv_heads,
            head_dim=8 * pick(1, 32),
            block_size=pick(1, 40),
            seq_lens=tuple(pick(1, 150) for _ in range(pick(0, 6))),
        )
        kernels = pacpu.kernels(dtype)
        kernel = kernels[pick(0, len(kernels) - 1)]
        case.check(kernel=kernel, num_threads=pick(1, 9))


@every_dtype
def test_contiguous_arguments_and_batch_of_none(dtype):
    case = make_case(dtype)
    replace(case, q=case.q.contiguous(), k=case.k.contiguous(), v=case.v.contiguous()).check()
    make_case(dtype, seq_lens=()).check()
    make_case(dtype, seq_lens=(21,)).check()


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_numpy_arrays_may_be_read_only(dtype):
    case = make_case(torch.from_numpy(np.empty(0, dtype)).dtype)
    expected_cache = case.kv_cache.clone()
    reference.store_new_tokens(case.k, case.v, expected_cache, case.block_tables, case.seq_lens)
    expected = reference.paged_attention(case.q, expected_cache, case.block_tables, case.seq_lens, case.scale)
    inputs = [getattr(case, name).numpy() for name in ("q", "k", "v")]
    tables = [case.block_tables.numpy(), case.seq_lens.numpy()]
    for array in inputs + tables:
        array.setflags(write=False)
    cache, out = case.kv_cache.numpy(), np.full(case.q.shape, np.nan, dtype)
    pacpu.paged_attention(*inputs, cache, *tables, out, case.scale)
    assert_close(torch.from_numpy(out), expected)

    out.setflags(write=False)
    with pytest.raises(ValueError, match="out must be writable"):
        pacpu.paged_attention(*inputs, cache, *tables, out, case.scale)


def changed(tensor: torch.Tensor, index: tuple[int, ...], value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


BAD_ARGUMENTS = {
    "dtype of q": (lambda c: {"q": c.q.double()}, r"q must have dtype .* not float64"),
    "dtype of k": (lambda c: {"k": c.k.bfloat16()}, r"k must have the dtype of q, float16, not bfloat16"),
    "dtype of v": (lambda c: {"v": c.v.float()}, r"v must have the dtype .* not float32"),
    "dtype of kv_cache": (lambda c: {"kv_cache": c.kv_cache.float()}, r"kv_cache .* not float32"),
    "dtype of out": (lambda c: {"out": c.out.float()}, r"out .* not float32"),
    "dtype of block_tables": (lambda c: {"block_tables": c.block_tables.long()}, r"block_tables .* not int64"),
    "dtype of seq_lens": (lambda c: {"seq_lens": c.seq_lens.long()}, r"seq_lens .* not int64"),
    "rank of q": (lambda c: {"q": c.q[0]}, r"q must have shape .* not \[9, 64\]"),
    "rank of kv_cache": (lambda c: {"kv_cache": c.kv_cache[0]}, r"kv_cache must have shape .* not \[3, 2, 16, 64\]"),
    "rank of block_tables": (lambda c: {"block_tables": c.seq_lens}, r"block_tables must have shape .* not \[5\]"),
    "shape of k": (lambda c: {"k": c.k[:, :2]}, r"k must have shape .* = \[5, 3, 64\], not \[5, 2, 64\]"),
    "shape of v": (lambda c: {"v": c.v[:4]}, r"v must have shape .* not \[4, 3, 64\]"),
    "shape of out": (lambda c: {"out": c.out[:4]}, r"out must have shape .* not \[4, 9, 64\]"),
    "shape of seq_lens": (lambda c: {"seq_lens": c.seq_lens[:4]}, r"seq_lens must have shape .* not \[4\]"),
    "shape of kv_cache": (
        lambda c: {"kv_cache": c.kv_cache[:, :, :1].contiguous()},
        r"kv_cache must have shape .* not \[22, 3, 1, 16, 64\]",
    ),
    "rows of block_tables": (
        lambda c: {"block_tables": c.block_tables[:3]},
        r"block_tables must have shape .* not \[3, 11\]",
    ),
    "heads": (lambda c: {"q": c.q[:, :8], "out": c.out[:, :8]}, r"q must have a multiple of .* 3 KV heads, not 8"),
    "head_dim": (lambda c: {"q": c.q[:, :, :60]}, r"q must have a head_dim .* not 60"),
    "strides of q": (
        lambda c: {"q": c.q.transpose(0, 1).contiguous().transpose(0, 1)},
        r"q must be contiguous within a row, but has strides \[64, 320, 1\]",
    ),
    "strides of kv_cache": (
        lambda c: {"kv_cache": c.kv_cache[::2]},
        r"kv_cache must have rows exactly 6144 .* not 12288",
    ),
    "overlapping out": (lambda c: {"out": c.out[:1].expand(5, -1, -1)}, r"out must have rows at least 576 .* not 0"),
    "seq_len of 0": (lambda c: {"seq_lens": changed(c.seq_lens, (2,), 0)}, r"seq_lens\[2\] must be .* not 0"),
    "seq_len too long": (lambda c: {"seq_lens": changed(c.seq_lens, (1,), 177)}, r"seq_lens\[1\] .* 176 .* not 177"),
    "negative block": (
        lambda c: {"block_tables": changed(c.block_tables, (3, 8), -1)},
        r"block_tables\[3, 8\] must be a block id below 22, not -1",
    ),
    "block out of range": (
        lambda c: {"block_tables": changed(c.block_tables, (0, 0), 22)},
        r"block_tables\[0, 0\] must be a block id below 22, not 22",
    ),
    "no array": (lambda c: {"v": [1.0, 2.0]}, r"v must be an array that supports DLPack, not <class 'list'>"),
    "no host memory": (lambda c: {"k": c.k.to("meta")}, r"k "),
    "num_threads of 0": (lambda c: {"num_threads": 0}, r"num_threads must be at least 1, not 0"),
    "num_threads no number": (lambda c: {"num_threads": "many"}, r"num_threads cannot be 'many'"),
    "scale no number": (lambda c: {"scale": None}, r"scale cannot be None"),
    "unknown kernel": (lambda c: {"kernel": "magic"}, r"kernel 'magic' is unknown; available: native"),
}


@pytest.mark.parametrize("problem", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_anything_is_written(problem):
    case = make_case(torch.float16)
    change, message = BAD_ARGUMENTS[problem]
    arguments = vars(case) | change(case)
    before = bits(case.kv_cache).clone()
    with pytest.raises(ValueError, match=message):
        pacpu.paged_attention(**arguments)
    assert torch.equal(bits(case.kv_cache), before)
    assert case.out.isnan().all()


def test_kernels_are_listed_with_reasons():
    assert pacpu.kernels()[0] == "native"
    assert not set(pacpu.kernels()) & set(pacpu.unavailable())
    assert all(pacpu.unavailable().values())
    for dtype in (torch.float16, "bfloat16", np.dtype(np.float32)):
        assert pacpu.default_kernel(dtype) in pacpu.kernels()
    with pytest.raises(ValueError, match="int8"):
        pacpu.default_kernel("int8")


def test_unavailable_kernel_is_refused_with_the_reason():
    use("portable", "native")
    with pytest.raises(ValueError, match=r"kernel 'ispc' is unavailable: .+"):
        make_case(torch.float16).run(kernel="ispc")


def test_calls_from_two_python_threads():
    """Different problems at once, each with a team of its own size, many times."""
    failures = []

    def work(case: Case, num_threads: int) -> None:
        try:
            for _ in range(30):
                case.check(num_threads=num_threads)
        except AssertionError as error:
            failures.append(error)

    cases = [make_case(torch.float16), make_case(torch.float32, num_heads=8, num_kv_heads=2, seq_lens=(250, 3))]
    threads = [threading.Thread(target=work, args=(case, n)) for case, n in zip(cases, (3, 2), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_python_runs_on_during_a_call():
    """The GIL is released: this thread gets to run between the start and the end of another one's call."""
    case = make_case(torch.float16, seq_lens=(16,))
    batch = 2000  # one block, looked at again and again
    case = replace(
        case,
        q=case.q.repeat(batch, 1, 1),
        k=case.k.repeat(batch, 1, 1),
        v=case.v.repeat(batch, 1, 1),
        block_tables=case.block_tables[:, :1].repeat(batch, 128),
        seq_lens=torch.full((batch,), 2048, dtype=torch.int32),
        out=case.out.repeat(batch, 1, 1),
    )
    span = []

    def work() -> None:
        span.append(time.perf_counter())
        case.run()
        span.append(time.perf_counter())

    thread = threading.Thread(target=work)
    thread.start()
    ticks = []
    while thread.is_alive():
        ticks.append(time.perf_counter())
        time.sleep(0.001)
    thread.join()
    start, end = span
    middle = [tick for tick in ticks if start + 0.2 * (end - start) < tick < end - 0.2 * (end - start)]
    assert len(middle) >= 2


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("num_threads", [1, 2])
def test_calls_do_not_leak(num_threads):
    case = make_case(torch.float32, seq_lens=(3, 20))
    arrays = [getattr(case, name).numpy() for name in ("q", "k", "v", "kv_cache", "block_tables", "seq_lens", "out")]
    arrays[0].setflags(write=False)

    def call_often(count: int) -> None:
        for _ in range(count):
            case.run(num_threads=num_threads)
            pacpu.paged_attention(*arrays, case.scale, num_threads=num_threads)
            with pytest.raises(ValueError):
                case.run(num_threads=0)

    call_often(500)
    before = resident_bytes()
    call_often(7000)
    assert resident_bytes() - before < 2**20


def test_many_calls_do_not_leak():
    """A leak of some ten bytes a call would show; NEO's kernel loses a kilobyte."""
    case = make_case(torch.float16, num_heads=1, num_kv_heads=1, head_dim=8, seq_lens=(1,))
    arguments = [array.numpy() for array in list(vars(case).values())[:7]]

    def call_often(count: int) -> None:
        for _ in range(count):
            _pacpu.paged_attention(*arguments, 1.0, 1, None)

    call_often(20_000)
    before = resident_bytes()
    call_often(200_000)
    assert resident_bytes() - before < 2**21


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forked_child_computes():
    """A child has none of its parent's helper threads and must not wait for them."""
    case = make_case(torch.float32)
    case.check(num_threads=4)
    expected, cache = case.out.clone(), case.kv_cache.clone()
    child = os.fork()
    if child == 0:
        case.out.fill_(torch.nan)
        case.run(num_threads=4)
        os._exit(0 if torch.allclose(case.out, expected) and torch.equal(bits(case.kv_cache), bits(cache)) else 1)
    deadline = time.monotonic() + 10
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert done == (child, 0)


def import_with_isa(isa: str) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", "import pacpu; print(pacpu.isa())"],
        env=os.environ | {"PACPU_ISA": isa},
        cwd=root,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("isa", ISAS)
def test_environment_chooses_the_instruction_set(isa):
    use(isa, "native")
    assert import_with_isa(isa).stdout.strip() == isa


def test_unavailable_instruction_sets_have_reasons_and_are_refused():
    assert BEST_ISA not in pacpu.unavailable_isas()
    assert "portable" not in pacpu.unavailable_isas()
    for isa, reason in pacpu.unavailable_isas().items():
        assert reason
        with pytest.raises(ValueError, match=f"'{isa}' cannot be used: {reason}; the best is '{BEST_ISA}'"):
            _pacpu.select_isa(isa)


def test_unknown_instruction_set_is_refused_on_import():
    result = import_with_isa("mmx")
    assert result.returncode != 0
    message = "ImportError: PACPU_ISA: unknown instruction set 'mmx'; use portable, avx2, avx512, avx512bf16 or amx"
    assert message in result.stderr
