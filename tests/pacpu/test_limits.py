"""Numbers that no machine has: every entry point refuses them by a sentence that names the argument and the limit."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pacpu
from pacpu import _pacpu, rows
from tests.pacpu.cases import BEST_ISA, use
from tests.pacpu.random_calls import Call, drawn, name_of, run

ROOT = Path(__file__).parents[2]
BF16 = torch.bfloat16
HUGE = [2**29, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64]
NEGATIVE = [-1, -(2**31), -(2**63), -(2**64)]
MOST_THREADS, MOST_SIZE = 4096, 2**28
WITH_THREADS = {"Crossing", "PackedCodes.linear", "PackedCodes.write_out", "PackedExperts", "argmax", "gather_blocks"}
WITH_THREADS |= {
    "gather_kv",
    "linear",
    "norm_heads",
    "paged_attention",
    "prompt_attention",
    "read_bandwidth",
    "rms_norm",
}
WITH_THREADS |= {"convolve", "delta_rule", "rotary", "scatter_blocks", "silu_and_mul", "store_kv", "zero"}
SIZES = {
    "packed_shape": {"out_features", "in_features"},
    "PackedCodes.__init__": {"out_features", "in_features"},
    "PackedExperts.__init__": {"num_experts", "hidden_size", "ffn_size"},
    "Crossing.__init__": {"attention_size", "intermediate_size", "out_features", "rotated_heads", "head_dim"},
}


@pytest.fixture(scope="module")
def calls() -> dict[str, Call]:
    """One that fits of each entry point, with some rows, by name; of classes also their makers."""
    found: dict[str, Call] = {}
    for number in range(300):
        call = drawn(random.Random(number))
        arrays = [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]
        if all(array.numel() for array in arrays) and call.arguments.get("prompts") != []:
            found.setdefault(name_of(call), call)
    _pacpu.select_isa(BEST_ISA)
    return found


def test_no_entry_point_is_left_out(calls):
    assert {name for name, call in calls.items() if "num_threads" in call.arguments} == WITH_THREADS
    for name, sizes in SIZES.items():
        assert sizes <= set(calls[name].arguments)


def check_refused(call: Call, argument: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{argument} {message}"):
        call.function(**call.arguments | {argument: value})


def test_thread_counts(calls):
    for name in WITH_THREADS:
        for count in (*HUGE, MOST_THREADS + 1):
            check_refused(calls[name], "num_threads", count, f"must be at most {MOST_THREADS}, not {count}$")
        for count in (0, *NEGATIVE):
            check_refused(calls[name], "num_threads", count, f"must be at least 1, not {count}$")
        for count in ("2", 2.0, None):
            check_refused(calls[name], "num_threads", count, f"cannot be {count!r}$")


def test_as_many_threads_as_there_may_be_give_the_result_of_one():
    x, one, many = torch.randn(300, 700), *torch.full((2, 300, 350), torch.nan)
    rows.silu_and_mul(x, one)
    rows.silu_and_mul(x, many, num_threads=MOST_THREADS)
    assert torch.equal(one, many)


def test_sizes(calls):
    for name, sizes in SIZES.items():
        for size in sizes:
            most = MOST_SIZE // 2 if size in ("intermediate_size", "ffn_size") else MOST_SIZE
            for number in (*HUGE, most + 1):
                check_refused(calls[name], size, number, f"must be at most {most}, not {number}$")
            for number in NEGATIVE:
                check_refused(calls[name], size, number, f"must be at least [01], not {number}$")
            if size not in ("rotated_heads", "head_dim"):
                check_refused(calls[name], size, 0, "must be at least 1, not 0$")


def test_rows_per_read():
    """Of the 16 query heads that are attended with one read of a block."""
    assert [pacpu.rows_per_read(*heads) for heads in ((4, 4), (8, 2), (32, 8), (16, 1), (40, 2))] == [16, 4, 4, 1, 1]
    for heads in ((4, 0), (1, 2), (0, 1), (0, 0), (-4, 2), (4, -2), (4, 3), (-(2**31), -1)):
        with pytest.raises(ValueError, match="num_heads must be a multiple of num_kv_heads, both at least 1"):
            pacpu.rows_per_read(*heads)
    for number in HUGE:
        with pytest.raises(ValueError, match=f"num_heads must be at most {MOST_SIZE}, not {number}"):
            pacpu.rows_per_read(number, 1)
        with pytest.raises(ValueError, match=f"num_kv_heads must be at most {MOST_SIZE}, not {number}"):
            pacpu.rows_per_read(4, number)


def test_windows_of_any_size_reach_all_tokens():
    q, cache, tables = torch.randn(1, 1, 8), torch.zeros(1, 1, 2, 16, 8), torch.zeros(1, 1).int()
    for window in (16, 2**31 - 1, 2**31, 2**63 - 1):
        out = torch.full((1, 1, 8), torch.nan)
        pacpu.paged_attention(q, q, q, cache, tables, torch.tensor([1]).int(), out, 0.1, window=window)
        torch.testing.assert_close(out, q)


def test_contexts_and_heads_of_attention():
    cache, tables = torch.zeros(1, 1, 2, 1 << 20, 8, dtype=torch.float16), torch.zeros(1, 1 << 9).int()
    q, out = torch.zeros(2, 1, 1, 8).half()
    for length in (MOST_SIZE + 1, 2**29, 2**31 - 1):
        with pytest.raises(ValueError, match=rf"seq_lens\[0\] must be between 1 and .*, not {length}"):
            pacpu.paged_attention(q, q, q, cache, tables, torch.tensor([length]).int(), out, 1.0)
    q = torch.zeros(1, (1 << 15) + 1, 8)
    with pytest.raises(ValueError, match=r"q must have at most 262144 elements in a row .*, not 262152"):
        pacpu.paged_attention(
            q, q[:, :1], q[:, :1], torch.zeros(1, 1, 2, 1, 8), tables, torch.ones(1).int(), q.clone(), 1.0
        )


def test_contexts_and_heads_of_prompts():
    """An array may repeat its tokens, so that a context needs no memory."""
    q = torch.zeros(1, 1, 8, dtype=BF16)
    for kv_heads, context in (
        (1, 2**31 - 1),
        (1, 2**31 - 64),
        (1, 2**29),
        (1, MOST_SIZE + 1),
        (2, MOST_SIZE),
        (1, 2**31),
    ):
        k = torch.zeros(1, 1, 8, dtype=BF16).expand(kv_heads, context, 8)
        with pytest.raises(ValueError, match=f"k (is too large|must have at most).*{MOST_SIZE}"):
            rows.prompt_attention([(q.expand(1, kv_heads, 8).contiguous(), k, k, q)], 1.0)
    q = torch.zeros(1, (1 << 17) + 1, 2, dtype=BF16)
    with pytest.raises(ValueError, match=r"q must have at most 262144 elements in a row .*, not 262146"):
        rows.prompt_attention([(q, q[:, :1], q[:, :1], q)], 1.0)


def test_products_without_inputs_are_refused(calls):
    for x, out in ((0, 3), (3, 0)):
        with pytest.raises(ValueError, match=r"a packed matrix must have from 1 to 268435456 (in|out)_features, not 0"):
            rows.linear(*(torch.zeros(2, n, dtype=BF16) for n in (x, 8)), None, torch.zeros(2, out, dtype=BF16))
        with pytest.raises(ValueError, match="a packed matrix must have from 1"):
            rows.pack_matrix(torch.zeros(out, x, dtype=BF16), torch.zeros(1, dtype=BF16))
    with pytest.raises(ValueError, match="norm must have from 1 to 268435456 elements, not 0"):
        rows.Crossing(**calls["Crossing.__init__"].arguments | {"norm": torch.zeros(0, dtype=BF16)})


WITHOUT_MEMORY = """
import resource
from pathlib import Path
import pytest, torch
from pacpu import rows
from tests.pacpu.cases import use

use("avx512", "native")
ones = lambda *shape: torch.ones(*shape, dtype=torch.bfloat16)
x, packed, out = ones(128, 1 << 17), ones(rows.packed_shape(96, 1 << 17)), ones(128, 96)
rows.linear(x[:1, :8], ones(rows.packed_shape(96, 8)), None, out[:1], num_threads=2)
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (24 << 20), resource.RLIM_INFINITY))
with pytest.raises(MemoryError):
    rows.linear(x, packed, None, out, num_threads=2)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
rows.linear(x, packed, None, out, num_threads=2)
assert (out == 1 << 17).all()
"""


def test_a_thread_that_gets_no_memory_fails_its_call_alone():
    """A product of 128 rows widens them, by each of its threads: 64 MiB here. Later calls are served again. It is in a
    process of its own, since a thread keeps such memory and would need no more."""
    use("avx512", "native")
    done = subprocess.run([sys.executable, "-c", WITHOUT_MEMORY], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_random_calls_end_in_a_result_or_a_sentence():
    """``python -m tests.pacpu.random_calls`` makes many more."""
    outcomes = run(0, 300)
    assert sum(outcomes.values()) == 300
    assert not [what for what in outcomes if not what.endswith(("done", "Error"))]
