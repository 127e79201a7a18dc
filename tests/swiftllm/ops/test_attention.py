"""Attention with windows and sinks, in plain torch and by the CPU's operations, against float64."""

import pytest
import torch

import pacpu
import swiftllm.ops.interface as interface
from pacpu import _pacpu, rows
from swiftllm.device import CudaDevice
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import ChunkLens, ContextBlocks, Ops
from tests.pacpu.cases import BEST_ISA, make_case
from tests.reference.fake_device import FakeCuda
from tests.reference.fake_gpu import FakeOps
from tests.reference.paged_attention import attend_chunk, chunk_attention, paged_attention, store_new_tokens
from tests.reference.tolerances import TOLERANCES, assert_close

every_ops = pytest.mark.parametrize("ops", [Ops(), CpuOps(num_threads=2)], ids=["torch", "cpu"])
every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
WINDOWS = (None, 1, 5, 16, 17, 128)


@pytest.fixture(autouse=True)
def fresh_inputs():
    print("seed", torch.seed())


@every_ops
@every_dtype
def test_decode_with_windows_and_sinks(ops, dtype):
    """What a window does not reach is NaN, in blocks of their own and in the block where it begins."""
    for window in WINDOWS:
        for sinks in (None, 3 * torch.randn(6)):
            case = make_case(dtype, num_heads=6, num_kv_heads=3, head_dim=32, seq_lens=(1, 37, 16, 130, 129))
            cache, tables, lens = case.kv_cache, case.block_tables, case.seq_lens
            tables.masked_fill_(tables >= len(cache), 0)  # ids beyond a context are read by plain torch
            if window is not None:
                for row, length in enumerate(lens.tolist()):
                    for token in range(length - window):
                        cache[tables[row, token // 16], :, :, token % 16] = torch.nan
            expected_cache = cache.clone()
            store_new_tokens(case.k, case.v, expected_cache, tables, lens)
            expected = paged_attention(case.q, expected_cache, tables, lens, 0.3, window, sinks)
            case.out.fill_(torch.nan)
            ops.decode_attention(case.q, case.k, case.v, cache, tables, lens, case.out, 0.3, window, sinks)
            torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
            assert_close(case.out, expected)


@pytest.fixture
def by_dot_products():
    """Prompts go to pacpu, on CPUs where these are fast."""
    if "avx512bf16" in pacpu.unavailable_isas():
        pytest.skip(pacpu.unavailable_isas()["avx512bf16"])
    _pacpu.select_isa("avx512bf16")
    yield
    _pacpu.select_isa(BEST_ISA)


def chunks_in_one_call(ops, dtype, window, sinks, send=lambda tensor: tensor, heads=6) -> None:
    """Chunks of several requests in one call, as the rows of a GPU batch, against float64 one by one."""
    sizes = (12, 12), (7, 30), (33, 50), (1, 1), (1, 40), (65, 65), (32, 33)
    num_rows, tokens = zip(*sizes, strict=True)
    qkv, (k, v) = torch.randn(sum(num_rows), heads + 6, 16).to(dtype), torch.randn(2, 3, sum(tokens), 16).to(dtype)
    lens, out = ChunkLens.of(num_rows, tokens, send), send(torch.full((sum(num_rows), heads, 16), torch.nan).to(dtype))
    on_device = None if sinks is None else send(sinks)
    ops.prefill_attention(send(qkv)[:, :heads], send(k), send(v), lens, out, 0.3, window, on_device)
    for own, context in lens.slices():
        expected = chunk_attention(qkv[own, :heads], k[:, context], v[:, context], 0.3, window, sinks)
        assert_close(out[own].cpu(), expected, dtype)


@every_ops
@every_dtype
@pytest.mark.parametrize("window", [None, 5])
def test_chunks_of_several_requests_in_one_call(ops, dtype, window):
    chunks_in_one_call(ops, dtype, window, torch.randn(6))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["flash", "memory-efficient"])
@pytest.mark.parametrize("heads", [3, 6])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_chunks_of_several_requests_in_one_call_of_a_gpu(dtype, heads, window, has_sinks):
    """The calls that torch's kernels for sequences of different lengths get, and what comes of their results."""
    with FakeCuda(0) as cuda, torch.inference_mode():
        send = CudaDevice(1).compute.send
        sinks = torch.randn(heads) if has_sinks else None
        chunks_in_one_call(FakeOps(cuda), dtype, window, sinks, send, heads)


@every_ops
@every_dtype
def test_contexts_are_gathered_one_behind_the_other(ops, dtype):
    """Of any length, in shuffled blocks; slots beyond a context hold NaN."""
    lens = 7, 1, 16, 33
    layer = torch.full((9, 3, 2, 8, 16), torch.nan).to(dtype)
    order, blocks, expected = iter(torch.randperm(9).tolist()), [], []
    for count in lens:
        blocks.append([next(order) for _ in range(-(-count // 8))])
        expected.append(torch.randn(2, 3, count, 16).to(dtype))
        for place, block in enumerate(blocks[-1]):
            part = expected[-1][:, :, place * 8 : place * 8 + 8]
            layer[block, :, :, : part.shape[2]] = part.transpose(0, 1)
    contexts = ContextBlocks.of(blocks, lens, 8, lambda tensor: tensor)
    assert torch.equal(ops.gather_contexts(layer, contexts), torch.cat(expected, dim=2))


def test_prompts_of_several_windows_by_dot_products(by_dot_products, monkeypatch):
    monkeypatch.setattr(rows, "linear_is_fastest", lambda: True)
    if not rows.has_prompt_attention():
        pytest.skip("dot products are slow here")
    for window in (5, None, 9):
        chunks_in_one_call(CpuOps(num_threads=2), torch.bfloat16, window, torch.randn(6))


@every_ops
@every_dtype
def test_prefill_with_windows_and_sinks(ops, dtype, monkeypatch):
    """In pieces of several lengths; of all tokens and of those that the window reaches."""
    monkeypatch.setattr(interface, "LEAST_WINDOWED_ROWS", 8)
    for num_rows, context in ((12, 12), (33, 50), (1, 20), (40, 40)):
        q, (k, v) = torch.randn(num_rows, 6, 16).to(dtype), torch.randn(2, 3, context, 16).to(dtype)
        for window in WINDOWS:
            for sinks in (None, 3 * torch.randn(6)):
                expected = chunk_attention(q, k, v, 0.3, window, sinks)
                assert_close(attend_chunk(ops, q, k, v, 0.3, window, sinks), expected, dtype)
                if window is None:
                    continue
                reached = min(context, num_rows + window - 1)
                last = k[:, context - reached :], v[:, context - reached :]
                assert_close(attend_chunk(ops, q, *last, 0.3, window, sinks), expected, dtype)
