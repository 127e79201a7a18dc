"""How the work of decode attention and of 4-bit products is divided: splits, and tiles of rows and outputs."""

from __future__ import annotations

MIN_DOT_TILE = 16  # rows and slots of tl.dot
# A split is long enough that its partial result (one fp32 head per 128 keys and values) is small beside its reads, and
# short enough that every multiprocessor has some programs.
MIN_SPLIT_TOKENS, MAX_SPLIT_TOKENS = 128, 1024
MIN_SPLIT_BLOCKS = 4  # of 128 inputs: a split reads 16 times as many bytes of codes as it writes of partial sums


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient, rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is at least ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def tokens_per_split(num_sequences: int, context: int, programs: int) -> int:
    """A power of two, for ``num_sequences`` (requests x KV heads) of up to ``context`` tokens, on a GPU that runs so
    many programs at once."""
    wanted_splits = cdiv(programs, num_sequences)
    tokens = next_power_of_2(cdiv(context, wanted_splits))
    return min(max(tokens, MIN_SPLIT_TOKENS), MAX_SPLIT_TOKENS)


def linear_tiles(rows: int) -> tuple[int, int]:
    """Rows and outputs of a tile: powers of two. More rows would leave no registers for as many outputs."""
    rows_tile = min(max(MIN_DOT_TILE, next_power_of_2(rows)), 64)
    return rows_tile, 64 if rows_tile == 64 else 128


def blocks_per_split(blocks: int, tiles: int, programs: int) -> int:
    """How many of a matrix's blocks of inputs one split computes, with so many tiles of rows and outputs, on a GPU that
    runs so many programs at once."""
    wanted_splits = cdiv(programs, tiles)
    return max(cdiv(blocks, wanted_splits), MIN_SPLIT_BLOCKS)
