"""The layout of a KV cache in eight bits: codes, and a float32 scale per token and KV head.

`pacpu/include/int8.h` is the same for C++. A *tile* holds 16 tokens of one KV head:

- K, uint8: `code + 128`, `[head_dim / 4, 16 tokens, 4]`;
- V, int8: `[4, head_dim, 4 tokens]`, token `4 i + j` at `[i, :, j]`;
- 16 float32 scales of K, 16 of V.

A block of `16 n` tokens has n tiles of its first KV head, then those of the next one. A cache of one layer is uint8
`[num_blocks, num_kv_heads, head_bytes]`. :func:`pacpu.paged_attention` and `store_kv`, `gather_kv`, `gather_blocks` and
`scatter_blocks` of `pacpu.rows` know it by its dtype.

A row (one token's K or V of one head) becomes codes in float32, with the same bits on every instruction set:
`scale = max(max|x| * float32(1 / 127), 2**-23)`, rounded to 16 significant bits (`bits + 0x80 & ~0xff`);
`code = x * (1 / scale)` to the nearest integer, ties to even. A row with an infinity or NaN has NaN for its scale.
`code * scale`, rounded to float32, float16 or bfloat16, becomes the same codes and scale again: a block may travel
between tiers as often as it likes.
"""

TILE_TOKENS = 16


def tile_bytes(head_dim: int) -> int:
    """Bytes of a tile.

    Raises:
        ValueError: head_dim is not a positive multiple of 8.
    """
    if head_dim < 8 or head_dim % 8:
        raise ValueError(f"head_dim must be a positive multiple of 8 for an int8 KV cache, not {head_dim}")
    return 2 * TILE_TOKENS * (head_dim + 4)


def head_bytes(block_size: int, head_dim: int) -> int:
    """Bytes of K and V of one KV head in a block of so many tokens, scales included.

    Raises:
        ValueError: block_size is not a positive multiple of 16, or head_dim not one of 8.
    """
    if block_size < 1 or block_size % TILE_TOKENS:
        raise ValueError(f"block_size must be a multiple of {TILE_TOKENS} for an int8 KV cache, not {block_size}")
    return block_size // TILE_TOKENS * tile_bytes(head_dim)
