"""The search for a placement: all numbers of streamed and CPU boundaries are tried (Park and Egger, section 4.2).

Their objective is the maximum of CPU time, host-to-device time and decompression. It bounds an iteration from below.
It is reached unless the two slots are full while the CPU computes. So the bound excludes most numbers, and the
others are compared by :func:`iteration_s`, which knows the slots. Decompression of 4-bit weights is part of GPU time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from apex.placement.formulas import split_s
from apex.placement.placement import SLOTS, BoundaryCost, Place, Placement, spread

CYCLES = 4
"""Iterations after which times no longer change; the last one counts."""


@dataclass(frozen=True)
class Choice:
    """A placement, the seconds of an iteration with it, and the three times behind them."""

    placement: Placement
    iteration_s: float
    stream_s: float
    cpu_s: float
    gpu_s: float

    def describe(self) -> str:
        times = f"stream {self.stream_s * 1e3:.1f}, CPU {self.cpu_s * 1e3:.1f}, GPU {self.gpu_s * 1e3:.1f}"
        return f"{self.placement.describe()}; {self.iteration_s * 1e3:.1f} ms an iteration ({times} ms)"


def choose_placement(
    costs: Sequence[BoundaryCost], gpu_bytes: float, other_s: float = 0.0, cpu_allowed: bool = True
) -> Choice:
    """The placement with the shortest iteration of all numbers of boundaries that ``gpu_bytes`` allow.

    Args:
        costs: of the boundaries from -1 on, under the load to choose for.
        gpu_bytes: GPU memory for resident boundaries and slots.
        other_s: what an iteration takes on the GPU beside its boundaries: attention, logits, sampling.
        cpu_allowed: whether the CPU may compute boundaries.

    Raises:
        ValueError: no placement fits; the message says what would.
    """
    best: Choice | None = None
    sizes = [cost.weight_bytes for cost in costs]
    bounded = [
        (_bound_s(placement, costs, other_s), index, placement)
        for index, placement in enumerate(_placements_that_fit(sizes, gpu_bytes, cpu_allowed))
    ]
    for bound_s, _, placement in sorted(bounded, key=lambda entry: entry[:2]):
        if best is not None and bound_s >= best.iteration_s:
            break
        seconds = iteration_s(placement, costs, other_s)
        if best is None or seconds < best.iteration_s:
            best = Choice(placement, seconds, *_parts_s(placement, costs, other_s))
    if best is None:
        needed = SLOTS * max(sizes)
        raise ValueError(
            f"{gpu_bytes / 2**30:.2f} GiB hold no placement of the weights: streaming them needs "
            f"{needed / 2**30:.2f} GiB for two boundaries beside embedding and head"
        )
    return best


def _placements_that_fit(sizes: Sequence[float], gpu_bytes: float, cpu_allowed: bool) -> Iterator[Placement]:
    """One placement for each number of streamed boundaries: as many resident ones as fit, the others on the CPU.

    Fewer resident boundaries than memory allows are never faster.
    """
    number, largest = len(sizes), max(sizes)
    for streamed in range(number + 1):
        free_bytes = gpu_bytes - (SLOTS * largest if streamed else 0.0)
        least = number - streamed - 1 - int(max(0.0, free_bytes) / largest)  # the first and last make up one boundary
        for on_cpu in range(max(0, least), number - streamed + 1 if cpu_allowed else 1):
            placement = spread(number, streamed, on_cpu)
            if placement.gpu_bytes(sizes) <= gpu_bytes:
                yield placement
                break


def iteration_s(placement: Placement, costs: Sequence[BoundaryCost], other_s: float = 0.0) -> float:
    """An iteration in the steady state: each boundary after the one before, copies ahead as far as slots are free.

    ``other_s`` is spread over the boundaries, as attention is. The copy of a streamed boundary begins once the last
    but one before it is left.
    """
    each_s = other_s / len(costs)
    stages = list(zip(placement.places, costs, strict=True))
    clock_s = link_free_s = start_s = 0.0
    left_s = [0.0] * SLOTS  # when each slot was left, the oldest first
    for _ in range(CYCLES):
        start_s = clock_s
        for place, cost in stages:
            if place is Place.STREAMED:
                link_free_s = max(link_free_s, left_s[0]) + cost.stream_s
                clock_s = max(clock_s, link_free_s) + cost.gpu_s
                left_s = [*left_s[1:], clock_s]
            else:
                clock_s += cost.cpu_s if place is Place.CPU else cost.gpu_s
            clock_s += each_s
    return clock_s - start_s


def _bound_s(placement: Placement, costs: Sequence[BoundaryCost], other_s: float) -> float:
    """Park and Egger's objective. GPU time adds to the CPU's, since a boundary waits for the one before."""
    stream_s, cpu_s, gpu_s = _parts_s(placement, costs, other_s)
    return split_s(cpu_s + gpu_s, stream_s)


def _parts_s(placement: Placement, costs: Sequence[BoundaryCost], other_s: float) -> tuple[float, float, float]:
    """Seconds of an iteration that the link, the CPU and the GPU work."""
    stages = list(zip(placement.places, costs, strict=True))
    stream_s = sum(cost.stream_s for place, cost in stages if place is Place.STREAMED)
    cpu_s = sum(cost.cpu_s for place, cost in stages if place is Place.CPU)
    gpu_s = sum(cost.gpu_s for place, cost in stages if place is not Place.CPU)
    return stream_s, cpu_s, gpu_s + other_s
