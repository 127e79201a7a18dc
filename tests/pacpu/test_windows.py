"""Windows and sinks, for every CPU kernel, element type and instruction set, against the float64 reference."""

from dataclasses import replace

import pytest
import torch

import pacpu
from tests.pacpu.cases import DTYPES, every_dtype, every_variant, make_case, shared_case, use, windowed_case
from tests.pacpu.int8_cases import as_int8

SEQ_LENS = (1, 37, 16, 130, 65, 64)


@every_variant
@every_dtype
def test_windows_and_sinks(kernel, isa, dtype):
    """A window may begin anywhere in a block, and reach from within one chunk of tokens or tile to another."""
    use(isa, kernel, dtype)
    for group, num_kv_heads, block_size, window in (
        (1, 2, 16, 1),
        (1, 3, 32, 57),
        (2, 2, 16, 64),
        (3, 1, 16, 33),
        (4, 2, 16, 128),
        (8, 1, 64, 20),
        (2, 2, 5, 31),
    ):
        heads = {"num_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads}
        case = windowed_case(dtype, window, block_size, head_dim=40, seq_lens=SEQ_LENS, **heads)
        for sinks in (None, 3 * torch.randn(group * num_kv_heads)):
            for num_threads in (1, 3, 64):
                replace(case, sinks=sinks).check(kernel=kernel, num_threads=num_threads)


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "amx"])
@every_dtype
def test_windows_and_sinks_over_codes(isa, dtype):
    use(isa, "native")
    for group, num_kv_heads, block_size, window in ((1, 2, 16, 1), (3, 1, 16, 33), (4, 2, 48, 57), (8, 2, 64, 20)):
        heads = {"num_heads": group * num_kv_heads, "num_kv_heads": num_kv_heads}
        case = windowed_case(dtype, window, block_size, head_dim=40, seq_lens=SEQ_LENS, **heads)
        for sinks in (None, 3 * torch.randn(group * num_kv_heads)):
            for num_threads in (1, 3, 64):
                as_int8(replace(case, sinks=sinks)).check(num_threads=num_threads)


@every_variant
def test_a_sink_counts_once_however_the_context_is_split(kernel, isa):
    """Over zeros a sink of log(n) halves what n tokens give."""
    use(isa, kernel)
    case = make_case(torch.float32, num_heads=4, num_kv_heads=2, seq_lens=(900,))
    case.q.zero_()
    case.v.fill_(1)
    case.kv_cache[case.block_tables[0, :57].long(), :, 1] = 1
    for num_threads in (1, 2, 7, 64):
        replace(case, sinks=torch.full((4,), 900.0).log()).run(kernel=kernel, num_threads=num_threads)
        torch.testing.assert_close(case.out, torch.full_like(case.out, 0.5))


def test_sinks_far_from_all_scores():
    """One that is far above takes all weight, one that is far below none."""
    for dtype in DTYPES:
        case = make_case(dtype, num_heads=4, num_kv_heads=2)
        case.run(num_threads=3)
        without = case.out.clone()
        for sinks, kept in ((-torch.inf, 1), (-1e30, 1), (1e30, 0)):
            replace(case, sinks=torch.full((4,), sinks)).run(num_threads=3)
            assert torch.equal(case.out, without * kept)


def test_a_window_of_all_tokens_is_none():
    case = make_case(torch.float32, seq_lens=(300, 16, 1))
    case.run(num_threads=3)
    without = case.out.clone()
    for window in (300, 301, 2**31 - 1, 2**40):
        replace(case, window=window).run(num_threads=3)
        assert torch.equal(case.out, without)
    replace(case, window=299).run(num_threads=3)
    assert not torch.equal(case.out[0], without[0]) and torch.equal(case.out[1:], without[1:])


@every_variant
def test_rows_that_share_blocks(kernel, isa):
    """Those that the window cuts have no blocks in common with others, whatever their tables say."""
    use(isa, kernel)
    for heads in pacpu.HEADS:
        pacpu.set_shared_row_cost(torch.float16, heads, 1 / 8)
    try:
        for group, window in ((1, 300), (2, 580), (2, 700), (1, 870)):
            case = shared_case(torch.float16, num_heads=2 * group, num_kv_heads=2, head_dim=40)
            case = replace(case, window=window, sinks=torch.randn(2 * group))
            for num_threads in (1, 3):
                case.check(kernel=kernel, num_threads=num_threads)
    finally:
        for heads in pacpu.HEADS:
            pacpu.set_shared_row_cost(torch.float16, heads, 1.0)


def test_random_windows():
    for _ in range(40):
        pick = lambda low, high: int(torch.randint(low, high + 1, ()))  # noqa: E731
        dtype, num_kv_heads, block_size = DTYPES[pick(0, 2)], pick(1, 4), pick(1, 40)
        num_heads = num_kv_heads * pick(1, 9)
        shape = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8 * pick(1, 20))
        lengths = tuple(pick(1, 200) for _ in range(pick(0, 6)))
        case = windowed_case(dtype, pick(1, 220), block_size, seq_lens=lengths, **shape)
        kernels = pacpu.kernels(dtype)
        case = replace(case, sinks=torch.randn(num_heads) if pick(0, 1) else None)
        case.check(kernel=kernels[pick(0, len(kernels) - 1)], num_threads=pick(1, 9))
