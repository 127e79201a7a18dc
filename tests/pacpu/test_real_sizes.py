"""What only the sizes of real models reach, or numbers made for it: without parameters, so that every run has it all.

Expected values are float64 sums over the same inputs (`tests.reference`), or follow from the numbers by hand.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import pacpu
from pacpu import _pacpu, int8, rows
from swiftllm.ops.interface import pack, unpack
from tests.pacpu.cases import DTYPES, USABLE_ISAS, VARIANTS, Case, make_case
from tests.pacpu.int8_cases import as_int8
from tests.pacpu.packed_codes import random_matrix
from tests.pacpu.test_crossing import NAMES, WHOLE_RUNS, Layer
from tests.pacpu.test_experts import Layer as Experts
from tests.pacpu.test_experts import routing
from tests.pacpu.test_rows import Rows, packed
from tests.reference.paged_attention import chunk_attention, store_new_tokens
from tests.reference.tolerances import assert_close

BF16 = torch.bfloat16
WITH_PRODUCTS = [isa for isa in USABLE_ISAS if isa in ("avx512", "avx512bf16")]
INT8_ISAS = [isa for isa in USABLE_ISAS if isa in ("portable", "avx2", "avx512")]


@pytest.fixture(autouse=True)
def same_draws():
    torch.manual_seed(0)


def test_products_of_more_inputs_and_rows_than_a_block_has():
    """2,048 inputs and 128 rows are a block. An odd number of inputs is copied first, to where NaN lay before."""
    nan = torch.full((133, 2053), torch.nan, dtype=BF16)
    for isa in WITH_PRODUCTS:
        _pacpu.select_isa(isa)
        for inputs in (2050, 2051):
            x, weight = torch.randn(133, inputs).to(BF16), torch.randn(97, inputs).to(BF16) / 64
            bias, out = torch.randn(97).to(BF16), Rows(133, 97, dtype=BF16)
            rows.linear(nan[:, : inputs + 2], packed(nan[:97, : inputs + 2]), None, out.view)
            rows.linear(x, packed(weight), bias, out.view)
            out.check(F.linear(x.double(), weight.double(), bias.double()))


def test_the_first_of_highest_values_that_lie_far_apart():
    """512 values are compared at a time."""
    for isa in USABLE_ISAS:
        _pacpu.select_isa(isa)
        for dtype in DTYPES:
            x, found = torch.zeros(2, 1300, dtype=dtype), torch.full((2,), -1)
            x[0, [3, 700, 1299]], x[1, [511, 512]] = 1.0, torch.nan
            rows.argmax(x, found)
            assert found.tolist() == [3, 511]


def test_experts_whose_scales_are_float32():
    for isa in USABLE_ISAS:
        _pacpu.select_isa(isa)
        layer = Experts(3, 96, 32, 32, torch.float32, torch.float32, is_clamped=False)
        x, (ids, likelihoods), out = torch.randn(9, 96), routing(3, 9, 2, padding=0), torch.empty(9, 96)
        layer.packed(x, ids, likelihoods, out)
        assert_close(out, layer.expected(x, ids, likelihoods))


def test_a_crossing_of_more_rows_than_cross_at_a_time():
    """512 rows cross at a time."""
    for isa in WITH_PRODUCTS:
        _pacpu.select_isa(isa)
        for sizes in ({"has_bias": True, "has_head_norms": True}, {"has_codes": NAMES, **WHOLE_RUNS}):
            layer = Layer(**sizes)
            attention_out, before = (
                torch.randn(530, size).to(BF16) for size in (layer.attention_size, layer.hidden_size)
            )
            angles, residual = torch.randn(530, 2, layer.head_dim), before.clone()
            out = torch.full((530, layer.out_features), torch.nan, dtype=BF16)
            rows.Crossing(**layer.arguments())(attention_out, residual, angles, out, num_threads=2)
            assert torch.equal(out, layer.part_by_part(attention_out, before, angles))
            assert torch.equal(residual, before)


def test_products_with_codes_take_several_panels_at_once():
    """Six panels of eight outputs, where the level-2 cache does not hold the inputs of all rows: 512 KiB of floats."""
    matrix = random_matrix(57, 2064, 48, BF16)
    x = torch.randn(140, 2064).to(BF16)
    expected = F.linear(x.double(), matrix.weight.double())
    for isa in USABLE_ISAS:
        _pacpu.select_isa(isa)
        out = Rows(140, 57, dtype=BF16)
        matrix.packed.linear(x, None, out.view, num_threads=1)
        out.check(expected)


def test_elements_of_codes_in_every_half_of_a_group_and_vector():
    """An odd number of groups, of one run and of three, and codes on either side of each zero point."""
    for dtype in DTYPES:
        for group_size, scale_dtype in ((16, torch.float32), (48, torch.float16), (16, BF16), (48, torch.uint8)):
            matrix = random_matrix(19, 144, group_size, dtype, scale_dtype)
            for isa in USABLE_ISAS:
                _pacpu.select_isa(isa)
                out = torch.full((19, 144), torch.nan, dtype=dtype)
                matrix.packed.write_out(out)
                assert torch.equal(out, matrix.in_order), (dtype, group_size, isa)


def far_maxima(dtype: torch.dtype, num_heads: int, tokens: int = 50) -> Case:
    """Row i attends to so many tokens, and the score of token i is above the others by 128: exp of that is no float."""
    case = make_case(dtype, num_heads, 1, 64, seq_lens=(tokens,) * tokens)
    case.kv_cache[:, :, 0] /= 64
    case.k.div_(64)
    for row, table in enumerate(case.block_tables[:-1]):
        case.kv_cache[table[row // 16], :, 0, row % 16] = 16.0
    case.k[-1] = 16.0
    case.q.fill_(1.0)
    return case


def test_the_largest_score_may_be_that_of_any_token():
    for dtype in DTYPES:
        for num_heads in (1, 3):
            case = far_maxima(dtype, num_heads)
            store_new_tokens(case.k, case.v, case.kv_cache, case.block_tables, case.seq_lens)
            expected = case.expected(case.kv_cache)
            for kernel, isa in VARIANTS:
                if isa in USABLE_ISAS:
                    _pacpu.select_isa(isa)
                    if kernel in pacpu.kernels(dtype):
                        case.out.fill_(torch.nan)
                        case.run(kernel=kernel)
                        assert_close(case.out, expected)
    for isa in INT8_ISAS:
        _pacpu.select_isa(isa)
        as_int8(far_maxima(torch.float32, 3)).check()


def test_the_largest_score_of_a_prompt_may_be_that_of_any_token():
    """Row i has its own token's direction or that of an earlier one."""
    if "avx512bf16" not in USABLE_ISAS:
        pytest.skip("AVX-512 BF16")
    _pacpu.select_isa("avx512bf16")
    if not rows.has_prompt_attention():
        pytest.skip("dot products are slow here")
    directions, v = torch.eye(70, 128, dtype=BF16), torch.randn(1, 70, 128).to(BF16)
    for chosen in (torch.arange(70), torch.arange(70) // 2, torch.arange(70) * 0):
        q, out = 16 * directions[chosen][:, None], torch.full((70, 1, 128), torch.nan, dtype=BF16)
        k = 8 * directions[None]
        rows.prompt_attention([(q, k, v, out)], 1.0)
        assert_close(out, chunk_attention(q, k, v, 1.0, None, None))


def test_tokens_of_large_heads_become_codes_in_one_piece():
    """256 elements are cut at a time, of a token that is stored and of a block that comes in."""
    for isa in INT8_ISAS:
        _pacpu.select_isa(isa)
        for dtype in DTYPES:
            as_int8(make_case(dtype, 2, 1, 520, seq_lens=(20, 3))).check()
        blocks = torch.randn(1, 2, 1, 2, 16, 520)
        pool, ids = torch.zeros(1, 3, 1, int8.head_bytes(16, 520), dtype=torch.uint8), torch.tensor([2, 0])
        rows.scatter_blocks(blocks, pool, ids)
        assert torch.equal(pool[:, ids], pack(blocks))
        back = torch.empty_like(blocks)
        rows.gather_blocks(pool, ids, back)
        assert torch.equal(back, unpack(pack(blocks), 520))


def test_integer_sums_of_large_heads_fit_32_bits():
    """Of 1,032 elements and more: the products of a score are as large as they get and have one sign."""
    for isa in INT8_ISAS:
        _pacpu.select_isa(isa)
        for head_dim in (1032, 2048):
            case = make_case(torch.float32, 4, 2, head_dim, seq_lens=(20, 3))
            case.q.fill_(1.0)
            case.k.fill_(-1.0)
            case.kv_cache[:, :, 0] = case.kv_cache[:, :, 0] * 0 - 1.0
            as_int8(case).check()


def two_tokens(dtype: torch.dtype, value: float) -> Case:
    """Of two heads of 64: the earlier one with value 1 and the new one with `value`, whose scores differ by q k."""
    q, k, v = (
        torch.zeros(1, 2, 64, dtype=dtype),
        torch.zeros(1, 1, 64, dtype=dtype),
        torch.full((1, 1, 64), value).to(dtype),
    )
    cache = torch.zeros(1, 1, 2, 16, 64, dtype=dtype)
    cache[0, 0, 1, 0] = 1.0
    tables, out = torch.zeros(1, 1).int(), torch.full((1, 2, 64), torch.nan, dtype=dtype)
    return Case(q, k, v, cache, tables, torch.tensor([2]).int(), out, 1.0)


def test_weights_are_rounded_to_the_nearest():
    """exp(-2^-10) is 1 in bfloat16, to the nearest; cut off it is 1 - 2^-8. The values 1 and -1 then leave 2^-9."""
    case = two_tokens(BF16, -1.0)
    case.q[..., 0], case.k[..., 0] = 1.0, -(2.0**-10)
    for isa in USABLE_ISAS:
        _pacpu.select_isa(isa)
        for kernel in pacpu.kernels(BF16):
            case.run(kernel=kernel)
            assert (case.out.abs() < 2.0**-10).all(), (isa, kernel)
    if rows.has_prompt_attention():
        k = torch.stack([torch.zeros_like(case.k[0]), case.k[0]], 1)
        v = torch.stack([torch.ones_like(case.v[0]), case.v[0]], 1)
        rows.prompt_attention([(case.q, k, v, case.out)], 1.0)
        assert (case.out.abs() < 2.0**-10).all()


def test_integer_weights_are_rounded_to_the_nearest():
    """A weight is nine tenths of the least of 15 bits, and 1.8 times the least of 16: rounded one and two of these.

    Cut off they would be none and one. The values are 1 and -1."""
    weight = 0.9 / 0x7FFF
    case = two_tokens(torch.float32, -1.0)
    case.q[..., 0], case.k[..., 0] = 1.0, math.log(weight)
    value = unpack(pack(case.kv_cache), 64)[0, 0, 1, 0]
    for isa in INT8_ISAS:
        _pacpu.select_isa(isa)
        as_int8(case).run()
        assert (case.out / value - (1 - weight) / (1 + weight)).abs().max() < 6e-6, isa
