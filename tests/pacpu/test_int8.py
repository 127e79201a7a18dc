"""A KV cache in eight bits: attention over codes, and the ways of rows and blocks into the cache and out of it."""

import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pacpu
from pacpu import int8, rows
from swiftllm.machine import cpu_flags
from swiftllm.ops.interface import codes_and_scales, pack, unpack
from tests.pacpu.cases import DTYPES, HALF_DTYPES, check_at_the_same_time, every_dtype, make_case, shared_case, use
from tests.pacpu.int8_cases import as_int8, make_int8_case, relative_error
from tests.reference import paged_attention as reference

every_isa = pytest.mark.parametrize("isa", ["portable", "avx2", "avx512"])  # with VNNI, where the CPU has it


@every_isa
@every_dtype
def test_matches_the_reference_on_the_same_codes(isa, dtype):
    use(isa, "native")
    for shape in (
        dict(),
        dict(num_heads=32, num_kv_heads=8, head_dim=128, seq_lens=(70, 1, 519)),
        dict(num_heads=14, num_kv_heads=2, head_dim=72, block_size=48, seq_lens=(5, 90, 16, 33)),
        dict(seq_lens=()),
    ):
        for num_threads in (1, 3):
            make_int8_case(dtype, **shape).check(num_threads=num_threads)


@every_isa
@pytest.mark.parametrize("head_dim", [8, 64, 80, 256])
def test_groups_and_head_dims(isa, head_dim):
    use(isa, "native")
    for group in (1, 2, 3, 4, 5, 8):
        make_int8_case(torch.float16, num_heads=2 * group, num_kv_heads=2, head_dim=head_dim, seq_lens=(1, 70)).check()


@every_isa
@pytest.mark.parametrize("way", pacpu.prefetches("int8", "MHA"))
def test_ways_of_prefetching_and_shared_blocks(isa, way):
    use(isa, "native")
    float_way = pacpu.prefetch("float16", "GQA")
    for heads, group in zip(pacpu.HEADS, (1, 3), strict=True):
        before = pacpu.prefetch("int8", heads), pacpu.shared_row_cost("int8", heads)
        pacpu.set_prefetch("int8", heads, way if way in pacpu.prefetches("int8", heads) else "L1")
        pacpu.set_shared_row_cost("int8", heads, 1 / 8)
        try:
            as_int8(shared_case(torch.float16, num_heads=2 * group, num_kv_heads=2, head_dim=40)).check(num_threads=3)
        finally:
            pacpu.set_prefetch("int8", heads, before[0])
            pacpu.set_shared_row_cost("int8", heads, before[1])
    assert pacpu.prefetch("float16", "GQA") == float_way


def test_narrow_ways_have_the_bits_of_avx2():
    case, outputs = make_int8_case(torch.float32, num_heads=3, num_kv_heads=3, seq_lens=(300,)), []
    for isa, way in (("avx2", "L1"), ("avx512", "L1 AVX2"), ("avx512", "L1")):
        use(isa, "native")
        before = pacpu.prefetch("int8", "MHA")
        pacpu.set_prefetch("int8", "MHA", way)
        case.run()
        pacpu.set_prefetch("int8", "MHA", before)
        outputs.append(case.case.out.clone())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2]) == ("avx512_vnni" not in cpu_flags())


@every_isa
@pytest.mark.parametrize("num_kv_heads", [2, 8])
def test_error_on_random_normal_numbers_is_below_one_percent(isa, num_kv_heads):
    use(isa, "native")
    case = make_case(torch.float16, 8, num_kv_heads, 128, seq_lens=(1024, 1000) * 3)
    as_int8(case).run()
    reference.store_new_tokens(case.k, case.v, case.kv_cache, case.block_tables, case.seq_lens)
    exact = reference.paged_attention(case.q, case.kv_cache, case.block_tables, case.seq_lens, case.scale)
    assert 0.004 < relative_error(case.out, exact) < 0.010


