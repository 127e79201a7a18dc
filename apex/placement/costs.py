"""What stages cost in each place, and the formulas for weights that do not fit the GPU: seconds, bytes, bytes/s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageCost:
    """One stage in a given iteration: the bytes of its weights, and seconds on GPU, on CPU and over PCIe.

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


@dataclass(frozen=True)
class Rates:
    """Bytes a second: of one direction of PCIe, of CPU attention alone, and what both read together.

    Copies of weights cross in chunks of ``chunk_bytes``.
    """

    pcie: float
    cpu_attention: float
    dram: float
    chunk_bytes: float

    @property
    def copy_effect(self) -> CopyEffect:
        return CopyEffect(self.pcie / self.dram, self.chunk_bytes / self.pcie / 2)


def stage_costs(
    sizes: Sequence[float],
    whole_bytes: float,
    gpu_s: float,
    cpu_s: float,
    pcie_bytes_per_s: float,
    crossing_s: float = 0.0,
) -> list[StageCost]:
    """Of stages of these sizes in bytes. GPU and CPU times are those of ``whole_bytes``; each has its share."""
    return [
        StageCost(size, gpu_s * size / whole_bytes, cpu_s * size / whole_bytes, size / pcie_bytes_per_s, crossing_s)
        for size in sizes
    ]


def batch_s(streamed_bytes: float, kv_bytes: float, gpu_s: float, rates: Rates, cpu_linear_s: float = 0.0) -> float:
    """An iteration in which weights are streamed while the CPU attends to ``kv_bytes``: max(S/beta, C + K/b + S/D, G).

    The stream takes DRAM bandwidth from CPU attention, for which S/D stands. C is ``cpu_linear_s``, what the same cores
    need for the stages that they compute; G is the GPU batch's time, those stages included.
    """
    cpu_s = cpu_linear_s + kv_bytes / rates.cpu_attention + streamed_bytes / rates.dram
    return max(streamed_bytes / rates.pcie, cpu_s, gpu_s)


def beside_copies_s(alone_s: float, copies_s: float, dram_share: float) -> float:
    """The CPU's work of ``alone_s`` while copies run for ``copies_s`` and take a share of DRAM: T = alone + share
    min(copies, T)."""
    return alone_s + dram_share * min(copies_s, alone_s / (1.0 - dram_share))
