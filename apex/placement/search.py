"""The search for a placement: all numbers of streamed and CPU stages are tried (Park and Egger, section 4.2).

Their objective is the maximum of CPU time, host-to-device time and decompression. It bounds an iteration from below.
It is reached unless the two slots are full while the CPU computes. So the bound excludes most numbers, and the
others are compared by :func:`iteration_s`, which knows the slots. Decompression of 4-bit weights is part of GPU time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from apex.placement.costs import CopyEffect, StageCost, beside_copies_s
from swiftllm.model.stages.placement import SLOTS, Place, Placement, spread

NO_EFFECT = CopyEffect()
CYCLES = 4
"""Iterations after which times no longer change; the last one counts."""
STARTS = 4
LEAST_GAIN = 0.001
"""Improvements below this part of an iteration are not followed."""


@dataclass(frozen=True)
class PlacementProblem:
    """What a placement is searched for.

    Attributes:
        costs: of the stages from -1 on, in the iteration to choose for.
        gpu_bytes: GPU memory for resident stages and slots.
        other_s: what an iteration takes on the GPU beside its stages: attention, logits, sampling.
        effect: of copies on the CPU.
        cpu_computes: whether stages may be the CPU's.
    """

    costs: Sequence[StageCost]
    gpu_bytes: float
    other_s: float = 0.0
    effect: CopyEffect = NO_EFFECT
    cpu_computes: bool = True

    @property
    def sizes(self) -> list[float]:
        """Bytes of the stages."""
        return [cost.weight_bytes for cost in self.costs]


@dataclass(frozen=True)
class TimedPlacement:
    """A placement, the seconds of an iteration with it, and those that link, CPU and GPU work of it."""

    placement: Placement
    iteration_s: float
    stream_s: float
    cpu_s: float
    gpu_s: float

    def with_embedding(self, num_bytes: float) -> TimedPlacement:
        """With an embedding of so many bytes in host memory: reading a token's row takes next to no time."""
        return replace(self, placement=replace(self.placement, embedding_on_host=num_bytes > 0))

    def describe(self) -> str:
        times = f"stream {self.stream_s * 1e3:.1f}, CPU {self.cpu_s * 1e3:.1f}, GPU {self.gpu_s * 1e3:.1f}"
        return f"{self.placement.describe()}; {self.iteration_s * 1e3:.1f} ms an iteration ({times} ms)"


def fastest_placements(problem: PlacementProblem) -> list[TimedPlacement]:
    """The fastest placement for each number of streamed stages, fastest first.

    Those that their objective excludes are left out, but for :data:`STARTS` placements.

    Raises:
        ValueError: no placement fits; the message says what would.
    """
    bounded = []
    for placement in _placements_that_fit(problem):
        stream_s, cpu_s, gpu_s = parts_s = _parts_s(placement, problem)
        # GPU time adds to the CPU's: a stage waits for the one before.
        bounded.append((max(cpu_s + gpu_s, stream_s), placement, parts_s))
    found: list[TimedPlacement] = []
    for bound_s, placement, parts_s in sorted(bounded, key=lambda entry: entry[0]):
        if len(found) >= STARTS and bound_s >= min(timed.iteration_s for timed in found):
            break
        found.append(TimedPlacement(placement, iteration_s(placement, problem), *parts_s))
    if not found:
        raise ValueError(f"{problem.gpu_bytes / 2**30:.2f} GiB hold no placement of the weights: give more")
    return sorted(found, key=lambda timed: timed.iteration_s)


def _makes_useless(other: TimedPlacement, timed: TimedPlacement, problem: PlacementProblem) -> bool:
    """Whether the other streams less, takes no more memory, and is slower by rounding at most."""
    return (
        other.placement.count(Place.STREAMED) < timed.placement.count(Place.STREAMED)
        and other.placement.gpu_bytes(problem.sizes) <= timed.placement.gpu_bytes(problem.sizes) * (1 + 1e-12)
        and other.iteration_s <= timed.iteration_s * (1 + 1e-12)
    )


def refined_placement(problem: PlacementProblem) -> TimedPlacement:
    """The best of the fastest few, each improved stage by stage. Takes up to a second.

    The first and the last stage are smaller than the others, for which an even spread does not account.

    Raises:
        ValueError: no placement fits; the message says what would.
    """
    found = [_improve(timed, problem) for timed in fastest_placements(problem)[:STARTS]]
    useful = (timed for timed in found if not any(_makes_useless(other, timed, problem) for other in found))
    return min(useful, key=lambda timed: timed.iteration_s)


