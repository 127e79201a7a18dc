"""How the native kernel prefetches: a setting of the process that changes no result."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pacpu
from tests.pacpu.cases import DTYPES, ISAS, make_case, use

# Blocks of 128 KiB and more, which a processor may read ahead by itself, and small ones.
SHAPES = {
    "MHA": (
        dict(num_heads=32, num_kv_heads=32, head_dim=128, seq_lens=(70, 1, 33)),
        dict(num_heads=3, num_kv_heads=3, head_dim=72, block_size=5, seq_lens=(1, 64, 130)),
    ),
    "GQA": (
        dict(num_heads=32, num_kv_heads=8, head_dim=128, seq_lens=(70, 1, 33)),
        dict(num_heads=15, num_kv_heads=3, head_dim=72, block_size=5, seq_lens=(1, 64, 130)),
    ),
}


@pytest.fixture(autouse=True)
def restored():
    yield
    for dtype in DTYPES:
        for heads in pacpu.HEADS:
            pacpu.set_prefetch(dtype, heads, "L1")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", pacpu.PREFETCHES)
@pytest.mark.parametrize("heads", pacpu.HEADS)
def test_every_way_of_prefetching_matches_the_reference(isa, dtype, way, heads):
    use(isa, "native", dtype)
    pacpu.set_prefetch(dtype, heads, way)
    for shape in SHAPES[heads]:
        for num_threads in (1, 3):
            make_case(dtype, **shape).check(kernel="native", num_threads=num_threads)


def test_without_a_measurement_all_is_prefetched_into_the_first_level():
    ask = "import pacpu; print({pacpu.prefetch(d, h) for d in ('float16', 'bfloat16', 'float32') for h in pacpu.HEADS})"
    root = Path(__file__).parents[2]
    answer = subprocess.run([sys.executable, "-c", ask], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "{'L1'}"


def test_a_choice_holds_for_its_type_heads_and_instruction_set():
    use("portable", "native")
    pacpu.set_prefetch(torch.float16, "GQA", "none")
    assert pacpu.prefetch("float16", "GQA") == "none"
    assert pacpu.prefetch("float16", "MHA") == pacpu.prefetch("bfloat16", "GQA") == "L1"
    use("avx2", "native")
    before = pacpu.prefetch("float16", "GQA")
    pacpu.set_prefetch("float16", "GQA", "L2")
    use("portable", "native")
    assert pacpu.prefetch("float16", "GQA") == "none"
    use("avx2", "native")
    assert pacpu.prefetch("float16", "GQA") == "L2"
    pacpu.set_prefetch("float16", "GQA", before)
    use("portable", "native")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int4", "MHA", "L1"), "dtype must be float32, float16 or bfloat16, not int4"),
        (("float16", "MQA", "L1"), "heads must be MHA or GQA, not MQA"),
        (("float16", "MHA", "L3"), "prefetch must be none, L2 or L1, for int8 MHA also L2 AVX2 or L1 AVX2, not L3"),
        (("float16", "MHA", "L1 AVX2"), "prefetch must be none, L2 or L1, .* not L1 AVX2"),
        (("int8", "GQA", "L1 AVX2"), "prefetch must be none, L2 or L1, .* not L1 AVX2"),
    ],
)
def test_a_choice_that_there_is_not_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pacpu.set_prefetch(*arguments)
