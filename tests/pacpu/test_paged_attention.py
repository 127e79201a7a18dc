"""Every CPU kernel, in every element type and instruction set, against the float64 reference."""

from dataclasses import replace

import pytest
import torch

import pacpu
from tests.pacpu.cases import DTYPES, HALF_DTYPES, every_dtype, every_variant, make_case, use

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


def test_the_work_is_cut_finer_than_threads_so_that_one_that_shares_its_core_is_not_waited_for():
    """64 blocks are eight parts for two threads and for eight, which shows in the last bits of the sums."""
    case = make_case(torch.float32, num_heads=4, num_kv_heads=1, seq_lens=(64 * 16,))
    outs = []
    for num_threads in (1, 2, 8):
        case.run(num_threads=num_threads)
        outs.append(case.out.clone())
    assert torch.equal(outs[1], outs[2]) and not torch.equal(outs[0], outs[1])


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
@pytest.mark.parametrize("group", [1, 2])
def test_every_16_bit_number_survives(kernel, isa, dtype, group):
    """A context of one token returns its V: all 65,536 patterns are widened and narrowed, subnormals too."""
    use(isa, kernel, dtype)
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, 8, 64)
    case = make_case(dtype, num_heads=8 * group, num_kv_heads=8, seq_lens=(1,) * values.shape[0])
    replace(case, v=values).run(kernel=kernel)
    values = values.repeat_interleave(group, 1)
    assert torch.equal(case.out.isnan(), values.isnan())
    if dtype == torch.bfloat16 and (isa == "amx" or (isa == "avx512bf16" and group > 1)):  # by dot products
        values = torch.where(values.abs() < torch.finfo(dtype).tiny, 0, values)
    assert torch.equal(case.out.nan_to_num(), values.nan_to_num())


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_output_is_rounded_to_nearest_even(dtype):
    """Equal scores average two values; many of the averages are ties."""
    pairs = torch.randint(-(2**15), 2**15, (2, 64, 8, 64)).to(torch.int16).view(dtype).nan_to_num(0.0, 0.0, 0.0)
    if dtype == torch.bfloat16:  # some instruction sets take subnormal numbers for zero: no input or difference is one
        pairs = torch.where(pairs.abs() < 512 * torch.finfo(dtype).tiny, 0, pairs)
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