def _improve(timed: TimedPlacement, problem: PlacementProblem) -> TimedPlacement:
    """After all changes of one stage, and exchanges with the first or the last, that make it faster."""
    sizes = problem.sizes
    places = tuple(Place) if problem.cpu_computes else (Place.RESIDENT, Place.STREAMED)
    while True:
        neighbours = [p for p in _neighbours(timed.placement, places) if p.gpu_bytes(sizes) <= problem.gpu_bytes]
        seconds, index = min(((iteration_s(p, problem), i) for i, p in enumerate(neighbours)), default=(inf, 0))
        if seconds >= timed.iteration_s * (1 - LEAST_GAIN):
            return timed
        timed = TimedPlacement(neighbours[index], seconds, *_parts_s(neighbours[index], problem))


def _neighbours(placement: Placement, allowed: Sequence[Place]) -> Iterator[Placement]:
    places = placement.places
    for index, old in enumerate(places):
        for new in allowed:
            if new is not old:
                yield Placement((*places[:index], new, *places[index + 1 :]))
    for end in (0, len(places) - 1):
        for index, other in enumerate(places):
            if other is not places[end]:
                exchanged = list(places)
                exchanged[end], exchanged[index] = other, places[end]
                yield Placement(tuple(exchanged))


def iteration_s(placement: Placement, problem: PlacementProblem) -> float:
    """An iteration in the steady state: each stage after the one before, copies ahead as far as slots are free.

    The copy of a streamed stage begins once the last but one before it is left. ``problem.other_s`` is spread over
    the stages, as attention is.
    """
    costs, effect = problem.costs, problem.effect
    each_s = problem.other_s / len(costs)
    stages = list(zip(placement.places, costs, strict=True))
    order = [cost.stream_s for place, cost in stages if place is Place.STREAMED]
    clock_s = link_free_s = start_s = 0.0
    copied = 0
    arrivals: deque[float] = deque()

    def copy(earliest_s: float) -> None:
        nonlocal link_free_s, copied
        link_free_s = max(link_free_s, earliest_s) + order[copied % len(order)]
        copied += 1
        arrivals.append(link_free_s)

    for _ in range(SLOTS if order else 0):
        copy(0.0)
    for _ in range(CYCLES):
        start_s = clock_s
        for place, cost in stages:
            if place is Place.STREAMED:
                clock_s = max(clock_s, arrivals.popleft()) + cost.gpu_s
                copy(clock_s)
            elif place is Place.CPU:
                clock_s += cost.crossing_s
                busy_s = max(0.0, link_free_s - clock_s)  # the link's, from now on without a gap
                clock_s += beside_copies_s(cost.cpu_s, busy_s, effect.dram_share)
                if clock_s < link_free_s:
                    clock_s += effect.wait_s
            else:
                clock_s += cost.gpu_s
            clock_s += each_s
    return clock_s - start_s


def least_gpu_bytes(sizes: Sequence[float], cpu_computes: bool) -> float:
    """GPU memory without which no placement of stages of these bytes fits: that of slots, or of all stages if
    they take less. The CPU needs none."""
    return 0.0 if cpu_computes else min(SLOTS * max(sizes), sum(sizes))


def _placements_that_fit(problem: PlacementProblem) -> Iterator[Placement]:
    """One placement for each number of streamed stages: as many resident ones as fit, the others on the CPU.

    Fewer resident stages than memory allows are never faster.
    """
    sizes, gpu_bytes = problem.sizes, problem.gpu_bytes
    number, largest = len(sizes), max(sizes)
    for streamed in range(number + 1):
        free_bytes = gpu_bytes - (SLOTS * largest if streamed else 0.0)
        least = number - streamed - 1 - int(max(0.0, free_bytes) / largest)  # the first and last make up one stage
        for on_cpu in range(max(0, least), number - streamed + 1 if problem.cpu_computes else 1):
            placement = spread(number, streamed, on_cpu)
            if placement.gpu_bytes(sizes) <= gpu_bytes:
                yield placement
                break


def _parts_s(placement: Placement, problem: PlacementProblem) -> tuple[float, float, float]:
    """Seconds of an iteration that the link, the CPU and the GPU work."""
    stages = list(zip(placement.places, problem.costs, strict=True))
    stream_s = sum(cost.stream_s for place, cost in stages if place is Place.STREAMED)
    cpu_s = sum(cost.cpu_s + cost.crossing_s for place, cost in stages if place is Place.CPU)
    gpu_s = sum(cost.gpu_s for place, cost in stages if place is not Place.CPU)
    return stream_s, cpu_s, gpu_s + problem.other_s
