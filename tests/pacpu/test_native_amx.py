"""The AMX path against the float64 reference, its instructions emulated: CPUs that have them are rare.

What the emulation cannot show is checked by pacpu itself on a CPU with AMX, before the path is first used.
"""

import ctypes
import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pacpu
from tests.pacpu.cases import Case, make_case, reference, shared_case, windowed_case
from tests.reference.tolerances import assert_close

ROOT = Path(__file__).parents[2]
FLAGS = "-std=gnu++17 -O1 -fno-math-errno -shared -fPIC -pthread -DPACPU_EMULATE_AMX -Ipacpu/include"
AVX512_BF16 = "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl -mavx512bf16"
SOURCES = (
    "tests/pacpu/emulated_amx.cpp pacpu/src/paged_attention.cpp pacpu/src/contexts.cpp pacpu/src/thread_team.cpp "
    "pacpu/src/rows/avx512.cpp"
)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if "avx512bf16" in pacpu.unavailable_isas():
        pytest.skip(f"avx512bf16: {pacpu.unavailable_isas()['avx512bf16']}")
    path = tmp_path_factory.mktemp("amx") / "emulated_amx.so"
    command = [*shlex.split(os.environ.get("CXX", "g++")), *shlex.split(f"{FLAGS} {AVX512_BF16} {SOURCES}")]
    subprocess.run([*command, "-o", str(path)], cwd=ROOT, check=True)
    return ctypes.CDLL(str(path)).emulated_amx


def check(emulated, case: Case, num_threads: int = 1, way: str = "L1", cost: int = 8) -> None:
    q, k, v = case.q.contiguous(), case.k.contiguous(), case.v.contiguous()
    expected_cache, out = case.kv_cache.clone(), torch.full_like(q, torch.nan)
    reference.store_new_tokens(k, v, expected_cache, case.block_tables, case.seq_lens)
    expected = case.expected(expected_cache)
    (batch, num_heads, head_dim), (_, num_kv_heads, _, block_size, _) = q.shape, case.kv_cache.shape
    sizes = [ctypes.c_int(size) for size in (batch, num_heads, num_kv_heads, head_dim, block_size)]
    arrays = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (q, k, v, out, case.kv_cache, case.block_tables)]
    emulated(
        *sizes,
        *arrays,
        ctypes.c_int64(case.block_tables.stride(0)),
        ctypes.c_void_p(case.seq_lens.data_ptr()),
        ctypes.c_float(case.scale),
        ctypes.c_int(2**31 - 1 if case.window is None else case.window),
        ctypes.c_void_p(None if case.sinks is None else case.sinks.data_ptr()),
        ctypes.c_int(num_threads),
        ctypes.c_int(pacpu.PREFETCHES.index(way)),
        ctypes.c_int(cost),
    )
    assert_close(out, expected)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 11, 16, 17])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256, 8, 136])
def test_groups_and_head_dims(emulated, group, head_dim):
    check(emulated, make_case(torch.bfloat16, 2 * group, 2, head_dim, seq_lens=(1, 70, 33)))


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 32, 128])
def test_block_sizes(emulated, block_size):
    case = make_case(torch.bfloat16, 8, 2, 128, block_size, (1, 15, 16, 17, 31, 32, 33, 64, 129))
    check(emulated, case)
    check(emulated, case, num_threads=5)


@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_windows_and_sinks(emulated, block_size):
    for window in (1, 13, 47, 64, 100):
        case = windowed_case(torch.bfloat16, window, block_size, num_heads=8, num_kv_heads=2, seq_lens=(1, 70, 129))
        case = replace(case, sinks=torch.randn(8))
        check(emulated, case)
        check(emulated, case, num_threads=5)


@pytest.mark.parametrize("way", pacpu.PREFETCHES)
def test_every_way_of_prefetching(emulated, way):
    check(emulated, make_case(torch.bfloat16, 8, 2, 128, seq_lens=(1, 70, 33)), num_threads=3, way=way)


@pytest.mark.parametrize("group", [1, 2])
def test_rows_that_share_blocks(emulated, group):
    case = shared_case(torch.bfloat16, num_heads=2 * group, num_kv_heads=2, head_dim=80)
    for num_threads in (1, 3):
        check(emulated, case, num_threads, cost=1)


def test_peaked_scores(emulated):
    check(emulated, make_case(torch.bfloat16, 8, 2, 128, seq_lens=(400, 9), spread=12.0), num_threads=3)


def test_infinite_values_stay_infinite(emulated):
    """Tokens that fill up a tile weigh zero and must not turn an infinity into NaN."""
    case = make_case(torch.bfloat16, 4, 1, 64, seq_lens=(1, 19))
    case.v[:, 0, 3] = torch.inf
    check(emulated, case)


def test_too_many_heads_for_the_stack(emulated):
    check(emulated, make_case(torch.bfloat16, 160, 80, 256, seq_lens=(20,)))
