"""Kernels on a pool of more than 2^32 elements: block ids whose elements lie beyond what 32 bits count."""

from __future__ import annotations

import pytest
import torch

from swiftllm.ops.interface import ContextBlocks
from swiftllm.ops.triton.ops import TritonOps
from tests.reference.paged_attention import paged_attention, store_new_tokens
from tests.reference.reserved_memory import WidePool
from tests.reference.tolerances import assert_close
from tests.triton.memory_check import watch_memory

watch_memory()

HOST = torch.device("cpu")


@pytest.fixture
def wide() -> WidePool:
    return WidePool()


def make_ops(capability: int = 80) -> TritonOps:
    return TritonOps(HOST, capability, num_multiprocessors=16)


def test_rows_are_stored_in_blocks_beyond_2_to_the_31_elements(wide):
    k, v = torch.randn(2, 5, 2, 64).half()
    offsets = torch.tensor([0, 15, 3, 7, 9])
    wide.small[1, torch.arange(5), :, 0, offsets] = k
    wide.small[1, torch.arange(5), :, 1, offsets] = v
    make_ops().store_kv(k, v, wide.pool[1], wide.ids, offsets)
    assert torch.equal(wide.used(), wide.small)


def test_contexts_are_gathered_beyond_2_to_the_31_elements(wide):
    where = ContextBlocks.of([wide.ids.tolist()], (70,), 16, lambda ids: ids)
    expected = wide.small[0].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :70]
    assert torch.equal(make_ops().gather_contexts(wide.pool[0], where), expected)


def test_blocks_are_swapped_beyond_2_to_the_31_words(wide):
    ops, staging = make_ops(), torch.zeros_like(wide.small)
    ops.gather_blocks(wide.pool, wide.ids, staging)
    assert torch.equal(staging, wide.small)
    wide.small[:] = staging.flip(1)
    ops.scatter_blocks(staging, wide.pool, wide.ids.flip(0))
    assert torch.equal(wide.used(), wide.small)


@pytest.mark.parametrize("capability", [75, 80])
def test_a_context_beyond_2_to_the_31_elements_is_attended(wide, capability):
    small_tables = torch.tensor([[2, 0, 3], [4, 1, 0]], dtype=torch.int32)
    tables, seq_lens = wide.ids[small_tables].int(), torch.tensor([37, 20], dtype=torch.int32)
    q, k, v = torch.randn(2, 8, 64).half().split((4, 2, 2), dim=1)
    store_new_tokens(k, v, wide.small[1], small_tables, seq_lens)
    expected = paged_attention(q, wide.small[1], small_tables, seq_lens, 0.125)
    out = torch.full((2, 4, 64), torch.nan, dtype=torch.float16)
    make_ops(capability).decode_attention(q, k, v, wide.pool[1], tables, seq_lens, out, 0.125)
    assert_close(out, expected)
    assert torch.equal(wide.used(), wide.small)
