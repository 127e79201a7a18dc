"""Every Triton kernel in Triton's interpreter, on host tensors, against float64 results of the torch reference."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import swiftllm.ops.triton.ops as triton_ops
from pacpu import int8, rows
from swiftllm.ops.interface import ContextBlocks, Ops, unpack
from swiftllm.ops.triton.ops import TritonOps
from swiftllm.ops.triton.tiles import MAX_SPLIT_TOKENS, MIN_SPLIT_TOKENS, tokens_per_split
from tests.reference.paged_attention import attend_chunk, chunk_attention, paged_attention, store_new_tokens
from tests.reference.tolerances import assert_close
from tests.triton.interpreter import repair_bfloat16
from tests.triton.memory_check import watch_memory

repair_bfloat16()
watch_memory()

HOST = torch.device("cpu")
REFERENCE = Ops()
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-5
EXACTLY = {"rtol": 0, "atol": 0, "equal_nan": True}


@pytest.fixture(autouse=True)
def fresh_inputs_and_poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New random inputs each time, their seed printed with a failure; NaN wherever memory is not initialised."""
    print("seed", torch.seed())
    empty = torch.empty

    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    yield


def make_ops(capability: int = 80) -> TritonOps:
    return TritonOps(HOST, capability, num_multiprocessors=16)


