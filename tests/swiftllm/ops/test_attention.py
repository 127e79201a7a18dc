"""Attention with windows and sinks, in plain torch and by the CPU's operations, against float64."""

import pytest
import torch

import pacpu
import swiftllm.ops.interface as interface
from pacpu import _pacpu, rows
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import ChunkAttention, Ops
from tests.pacpu.cases import BEST_ISA, make_case
from tests.reference.paged_attention import attend_chunk, attends, chunk_attention, paged_attention, store_new_tokens
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


def test_prompts_of_several_windows_by_dot_products(by_dot_products, monkeypatch):
    monkeypatch.setattr(rows, "linear_is_fastest", lambda: True)
    if not rows.has_prompt_attention():
        pytest.skip("dot products are slow here")
    sinks, chunks, expected = torch.randn(6), [], []
    for num_rows, context, window in ((12, 12, 5), (7, 30, None), (33, 50, 5), (20, 20, 9)):
        q, (k, v) = torch.randn(num_rows, 6, 16).bfloat16(), torch.randn(2, 3, context, 16).bfloat16()
        mask = None if num_rows == context else attends(num_rows, context, window)
        chunks.append(ChunkAttention(q, k, v, mask, torch.full_like(q, torch.nan), window))
        expected.append(chunk_attention(q, k, v, 0.3, window, sinks))
    CpuOps(num_threads=2).prefill_attention(chunks, 0.3, sinks)
    for chunk, out in zip(chunks, expected, strict=True):
        assert_close(chunk.out, out)


@every_ops
@every_dtype
def test_prefill_with_windows_and_sinks(ops, dtype, monkeypatch):
    """In pieces of several lengths; with a mask and without; of all tokens and of those that the window reaches."""
    monkeypatch.setattr(interface, "LEAST_WINDOWED_ROWS", 8)
    for num_rows, context in ((12, 12), (33, 50), (1, 20), (40, 40)):
        q, (k, v) = torch.randn(num_rows, 6, 16).to(dtype), torch.randn(2, 3, context, 16).to(dtype)
        for window in WINDOWS:
            for sinks in (None, 3 * torch.randn(6)):
                expected = chunk_attention(q, k, v, 0.3, window, sinks)
                mask = None if num_rows == context and window is None else attends(num_rows, context, window)
                assert_close(attend_chunk(ops, q, k, v, mask, 0.3, window, sinks), expected, dtype)
                if window is None:
                    continue
                reached = min(context, num_rows + window - 1)
                last = k[:, context - reached :], v[:, context - reached :]
                assert_close(attend_chunk(ops, q, *last, None, 0.3, window, sinks), expected, dtype)