@every_isa
def test_peaked_scores_and_values_of_many_sizes(isa):
    use(isa, "native")
    case = make_case(torch.float32, seq_lens=(400, 9), spread=12.0)
    case.kv_cache[:, :, 1] *= torch.randn(case.kv_cache[:, :, 1].shape[:-1]).exp()[..., None]
    as_int8(case).check(tolerance=1e-3)


@every_isa
def test_values_of_zero_and_memory_never_written_give_zero(isa):
    use(isa, "native")
    case = make_case(torch.float16, seq_lens=(100, 7))
    case.kv_cache[:, :, 1], case.v[:] = 0, 0
    int8_case = as_int8(case)
    int8_case.run()
    assert (case.out == 0).all()
    int8_case.cache.zero_()
    int8_case.run()
    assert (case.out == 0).all()


@every_isa
@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_number_that_is_not_finite_shows_in_its_row_only(isa, part, bad):
    use(isa, "native")
    case = make_case(torch.float16, num_heads=4, num_kv_heads=2, seq_lens=(70, 40))
    case.kv_cache[case.block_tables[0, 2], 1, part, 3, 5] = bad
    as_int8(case).run()
    assert case.out[0, 2:].isnan().all() and case.out[0, :2].isfinite().all() and case.out[1].isfinite().all()
    case.q[1, 0, 7] = bad
    as_int8(case).run()
    assert case.out[1, 0].isnan().all() and case.out[1, 1:].isfinite().all()


def random_blocks(dtype: torch.dtype, block_size: int, head_dim: int) -> torch.Tensor:
    """Rows of many sizes, of zeros, with a NaN, with the largest number, subnormal ones."""
    blocks = torch.randn(2, 4, 3, 2, block_size, head_dim)
    blocks = (blocks * torch.randn(blocks.shape[:-1]).mul(4).exp()[..., None]).to(dtype)
    blocks[0, 1, 2, 1, 3, 4] = torch.nan
    blocks[1, 1, 1, 1] = 0
    blocks[1, 2] *= 1e-7
    blocks[0, 3, 0, 0, 7, 1] = torch.finfo(dtype).max
    return blocks


@every_isa
@every_dtype
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 128), (48, 72), (16, 8), (16, 264)])
def test_blocks_that_travel_keep_their_bits(isa, dtype, block_size, head_dim):
    """The first time elements are rounded to codes, as the reference has it; then never again, in whatever type."""
    use(isa, "native")
    blocks = random_blocks(dtype, block_size, head_dim)
    pool = torch.randint(256, (2, 9, 3, int8.head_bytes(block_size, head_dim)), dtype=torch.uint8)
    ids = torch.randperm(9)[:4]
    expected = pool.clone()
    expected[:, ids] = pack(blocks)
    rows.scatter_blocks(blocks, pool, ids, num_threads=2)
    assert torch.equal(pool, expected)
    for _ in range(20):
        back = torch.empty_like(blocks)
        rows.gather_blocks(pool, ids, back, num_threads=2)
        expected_back = unpack(expected[:, ids], head_dim).to(dtype)
        assert torch.equal(back.isnan(), expected_back.isnan())
        assert torch.equal(back.nan_to_num(7), expected_back.nan_to_num(7))
        pool[:, ids] = 0
        rows.scatter_blocks(back, pool, ids)
        assert torch.equal(pool, expected)
    staging = torch.empty(2, 4, *pool.shape[2:], dtype=torch.uint8)
    rows.gather_blocks(pool, ids, staging)
    assert torch.equal(staging, pool[:, ids])


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_every_size_of_a_row_comes_back_the_same(dtype):
    """The largest element may be any finite number of its type, the others anything below."""
    largest = torch.arange(2**15, dtype=torch.int16).view(dtype)
    largest = largest[largest.isfinite()]
    elements = (torch.rand(len(largest), 16) * largest[:, None].float()).to(dtype)
    elements[:, 3] = -largest
    codes, scales = codes_and_scales(elements)
    back = (codes.float() * scales[:, None]).to(dtype)
    again = codes_and_scales(back)
    assert torch.equal(codes, again[0]) and torch.equal(scales, again[1])


