"""The search for the places of weights that do not fit the GPU: what they cost, and how much GPU memory they get.

A stage's weights are *resident* on the GPU, *streamed* (copied to one of a few slots there in each iteration, which has
nothing to do with CUDA streams), or the CPU's, which then computes the stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Protocol

from swiftllm.kv.block_pool import LayerGroups
from swiftllm.machine import GIB, gib_rounded_up
from swiftllm.model.placement import SLOTS, Place, Placement, spread, with_experts_on_host

# -- costs -------------------------------------------------------------------------------------------------------------
# What stages cost in each place, and the formulas for weights that do not fit the GPU: seconds, bytes, bytes/s.


@dataclass(frozen=True)
class ExpertsCost:
    """The experts of a stage in host memory, in a given iteration: their bytes, and seconds on the CPU and over PCIe.

    ``rest_s`` is what the GPU takes for all else, and what rows take to the CPU and back. ``are_copied``: to the GPU,
    since there are many rows; else the CPU computes them.
    """

    weight_bytes: float
    cpu_s: float
    stream_s: float
    rest_s: float
    are_copied: bool


@dataclass(frozen=True)
class StageCost:
    """One stage in a given iteration: the bytes of its weights, and seconds on GPU, on CPU and over PCIe.

    ``cpu_s`` is without copies under way; ``crossing_s`` is what its rows take to the CPU and back. ``experts``: of a
    stage that has some.
    """

    weight_bytes: float
    gpu_s: float
    cpu_s: float
    stream_s: float
    crossing_s: float = 0.0
    experts: ExpertsCost | None = None

    def is_copied(self, place: Place) -> bool:
        """Whether some of the stage at ``place`` is copied to the GPU in the iteration."""
        of_experts = place is Place.EXPERTS and self.experts is not None and self.experts.are_copied
        return place is Place.STREAMED or of_experts

    def parts_s(self, place: Place) -> tuple[float, float, float]:
        """Seconds that the link, the CPU and the GPU work where the stage is at ``place``."""
        if place is Place.CPU:
            return 0.0, self.cpu_s + self.crossing_s, 0.0
        if place is Place.STREAMED:
            return self.stream_s, 0.0, self.gpu_s
        if place is Place.RESIDENT or self.experts is None:
            return 0.0, 0.0, self.gpu_s
        experts = self.experts
        return (experts.stream_s, 0.0, self.gpu_s) if experts.are_copied else (0.0, experts.cpu_s, experts.rest_s)


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


MOST_ROWS = 1 << 16


def most_cpu_rows(on_cpu_s: Callable[[int], float], copied_s: Callable[[int], float]) -> int:
    """Up to how many rows the CPU computes experts sooner than they are copied; both are seconds of a stage by rows.

    With codes of ``bits`` and many rows that is (E / k) (bits / 16) F / beta: the CPU multiplies at F, in FLOP/s.
    """
    return bisect_left(range(1, MOST_ROWS), True, key=lambda rows: on_cpu_s(rows) > copied_s(rows))


def batch_s(streamed_bytes: float, kv_bytes: float, gpu_s: float, rates: Rates, cpu_linear_s: float = 0.0) -> float:
    """An iteration in which weights are streamed while the CPU attends to ``kv_bytes``: max(S/beta, C + K/b + S/D, G).

    The stream takes DRAM bandwidth from CPU attention, for which S/D stands. C is ``cpu_linear_s``, what the same cores
    need for the stages that they compute; G is the GPU batch's time, those stages included.
    """
    cpu_s = cpu_linear_s + kv_bytes / rates.cpu_attention + streamed_bytes / rates.dram
    # Link, cores and GPU work side by side, so the slowest sets the pace.
    return max(streamed_bytes / rates.pcie, cpu_s, gpu_s)


def beside_copies_s(alone_s: float, copies_s: float, dram_share: float) -> float:
    """The CPU's work of ``alone_s`` while copies run for ``copies_s`` and take a share of DRAM: T = alone + share
    min(copies, T)."""
    return alone_s + dram_share * min(copies_s, alone_s / (1.0 - dram_share))


# -- the search for a placement ----------------------------------------------------------------------------------------
# The search for a placement: all numbers of streamed and CPU stages are tried (Park and Egger, section 4.2).
#
# Their objective is the maximum of CPU time, host-to-device time and decompression. It bounds an iteration from below.
# It is reached unless the two slots are full while the CPU computes. So the bound excludes most numbers, and the others
# are compared by :func:`iteration_s`, which knows the slots. Decompression of 4-bit weights is part of GPU time.

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
        most_cpu_rows: see :class:`~swiftllm.model.placement.Placement`.
    """

    costs: Sequence[StageCost]
    gpu_bytes: float
    other_s: float = 0.0
    effect: CopyEffect = NO_EFFECT
    cpu_computes: bool = True
    most_cpu_rows: int = 0

    @property
    def sizes(self) -> list[float]:
        """Bytes of the stages."""
        return [cost.weight_bytes for cost in self.costs]

    @property
    def expert_sizes(self) -> list[float]:
        """Of these those of experts."""
        return [0.0 if cost.experts is None else cost.experts.weight_bytes for cost in self.costs]

    def gpu_bytes_of(self, placement: Placement) -> float:
        """What a placement takes of :attr:`gpu_bytes`."""
        return placement.gpu_bytes(self.sizes, self.expert_sizes)

    @property
    def takes_experts(self) -> bool:
        """Whether experts may be in host memory."""
        experts = self.costs[-1].experts
        return experts is not None and (self.cpu_computes or experts.are_copied)


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
    """
    bounded = []
    for placement in _placements_that_fit(problem):
        stream_s, cpu_s, gpu_s = parts_s = _parts_s(placement, problem)
        # GPU time adds to the CPU's: a stage waits for the one before.
        bounded.append((max(cpu_s + gpu_s, stream_s), placement, parts_s))
    found: list[TimedPlacement] = []
    # In the order of their bounds: once a bound exceeds the best time found, so do all that follow.
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
        and problem.gpu_bytes_of(other.placement) <= problem.gpu_bytes_of(timed.placement) * (1 + 1e-12)
        and other.iteration_s <= timed.iteration_s * (1 + 1e-12)
    )


def refined_placement(problem: PlacementProblem) -> TimedPlacement:
    """The best of the fastest few, each improved stage by stage. Takes up to a second.

    The first and the last stage are smaller than the others, for which an even spread does not account.
    """
    found = [_improve(timed, problem) for timed in fastest_placements(problem)[:STARTS]]
    # The fastest by rounding alone may be one that streams for nothing, whose slots would take room from KV cache.
    useful = (timed for timed in found if not any(_makes_useless(other, timed, problem) for other in found))
    best = min(useful, key=lambda timed: timed.iteration_s)
    if not best.placement.count(Place.EXPERTS):
        return best
    return replace(best, placement=replace(best.placement, most_cpu_rows=problem.most_cpu_rows))


def _improve(timed: TimedPlacement, problem: PlacementProblem) -> TimedPlacement:
    """After all changes of one stage, and exchanges with the first or the last, that make it faster."""
    sizes, expert_sizes = problem.sizes, problem.expert_sizes
    places = (Place.RESIDENT, Place.STREAMED, *([Place.CPU] if problem.cpu_computes else []))
    if timed.placement.count(Place.EXPERTS):
        places = (Place.RESIDENT, Place.EXPERTS)
    while True:
        neighbours = [
            placement
            for placement in _neighbours(timed.placement, places)
            if placement.gpu_bytes(sizes, expert_sizes) <= problem.gpu_bytes
            if placement.places[0] is not Place.EXPERTS  # the first stage has none
        ]
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
    order = [cost.parts_s(place)[0] for place, cost in stages if cost.is_copied(place)]
    clock_s = link_free_s = start_s = 0.0
    copied = 0
    arrivals: deque[float] = deque()

    def copy(earliest_s: float) -> None:
        nonlocal link_free_s, copied
        link_free_s = max(link_free_s, earliest_s) + order[copied % len(order)]
        copied += 1
        arrivals.append(link_free_s)

    # All slots are filled before the first iteration. It is therefore too fast, as CYCLES accounts for.
    for _ in range(SLOTS if order else 0):
        copy(0.0)
    for _ in range(CYCLES):
        start_s = clock_s
        for place, cost in stages:
            experts = cost.experts if place is Place.EXPERTS else None
            if cost.is_copied(place):
                clock_s = max(clock_s, arrivals.popleft()) + cost.gpu_s
                copy(clock_s)  # into the slot that has just been left: that of a later stage, or of the next iteration
            elif place is Place.CPU or experts is not None:
                clock_s += cost.crossing_s if experts is None else experts.rest_s
                busy_s = max(0.0, link_free_s - clock_s)  # the link's, from now on without a gap
                cpu_s = cost.cpu_s if experts is None else experts.cpu_s
                clock_s += beside_copies_s(cpu_s, busy_s, effect.dram_share)
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
    if problem.takes_experts:
        of_experts = (with_experts_on_host(number, count) for count in range(1, number))
        yield from islice((p for p in of_experts if problem.gpu_bytes_of(p) <= gpu_bytes), 1)


def _parts_s(placement: Placement, problem: PlacementProblem) -> tuple[float, float, float]:
    """Seconds of an iteration that the link, the CPU and the GPU work."""
    each = [cost.parts_s(place) for place, cost in zip(placement.places, problem.costs, strict=True)]
    stream_s, cpu_s, gpu_s = (sum(of_one) for of_one in zip(*each, strict=True))
    return stream_s, cpu_s, gpu_s + problem.other_s


# -- the search for a budget -------------------------------------------------------------------------------------------
# The search for a budget: how much GPU memory weights take, so that with the rest for KV cache the rate is highest.
#
# The workload to choose for is that of requests of one size, half-way through their outputs, while others prefill.

CPU_SHARES = tuple(i / 8 for i in range(9))  # of the requests that the CPU tier could have: the best one counts


PROMPT_ROWS = 2048
"""Of a prompt in an iteration: longer ones take several."""


@dataclass(frozen=True)
class UniformLoad:
    """Requests of one size: how many may hold KV cache at once at most, and the mean tokens of prompt and output."""

    num_requests: int
    input_len: float
    output_len: float
    assumed: bool = False

    @property
    def context(self) -> float:
        """Tokens of KV cache of a request half-way through its output."""
        return self.input_len + self.output_len / 2

    def rows(self, requests: float) -> float:
        """Rows of an iteration in which each request decodes, and so many prompts prefill as requests end."""
        return requests * (1 + self.input_len / self.output_len)

    def describe(self) -> str:
        lengths = f"{self.input_len:,.0f} in / {self.output_len:,.0f} out"
        return f"{self.num_requests:,} requests of {lengths}{', as assumed' if self.assumed else ''}"


class CostModel(Protocol):
    """What the search asks of hardware and model, be they simulated or measured. All sizes are bytes."""

    @property
    def stage_bytes(self) -> Sequence[float]:
        """Of the stages from -1 on."""
        ...

    @property
    def other_bytes(self) -> float:
        """Vocabulary and norms, which stay on the GPU."""
        ...

    @property
    def layer_groups(self) -> LayerGroups: ...

    @property
    def kv_bytes_per_token(self) -> float:
        """In all layers of a group, on the GPU."""
        ...

    @property
    def cpu_kv_bytes_per_token(self) -> float:
        """In all layers of a group, in the CPU tier."""
        ...

    @property
    def rates(self) -> Rates: ...

    @property
    def most_cpu_rows(self) -> int:
        """See :func:`most_cpu_rows`; 0 for a model without experts."""
        ...

    def costs(self, rows: float) -> list[StageCost]:
        """Of the stages, for an iteration of ``rows``."""
        ...

    def other_s(self, on_gpu: float, context: float, requests: float) -> float:
        """GPU time of an iteration beside its stages: attention of ``on_gpu`` requests, what the attention tasks of the
        others cost the GPU, logits of ``requests``."""
        ...

    def cpu_attention_s(self, on_cpu: float, context: float) -> float:
        """CPU time of an iteration for the attention of ``on_cpu`` requests with ``context`` tokens each."""
        ...

    def gpu_kv_bytes(self, weight_bytes: float) -> float:
        """GPU memory for KV cache beside so many bytes of weights.

        Raises:
            ValueError: there is none, or not enough for the blocks asked for.
        """
        ...

    def cpu_kv_bytes(self, off_gpu_bytes: float) -> float:
        """Host memory for KV cache beside so many bytes of weights.

        Raises:
            ValueError: the host does not hold them, or the blocks asked for beside them.
        """
        ...


@dataclass(frozen=True)
class Estimate:
    """A budget, the predicted rate with it, and what the placement that gives the rate is chosen for."""

    weight_bytes: float
    tokens_per_s: float
    requests: float
    problem: PlacementProblem


def best_budget(model: CostModel, workload: UniformLoad, *, offloads: bool, cpu_computes: bool = True) -> Estimate:
    """The budget with the highest predicted rate, of all numbers of stages' worth of memory from none on.

    Arguments are those of :func:`estimate_budget`.
    """
    estimates: list[Estimate] = []
    refused: ValueError | None = None
    for number in range(len(model.stage_bytes) + 1):
        weight_bytes = model.other_bytes + number * max(model.stage_bytes)
        try:
            estimates.append(estimate_budget(model, weight_bytes, workload, offloads, cpu_computes))
        except ValueError as error:
            refused = refused or error
    if not estimates:
        assert refused is not None
        raise refused
    # Where rates differ by rounding alone the first counts, which leaves most to KV cache.
    return max(estimates, key=lambda estimate: round(estimate.tokens_per_s, 9))


def estimate_budget(
    model: CostModel, weight_bytes: float, workload: UniformLoad, offloads: bool, cpu_computes: bool = True
) -> Estimate:
    """The highest rate with so many bytes of weights on the GPU, over numbers of requests in the CPU tier.

    ``offloads``: whether the system has a CPU tier of KV cache. ``cpu_computes``: whether the CPU may compute
    stages.

    Raises:
        ValueError: the weights fit neither GPU nor host, or leave no room for a request; or so many bytes are too
            few, and the message names the least that work.
    """
    least_bytes = model.other_bytes + least_gpu_bytes(model.stage_bytes, cpu_computes)
    if weight_bytes < least_bytes:
        least = gib_rounded_up(least_bytes)
        # The least is named only if it works: this raises what is in the way of it.
        estimate_budget(model, float(least) * GIB, workload, offloads, cpu_computes)
        raise ValueError(
            f"{weight_bytes / GIB:.2f} GiB of GPU memory for weights do not hold vocabulary and norms, "
            f"which stay on the GPU{'' if cpu_computes else ', and the slots of streamed weights'}: give at "
            f"least {least} (--weights-gpu-memory {least}), or auto"
        )
    gpu_kv_bytes = model.gpu_kv_bytes(weight_bytes)
    gpu_bytes = weight_bytes - model.other_bytes
    slots = model.layer_groups.slots(workload.context)  # fewer than tokens where layers have attention windows
    on_gpu = min(workload.num_requests, gpu_kv_bytes / (model.kv_bytes_per_token * slots))
    tier_bytes = model.cpu_kv_bytes(sum(model.stage_bytes) - max(0.0, gpu_bytes))
    most_on_cpu = min(workload.num_requests - on_gpu, tier_bytes / (model.cpu_kv_bytes_per_token * slots))
    estimates = []
    for share in CPU_SHARES if offloads else CPU_SHARES[:1]:
        on_cpu = share * most_on_cpu
        if on_gpu + on_cpu < 1:
            continue
        ways = {cpu_computes}
        if on_cpu and gpu_bytes >= least_gpu_bytes(model.stage_bytes, cpu_computes=False):
            ways.add(False)  # cores that compute stages do not attend meanwhile
        estimates += [_estimate(model, weight_bytes, workload, on_gpu, on_cpu, way) for way in sorted(ways)]
    if not estimates:
        raise ValueError(
            f"{weight_bytes / GIB:.2f} GiB of weights leave no room for the KV cache of a request of "
            f"{workload.context:g} tokens: take a smaller --weights-gpu-memory, or auto"
        )
    return max(estimates, key=lambda estimate: estimate.tokens_per_s)


def _mean_costs(model: CostModel, workload: UniformLoad, requests: float, elsewhere: float = 0.0) -> list[StageCost]:
    """Of an iteration in which so many requests decode and prompts prefill as requests end. ``elsewhere``: of the
    requests, those whose decodes are not among its rows.

    Most times grow with rows, so that those of the mean rows are the mean ones. Experts in host memory are another
    matter: they are copied in the iterations with a prompt, and the CPU computes those of the decodes in all others.
    """
    decoding = requests - elsewhere
    costs = model.costs(workload.rows(requests) - elsewhere)
    chunk = min(workload.input_len, PROMPT_ROWS)
    with_prompt = min(1.0, requests / workload.output_len * workload.input_len / chunk)  # of all iterations
    at_decodes, at_prompts = model.costs(decoding), model.costs(decoding + chunk)
    mean = []
    for cost, decodes, prompts in zip(costs, at_decodes, at_prompts, strict=True):
        alone, beside = decodes.experts, prompts.experts
        if alone is not None and beside is not None and not alone.are_copied and beside.are_copied:
            rest_s = (1 - with_prompt) * alone.rest_s + with_prompt * max(beside.stream_s, prompts.gpu_s)
            cost = replace(cost, experts=replace(alone, cpu_s=(1 - with_prompt) * alone.cpu_s, rest_s=rest_s))
        mean.append(cost)
    return mean


def _estimate(
    model: CostModel, weight_bytes: float, workload: UniformLoad, on_gpu: float, on_cpu: float, cpu_computes: bool
) -> Estimate:
    """The rate with so many requests in each tier, and the placement for them."""
    requests = on_gpu + on_cpu
    problem = PlacementProblem(
        _mean_costs(model, workload, requests),
        weight_bytes - model.other_bytes,
        model.other_s(on_gpu, workload.context, requests),
        model.rates.copy_effect,
        cpu_computes,
        model.most_cpu_rows,
    )
    # The spread placements suffice to compare budgets; the one chosen is refined (:func:`refined_placement`).
    fastest = fastest_placements(problem)[0]
    streamed_bytes = fastest.placement.bytes_at(Place.STREAMED, model.stage_bytes)
    if problem.costs[-1].is_copied(Place.EXPERTS):
        streamed_bytes += fastest.placement.bytes_at(Place.EXPERTS, problem.expert_sizes)
    kv_bytes = on_cpu * model.layer_groups.slots(workload.context) * model.cpu_kv_bytes_per_token
    # CPU attention comes on top: a placement is searched for as if the cores computed stages alone.
    seconds = batch_s(streamed_bytes, kv_bytes, fastest.iteration_s, model.rates, fastest.cpu_s)
    if fastest.placement.count(Place.EXPERTS):
        # What the placement leaves of its budget holds KV cache too.
        spare_bytes = problem.gpu_bytes - problem.gpu_bytes_of(fastest.placement)
        slots = model.layer_groups.slots(workload.context)
        on_cpu = max(0.0, on_cpu - spare_bytes / (model.kv_bytes_per_token * slots))
        if on_cpu:
            seconds = max(seconds, _beside_experts_s(model, workload, requests - on_cpu, on_cpu, fastest, problem))
    return Estimate(weight_bytes, requests / seconds, requests, problem)


def _beside_experts_s(
    model: CostModel,
    workload: UniformLoad,
    on_gpu: float,
    on_cpu: float,
    whole: TimedPlacement,
    problem: PlacementProblem,
) -> float:
    """An iteration in which the CPU computes experts, for which the GPU waits, and attends for ``on_cpu`` requests.

    It does one after the other. If these requests share the GPU batch's stages, it waits for their attention too. If
    they run the stages by themselves, their attention hides beside the GPU's work for the others. But then a layer's
    rows come to the CPU twice, and choose experts twice.
    """
    attention_s = model.cpu_attention_s(on_cpu, workload.context)
    together_s = whole.iteration_s + attention_s
    if not on_gpu:
        return together_s
    placement = whole.placement
    of_gpu_batch = replace(problem, costs=_mean_costs(model, workload, on_gpu + on_cpu, elsewhere=on_cpu))
    of_cpu_batch = replace(problem, costs=model.costs(on_cpu), other_s=0.0)
    _, cpu_s, _ = _parts_s(placement, of_gpu_batch)
    gpu_batch_s = max(iteration_s(placement, of_gpu_batch), cpu_s + attention_s)
    return min(together_s, gpu_batch_s + iteration_s(placement, of_cpu_batch))
