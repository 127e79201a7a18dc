"""The CPU tier in a pool of more than 2^32 elements: block ids whose elements lie beyond what 32 bits count."""

from __future__ import annotations

import pytest
import torch

import pacpu
from pacpu import rows
from swiftllm.ops.interface import ContextBlocks, Ops
from tests.pacpu.cases import every_variant, use
from tests.reference.paged_attention import paged_attention, store_new_tokens
from tests.reference.reserved_memory import WidePool
from tests.reference.tolerances import assert_close


@pytest.fixture
def wide() -> WidePool:
    return WidePool()


@every_variant
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_context_beyond_2_to_the_31_elements_is_attended(wide, kernel, isa, num_threads):
    use(isa, kernel, torch.float16)
    small_tables = torch.tensor([[2, 0, 3], [4, 1, 0]], dtype=torch.int32)
    tables, seq_lens = wide.ids[small_tables].int(), torch.tensor([37, 20], dtype=torch.int32)
    q, k, v = torch.randn(2, 8, 64).half().split((4, 2, 2), dim=1)
    store_new_tokens(k, v, wide.small[1], small_tables, seq_lens)
    expected = paged_attention(q, wide.small[1], small_tables, seq_lens, 0.125)
    out = torch.full((2, 4, 64), torch.nan, dtype=torch.float16)
    pacpu.paged_attention(q, k, v, wide.pool[1], tables, seq_lens, out, 0.125, kernel=kernel, num_threads=num_threads)
    assert_close(out, expected)
    assert torch.equal(wide.used(), wide.small)


def test_rows_and_whole_blocks_reach_and_leave_the_end_of_the_pool(wide):
    ops, offsets = Ops(), torch.tensor([0, 15, 3, 7, 9])
    k, v = torch.randn(2, 5, 2, 64).half()
    wide.small[1, torch.arange(5), :, 0, offsets] = k
    wide.small[1, torch.arange(5), :, 1, offsets] = v
    rows.store_kv(k, v, wide.pool[1], wide.ids, offsets, num_threads=2)
    assert torch.equal(wide.used(), wide.small)

    staging = torch.zeros_like(wide.small)
    ops.gather_blocks(wide.pool, wide.ids, staging)
    assert torch.equal(staging, wide.small)
    ops.scatter_blocks(staging.flip(1), wide.pool, wide.ids)
    assert torch.equal(wide.used(), wide.small.flip(1))
    where = ContextBlocks(wide.ids, torch.arange(5) * 16, (70,))
    context = ops.gather_contexts(wide.pool[0], where)
    assert torch.equal(context, wide.small[0].flip(0).permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :70])
