"""Copies between a paged KV cache and buffers, against indexing by torch: every bit, and nothing beside."""

import pytest
import torch

from pacpu import rows

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
how_many = pytest.mark.parametrize("num_threads", [1, 3])


def random_bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits at all, NaN of every kind among them."""
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (num_bytes,), dtype=torch.uint8).view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@every_dtype
@how_many
@pytest.mark.parametrize(
    ("tokens", "heads", "block_size", "head_dim", "spare"),
    [(1, 1, 1, 1, 0), (29, 3, 5, 7, 0), (20, 3, 5, 8, 2), (0, 2, 4, 8, 1), (300, 5, 16, 72, 1)],
)
def test_earlier_tokens_come_out_of_shuffled_blocks(dtype, num_threads, tokens, heads, block_size, head_dim, spare):
    count = -(-tokens // block_size) + spare
    cache = random_bits(count + 4, heads, 2, block_size, head_dim, dtype=dtype)
    blocks = torch.randperm(count + 4)[:count]
    expected = cache[blocks].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
    around = random_bits(4, heads, tokens, head_dim, dtype=dtype)
    before, inside = around.clone(), cache.clone()
    rows.gather_kv(cache, blocks, around[1:3], num_threads=num_threads)
    assert torch.equal(bits(around[1:3]), bits(expected))
    assert torch.equal(bits(around[::3]), bits(before[::3]))
    assert torch.equal(bits(cache), bits(inside))


@every_dtype
@how_many
@pytest.mark.parametrize("shape", [(1, 1), (3, 2, 5, 7), (2, 3, 2, 16, 72), (0, 4)])
def test_blocks_cross_and_come_back(dtype, num_threads, shape):
    layers, count = 3, 5
    pool = random_bits(layers, count + 4, *shape, dtype=dtype)
    blocks, targets = (torch.randperm(count + 4)[:count] for _ in range(2))
    staging = random_bits(layers, count, *shape, dtype=dtype)
    rows.gather_blocks(pool[1:], blocks, staging[1:], num_threads=num_threads)
    assert torch.equal(bits(staging[1:]), bits(pool[1:, blocks]))
    expected = pool.clone()
    expected[:2, targets] = staging[:2]
    rows.scatter_blocks(staging[:2], pool[:2], targets, num_threads=num_threads)
    assert torch.equal(bits(pool), bits(expected))


KV, CACHE, SLOTS = torch.ones(2, 1, 8, 8), torch.ones(3, 1, 2, 4, 8), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rows.gather_kv(CACHE, SLOTS + 3, KV), r"blocks\[0\] must be below 3, not 3"),
        (lambda: rows.gather_kv(CACHE, SLOTS - 1, KV), r"blocks\[0\] must be below 3, not -1"),
        (lambda: rows.gather_kv(CACHE, SLOTS[:1], KV), "a slot for each of the 8 tokens of out, not 4"),
        (lambda: rows.gather_kv(CACHE, SLOTS, KV.half()), "out must have the dtype of kv_cache"),
        (lambda: rows.gather_kv(CACHE, SLOTS, KV[:1]), "out must have shape"),
        (lambda: rows.gather_kv(CACHE, SLOTS, KV.transpose(2, 3)), "out must be contiguous"),
        (lambda: rows.gather_kv(CACHE[:, :, :1], SLOTS, KV), "kv_cache must have shape"),
        (lambda: rows.gather_kv(CACHE[::2], SLOTS, KV), "kv_cache must have rows exactly"),
        (lambda: rows.gather_kv(CACHE, SLOTS.int(), KV), "blocks must have dtype int64, not int32"),
        (lambda: rows.gather_blocks(CACHE, SLOTS + 1, CACHE), r"blocks\[0\] must be below 1, not 1"),
        (lambda: rows.gather_blocks(CACHE, SLOTS, CACHE), r"staging must have shape .* = \[3, 2, 2, 4, 8\]"),
        (lambda: rows.scatter_blocks(CACHE.half(), CACHE, SLOTS), "staging must have the dtype of pool"),
        (lambda: rows.scatter_blocks(CACHE, CACHE, SLOTS, num_threads=0), "num_threads must be"),
        (lambda: rows.scatter_blocks(SLOTS, SLOTS, SLOTS), "pool must have dtype float32"),
        (lambda: rows.scatter_blocks(KV[0, 0, 0], KV[0, 0, 0], SLOTS), "pool must have shape"),
    ],
)
def test_refusals(call, message):
    with pytest.raises(ValueError, match=message):
        call()