@every_isa
@every_dtype
def test_tokens_are_stored_and_gathered_one_by_one(isa, dtype):
    use(isa, "native")
    heads, head_dim, block_size, tokens = 3, 72, 32, 100
    k, v = torch.randn(2, tokens, heads, head_dim).to(dtype)
    ids = torch.randperm(7)[:4]
    cache = torch.full((7, heads, int8.head_bytes(block_size, head_dim)), 0xFF, dtype=torch.uint8)
    at = torch.arange(tokens)
    rows.store_kv(k, v, cache, ids[at // block_size], at % block_size, num_threads=3)
    whole = unpack(cache, head_dim)[ids].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
    codes, scales = codes_and_scales(torch.stack([k, v]).transpose(1, 2))
    assert torch.equal(whole, codes * scales[..., None])
    out = torch.empty(2, heads, tokens, head_dim, dtype=dtype)
    rows.gather_kv(cache, ids, out, num_threads=3)
    assert torch.equal(out, whole.to(dtype))


def test_calls_at_the_same_time_do_not_disturb_each_other():
    other = make_int8_case(torch.bfloat16, num_heads=8, num_kv_heads=2, seq_lens=(90,))
    check_at_the_same_time(make_int8_case(torch.float16, seq_lens=(300, 20)), other, rounds=20)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_many_calls_take_no_memory():
    case = make_int8_case(torch.float16, num_heads=2, num_kv_heads=1, head_dim=8, seq_lens=(20,))
    case.run(num_threads=2)
    before = resident_bytes()
    for _ in range(20_000):
        case.run()
    assert resident_bytes() - before < 1 << 20  # 52 bytes a call


def test_refusals():
    case = make_case(torch.float16)
    cache = pack(case.kv_cache)
    for changes, message in (
        (dict(kv_cache=cache[..., :-1].contiguous()), "must have a multiple of 2176 bytes .* not 2175"),
        (dict(kv_cache=cache[:, :, None]), r"kv_cache must have shape \[num_blocks, num_kv_heads, head_bytes\]"),
        (dict(kv_cache=cache.view(torch.int8)), "kv_cache must have the dtype of q"),
        (dict(kv_cache=cache, k=case.k.bfloat16()), "k must have the dtype of q"),
        (dict(kv_cache=cache[:1]), "must be a block id below 1"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(case, **changes).run()
    for kernel in set(pacpu.kernels(torch.float16)) - {"native"}:
        with pytest.raises(ValueError, match=f"'{kernel}' does not compute in int8"):
            replace(case, kv_cache=cache).run(kernel=kernel)
    assert case.out.isnan().all()
    ids = torch.zeros(5, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"offsets\[0\] must be below 16, not 16"):
        rows.store_kv(case.k, case.v, cache, ids, ids + 16)
    with pytest.raises(ValueError, match="blocks must have a slot for each of the 81 tokens"):
        rows.gather_kv(cache, ids, torch.empty(2, 3, 81, 64))
    with pytest.raises(ValueError, match=r"staging must have shape .* = \[1, 5, 3, 2, 16, 64\]"):
        rows.scatter_blocks(torch.empty(1, 5, 3, 2, 32, 64), cache[None], ids)
    with pytest.raises(ValueError, match="block_size must be a multiple of 16"):
        int8.head_bytes(24, 64)
    with pytest.raises(ValueError, match="head_dim must be a positive multiple of 8"):
        int8.head_bytes(16, 12)


def test_the_description_says_what_a_token_takes():
    assert int8.head_bytes(16, 128) == 16 * 264
    assert [int8.head_bytes(16 * n, 64) for n in (1, 3)] == [16 * 136, 48 * 136]
    assert set(DTYPES) == {torch.float32, *HALF_DTYPES}
