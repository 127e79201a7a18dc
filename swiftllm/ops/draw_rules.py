"""What all draws of tokens have in common, in torch and in Triton: their weights, and the numbers of an attempt."""

from __future__ import annotations

# The weights of 2**18 tokens sum to at most 2**52, and float64 holds every integer up to 2**53. A token 2**34 times
# less likely than the likeliest has weight zero and is never drawn.
WEIGHT_BITS = 34
WEIGHT_OF_THE_LIKELIEST = 2.0**WEIGHT_BITS
LEAST_EXPONENT = -40.0  # weights are zero from -34 ln 2 on

UNIFORM_BITS = 53  # of a uniform number in [0, 1): float64 holds them all
# SplitMix64 (Steele, Lea and Flood, 2014): numbers in a row become independent ones.
STEP, FIRST_FACTOR, SECOND_FACTOR = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS_64 = (1 << 64) - 1


def uniform_of(first: float, attempt: int) -> float:
    """The uniform number in [0, 1) of an attempt at a token, from that of the first one, which is attempt 0."""
    if attempt == 0:
        return first
    bits = (int(first * 2.0**UNIFORM_BITS) + attempt * STEP) & BITS_64
    bits = (bits ^ (bits >> 30)) * FIRST_FACTOR & BITS_64
    bits = (bits ^ (bits >> 27)) * SECOND_FACTOR & BITS_64
    return ((bits ^ (bits >> 31)) >> (64 - UNIFORM_BITS)) / 2.0**UNIFORM_BITS
