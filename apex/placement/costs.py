"""What a boundary costs in each place, and what copies of weights cost the CPU."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BoundaryCost:
    """One boundary under a given load: the bytes of its weights, and seconds on GPU, on CPU and over PCIe.

    ``cpu_s`` is without copies under way; ``crossing_s`` is what its rows take to the CPU and back.
    """

    weight_bytes: float
    gpu_s: float
    cpu_s: float
    stream_s: float
    crossing_s: float = 0.0


@dataclass(frozen=True)
class CopyEffect:
    """What a copy of weights that is under way does to the CPU."""

    dram_share: float = 0.0
    """The share of DRAM bandwidth that it takes."""
    wait_s: float = 0.0
    """Mean wait of a result for the chunk that crosses."""