def strided_rows(rows: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random rows that lie apart, NaN between them."""
    size = torch.Size(shape).numel()
    wide = torch.full((rows, size + 24), torch.nan, dtype=dtype)
    wide[:, 8 : 8 + size] = torch.randn(rows, size)
    return wide[:, 8 : 8 + size].unflatten(1, shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_embedded_by_their_ids(dtype):
    embedding, token_ids = torch.randn(7, 1100).to(dtype), torch.tensor([6, 0, 3, 3])
    torch.testing.assert_close(make_ops().embed(token_ids, embedding), embedding[token_ids], **EXACTLY)


@pytest.mark.parametrize("size", [64, 576])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(dtype, size):
    ops = make_ops()
    x, residual = strided_rows(5, size, dtype=dtype), strided_rows(5, size, dtype=dtype)
    weight = torch.rand(size).to(dtype) + 0.5
    for offset in (0.0, 1.0):
        expected = REFERENCE.rms_norm(x.double(), weight.double(), EPS, offset)
        assert_close(ops.rms_norm(x, weight, EPS, offset), expected, dtype)

    before = x.clone()
    expected_sum = x.double() + residual.double()
    normed = ops.add_rms_norm_(residual, x, weight, EPS, 1.0)
    assert_close(residual, expected_sum, dtype)
    # To the bit the norm of the rounded sum, which is what the next layers see.
    torch.testing.assert_close(normed, ops.rms_norm(residual, weight, EPS, 1.0), **EXACTLY)
    torch.testing.assert_close(x, before, **EXACTLY)


@pytest.mark.parametrize("size", [64, 576])
def test_norms_of_residuals_in_float32_are_float16(size):
    """The residual passes float16's largest number."""
    ops = make_ops(75)
    x, residual = strided_rows(5, size, dtype=torch.float16), strided_rows(5, size, dtype=torch.float32)
    x.mul_(10_000.0)
    residual.mul_(200_000.0)
    weight = torch.rand(size).half() + 0.5
    normed = ops.rms_norm(residual, weight, EPS)
    assert normed.dtype is torch.float16
    assert_close(normed, REFERENCE.rms_norm(residual.double(), weight.double(), EPS), torch.float16)

    before, expected_sum = x.clone(), x.double() + residual.double()
    normed = ops.add_rms_norm_(residual, x, weight, EPS)
    assert_close(residual, expected_sum, torch.float32)
    torch.testing.assert_close(normed, ops.rms_norm(residual, weight, EPS), **EXACTLY)
    torch.testing.assert_close(x, before, **EXACTLY)


@pytest.mark.parametrize("heads, head_dim", [(10, 64), (5, 80)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_of_heads_leave_other_heads_alone(dtype, heads, head_dim):
    qkv = strided_rows(4, heads + 2, head_dim, dtype=dtype)
    weights = torch.rand(heads, head_dim).to(dtype) + 0.5
    for offset in (0.0, 1.0):
        expected = qkv.double()
        REFERENCE.norm_heads_(expected[:, :heads], weights.double(), EPS, offset)
        make_ops().norm_heads_(qkv[:, :heads], weights, EPS, offset)
        assert_close(qkv, expected, dtype)


@pytest.mark.parametrize("heads, head_dim", [(10, 64), (5, 80)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_turns_some_heads_and_leaves_the_others(dtype, heads, head_dim):
    qkv = strided_rows(4, heads + 2, head_dim, dtype=dtype)
    rotary_rows = torch.randn(4, 2, head_dim)
    expected = qkv.double()
    wide = expected[:, :heads].clone()
    exchanged = wide.roll(head_dim // 2, -1)
    expected[:, :heads] = wide * rotary_rows[:, None, 0] + exchanged * rotary_rows[:, None, 1]
    make_ops().rotary_(qkv[:, :heads], rotary_rows)
    assert_close(qkv, expected, dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # infinity is the right value there
@pytest.mark.parametrize("size", [96, 1536])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul(dtype, size):
    gate_up = strided_rows(3, 2 * size, dtype=dtype)
    gate_up[0, 0], gate_up[0, 1] = -200.0, 60.0  # where a careless exponential overflows
    assert_close(make_ops().silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up.double()), dtype)


@pytest.mark.parametrize("num_kv_heads, head_dim, block_size", [(3, 64, 16), (9, 80, 8)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_kv_writes_its_slots_and_no_others(dtype, num_kv_heads, head_dim, block_size):
    kv_layer = torch.full((7, num_kv_heads, 2, block_size, head_dim), torch.nan, dtype=dtype)
    k, v = (strided_rows(11, num_kv_heads, head_dim, dtype=dtype) for _ in "kv")
    slots = torch.randperm(7 * block_size)[:11]
    blocks, offsets = slots // block_size, slots % block_size
    expected = kv_layer.clone()
    REFERENCE.store_kv(k, v, expected, blocks, offsets)
    make_ops().store_kv(k, v, kv_layer, blocks, offsets)
    torch.testing.assert_close(kv_layer, expected, **EXACTLY)


@pytest.mark.parametrize("lens", [(20, 1, 16), (7,)])
@pytest.mark.parametrize("num_kv_heads, head_dim, block_size", [(3, 64, 16), (9, 80, 8)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_contexts_are_gathered_one_behind_the_other(dtype, num_kv_heads, head_dim, block_size, lens):
    kv_layer = torch.full((9, num_kv_heads, 2, block_size, head_dim), torch.nan, dtype=dtype)
    free, blocks = torch.randperm(9).tolist(), []
    for count in lens:
        blocks.append([free.pop() for _ in range(-(-count // block_size))])
        for place, block in enumerate(blocks[-1]):
            kv_layer[block, :, :, : count - place * block_size] = torch.randn(
                num_kv_heads, 2, min(block_size, count - place * block_size), head_dim
            ).to(dtype)
    contexts = ContextBlocks.of(blocks, lens, block_size, lambda ids: ids)
    gathered = make_ops().gather_contexts(kv_layer, contexts)
    assert not gathered.isnan().any()
    torch.testing.assert_close(gathered, REFERENCE.gather_contexts(kv_layer, contexts), **EXACTLY)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_go_to_the_staging_buffer_and_back_bit_by_bit(dtype):
    ops = make_ops()

    def random_bits(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31 - 1, (*shape[:-1], shape[-1] * dtype.itemsize // 4), dtype=torch.int32)

    shape = (3, 2, 16, 48)  # of a block in one layer: more than one tile of words
    pool = random_bits(2, 9, *shape)
    blocks = torch.randperm(9)[:4]
    staging = torch.zeros_like(pool[:, :4])
    ops.gather_blocks(pool.view(dtype), blocks, staging.view(dtype))
    assert torch.equal(staging, pool[:, blocks])

    target = random_bits(2, 6, *shape)
    expected, places = target.clone(), torch.randperm(6)[:4]
    expected[:, places] = staging
    ops.scatter_blocks(staging.view(dtype), target.view(dtype), places)
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    "dtype, num_kv_heads, head_dim, block_size",
    [(torch.float32, 2, 72, 32), (torch.float16, 3, 64, 16), (torch.bfloat16, 1, 8, 16)],
    ids=str,
)
def test_blocks_leave_as_the_codes_of_pacpu_and_come_back_as_their_elements(dtype, num_kv_heads, head_dim, block_size):
    """Bit by bit, with zeros, the least numbers, ties and what is not finite; other blocks are not touched."""
    ops, shape = make_ops(), (2, 6, num_kv_heads, 2, block_size, head_dim)
    pool = torch.randn(shape) * 4 ** torch.randn(*shape[:-1], 1)
    pool[0, :, 0, :, 0], pool[0, :, 0, :, 1] = 0.0, 2.0**-24
    pool[0, :, 0, :, 2] = torch.randint(-253, 254, (6, 2, head_dim)) / 2
    pool[0, :, 0, :, 2, 0] = 127
    pool[1, :, 0, :, 3, 5], pool[1, :, 0, :, 4, 7] = torch.inf, torch.nan
    pool = pool.to(dtype)
    blocks = torch.randperm(6)[:4]
    head_bytes = int8.head_bytes(block_size, head_dim)
    staging = torch.full((2, 4, num_kv_heads, head_bytes), 255, dtype=torch.uint8)
    expected, by_pacpu = staging.clone(), staging.clone()
    ops.quantise_blocks(pool, blocks, staging)
    REFERENCE.quantise_blocks(pool, blocks, expected)
    rows.scatter_blocks(pool[:, blocks].contiguous(), by_pacpu, torch.arange(4))
    for x in (staging, expected):
        torch.testing.assert_close(unpack(x, head_dim), unpack(by_pacpu, head_dim), **EXACTLY)
    is_finite = pool[:, blocks].isfinite().all(-1).all(-1).all(-1)  # else NaN has many bit patterns
    assert is_finite[0].all() and torch.equal(staging[is_finite], by_pacpu[is_finite])
    assert torch.equal(staging[is_finite], expected[is_finite])

    places = torch.randperm(6)[:4]
    for there in (pool.clone(), pool.clone().fill_(torch.nan)):
        expected, by_pacpu = there.clone(), there.clone()
        by_pacpu[:, places] = rows_of(staging, pool)
        REFERENCE.dequantise_blocks(staging, expected, places)
        ops.dequantise_blocks(staging, there, places)
        torch.testing.assert_close(there, by_pacpu, **EXACTLY)
        torch.testing.assert_close(there, expected, **EXACTLY)


def rows_of(staging: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(pool[:, : staging.shape[1]])
    rows.gather_blocks(staging, torch.arange(staging.shape[1]), out)
    return out


ATTENTIONS = {  # name: query heads, KV heads, head_dim, block_size
    "MHA": (2, 2, 128, 16),
    "GQA 3": (6, 2, 64, 16),
    "GQA 4, short blocks": (4, 1, 64, 8),
    "MQA 9, odd head": (9, 1, 80, 16),
}

# float32 takes the same kernel on every GPU, and bfloat16 needs sm_80.
LANES, DOT = [(torch.float32, 80), (torch.float16, 75)], [(torch.float16, 80), (torch.bfloat16, 80)]
PATHS = LANES + DOT
# Each shape in both kernels, each dtype with two shapes.
CASES = [(name, *kernel[index % 2]) for index, name in enumerate(ATTENTIONS) for kernel in (LANES, DOT)]


@pytest.mark.parametrize("name, dtype, capability", CASES, ids=str)
def test_decode_attention(name, dtype, capability):
    """Ragged contexts in shuffled blocks: of one token, at and around the ends of blocks, tiles and splits.

    Splits beyond a context hold nothing; slots and blocks beyond it are NaN, and so are partial results never made.
    """
    num_heads, num_kv_heads, head_dim, block_size = ATTENTIONS[name]
    edge = MIN_SPLIT_TOKENS
    seq_lens = torch.tensor([1, 2 * edge + 1, edge, 17, edge + random.randrange(2, edge)], dtype=torch.int32)
    width = 3 * edge // block_size
    needed = [-(-n // block_size) for n in seq_lens.tolist()]
    num_blocks = sum(needed) + 3
    order = torch.randperm(num_blocks, dtype=torch.int32)
    tables = torch.full((len(needed), width), 2**30, dtype=torch.int32)  # far outside the cache
    kv_layer = torch.full((num_blocks, num_kv_heads, 2, block_size, head_dim), torch.nan, dtype=dtype)
    for row, count in enumerate(needed):
        tables[row, :count], order = order[:count], order[count:]
        context = torch.randn(count, num_kv_heads, 2, block_size, head_dim).to(dtype)
        beyond = torch.arange(count * block_size).view(count, 1, 1, block_size, 1) >= seq_lens[row] - 1
        kv_layer[tables[row, :count].long()] = context.masked_fill(beyond, torch.nan)
    new = strided_rows(len(needed), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    q, k, v = new.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    expected_layer = kv_layer.clone()
    store_new_tokens(k, v, expected_layer, tables, seq_lens)
    expected = paged_attention(q, expected_layer, tables, seq_lens, head_dim**-0.5)

    out = torch.full((len(needed), num_heads, head_dim), torch.nan, dtype=dtype)
    make_ops(capability).decode_attention(q, k, v, kv_layer, tables, seq_lens, out, head_dim**-0.5)
    torch.testing.assert_close(kv_layer, expected_layer, **EXACTLY)
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("dtype, capability", PATHS, ids=str)
def test_contexts_of_one_split_take_one_kernel_and_have_the_bits_of_two(dtype, capability, monkeypatch):
    launched: list[str] = []
    launch = triton_ops.launch

    def counted(kernel, *arguments, **options) -> None:
        launched.append(kernel.fn.__name__)
        launch(kernel, *arguments, **options)

    monkeypatch.setattr(triton_ops, "launch", counted)
    seq_lens = torch.tensor([1, MIN_SPLIT_TOKENS, 0, 37], dtype=torch.int32)
    q, k, v = strided_rows(4, 8, 64, dtype=dtype).split((4, 2, 2), dim=1)
    kv_layer = torch.randn(40, 2, 2, 16, 64).to(dtype)
    for sinks in (None, torch.randn(4)):
        outs = []
        for blocks in (MIN_SPLIT_TOKENS // 16, 2 * MIN_SPLIT_TOKENS // 16):  # the wider one has room for a second split
            tables = torch.full((4, blocks), 2**30, dtype=torch.int32)
            tables[:, : MIN_SPLIT_TOKENS // 16] = torch.arange(32).view(4, 8)
            outs.append(torch.empty(4, 4, 64, dtype=dtype))
            new = q, k, v, kv_layer.clone()
            make_ops(capability).decode_attention(*new, tables, seq_lens, outs[-1], 0.125, sinks=sinks)
        assert torch.equal(*outs) and not outs[0][2].any() and outs[0][3].any()
    assert launched.count("decode_combine_kernel") == 2 and len(launched) == 6


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2", "ignore:invalid value encountered in subtract")
@pytest.mark.parametrize("dtype, capability", PATHS, ids=str)
def test_windows_and_sinks(dtype, capability):
    """A window is one split or more, and may reach back before the first token."""
    two_splits, sinks = MIN_SPLIT_TOKENS + 9, 3 * torch.randn(6)
    sinks[1], sinks[5] = -torch.inf, 1e4
    for window in (1, 37, two_splits, None):
        check_windows_and_sinks(dtype, capability, window, sinks)
    check_windows_and_sinks(dtype, capability, two_splits, None)


def check_windows_and_sinks(dtype, capability, window, sinks) -> None:
    """What the window does not reach is NaN, and the ids of its blocks are out of range."""
    edge, block_size = MIN_SPLIT_TOKENS, 16
    seq_lens = torch.tensor([1, edge, 0, 2 * edge + 7], dtype=torch.int32)
    tables = torch.full((4, 3 * edge // block_size), 2**30, dtype=torch.int32)
    order = iter(torch.randperm(tables.numel()).tolist())
    kv_layer = torch.full((tables.numel(), 2, 2, block_size, 64), torch.nan, dtype=dtype)
    for row, length in enumerate(seq_lens.tolist()):
        begin = 0 if window is None else max(0, length - window)
        for index in range(begin // block_size, -(-length // block_size)):
            block = tables[row, index] = next(order)
            slots = slice(max(0, begin - index * block_size), length - 1 - index * block_size)
            kv_layer[block, :, :, slots] = torch.randn_like(kv_layer[block, :, :, slots])
    q, k, v = strided_rows(4, 10, 64, dtype=dtype).split((6, 2, 2), dim=1)
    some = seq_lens > 0
    expected_layer = kv_layer.clone()
    store_new_tokens(k[some], v[some], expected_layer, tables[some], seq_lens[some])
    expected = torch.zeros(4, 6, 64, dtype=torch.float64)
    expected[some] = paged_attention(q[some], expected_layer, tables[some], seq_lens[some], 0.125, window, sinks)
    out = torch.full((4, 6, 64), torch.nan, dtype=dtype)
    make_ops(capability).decode_attention(q, k, v, kv_layer, tables, seq_lens, out, 0.125, window, sinks)
    torch.testing.assert_close(kv_layer, expected_layer, **EXACTLY)
    assert_close(out, expected, dtype)


@pytest.mark.parametrize("capability", [75, 80])
def test_rows_without_context_are_left_out(capability):
    """A batch may be padded to the size of a captured graph with rows of length 0."""
    kv_layer, out = torch.randn(4, 1, 2, 16, 16).half(), torch.empty(2, 2, 16, dtype=torch.float16)
    q, k, v = torch.randn(2, 4, 16).half().split((2, 1, 1), dim=1)
    tables, seq_lens = torch.tensor([[3], [0]], dtype=torch.int32), torch.tensor([5, 0], dtype=torch.int32)
    expected_layer = kv_layer.clone()
    store_new_tokens(k[:1], v[:1], expected_layer, tables[:1], seq_lens[:1])
    make_ops(capability).decode_attention(q, k, v, kv_layer, tables, seq_lens, out, 0.25)
    assert torch.equal(kv_layer, expected_layer)
    assert not out[1].any()
    assert_close(out[0], paged_attention(q[:1], expected_layer, tables[:1], seq_lens[:1], 0.25)[0])


@pytest.mark.parametrize("rows, context", [(12, 12), (5, 33)], ids=["whole prompt", "chunk"])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prefill_attention_groups_heads(dtype, heads, rows, context):
    num_heads, num_kv_heads = heads
    new = strided_rows(rows, num_heads, 32, dtype=dtype)
    k, v = torch.randn(2, num_kv_heads, context, 32).to(dtype)
    assert_close(attend_chunk(make_ops(), new, k, v, 0.2), chunk_attention(new, k, v, 0.2), dtype)


def test_no_rows_are_no_work():
    ops, rows = make_ops(), torch.empty(0, 4, 16)
    tables, lens = torch.empty(0, 0, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    layer = torch.zeros(2, 4, 2, 16, 16)
    ops.rotary_(rows, torch.empty(0, 2, 16))
    ops.norm_heads_(rows, torch.ones(4, 16), EPS)
    ops.store_kv(rows, rows, layer, tables.long()[:, 0:0].flatten(), lens.long())
    ops.decode_attention(rows, rows, rows, layer, tables, lens, rows, 1.0)
    assert ops.rms_norm(rows.flatten(1), torch.ones(64), EPS).shape == (0, 64)
    assert ops.add_rms_norm_(rows.flatten(1), rows.flatten(1), torch.ones(64), EPS).shape == (0, 64)
    assert ops.silu_and_mul(rows.flatten(1)).shape == (0, 32)
    assert not layer.any()


def test_rows_that_do_not_lie_together_are_refused():
    with pytest.raises(ValueError, match="not contiguous"):
        make_ops().rotary_(torch.randn(3, 16, 4).transpose(1, 2), torch.randn(3, 2, 16))


@pytest.mark.parametrize("sequences, context", [(1, 64), (8, 832), (512, 1024), (160, 20_000), (4096, 131_072)])
def test_splits_are_long_enough_to_pay_and_cover_the_context(sequences, context):
    tokens = tokens_per_split(sequences, context, programs=64)
    assert tokens.bit_count() == 1 and MIN_SPLIT_TOKENS <= tokens <= MAX_SPLIT_TOKENS


def test_a_decode_has_as_many_splits_as_programs_find_shared_memory(monkeypatch):
    """A multiprocessor of an A10 holds two programs of this kernel, one of an A100 four."""
    grids: dict[int, int] = {}
    rows, tables = torch.empty(1, 24, 128, dtype=torch.float16), torch.zeros(1, 1024, dtype=torch.int32)
    layer = torch.empty(1, 8, 2, 16, 128, dtype=torch.float16)
    for shared_kib in (100, 164):
        monkeypatch.setattr(
            triton_ops, "launch", lambda kernel, grid, *_, kib=shared_kib, **__: grids.setdefault(kib, grid[0])
        )
        ops = TritonOps(HOST, 80, num_multiprocessors=64, shared_bytes=shared_kib << 10)
        q, k, v = rows.split((8, 8, 8), dim=1)
        ops.decode_attention(q, k, v, layer, tables, torch.zeros(1, dtype=torch.int32), torch.empty_like(q), 0.1)
    assert grids == {100: 16, 164: 32}
