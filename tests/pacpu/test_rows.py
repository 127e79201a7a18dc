"""The work on rows, in every element type and instruction set, against float64 on the same inputs."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pacpu import _pacpu, rows
from tests.pacpu.cases import BEST_ISA, ISAS
from tests.reference.paged_attention import chunk_attention
from tests.reference.tolerances import TOLERANCES, assert_close

SIZES = (1, 8, 35, 130)  # parts of a vector, whole vectors, both
every_isa = pytest.mark.parametrize("isa", ISAS)
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
how_many = pytest.mark.parametrize(("num_rows", "num_threads"), [(0, 1), (1, 1), (5, 3), (19, 2)])


@pytest.fixture(autouse=True)
def same_draws_and_isa():
    torch.manual_seed(0)
    yield
    _pacpu.select_isa(BEST_ISA)


def use(isa: str) -> None:
    """Switch to an instruction set; skip the test where the CPU cannot do it."""
    try:
        _pacpu.select_isa(isa)
    except ValueError as error:
        pytest.skip(str(error))


class Rows:
    """An array ``view [num_rows, ...]`` whose rows lie apart, in NaN; poisoned itself unless filled."""

    def __init__(self, num_rows: int, *shape: int, dtype: torch.dtype) -> None:
        size = int(np.prod(shape))
        self._memory = torch.full((num_rows + 1, size + 3), torch.nan, dtype=dtype)
        self.view = self._memory[:num_rows, :size].unflatten(1, shape)

    @classmethod
    def random(cls, num_rows: int, *shape: int, dtype: torch.dtype, spread: float = 1.0) -> torch.Tensor:
        view = cls(num_rows, *shape, dtype=dtype).view
        return view.copy_(spread * torch.randn(view.shape))

    def check(self, expected: torch.Tensor) -> None:
        assert_close(self.view, expected)
        self.view.fill_(torch.nan)
        assert self._memory.isnan().all(), "something was written between the rows"


@every_isa
@every_dtype
@how_many
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm_with_and_without_addend(isa, dtype, num_rows, num_threads, size):
    use(isa)
    x, addend = (Rows.random(num_rows, size, dtype=dtype) for _ in range(2))
    weight = torch.randn(size).to(dtype)
    out = Rows(num_rows, size, dtype=dtype)
    for total, arguments in ((x.clone(), {}), (x + addend, {"addend": addend, "offset": 1.0})):
        rows.rms_norm(x, weight, 1e-5, out.view, num_threads=num_threads, **arguments)
        assert torch.equal(x, total)
        out.check(F.rms_norm(total.double(), (size,), weight.double() + arguments.get("offset", 0.0), 1e-5))


@every_isa
@every_dtype
@how_many
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 64), (4, 40)])
def test_rotary(isa, dtype, num_rows, num_threads, num_heads, head_dim):
    use(isa)
    x = Rows(num_rows, num_heads, head_dim, dtype=dtype)
    before = torch.randn(num_rows, num_heads, head_dim).to(dtype)
    x.view.copy_(before)
    angles = Rows.random(num_rows, 2, head_dim, dtype=torch.float32)
    rows.rotary(x.view, angles, num_threads=num_threads)
    cos, sin = angles.double()[:, :, None].unbind(1)
    x.check(before.double() * cos + before.double().roll(head_dim // 2, -1) * sin)


@every_isa
@every_dtype
@how_many
@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 64), (4, 40)])
def test_norm_heads(isa, dtype, num_rows, num_threads, num_heads, head_dim):
    use(isa)
    x = Rows(num_rows, num_heads, head_dim, dtype=dtype)
    before = torch.randn(num_rows, num_heads, head_dim).to(dtype)
    weights = torch.randn(num_heads, head_dim).to(dtype)
    for offset in (0.0, 1.0):
        x.view.copy_(before)
        rows.norm_heads(x.view, weights, 1e-5, offset=offset, num_threads=num_threads)
        x.check(F.rms_norm(before.double(), (head_dim,), None, 1e-5) * (offset + weights.double()))


@every_isa
@every_dtype
@how_many
@pytest.mark.parametrize("size", [1, 7, 512, 1300])
def test_argmax_takes_the_first_of_equals(isa, dtype, num_rows, num_threads, size):
    use(isa)
    x = Rows(num_rows, size, dtype=dtype).view
    x.copy_(torch.randn(num_rows, size).round())
    for row, special in zip(range(num_rows), (torch.nan, torch.inf, -torch.inf), strict=False):
        x[row, torch.randint(size, (2,))] = special
    if num_rows > 3:
        x[3] = -torch.inf
    out = torch.full((num_rows,), -1)
    rows.argmax(x, out, num_threads=num_threads)
    for row, found in zip(x.tolist(), out.tolist(), strict=True):
        places = [i for i, value in enumerate(row) if value != value] or [row.index(max(row))]
        assert found == places[0]


@every_isa
@every_dtype
@how_many
@pytest.mark.parametrize("size", SIZES)
def test_silu_and_mul(isa, dtype, num_rows, num_threads, size):
    use(isa)
    x, out = Rows.random(num_rows, 2 * size, dtype=dtype, spread=4.0), Rows(num_rows, size, dtype=dtype)
    rows.silu_and_mul(x, out.view, num_threads=num_threads)
    gate, up = x.double().chunk(2, -1)
    out.check(F.silu(gate) * up)


@every_isa
@every_dtype
def test_silu_of_the_ends_of_the_range(isa, dtype):
    use(isa)
    gates = torch.tensor([-3e4, -88.0, -0.0, 0.0, 88.0, 3e4, torch.inf, torch.nan]).to(dtype)
    out = torch.empty(1, len(gates), dtype=dtype)
    rows.silu_and_mul(torch.cat([gates, torch.ones_like(gates)])[None], out)
    torch.testing.assert_close(out[0].double(), F.silu(gates.double()), rtol=8e-3, atol=1e-30, equal_nan=True)


def packed(weight: torch.Tensor) -> torch.Tensor:
    result = torch.full(rows.packed_shape(*weight.shape), torch.nan, dtype=weight.dtype)
    rows.pack_matrix(weight, result)
    return result


@pytest.mark.parametrize("isa", ISAS[2:])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("num_rows", "in_features", "out_features"),
    [(0, 8, 8), (1, 1, 1), (3, 5, 7), (8, 33, 50), (9, 64, 48), (17, 2050, 97), (133, 100, 200)],
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear(isa, num_threads, num_rows, in_features, out_features, has_bias):
    """Odd numbers of inputs, parts of a panel and of a tile of rows, more inputs and more rows than a block has."""
    use(isa)
    dtype = torch.bfloat16
    x = Rows.random(num_rows, in_features, dtype=dtype)
    weight = Rows.random(out_features, in_features, dtype=dtype, spread=in_features**-0.5)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    out = Rows(num_rows, out_features, dtype=dtype)
    rows.linear(x, packed(weight), bias, out.view, num_threads=num_threads)
    out.check(F.linear(x.double(), weight.double(), None if bias is None else bias.double()))


def test_a_row_of_a_product_does_not_depend_on_its_neighbours():
    use("avx512")
    x, matrix = torch.randn(139, 2100).bfloat16(), packed(torch.randn(100, 2100).bfloat16())
    together, alone = (torch.empty(139, 100, dtype=torch.bfloat16) for _ in range(2))
    rows.linear(x, matrix, None, together, num_threads=3)
    for row in range(139):
        rows.linear(x[row : row + 1], matrix, None, alone[row : row + 1])
    assert torch.equal(together, alone)


@pytest.mark.skipif("avx512bf16" not in ISAS or BEST_ISA not in ("avx512bf16", "amx"), reason="AVX-512 BF16")
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize(
    ("num_rows", "context", "num_heads", "num_kv_heads", "head_dim"),
    [
        (0, 3, 2, 1, 8),
        (1, 1, 3, 3, 64),
        (5, 5, 4, 2, 2),
        (17, 40, 6, 2, 80),
        (33, 700, 3, 1, 64),
        (100, 1100, 2, 1, 128),
    ],
)
def test_prompt_attention(num_threads, num_rows, context, num_heads, num_kv_heads, head_dim):
    """Parts of a tile, of a panel of keys and of a stretch; earlier chunks; a head that is no multiple of a panel."""
    use("avx512bf16")
    if not rows.has_prompt_attention():
        pytest.skip("dot products are slow here")
    dtype, scale = torch.bfloat16, head_dim**-0.5
    q = Rows.random(num_rows, num_heads, head_dim, dtype=dtype, spread=3.0)
    k, v = (Rows.random(context, num_kv_heads, head_dim, dtype=dtype).transpose(0, 1) for _ in range(2))
    for window in (None, 1, 50, 600):
        for sinks in (None, 3 * torch.randn(num_heads)):
            out = Rows(num_rows, num_heads, head_dim, dtype=dtype)
            how = {"window": window, "sinks": sinks, "num_threads": num_threads}
            rows.prompt_attention([(q, k, v, out.view)], scale, **how)
            out.check(chunk_attention(q, k, v, scale, window, sinks))


@pytest.mark.skipif("avx512bf16" not in ISAS or BEST_ISA not in ("avx512bf16", "amx"), reason="AVX-512 BF16")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_prompts_in_one_call_have_the_bits_of_single_calls(num_threads):
    """Prompts of all sizes, with other heads; the packed K and V of the last two take a job of their own each."""
    use("avx512bf16")
    if not rows.has_prompt_attention():
        pytest.skip("dot products are slow here")
    dtype, prompts, alone = torch.bfloat16, [], []
    for num_rows, context, num_heads, num_kv_heads in ((3, 9, 2, 1), (0, 5, 2, 2), (70, 70, 4, 4), (1, 90_000, 1, 1),
                                                       (2, 60_000, 2, 1)):  # fmt: skip
        q = Rows.random(num_rows, num_heads, 128, dtype=dtype)
        k, v = (Rows.random(context, num_kv_heads, 128, dtype=dtype).transpose(0, 1) for _ in range(2))
        prompts.append((q, k, v, Rows(num_rows, num_heads, 128, dtype=dtype)))
        alone.append(torch.empty_like(q, memory_format=torch.contiguous_format))
        rows.prompt_attention([(q, k, v, alone[-1])], 0.1)
    rows.prompt_attention([(q, k, v, out.view) for q, k, v, out in prompts], 0.1, num_threads=num_threads)
    for (*_, out), expected in zip(prompts, alone, strict=True):
        assert torch.equal(out.view, expected)
        out.check(expected)
    rows.prompt_attention([], 0.1)


def test_prompt_attention_refuses_what_does_not_fit():
    q, k = torch.ones(3, 4, 8, dtype=torch.bfloat16), torch.ones(2, 5, 8, dtype=torch.bfloat16)
    for wrong, message in (
        ({"q": q.float()}, "q must have dtype bfloat16"),
        ({"k": k[:, :2], "v": k[:, :2]}, "context of at least 3 tokens"),
        ({"k": torch.ones(3, 5, 8).bfloat16(), "v": torch.ones(3, 5, 8).bfloat16()}, "multiple of k's 3 heads"),
        ({"v": k[:1]}, "v must have shape"),
        ({"out": q[:2]}, "out must have shape"),
    ):
        arguments = {"q": q, "k": k, "v": k, "out": torch.empty_like(q)} | wrong
        with pytest.raises(ValueError, match=message):
            rows.prompt_attention([tuple(arguments.values())], 1.0)
    with pytest.raises(ValueError, match="q, k, v and out, not 3 arrays"):
        rows.prompt_attention([(q, k, k)], 1.0)
    prompt = q, k, k, torch.empty_like(q)
    with pytest.raises(ValueError, match="window must be at least 1, not 0"):
        rows.prompt_attention([prompt], 1.0, window=0)
    with pytest.raises(ValueError, match=r"sinks must have shape \[num_heads\] = \[4\], not \[2\]"):
        rows.prompt_attention([prompt], 1.0, sinks=torch.zeros(2))
    _pacpu.select_isa("portable")
    assert not rows.has_prompt_attention()
    with pytest.raises(ValueError, match="AVX-512 BF16"):
        rows.prompt_attention([(q, k, k, torch.empty_like(q))], 1.0)


def test_linear_needs_wide_vectors():
    _pacpu.select_isa("portable")
    x, packed = torch.ones(1, 2, dtype=torch.bfloat16), torch.ones(rows.packed_shape(3, 2), dtype=torch.bfloat16)
    assert not rows.linear_is_fastest()
    with pytest.raises(ValueError, match="AVX-512"):
        rows.linear(x, packed, None, torch.empty(1, 3, dtype=torch.bfloat16))


@every_dtype
@how_many
def test_store_kv(dtype, num_rows, num_threads):
    num_blocks, num_heads, block_size, head_dim = 7, 3, 5, 8
    k, v = (Rows.random(num_rows, num_heads, head_dim, dtype=dtype) for _ in range(2))
    slots = torch.randperm(num_blocks * block_size)[:num_rows]
    blocks, offsets = slots // block_size, slots % block_size
    cache = torch.full((num_blocks, num_heads, 2, block_size, head_dim), torch.nan, dtype=dtype)
    expected = cache.clone()
    expected[blocks, :, 0, offsets], expected[blocks, :, 1, offsets] = k, v
    rows.store_kv(k, v, cache, blocks, offsets, num_threads=num_threads)
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


BF16 = torch.bfloat16
X, PACKED = torch.ones(2, 6, dtype=BF16), torch.ones(rows.packed_shape(4, 6), dtype=BF16)
KV, CACHE, SLOTS = torch.ones(2, 1, 8), torch.ones(3, 1, 2, 4, 8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rows.linear(X.float(), PACKED, None, X), "x must have dtype bfloat16, not float32"),
        (lambda: rows.linear(X, PACKED, None, torch.ones(3, 4, dtype=BF16)), r"out must have shape .* = \[2, 4\]"),
        (lambda: rows.linear(X, PACKED[:, :2], None, torch.ones(2, 4, dtype=BF16)), "packed must have shape"),
        (lambda: rows.linear(X, PACKED, X[0, :3], torch.ones(2, 4, dtype=BF16)), r"bias must have shape .* = \[4\]"),
        (lambda: rows.linear(X, PACKED, None, torch.ones(2, 4, dtype=BF16), num_threads=0), "num_threads must be"),
        (lambda: rows.pack_matrix(X, torch.ones(2, 6, dtype=BF16)), "packed must have shape"),
        (lambda: rows.rms_norm(X, X[0, :5], 1e-5, X), r"weight must have shape \[size\] = \[6\]"),
        (lambda: rows.rms_norm(X, X[0].float(), 1e-5, X), "weight must have the dtype of x, bfloat16"),
        (lambda: rows.rms_norm(X, X[0], "small", X), "eps cannot be 'small'"),
        (lambda: rows.rms_norm(X.int(), X[0], 1e-5, X), "x must have dtype float32, float16 or bfloat16, not int32"),
        (lambda: rows.rotary(torch.ones(2, 1, 5), torch.ones(2, 2, 5)), "even head_dim, not 5"),
        (lambda: rows.rotary(torch.ones(2, 1, 4), torch.ones(2, 4)), "angles must have shape"),
        (
            lambda: rows.norm_heads(torch.ones(2, 1, 4), torch.ones(2, 4), 1e-5),
            r"weights must have shape .* = \[1, 4\]",
        ),
        (lambda: rows.argmax(X[:, :0], SLOTS), "x must have at least one column"),
        (lambda: rows.argmax(X, SLOTS.int()), "out must have dtype int64, not int32"),
        (lambda: rows.silu_and_mul(X, X), r"x must have shape .* = \[2, 12\]"),
        (lambda: rows.silu_and_mul(X.T, torch.ones(6, 1, dtype=BF16)), "x must be contiguous within a row"),
        (lambda: rows.store_kv(KV, KV, CACHE, SLOTS + 3, SLOTS), r"blocks\[0\] must be below 3, not 3"),
        (lambda: rows.store_kv(KV, KV, CACHE, SLOTS, SLOTS - 1), r"offsets\[0\] must be below 4, not -1"),
        (lambda: rows.store_kv(KV, KV, CACHE, SLOTS.int(), SLOTS), "blocks must have dtype int64, not int32"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
