"""Every operation as this GPU runs it, against the torch reference in float64 on the same random inputs."""

from __future__ import annotations

from functools import partial

import torch

from swiftllm.core.request import Request, SamplingParams
from swiftllm.device import open_device
from swiftllm.model.weights.quantised.readers import sort_into_runs
from swiftllm.ops.interface import Ops
from swiftllm.ops.library import MOST_ERROR, LibraryLinear, installed_version
from swiftllm.ops.quantised_matrix import QuantisedMatrix
from swiftllm.ops.select import select_ops
from swiftllm.sampling.sampler import Sampler
from tests.reference.paged_attention import attend_chunk, chunk_attention, paged_attention, store_new_tokens
from tests.reference.tolerances import assert_close

REFERENCE = Ops()
EPS = 1e-5
BLOCK_SIZE = 16
HEADS = ((32, 8, 128), (32, 32, 128), (9, 3, 64), (12, 4, 80))  # query heads, KV heads, head dim
CHUNKS = ((1, 1), (2, 2), (33, 33), (300, 300), (1, 33), (33, 40), (65, 200), (40, 65), (96, 513))  # rows, context
CONTEXTS = (1, 2, 15, 16, 17, 255, 257, 7, 2100)  # the last one has several splits


def dtypes(device: torch.device) -> list[torch.dtype]:
    has_bfloat16 = device.type == "cpu" or torch.cuda.get_device_capability(device)[0] >= 8
    return [torch.float32, torch.float16] + ([torch.bfloat16] if has_bfloat16 else [])


def check_rows(device: torch.device) -> None:
    """Embedding, norms of rows and of heads, rotary, SiLU-and-mul."""
    for dtype in dtypes(device):
        ops = select_ops(device, dtype)
        mapped = open_device(device.type).mapped((50, 4096), dtype).copy_(torch.randn(50, 4096))
        token_ids = torch.randint(50, (70,), device=device)
        for table in (mapped, mapped.to(device)):
            assert torch.equal(ops.embed(token_ids, table).cpu(), mapped[token_ids.cpu()])
        for rows, size in ((1, 4096), (70, 576), (3, 11008)):
            x, residual = (torch.randn(rows, size, device=device).to(dtype) for _ in range(2))
            weight = (torch.rand(size, device=device) + 0.5).to(dtype)
            assert_close(ops.rms_norm(x, weight, EPS), REFERENCE.rms_norm(x.double(), weight.double(), EPS), dtype)
            expected = x.double() + residual.double()
            normed = ops.add_rms_norm_(residual, x, weight, EPS)
            assert_close(residual, expected, dtype)
            assert_close(normed, REFERENCE.rms_norm(residual.double(), weight.double(), EPS), dtype)
            gate_up = torch.randn(rows, 2 * size, device=device).to(dtype)
            assert_close(ops.silu_and_mul(gate_up), REFERENCE.silu_and_mul(gate_up.double()), dtype)
        heads = torch.randn(33, 12, 128, device=device).to(dtype)
        untouched = heads[:, 10:].clone()
        weights, expected = (torch.rand(10, 128, device=device) + 0.5).to(dtype), heads.double()[:, :10]
        REFERENCE.norm_heads_(expected, weights.double(), EPS)
        ops.norm_heads_(heads[:, :10], weights, EPS)
        assert_close(heads[:, :10], expected, dtype)
        rotary_rows = torch.randn(33, 2, 128, device=device)
        wide = heads.double()[:, :10]
        expected = wide * rotary_rows[:, None, 0] + wide.roll(64, -1) * rotary_rows[:, None, 1]
        ops.rotary_(heads[:, :10], rotary_rows)
        assert_close(heads[:, :10], expected, dtype)
        assert torch.equal(heads[:, 10:], untouched)


def check_prefill_attention(device: torch.device) -> None:
    """Whole prompts and later chunks, whichever kernel torch takes for them; Q, K and V lie as in the engine."""
    for dtype in dtypes(device):
        ops = select_ops(device, dtype)
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


def check_decode_attention(device: torch.device) -> None:
    """Ragged contexts in shuffled blocks, NaN in every slot that holds no token."""
    for dtype in dtypes(device):
        ops = select_ops(device, dtype)
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


def check_blocks(device: torch.device) -> None:
    """Gathering and scattering of whole blocks and storing of single tokens, bit by bit."""
    for dtype in dtypes(device):
        ops = select_ops(device, dtype)
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


def check_quantised_linear(device: torch.device) -> None:
    """Products with 4-bit weights, of few rows by codes and of many with the matrix written out."""
    shapes = (
        (1024, 4096, 128, True, False),
        (1024, 4096, 128, True, True),
        (6144, 4096, 128, False, False),
        (576, 1536, 64, False, False),
    )
    for dtype in dtypes(device):
        ops = select_ops(device, dtype)
        for out, inputs, group_size, ordered, is_part in shapes:
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
            for rows in (1, 2, 16, 33, 128, 300, 1024, 1025):
                x = torch.randn(rows, inputs, device=device).to(dtype)
                expected = x.double() @ matrix.dequantise().double().t() + bias.double()
                assert_close(linear(x), expected, dtype)


def check_library(device: torch.device) -> None:
    """4-bit products by the optional library, which is used below sm_80, and the replay of a captured one."""
    if installed_version() is None or device.type == "cpu":
        print("       the library is not installed, or there is no GPU for it")
        return
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
        linear = LibraryLinear(matrix, bias)
        assert linear.error_of(33, matrix, bias) <= MOST_ERROR
        x, product = torch.randn(16, inputs, device=device).half(), torch.empty(16, out, device=device).half()
        graph = open_device(device.type).capture(partial(linear, x, out=product))
        for _ in range(3):
            x.normal_()
            product.fill_(torch.nan)
            graph.replay()
            assert torch.equal(product, linear(x))


def check_sampling(device: torch.device) -> None:
    """A row's token is the same alone and in a batch, and the one a CPU draws: up to the rounding of an exponential,
    which moves a draw across the edge of a token once in a million."""
    hows = [{}, {"temperature": 1.0}, {"temperature": 1.2, "top_p": 0.8}, {"temperature": 0.9, "top_k": 40}]
    for columns in (128, 50_257, 128_256):
        for dtype in dtypes(device):
            logits = (3.0 * torch.randn(32, columns)).to(dtype)
            on_device = logits.to(device)
            requests = [Request(str(row), (1,), SamplingParams(seed=row, **hows[row % 4])) for row in range(32)]
            sampler = Sampler(device=open_device(device.type), draw=select_ops(device, dtype).make_draw())
            tokens = sampler.sample(on_device, requests)
            for rows in (range(5), range(9, 30, 3), [31]):
                some = sampler.sample(on_device[list(rows)], [requests[row] for row in rows])
                assert some == [tokens[row] for row in rows], (columns, dtype)
            expected = Sampler().sample(logits, requests)
            assert sum(map(int.__ne__, tokens, expected)) <= 1, (columns, dtype, tokens, expected)
