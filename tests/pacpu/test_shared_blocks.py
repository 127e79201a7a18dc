"""Rows that share the blocks with which their contexts begin: those blocks are read once, where that pays."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import pacpu
from tests.pacpu.cases import (
    DTYPES,
    Case,
    check_at_the_same_time,
    every_dtype,
    every_variant,
    make_case,
    share,
    shared_case,
    use,
)

ROUNDS = 8
ALWAYS, SELDOM, NEVER = 1 / 8, 7 / 8, 1.0


@pytest.fixture(autouse=True)
def restored():
    """Costs are the process's: engines of other tests set them too."""
    set_costs(NEVER)
    yield
    set_costs(NEVER)


def set_costs(cost: float) -> None:
    for dtype in DTYPES:
        for heads in pacpu.HEADS:
            pacpu.set_shared_row_cost(dtype, heads, cost)


def output(case: Case, cost: float, **options) -> torch.Tensor:
    set_costs(cost)
    case.run(**options)
    return case.out.clone()


def are_blocks_shared(case: Case, cost: float) -> bool:
    """Other partial sums show in the last bits of float32."""
    return not torch.equal(output(case, cost), output(case, NEVER))


HEADS = {"MHA": dict(num_heads=4, num_kv_heads=4), "GQA": dict(num_heads=6, num_kv_heads=3)}


@every_variant
@every_dtype
@pytest.mark.parametrize("heads", HEADS)
def test_matches_reference(kernel, isa, dtype, heads):
    use(isa, kernel, dtype)
    case = shared_case(dtype, head_dim=40, **HEADS[heads])
    set_costs(ALWAYS)
    for num_threads in (1, 2, 3, 7, 64):
        case.check(kernel=kernel, num_threads=num_threads)


@every_variant
@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_any_block_size(kernel, isa, block_size):
    use(isa, kernel)
    set_costs(ALWAYS)
    case = shared_case(torch.float16, block_size, num_heads=6, num_kv_heads=3, head_dim=40)
    case.check(kernel=kernel)
    case.check(kernel=kernel, num_threads=5)


@every_variant
def test_more_rows_than_stand_side_by_side(kernel, isa):
    """Seventeen and more query heads of a KV head are several runs."""
    use(isa, kernel)
    set_costs(ALWAYS)
    for num_heads, num_rows in ((2, 40), (6, 17), (36, 3)):
        case = make_case(torch.float16, num_heads, 2, 32, seq_lens=(700, *range(640, 639 + num_rows)))
        share(case, list(range(num_rows)), 40)
        case.check(kernel=kernel)
        case.check(kernel=kernel, num_threads=3)


def test_random_trees():
    for _ in range(40):
        pick = lambda low, high: int(torch.randint(low, high + 1, ()))  # noqa: E731
        dtype, num_kv_heads, block_size = DTYPES[pick(0, 2)], pick(1, 4), pick(1, 20)
        lengths = sorted((pick(1, 900) for _ in range(pick(2, 9))), reverse=True)
        case = make_case(dtype, num_kv_heads * pick(1, 3), num_kv_heads, 8 * pick(1, 20), block_size, tuple(lengths))
        for row in range(1, len(lengths)):  # behind an earlier row, which is longer
            source, depth = pick(0, row - 1), pick(0, lengths[row] // block_size)
            case.block_tables[row, :depth] = case.block_tables[source, :depth]
        set_costs(pick(1, 7) / 8)
        kernels = pacpu.kernels(dtype)
        case.check(kernel=kernels[pick(0, len(kernels) - 1)], num_threads=pick(1, 9))


@pytest.mark.parametrize(
    ("heads", "num_blocks", "pays_with"),
    [
        ("MHA", 7, set()),  # five rows and a cost of an eighth: 112 tokens, of each row 0.7 saved, are less than 80
        ("MHA", 8, {ALWAYS}),
        ("MHA", 50, {ALWAYS}),  # seven eighths: 0.1 saved
        ("MHA", 51, {ALWAYS, SELDOM}),
        ("GQA", 14, set()),  # two query heads to a KV head: as many tokens again
        ("GQA", 15, {ALWAYS}),
        ("GQA", 100, {ALWAYS}),
        ("GQA", 101, {ALWAYS, SELDOM}),
    ],
)
def test_blocks_are_shared_only_where_that_pays(heads, num_blocks, pays_with):
    case = make_case(torch.float32, head_dim=8, seq_lens=(num_blocks * 16 + 1,) * 5, **HEADS[heads])
    assert not are_blocks_shared(case, ALWAYS)  # there are none
    share(case, [0, 1, 2, 3, 4], num_blocks)
    assert {cost for cost in (ALWAYS, SELDOM) if are_blocks_shared(case, cost)} == pays_with


def test_a_partial_block_is_not_shared():
    case = make_case(torch.float32, num_heads=4, num_kv_heads=4, block_size=512, seq_lens=(511, 511))
    share(case, [0, 1], 1)
    assert not are_blocks_shared(case, ALWAYS)
    case = make_case(torch.float32, num_heads=4, num_kv_heads=4, block_size=512, seq_lens=(513, 513))
    share(case, [0, 1], 1)
    assert are_blocks_shared(case, ALWAYS)


@pytest.mark.parametrize("heads", HEADS)
def test_results_are_the_same_each_time(heads):
    case = shared_case(torch.float32, **HEADS[heads])
    assert are_blocks_shared(case, ALWAYS)
    for num_threads in (1, 2, 5):
        first = output(case, ALWAYS, num_threads=num_threads)
        assert all(torch.equal(first, output(case, ALWAYS, num_threads=num_threads)) for _ in range(20))


def test_calls_at_the_same_time():
    set_costs(ALWAYS)
    cases = [shared_case(dtype, **shape) for dtype, shape in zip(DTYPES[:2], HEADS.values(), strict=True)]
    check_at_the_same_time(*cases, rounds=ROUNDS)


def test_without_a_measurement_no_blocks_are_shared():
    each = "pacpu.shared_row_cost(d, h) for d in ('float16', 'bfloat16', 'float32') for h in pacpu.HEADS"
    ask = f"import pacpu; print({{{each}}})"
    root = Path(__file__).parents[2]
    answer = subprocess.run([sys.executable, "-c", ask], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == f"{{{NEVER}}}"


def test_a_cost_holds_for_its_type_heads_and_instruction_set():
    use("portable", "native")
    pacpu.set_shared_row_cost(torch.float16, "GQA", 0.52)
    assert pacpu.shared_row_cost("float16", "GQA") == 0.5
    assert pacpu.shared_row_cost("float16", "MHA") == pacpu.shared_row_cost("bfloat16", "GQA") == NEVER
    pacpu.set_shared_row_cost(torch.float16, "GQA", 0.01)
    assert pacpu.shared_row_cost("float16", "GQA") == ALWAYS
    set_costs(NEVER)
    with pytest.raises(ValueError, match=r"cost must be above 0 and at most 1, not 1\.5"):
        pacpu.set_shared_row_cost("float16", "GQA", 1.5)
