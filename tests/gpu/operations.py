"""Every operation as this GPU runs it, against the torch reference in float64 on the same random inputs.

A GPU with tensor cores for Triton computes each operation twice: as it does it itself, and as a T4 (sm_75) does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial, wraps
from itertools import cycle

import torch

from pacpu.int8 import head_bytes
from swiftllm.core.request import Request, SamplingParams
from swiftllm.device import open_device
from swiftllm.model.quantised_weights import sort_into_runs
from swiftllm.ops.interface import ContextBlocks, Ops, StateChunk, StateRows
from swiftllm.ops.library import (
    CHECKED_ROWS,
    MOST_DIFFERENCE,
    LibraryLinear,
    LibraryProducts,
    installed_version,
    largest_difference,
)
from swiftllm.ops.matrices import MXFP4_GROUP, ClampedSwiGLU, ExpertWeights, QuantisedMatrix, choose_experts
from swiftllm.runtime.execution_context import TRITON_CAPABILITY, select_ops, why_no_triton
from swiftllm.sampling.sampler import Sampler
from tests.reference.paged_attention import attend_chunk, chunk_attention, paged_attention, store_new_tokens
from tests.reference.tolerances import TOLERANCES, assert_close

REFERENCE = Ops()
EPS = 1e-5
BLOCK_SIZE = 16
HEADS = ((32, 8, 128), (32, 32, 128), (9, 3, 64), (12, 4, 80))  # query heads, KV heads, head dim
CHUNKS = ((1, 1), (2, 2), (33, 33), (300, 300), (1, 33), (33, 40), (65, 200), (40, 65), (96, 513))  # rows, context
CONTEXTS = (1, 2, 15, 16, 17, 255, 257, 7, 2100)  # the last one has several splits
ROWS = ((1, 4096), (70, 576), (3, 11008))
EMBEDDED = (50, 4096, 70)  # tokens, hidden size, rows
INT8_BLOCKS = (20, 7, ((8, 128), (3, 80)))  # in a pool, moved, and KV heads and their dims
LINEARS = (  # outputs, inputs, group size, act-order, a part of an act-order matrix
    (1024, 4096, 128, True, False),
    (1024, 4096, 128, True, True),
    (6144, 4096, 128, False, False),
    (576, 1536, 64, False, False),
)
LINEAR_ROWS = (1, 2, 16, 33, 128, 300, 1024, 1025)
EXPERTS = (  # experts, of each row, hidden size, FFN size, 4-bit group (0: 16 or 32 bits; 32: MXFP4), as in gpt-oss
    (8, 2, 1024, 512, 0, False),
    (64, 8, 1024, 512, 128, False),
    (32, 4, 1440, 1440, MXFP4_GROUP, True),
)
EXPERT_ROWS = (1, 70, 600)
PAIRS = ((8, 2), (8, 1000), (128, 4096), (128, 20_000))  # experts, pairs
STATES = (16, 32, 128, 4096)  # key heads, value heads, their size, channels of the convolution
STATE_ROWS = (70, 2)  # of chunks
T4_MULTIPROCESSORS = 40


class NotHere(Exception):
    """This machine lacks what a check is of; the message says what. It is no failure."""


def forms(device: torch.device, dtype: torch.dtype) -> dict[str, Ops]:
    """The operations of this device by name: its own, and on a newer GPU those of sm_75, whose kernels it can run."""
    own = {"this device": select_ops(device, dtype)}
    if device.type == "cpu" or dtype is torch.bfloat16:  # which sm_75 has not
        return own
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor <= TRITON_CAPABILITY or why_no_triton(10 * major + minor):
        return own
    from swiftllm.ops.triton.ops import TritonOps

    return own | {"sm_75": TritonOps(device, TRITON_CAPABILITY, T4_MULTIPROCESSORS)}


def of_each_form(check: Callable[[torch.device, torch.dtype, Ops], None]) -> Callable[[torch.device], None]:
    """A check of a device from one of its operations in a dtype. A failure tells which."""

    @wraps(check)
    def check_all(device: torch.device) -> None:
        for dtype in dtypes(device):
            for name, ops in forms(device, dtype).items():
                try:
                    check(device, dtype, ops)
                except NotHere:
                    raise
                except Exception:
                    print(f"       in {str(dtype).removeprefix('torch.')}, as {name} computes", flush=True)
                    raise

    return check_all


def dtypes(device: torch.device) -> list[torch.dtype]:
    has_bfloat16 = device.type == "cpu" or torch.cuda.get_device_capability(device)[0] >= 8
    return [torch.float32, torch.float16] + ([torch.bfloat16] if has_bfloat16 else [])


@of_each_form
def check_rows(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """Embedding, norms of rows and of heads, rotary, SiLU-and-mul."""
    *shape, rows = EMBEDDED
    mapped = open_device(device.type).mapped(tuple(shape), dtype).copy_(torch.randn(shape))
    token_ids = torch.randint(shape[0], (rows,), device=device)
    for table in (mapped, mapped.to(device)):
        assert torch.equal(ops.embed(token_ids, table).cpu(), mapped[token_ids.cpu()])
    for rows, size in ROWS:
        x, residual = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
        weight = (torch.rand(size, device=device) + 0.5).to(dtype)
        for offset in (0.0, 1.0):
            norm = weight.double() + offset
            assert_close(ops.rms_norm(x, weight, EPS, offset), REFERENCE.rms_norm(x.double(), norm, EPS), dtype)
        expected = x.double() + residual.double()
        normed = ops.add_rms_norm_(residual, x, weight, EPS, 1.0)
        assert_close(residual, expected, dtype)
        assert_close(normed, REFERENCE.rms_norm(residual.double(), weight.double() + 1.0, EPS), dtype)
        wide = residual.float() * 1e5  # as of a checkpoint in bfloat16 that runs in float16
        expected = wide.double() + x.double()
        normed = ops.add_rms_norm_(wide, x, weight, EPS)
        assert normed.dtype is dtype
        assert_close(wide, expected, torch.float32)
        for made in (normed, ops.rms_norm(wide, weight, EPS)):
            assert_close(made, REFERENCE.rms_norm(wide.double(), weight.double(), EPS), dtype)
        gate_up = torch.randn(rows, 2 * size, device=device).to(dtype)
        assert_close(ops.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up.double()), dtype)
        matrix, bias = (torch.randn(24, size, device=device) / size**0.5).to(dtype), weight[:24].clone()
        expected = x.double() @ matrix.double().t()
        assert_close(ops.make_linear(matrix, bias)(x), expected + bias.double(), dtype)
        assert_close(ops.make_linear(matrix, None)(x), expected, dtype)
    heads = torch.randn(33, 12, 128, device=device).to(dtype)
    untouched = heads[:, 10:].clone()
    weights, expected = (torch.rand(10, 128, device=device) + 0.5).to(dtype), heads.double()[:, :10]
    REFERENCE.norm_heads_(expected, weights.double() + 1.0, EPS)
    ops.norm_heads_(heads[:, :10], weights, EPS, 1.0)
    assert_close(heads[:, :10], expected, dtype)
    rotary_rows = torch.randn(33, 2, 128, device=device)
    wide = heads.double()[:, :10]
    expected = wide * rotary_rows[:, None, 0] + wide.roll(64, -1) * rotary_rows[:, None, 1]
    ops.rotary_(heads[:, :10], rotary_rows)
    assert_close(heads[:, :10], expected, dtype)
    assert torch.equal(heads[:, 10:], untouched)


@of_each_form
def check_prefill_attention(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """Whole prompts and later chunks, whichever kernel torch takes for them; Q, K and V lie as in the engine."""
    for num_heads, num_kv_heads, head_dim in HEADS:
        for rows, context in CHUNKS:
            qkv = torch.randn(rows, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
            q, k, v = qkv.to(device).split((num_heads, num_kv_heads, num_kv_heads), 1)
            k, v = k.transpose(0, 1), v.transpose(0, 1)
            if context > rows:
                earlier = torch.randn(2, num_kv_heads, context - rows, head_dim).to(device, dtype)
                k, v = torch.cat([earlier, torch.stack((k, v))], dim=2)
            sinks = torch.randn(num_heads)
            for window, own_sinks in ((None, None), (None, sinks), (100, sinks), (3000, None)):
                on_device = None if own_sinks is None else own_sinks.to(device)
                out = attend_chunk(ops, q, k, v, head_dim**-0.5, window, on_device)
                how = head_dim**-0.5, window, own_sinks
                assert_close(out.cpu(), chunk_attention(q.cpu(), k.cpu(), v.cpu(), *how), dtype)


@of_each_form
def check_decode_attention(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """Ragged contexts in shuffled blocks, NaN in every slot that holds no token."""
    for num_heads, num_kv_heads, head_dim in HEADS:
        lens = torch.tensor(CONTEXTS, dtype=torch.int32)
        tables, num_blocks = shuffled_tables(lens)
        cache = torch.full((num_blocks, num_kv_heads, 2, BLOCK_SIZE, head_dim), torch.nan, dtype=dtype)
        for table, length in zip(tables.long(), lens.tolist(), strict=True):
            count = -(-length // BLOCK_SIZE)
            context = torch.randn(count, num_kv_heads, 2, BLOCK_SIZE, head_dim).to(dtype)
            is_token = torch.arange(count * BLOCK_SIZE).view(count, 1, 1, BLOCK_SIZE, 1) < length - 1
            cache[table[:count]] = context.masked_fill(~is_token, torch.nan)
        q = torch.randn(len(lens), num_heads, head_dim).to(dtype)
        k, v = (torch.randn(len(lens), num_kv_heads, head_dim).to(dtype) for _ in range(2))
        inputs, on_device = [tensor.to(device) for tensor in (q, k, v)], cache.to(device)
        addressed = on_device, tables.to(device), lens.to(device)
        store_new_tokens(k, v, cache, tables, lens)
        sinks = torch.randn(num_heads)
        for window, own_sinks in ((None, None), (None, sinks), (100, sinks), (1000, None)):
            out = torch.full((len(lens), num_heads, head_dim), torch.nan, dtype=dtype, device=device)
            how = head_dim**-0.5, window, None if own_sinks is None else own_sinks.to(device)
            ops.decode_attention(*inputs, *addressed, out, *how)
            expected = paged_attention(q, cache, tables, lens, head_dim**-0.5, window, own_sinks)
            assert_close(out.cpu(), expected, dtype)
        assert torch.equal(on_device.cpu().nan_to_num(7.0), cache.nan_to_num(7.0)), "the cache holds something else"


def shuffled_tables(lens: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Block tables for contexts of ``lens`` tokens, ids out of range behind their ends; and the number of blocks."""
    counts = [-(-length // BLOCK_SIZE) for length in lens.tolist()]
    order = torch.randperm(sum(counts)).to(torch.int32)
    tables = torch.full((len(counts), max(counts)), 1 << 20, dtype=torch.int32)
    for row, blocks in enumerate(order.split(counts)):
        tables[row, : len(blocks)] = blocks
    return tables, sum(counts)


@of_each_form
def check_blocks(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """Gathering and scattering of whole blocks and storing of single tokens, bit by bit."""
    pool = torch.randn(3, 40, 2, 2, BLOCK_SIZE, 64).to(dtype).to(device)
    blocks = torch.randperm(40, device=device)[:11]
    staging = torch.full((3, 11, *pool.shape[2:]), torch.nan, dtype=dtype, device=device)
    ops.gather_blocks(pool, blocks, staging)
    assert torch.equal(staging, pool[:, blocks])
    target = torch.zeros_like(pool)
    ops.scatter_blocks(staging, target, blocks)
    expected = torch.zeros_like(pool)
    expected[:, blocks] = pool[:, blocks]
    assert torch.equal(target, expected)
    k, v = torch.randn(11, 6, 64, device=device).to(dtype)[:, 1:5].chunk(2, 1)
    slots = torch.randperm(BLOCK_SIZE, device=device)[:11]
    ops.store_kv(k, v, target[1], blocks, slots)
    REFERENCE.store_kv(k, v, expected[1], blocks, slots)
    assert torch.equal(target, expected)


@of_each_form
def check_quantised_linear(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """Products with 4-bit weights, of few rows by codes and of many with the matrix written out."""
    for out, inputs, group_size, ordered, is_part in LINEARS:
        codes = torch.randint(16, (inputs, out), dtype=torch.uint8, device=device)
        zeros = torch.randint(16, (inputs // group_size, out), dtype=torch.uint8, device=device)
        scales = (0.1 + torch.rand(inputs // group_size, out, device=device)) / (4 * inputs**0.5)
        order, runs = torch.randperm(inputs, device=device).int() if ordered else None, None
        if is_part:  # of a matrix with act-order: no group need be full
            groups = torch.randint(inputs // group_size, (inputs,), device=device)
            codes, order, runs = sort_into_runs(codes, zeros, groups)
        matrix = QuantisedMatrix.from_codes(codes, scales.half(), zeros, group_size, dtype, order, runs)
        bias = torch.randn(out, device=device).to(dtype)
        linear = ops.make_quantised_linear(matrix, bias)
        for rows in LINEAR_ROWS:
            x = torch.randn(rows, inputs, device=device).to(dtype)
            expected = x.double() @ matrix.dequantise().double().t() + bias.double()
            assert_close(linear(x), expected, dtype)


@of_each_form
def check_contexts(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """Contexts of requests, as a chunk behind a prefix hit attends to them: gathered one behind the other, bit by bit,
    with NaN in every slot behind their ends."""
    lens = [length for length in CONTEXTS if length > 1]
    tables, num_blocks = shuffled_tables(torch.tensor(lens))
    kv_layer = torch.full((num_blocks, 3, 2, BLOCK_SIZE, 80), torch.nan, dtype=dtype)
    blocks = [table[: -(-length // BLOCK_SIZE)].tolist() for table, length in zip(tables, lens, strict=True)]
    for of_one, length in zip(blocks, lens, strict=True):
        for place, block in enumerate(of_one):
            slots = min(BLOCK_SIZE, length - place * BLOCK_SIZE)
            kv_layer[block, :, :, :slots] = torch.randn(3, 2, slots, 80).to(dtype)
    expected = REFERENCE.gather_contexts(kv_layer, ContextBlocks.of(blocks, lens, BLOCK_SIZE, lambda ids: ids))
    contexts = ContextBlocks.of(blocks, lens, BLOCK_SIZE, lambda ids: ids.to(device))
    gathered = ops.gather_contexts(kv_layer.to(device), contexts)
    assert not gathered.isnan().any() and torch.equal(gathered.cpu(), expected)


@of_each_form
def check_int8_blocks(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """Blocks on their way to a CPU tier of int8 and back, bit by bit as the host makes codes and elements."""
    there, moved, shapes = INT8_BLOCKS
    for heads, head_dim in shapes:
        pool = torch.randn(3, there, heads, 2, BLOCK_SIZE, head_dim) * 4 ** torch.randn(3, there, heads, 2, 1, 1)
        pool = pool.to(dtype)
        pool[0, :, 0, :, 0] = 0.0
        blocks = torch.randperm(there)[:moved]
        codes = torch.full((3, moved, heads, head_bytes(BLOCK_SIZE, head_dim)), 255, dtype=torch.uint8)
        on_device, own_pool = codes.to(device), pool.to(device)
        REFERENCE.quantise_blocks(pool, blocks, codes)
        ops.quantise_blocks(own_pool, blocks.to(device), on_device)
        assert torch.equal(on_device.cpu(), codes), "other codes"
        places = torch.randperm(there)[:moved]
        REFERENCE.dequantise_blocks(codes, pool, places)
        ops.dequantise_blocks(on_device, own_pool, places.to(device))
        assert torch.equal(own_pool.cpu(), pool), "other elements"


@of_each_form
def check_experts(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """Layers of experts in 16 bits, in 4 and in MXFP4, with few rows and many, and with rows that are padding."""
    for *sizes, is_gpt_oss in EXPERTS:
        weights = random_experts(*sizes, dtype, device, is_gpt_oss)
        layer = ops.make_experts(weights)
        for rows in EXPERT_ROWS:
            x = torch.randn(rows, sizes[2], device=device).to(dtype)
            expected = experts_in_float64(weights, x)
            assert_near(layer(x), expected, dtype)
            padded = torch.cat((x, x.new_full((2, sizes[2]), torch.nan)))
            out = layer(padded, num_rows=torch.tensor([rows], dtype=torch.int32, device=device))
            assert_near(out[:rows], expected, dtype)
            assert not out[rows:].any(), "padding has a result"


def random_experts(
    experts: int, per_token: int, hidden: int, ffn: int, group: int, dtype: torch.dtype, device: torch.device,
    is_gpt_oss: bool,
) -> ExpertWeights:  # fmt: skip
    """Their products with normal rows have a standard deviation of about 1. See :data:`EXPERTS`."""

    def stack(out: int, inputs: int) -> torch.Tensor | QuantisedMatrix:
        if not group:
            return (torch.randn(out, inputs, device=device) / inputs**0.5).to(dtype)
        if group == MXFP4_GROUP:
            codes = torch.randint(256, (out, inputs // group, group // 2), dtype=torch.uint8, device=device)
            highest = 125 - round(math.log2(inputs) / 2)
            powers = torch.randint(highest - 3, highest + 1, (out, inputs // group), dtype=torch.uint8, device=device)
            return QuantisedMatrix.from_mxfp4(codes, powers, dtype)
        codes = torch.randint(16, (inputs, out), dtype=torch.uint8, device=device)
        zeros = torch.randint(16, (inputs // group, out), dtype=torch.uint8, device=device)
        scales = (0.1 + torch.rand(inputs // group, out, device=device)) / (4 * inputs**0.5)
        return QuantisedMatrix.from_codes(codes, scales.half(), zeros, group, dtype)

    router = torch.randn(experts, hidden, device=device) / hidden**0.5
    stacks = stack(experts * 2 * ffn, hidden), stack(experts * hidden, ffn)
    more = {}
    if is_gpt_oss:
        biases = {"router": experts, "gate_up": experts * 2 * ffn, "down": experts * hidden}
        more = {f"{name}_bias": torch.randn(size, device=device).to(dtype) for name, size in biases.items()}
        more["activation"] = ClampedSwiGLU(limit=7.0)
    return ExpertWeights(router.to(dtype), *stacks, per_token, normalises=True, **more)


def experts_in_float64(weights: ExpertWeights, x: torch.Tensor) -> torch.Tensor:
    """By products of each expert with its rows; experts are chosen in float32, as the contract says."""
    logits = x.float() @ weights.router.float().t()
    if weights.router_bias is not None:
        logits += weights.router_bias.float()
    ids, likelihoods = choose_experts(logits, weights.per_token, weights.normalises)
    activate, out = REFERENCE.activation_of(weights), torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in ids.unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        products = x[rows].double()
        for work, (matrix, bias) in zip((activate, None), weights.of(expert), strict=True):
            matrix = matrix if isinstance(matrix, torch.Tensor) else matrix.dequantise()
            products = products @ matrix.double().t()
            products = products if bias is None else products + bias.double()
            products = products if work is None else work(products)
        out.index_add_(0, rows, products * likelihoods[rows, slots, None].double())
    return out


def assert_near(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    """Three products are rounded one after the other."""
    atol, rtol = (4 * part for part in TOLERANCES[dtype])
    torch.testing.assert_close(actual.double(), expected, atol=atol, rtol=rtol)


@of_each_form
def check_states(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """Linear attention: two chunks, one of them a prompt's first, and decodes, one of them padding, go on with states
    in shuffled slots; the others hold NaN. Beside the same on the CPU in float32, from the same rounded numbers."""
    key_heads, heads, size, channels, slots, (first, second) = *STATES, 5, STATE_ROWS
    count = first + second + 3
    pools = torch.full((slots, heads, size, size), torch.nan), torch.full((slots, channels, 3), torch.nan)
    for slot in (1, 3, 4):
        pools[0][slot], pools[1][slot] = torch.randn(heads, size, size), torch.randn(channels, 3).to(dtype)
    x, weight = torch.randn(count, channels).to(dtype), torch.randn(channels, 4).to(dtype)
    q, k, v = (torch.randn(count, number, size).to(dtype) for number in (key_heads, key_heads, heads))
    decay, beta = -torch.rand(count, heads), torch.rand(count, heads)
    gate, norm = torch.randn(count, heads, size).to(dtype), torch.rand(size).to(dtype)
    chunks = StateChunk(3, first, is_first=False), StateChunk(0, second, is_first=True)

    def computed(ops: Ops, where: torch.device, kind: torch.dtype) -> tuple[torch.Tensor, ...]:
        def there(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(where, kind, copy=True)

        states, inputs = pools[0].to(where, copy=True), there(pools[1])
        of_rows = StateRows.of(chunks, [4, -1, 1], lambda tensor: tensor.to(where))
        mixed = ops.convolve(there(x), there(weight), inputs, of_rows)
        own = there(q), there(k), there(v), decay.to(where), beta.to(where)
        out = ops.delta_rule(*own, states, of_rows)
        gated = ops.norm_and_gate(out, there(norm), there(gate), EPS)
        return mixed, out, gated, states[[0, 1, 3, 4]], inputs[[0, 1, 3, 4]], states[2], inputs[2]

    expected = computed(REFERENCE, torch.device("cpu"), torch.float32)
    *found, untouched, untouched_inputs = computed(ops, device, dtype)
    for made, right in zip(found, expected, strict=False):
        assert_close(made.cpu(), right, dtype)
    assert untouched.isnan().all() and untouched_inputs.isnan().all(), "a state of another request was written"


def check_sort_pairs(device: torch.device) -> None:
    """Pairs of rows and experts are sorted by expert, those of an expert in their order; padding has no expert."""
    if device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        raise NotHere("a GPU")
    from swiftllm.ops.triton.matrices import pairs_tile, sort_pairs_kernel
    from swiftllm.ops.triton.ops import launch

    for experts, num_pairs in PAIRS:
        ids = torch.randint(experts + 1, (num_pairs,), dtype=torch.int32)
        pairs, starts = torch.full((num_pairs,), -1, dtype=torch.int32), torch.empty(experts + 1, dtype=torch.int32)
        on_device = [tensor.to(device) for tensor in (ids, pairs, starts)]
        sizes = num_pairs, experts, pairs_tile(num_pairs)
        launch(sort_pairs_kernel, (experts + 1,), *on_device, *sizes, num_warps=4)
        _, pairs, starts = (tensor.cpu() for tensor in on_device)
        routed = int((ids < experts).sum())
        assert torch.equal(pairs[:routed].long(), ids.argsort(stable=True)[:routed])
        assert starts.tolist() == [int((ids < expert).sum()) for expert in range(experts + 1)]


def check_library(device: torch.device) -> None:
    """4-bit products by the optional library, whatever they take, and the replay of a captured one; and its products of
    experts."""
    if device.type == "cpu":
        raise NotHere("a GPU")
    if installed_version() is None:
        raise NotHere("the library")
    for out, inputs, group_size, ordered in (
        (1024, 4096, 128, True),
        (6144, 4096, 64, False),
        (576, 1536, 1536, False),
    ):
        codes = torch.randint(16, (inputs, out), dtype=torch.uint8, device=device)
        zeros = torch.randint(16, (inputs // group_size, out), dtype=torch.uint8, device=device)
        scales = ((0.1 + torch.rand(inputs // group_size, out, device=device)) / (4 * inputs**0.5)).half()
        order = torch.randperm(inputs, device=device).int() if ordered else None
        matrix = QuantisedMatrix.from_codes(codes, scales, zeros, group_size, torch.float16, order)
        bias = torch.randn(out, device=device).half()
        linear, own = LibraryLinear(matrix, bias), Ops().make_quantised_linear(matrix, bias)
        for rows in CHECKED_ROWS:
            x = torch.randn(rows, inputs, device=device).half()
            assert largest_difference(linear(x), own(x)) <= MOST_DIFFERENCE[torch.float16], rows
        x, product = torch.randn(16, inputs, device=device).half(), torch.empty(16, out, device=device).half()
        graph = open_device(device.type).capture(partial(linear, x, out=product))
        for _ in range(3):
            x.normal_()
            product.fill_(torch.nan)
            graph.replay()
            assert torch.equal(product, linear(x))
    experts, hidden, ffn = 8, 256, 128
    own, library = select_ops(device, torch.float16).in_place, untimed_library()
    ops = select_ops(device, torch.float16, library=library)
    for is_mxfp4 in (False, True):
        stacks = []
        for out, inputs in ((experts * 2 * ffn, hidden), (experts * hidden, ffn)):
            codes = torch.randint(16, (inputs, out), dtype=torch.uint8, device=device)
            zeros = torch.randint(16, (inputs // 32, out), dtype=torch.uint8, device=device)
            scales = ((0.1 + torch.rand(inputs // 32, out, device=device)) / (4 * inputs**0.5)).half()
            blocks = torch.randint(256, (out, inputs // 32, 16), dtype=torch.uint8, device=device)
            powers = torch.randint(118, 122, (out, inputs // 32), dtype=torch.uint8, device=device)
            if is_mxfp4:
                stacks.append(QuantisedMatrix.from_mxfp4(blocks, powers, torch.float16))
            else:
                stacks.append(QuantisedMatrix.from_codes(codes, scales, zeros, 32, torch.float16))
        weights = ExpertWeights(torch.randn(experts, hidden, device=device).half(), *stacks, 2, normalises=True)
        layer = ops.make_experts(weights)
        x = torch.randn(40, hidden, device=device).half()
        assert largest_difference(layer(x), own.make_experts(weights)(x)) <= MOST_DIFFERENCE[torch.float16]
        padded = layer(x, num_rows=torch.tensor([33], dtype=torch.int32, device=device))
        assert largest_difference(padded[:33], layer(x[:33])) <= MOST_DIFFERENCE[torch.float16]
        assert not padded[33:].any()
    assert library.description == f"humming-kernels {installed_version()}", "a warning says what it does not multiply"


def untimed_library() -> LibraryProducts:
    """It is used wherever its products are right."""
    times = cycle((2.0, 1.0))  # of own products and of its, in turn
    return LibraryProducts(lambda work, device: next(times))


@of_each_form
def check_sampling(device: torch.device, dtype: torch.dtype, ops: Ops) -> None:
    """A row's token is the same alone and in a batch, and the one a CPU draws: up to the rounding of an exponential,
    which moves a draw across the edge of a token once in a million."""
    hows = [{}, {"temperature": 1.0}, {"temperature": 1.2, "top_p": 0.8}, {"temperature": 0.9, "top_k": 40}]
    for columns in (128, 50_257, 128_256):
        logits = (3.0 * torch.randn(32, columns)).to(dtype)
        on_device = logits.to(device)
        requests = [Request(str(row), (1,), SamplingParams(seed=row, **hows[row % 4])) for row in range(32)]
        sampler = Sampler(device=open_device(device.type), draw=ops.make_draw())
        tokens = sampler.sample(on_device, requests)
        for rows in (range(5), range(9, 30, 3), [31]):
            some = sampler.sample(on_device[list(rows)], [requests[row] for row in rows])
            assert some == [tokens[row] for row in rows], (columns, dtype)
        expected = Sampler().sample(logits, requests)
        assert sum(map(int.__ne__, tokens, expected)) <= 1, (columns, dtype, tokens, expected)
