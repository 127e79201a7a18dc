"""What no schedule of a machine and a workload can exceed, in output tokens per second, and what binds there.

The bound is a linear program, and a relaxation: each thing for which the simulator charges time is charged here at most
once, and what any schedule does is possible here, too. So its least makespan is no longer than that of any schedule.

**Work.** A request has a prompt, and output tokens of which the first comes with the prompt; the others are decodes. A
decode attends on the GPU, or on the CPU. The program cuts the makespan into intervals. For each of them it finds, as
numbers that need not be whole:

- passes of the GPU batch through all layers, of several kinds by their prompt tokens, with GPU decodes in them, and
  decodes of the CPU tier that ride;
- own passes of CPU batches, beside those of the GPU batch or apart from them;
- the context tokens to which the decodes in each of these attend;
- how many requests of each class of output lengths start, and how many tokens those get that started earlier.

**Resources.** In each interval:

- GPU: linear layers, attention of prompts and of GPU decodes, what attention tasks cost the GPU, ends of passes and the
  host's work for each GPU batch take no longer than the interval, one after the other.
- CPU: so do attention tasks, with a fixed time of each, a time per context token and a time per row. The last is the
  *link*: Q, K, V and output on their way.
- Riders: a request that rides two stages in a row needs its attention between them. So the linear layers of passes and
  the attention of such riders, one after the other, take no longer than the interval. The executor takes a request
  through one layer at most while the GPU batch crosses one. So whoever misses a stage rides no more in that pass.
- GPU memory: the GPU decodes of a pass attend to no more context than the GPU's KV cache holds.
- Requests and CPU memory: a request is in one place at a time. For each decode its stages, or those of the GPU batch
  that pass meanwhile, and its attention take time. In sum that is no more than the requests that have started, times
  the interval. Weighted with the context of each, it is no more than the KV cache of all that have started, and for the
  CPU tier no more than this holds, times the interval.
- Order: prompts of all that have started by the end of an interval are computed by then. A request gets its tokens one
  after another.

Each approximation errs to the side of a higher bound. Linear layers are tangents to the lower convex hull of their
curve. Attention is the largest affine function that is nowhere above its table, exact for predicted ones. Products of
two amounts are tangents to a convex function of them. Requests of a class may be started in any order, so only sums
over the class are exact. Left out: swaps, launches, sizes of blocks, preemption, and all waiting but that above.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from apex.perf.model import PerfModel, ProfileTable, Surface
from apex.perf.operator_tables import OperatorTable

SHARES = (0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, *(0.125,) * 6)
"""The intervals' shares of the makespan. They are shorter where the run fills."""
COARSE = (0.1, 0.2, 0.35, 0.35)
"""Those of a program that is solved first, to begin near the bound."""
PRECISION = 0.004
"""Of the makespan: it lies between the bound and this fraction more."""
GROWTH = 1.8
"""Between neighbouring sizes at which tangents touch."""


# -- times ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Affine:
    """Seconds: ``fixed_s`` of a call, and those of each request and of each context token of it."""

    fixed_s: float
    request_s: float
    token_s: float

    @staticmethod
    def below(surface: Surface, requests: float, contexts: tuple[float, float]) -> Affine:
        """The largest affine function that is nowhere above ``surface``, up to so many requests, with contexts between
        two lengths. Largest: in the mean of its share of the surface over all sizes."""
        from scipy.optimize import linprog

        firsts = sorted({1.0, *(f for f in surface.firsts if 1 <= f <= requests), max(1.0, requests)})
        inside = {c for curve in surface.curves for c in curve.sizes if contexts[0] < c < contexts[1]}
        seconds = sorted({contexts[0], contexts[1], *inside})
        sizes = np.array([(1.0, n, n * context) for n in firsts for context in seconds])
        times = np.array([surface(n, context) for n in firsts for context in seconds])
        times = np.maximum(times, 1e-12)
        shares = sizes / times[:, None]
        scale = shares.max(axis=0)
        found = linprog(-(shares / scale).sum(axis=0), shares / scale, np.ones(len(times)), bounds=(0, None))
        return Affine(*(float(value) for value in found.x / scale))


class Hull:
    """The lower convex hull of seconds over a size. It is nondecreasing, and constant below the first size."""

    def __init__(self, seconds: Callable[[float], float], sizes: Iterable[float]) -> None:
        points: list[tuple[float, float]] = []
        for point in [(size, seconds(size)) for size in sorted(set(sizes))]:
            while len(points) > 1 and _slope(points[-2], points[-1]) >= _slope(points[-1], point):
                points.pop()
            points.append(point)
        self.sizes, self.seconds = (np.array(values) for values in zip(*points, strict=True))
        self.slopes = np.diff(self.seconds) / np.diff(self.sizes)

    def __call__(self, size: float) -> float:
        i = self._segment(size)
        return float(self.seconds[i] + self.slopes[i] * (max(size, self.sizes[0]) - self.sizes[i]))

    def slope(self, size: float) -> float:
        """Seconds of one more at this size; 0 below the first."""
        return float(self.slopes[self._segment(size)]) if size >= self.sizes[0] else 0.0

    def _segment(self, size: float) -> int:
        return int(np.clip(np.searchsorted(self.sizes, size, "right") - 1, 0, len(self.slopes) - 1))

    def tangents(self) -> list[tuple[float, float]]:
        """(a, b) such that a batch of n takes at least a + b n seconds, those that touch at a ladder of sizes."""
        segments = sorted({self._segment(size) for size in ladder(*self.sizes[[0, -1]])})
        return [(self.seconds[i] - self.slopes[i] * self.sizes[i], self.slopes[i]) for i in segments]

    def row_tangents(self, most: float) -> list[tuple[float, float]]:
        """(a, b) such that n rows, each for the time of a batch of n, take at least a + b n seconds.

        n times a convex nondecreasing function is convex for n from 0 on, so it lies above its tangents.
        """
        found = []
        for n in ladder(1.0, most):
            slope = self(n) + n * self.slope(n)
            found.append((n * self(n) - slope * n, slope))
        return found


def _slope(first: tuple[float, float], second: tuple[float, float]) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def ladder(least: float, most: float) -> list[float]:
    """Sizes from ``least`` to ``most``, each ``GROWTH`` of the one before."""
    steps = max(0, math.ceil(math.log(max(most, least) / least, GROWTH) - 1e-9))
    return [*(least * GROWTH**step for step in range(steps)), max(most, least)]


def square_tangents(most: float) -> list[tuple[float, float]]:
    """(a, b) such that the square of n is at least a + b n, for n up to ``most``."""
    return [(-size * size, 2.0 * size) for size in ladder(max(1.0, most / GROWTH**7), most)]


# -- machine and workload ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoundMachine:
    """What the bound knows of a machine with a model. The KV caches of the tiers are in tokens.

    ``max_batched_tokens`` and ``max_requests``: limits of the GPU batch and of requests at once. The factors say how
    many times as fast the GPU, the CPU and the link are as in the table.
    """

    table: ProfileTable
    num_layers: int
    gpu_tokens: float
    cpu_tokens: float
    max_batched_tokens: int
    max_requests: int
    has_host_work: bool = True
    gpu_speed: float = 1.0
    cpu_speed: float = 1.0
    link_speed: float = 1.0
    more_requests: float = 1.0


@dataclass(frozen=True)
class RequestClass:
    """Requests with similar output lengths. Decodes are the output tokens after the first."""

    count: int
    decodes: float
    """Of all requests together."""
    least_decodes: int
    most_decodes: int
    contexts: tuple[float, float]
    """The least and the most tokens to which a decode attends."""
    sorted_prompts: tuple[float, ...]
    """Prompt tokens, the shortest first."""


@dataclass(frozen=True)
class BoundWorkload:
    classes: tuple[RequestClass, ...]
    output_tokens: int
    prompt_tokens: int
    attended: float
    """Context tokens of all decodes."""
    shortest_contexts: tuple[tuple[float, float], ...]
    """(a, b) such that any n decodes attend to at least a + b n tokens."""
    longest_means: tuple[tuple[float, float], ...]
    """(a, b) such that n decodes that are the first ones of their requests attend to at most a + b n tokens."""

    @staticmethod
    def of(requests: Sequence[tuple[int, int]]) -> BoundWorkload:
        """``requests``: prompt tokens and output tokens of each."""
        ordered = sorted(requests, key=lambda request: request[1])
        cut = np.unique(np.round(np.array([0.0, 0.4, 0.7, 0.9, 1.0]) * len(ordered)).astype(int))
        if ordered[0][1] * 1.5 > ordered[-1][1]:  # all are much alike
            cut = np.array([0, len(ordered)])
        classes = tuple(request_class(ordered[a:b]) for a, b in itertools.pairwise(cut))
        return BoundWorkload(
            classes,
            sum(out for _, out in requests),
            sum(prompt for prompt, _ in requests),
            sum(attended_tokens(prompt, out) for prompt, out in requests),
            shortest_contexts(requests),
            longest_means(requests),
        )

    @property
    def num_requests(self) -> int:
        return sum(each.count for each in self.classes)

    @property
    def contexts(self) -> tuple[float, float]:
        return min(each.contexts[0] for each in self.classes), max(each.contexts[1] for each in self.classes)


def attended_tokens(prompt: int, output: int) -> float:
    """Context tokens of the decodes of a request: its first one attends to the prompt and the first output token."""
    return (output - 1) * (prompt + output / 2)


CUTS = (0.0, 0.03, 0.1, 0.25, 0.45, 0.7, 0.9, 0.98)
"""Parts of all decodes at which tangents touch."""


def shortest_contexts(requests: Sequence[tuple[int, int]]) -> tuple[tuple[float, float], ...]:
    """See :class:`BoundWorkload`. The sum of the n shortest contexts is convex in n."""
    contexts = np.sort(np.concatenate([np.arange(prompt + 1, prompt + out) for prompt, out in requests]))
    return tangents_of_sums(contexts.astype(float), np.ones(len(contexts)))


def longest_means(requests: Sequence[tuple[int, int]]) -> tuple[tuple[float, float], ...]:
    """See :class:`BoundWorkload`. The first decodes of a request attend to less, in the mean, than all of them. So n
    of them attend to at most what all decodes of the requests with the longest means do, which is concave in n."""
    decoding = sorted((-(prompt + out / 2), out - 1) for prompt, out in requests if out > 1)
    means, counts = (np.array(values, dtype=float) for values in zip(*decoding, strict=True))
    return tuple((-a, -b) for a, b in tangents_of_sums(means, counts))


def tangents_of_sums(values: NDArray[np.float64], counts: NDArray[np.float64]) -> tuple[tuple[float, float], ...]:
    """(a, b) of tangents to the sum of the first n of ascending values, each ``counts`` times."""
    before, sums = np.cumsum(counts) - counts, np.cumsum(values * counts) - values * counts
    touched = {int(np.searchsorted(before, cut * counts.sum(), "right")) - 1 for cut in CUTS}
    return tuple((float(sums[k] - values[k] * before[k]), float(values[k])) for k in sorted(touched))


def request_class(requests: Sequence[tuple[int, int]]) -> RequestClass:
    decodes = [out - 1 for _, out in requests]
    return RequestClass(
        len(requests),
        float(sum(decodes)),
        min(decodes),
        max(decodes),
        (min(prompt for prompt, _ in requests) + 1.0, max(prompt + out for prompt, out in requests)),
        tuple(sorted(float(prompt) for prompt, _ in requests)),
    )


Term = tuple[Any, float]
"""A variable and its coefficient."""

# -- the program ------------------------------------------------------------------------------------------------------


class Program:
    """A linear program: variables from 0 on, rows ``sum of coefficients <= limit``, and what is maximised."""

    def __init__(self) -> None:
        self.num_variables = 0
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.limits: list[float] = []

    def variables(self, *shape: int) -> NDArray[np.int64]:
        count = math.prod(shape)
        found = np.arange(self.num_variables, self.num_variables + count).reshape(shape)
        self.num_variables += count
        return found

    def at_most(self, limit: float, terms: Iterable[tuple[Any, float]]) -> None:
        row = len(self.limits)
        for variable, coefficient in terms:
            self.rows.append(row)
            self.columns.append(int(variable))
            self.values.append(float(coefficient))
        self.limits.append(limit)

    def matrix(self) -> Any:
        from scipy.sparse import csr_array

        shape = len(self.limits), self.num_variables
        return csr_array((self.values, (self.rows, self.columns)), shape=shape)


LEAST_CHUNK = 128
"""Prompt tokens: the kinds of passes are divided at powers of four times this, from this on."""
CUTS_OF_PROMPTS = 6
"""Tangents to the prompt tokens of the shortest prompts, over their number."""


class Costs:
    """Lower bounds of seconds on a machine, of all layers together, and the sizes of a workload there.

    Context tokens count in units of ``unit``, the mean context of a decode, so that all amounts are of one order.
    """

    def __init__(self, machine: BoundMachine, workload: BoundWorkload) -> None:
        table, layers = machine.table, machine.num_layers
        self.num_layers = layers
        self.unit = max(1.0, workload.attended / max(1.0, sum(each.decodes for each in workload.classes)))
        self.gpu_tokens, self.cpu_tokens = machine.gpu_tokens / self.unit, machine.cpu_tokens / self.unit
        self.contexts = tuple(context / self.unit for context in workload.contexts)
        self.batch = machine.max_batched_tokens
        self.rows = float(min(machine.max_requests, workload.num_requests * machine.more_requests))
        top = self.top = float(workload.num_requests)
        """Rows of a batch at most, to choose where tangents touch: where they do may not depend on the machine, since
        prices compare the rows of its program with those of another machine."""
        passes = layers - 1 + table.first_share  # the last stage is for sampled rows alone: see `ends`
        gpu = machine.gpu_speed
        sizes = [1, *(s for s in table.linear.sizes if s > 1), self.batch + top + 1]
        self._sizes, self._linear_s = sizes, lambda size: passes * table.linear(size) / gpu
        self.linear = self.linear_of(0, 1, self.batch + top)
        self.own_linear, self.prompt_linear = self.linear_of(0, 1, top + 1), self.linear_of(0, 1, self.batch)
        self.kinds = [self._kind(chunks, table, layers / gpu) for chunks in chunk_ranges(self.batch)]
        model = PerfModel(table, layers)
        last = [1, *(s for s in (*table.linear.sizes, *table.ends.sizes) if 1 < s <= top), top + 1]
        self.ends = Hull(lambda size: ((1 - table.first_share) * table.linear(size) + table.ends(size)) / gpu, last)
        self.host_s = model.host_work_s(0) if machine.has_host_work else 0.0
        on_gpu = Affine.below(table.gpu_attention, top, workload.contexts)
        on_cpu = Affine.below(table.cpu_attention, top, workload.contexts)
        self.gpu_fixed, self.gpu_row = layers * on_gpu.fixed_s / gpu, layers * on_gpu.request_s / gpu
        self.gpu_context = layers * on_gpu.token_s * self.unit / gpu
        cpu = machine.cpu_speed
        self.cpu_fixed, self.cpu_context = layers * on_cpu.fixed_s / cpu, layers * on_cpu.token_s * self.unit / cpu
        self.cpu_row = layers * on_cpu.request_s / machine.link_speed
        submitted = [1.0, *(size for size in table.hand_over.sizes if 1 < size < top), top]
        self.hand_over_row = layers * min(table.hand_over(size) / size for size in submitted) / gpu
        prompts = [prompt for each in workload.classes for prompt in each.sorted_prompts]
        attention = {n: layers * least_prompt_attention_s(table, n, self.batch) / gpu for n in set(prompts)}
        self.prompt_attention = sum(attention[n] for n in prompts)
        self.least_prompt_attention = min(seconds / n for n, seconds in attention.items())
        self.token_s = self.linear(1) + self.ends(1) + min(
            self.host_s + self.gpu_fixed + self.gpu_row + self.gpu_context * self.contexts[0],
            self.cpu_fixed + self.cpu_row + self.cpu_context * self.contexts[0],
        )  # fmt: skip
        """Of one token of a request, at least."""

    def linear_of(self, beside: float, least: float, most: float) -> Hull:
        """The linear layers of a pass of so many tokens, over those that are ``beside`` others."""
        least = max(1.0, beside + least)
        most = max(beside + most, least + 1.0)
        sizes = [least, *(size for size in self._sizes if least < size < most), most]
        return Hull(self._linear_s, sizes)

    def _kind(self, chunks: tuple[int, int], table: ProfileTable, layers: float) -> PassKind:
        least_prompt, most_prompt = chunks
        linear = self.linear_of(least_prompt, 0, most_prompt - least_prompt + self.top + 1)

        def both_s(decodes: float) -> float:
            own = [decodes * k / 8 for k in range(1, 9)]
            split = [linear(least_prompt + decodes - o) + self.own_linear(o) for o in own]
            return min(linear(least_prompt + decodes), *split)

        both = Hull(both_s, ladder(1.0, self.top + 1))
        return PassKind(least_prompt, most_prompt, linear, both, layers * saved_beside_chunks_s(table, chunks))


@dataclass(frozen=True)
class PassKind:
    """Passes of the GPU batch with decodes and so many prompt tokens.

    Attributes:
        linear: seconds of their linear layers, over tokens.
        both: those and the own stages meanwhile, over the decodes in both, at the best division, with the least prompt.
        saved_s: what attention of decodes and prompts in one call saves at most.
    """

    least_prompt: int
    most_prompt: int
    linear: Hull
    both: Hull
    saved_s: float


def chunk_ranges(batch: int) -> list[tuple[int, int]]:
    """Prompt tokens of a pass of each kind, from and to."""
    edges = [1, *(size for k in range(6) if (size := LEAST_CHUNK << k) < batch), batch]
    return [(0, 0), *itertools.pairwise(edges)]


def least_prompt_attention_s(table: ProfileTable, prompt: float, batch: int) -> float:
    """One layer's attention of a prompt, in equal chunks of the best number; unequal ones take longer in sum, since the
    time of a chunk grows faster than its size."""
    attention, best = table.prefill_attention, math.inf
    least = math.ceil(prompt / batch)
    for count in range(least, least + 32):
        chunk = prompt / count
        seconds = sum(attention(chunk, i * chunk) - table.prefill_shared_s for i in range(count))
        if seconds >= best:
            break
        best = seconds
    return max(0.0, best)


def saved_beside_chunks_s(table: ProfileTable, chunks: tuple[int, int]) -> float:
    """What one layer's attention of decodes and a chunk in one call saves at most over two calls, with a chunk between
    two sizes. 0 where a table has no such calls."""
    if not isinstance(table, OperatorTable) or table.mixed_attention is None:
        return 0.0
    least, most = chunks[0] / 2, chunks[1] * 2  # interpolated, so the measured sizes around count
    saved = [
        table.prefill_attention(new, cached) + table.gpu_attention(decodes, context) - seconds
        for new, cached, decodes, context, seconds in table.mixed_attention.points
        if decodes >= 1 and least <= new <= most
    ]
    return max(0.0, *saved) if saved else 0.0


def prompt_cuts(prompts: Sequence[float]) -> list[tuple[float, float]]:
    """(a, b) such that n of these prompts, sorted, have at least a + b n tokens: the sum is convex in n."""
    sums, count = np.cumsum([0.0, *prompts]), len(prompts)
    points = sorted({min(count - 1, round(count * k / CUTS_OF_PROMPTS)) for k in range(CUTS_OF_PROMPTS + 1)})
    cuts = {(sums[n] - prompts[n] * n, prompts[n]) for n in points}
    return sorted((float(a), float(b)) for a, b in cuts)


def program_of(machine: BoundMachine, workload: BoundWorkload, makespan_s: float, shares: Sequence[float]) -> Program:
    """The program: the first variable is the part of the workload that is done in ``makespan_s``."""
    costs, program, classes = Costs(machine, workload), Program(), workload.classes
    at_most, layers, rows, contexts = program.at_most, costs.num_layers, costs.rows, costs.contexts
    held_at_once = min(costs.cpu_tokens, rows * contexts[1])  # context tokens of the CPU tier
    whole = machine.more_requests
    (part,) = program.variables(1)
    started = program.variables(len(shares), len(classes))
    prompt_tokens, attention_s = program.variables(len(shares)), program.variables(len(shares))
    given: list[list[NDArray[np.int64]]] = []  # [interval][class]: tokens to those that started in each interval
    attended: list[dict[str, list[Term]]] = []  # of each interval: decodes and contexts by where they are done
    ends, squares = costs.ends.tangents(), square_tangents(costs.top * contexts[1])
    end_slope, least = costs.ends.slope(1.0), contexts[0]
    for i, share in enumerate(shares):
        interval_s = makespan_s * share
        passes = [PassVariables(*program.variables(len(fields(PassVariables)))) for _ in costs.kinds]
        beside, apart = (OwnVariables(*program.variables(len(fields(OwnVariables)))) for _ in range(2))
        prompts = PromptVariables(*program.variables(len(fields(PromptVariables))))
        apart_s, rider_square = program.variables(2)

        # Passes of the GPU batch.
        for kind, of_kind in zip(passes, costs.kinds, strict=True):
            in_products = [(kind.on_gpu, 1.0), (kind.riders, 1.0), (kind.late, 1.0)]
            decodes = [*in_products, (kind.own, 1.0)]
            at_most(0.0, [(kind.prompt, 1.0), (kind.passes, -of_kind.most_prompt)])
            at_most(0.0, [(kind.prompt, -1.0), (kind.passes, of_kind.least_prompt)])
            at_most(0.0, [(kind.prompt, 1.0), (kind.on_gpu, 1.0), (kind.passes, -costs.batch)])
            at_most(0.0, [(kind.gpu_context, 1.0), (kind.passes, -costs.gpu_tokens)])
            # A request crosses a layer at most once while the GPU batch does, and once more between two passes.
            at_most(0.0, [*decodes, (kind.passes, -rows * (1 + 1 / layers))])
            in_cpu_tier = [(kind.rider_context, 1.0), (kind.late_context, 1.0), (kind.own_context, 1.0)]
            at_most(0.0, [*in_cpu_tier, (kind.passes, -held_at_once * (1 + 1 / layers))])
            for count, context in kind.places:
                at_most(0.0, [(count, contexts[0]), (context, -1.0)])
                at_most(0.0, [(context, 1.0), (count, -contexts[1])])
            for fixed, each in of_kind.linear.tangents():
                terms = [(kind.prompt, each), *times(in_products, each)]
                at_most(0.0, [(kind.passes, fixed), *terms, (kind.linear_s, -1.0)])
            for fixed, each in ends:
                at_most(0.0, [(kind.passes, fixed), *times(in_products, each), (kind.ends_s, -1.0)])
            for fixed, each in of_kind.both.row_tangents(costs.top):
                at_most(0.0, [(kind.passes, fixed), *times(decodes, each), (kind.rows_s, -1.0)])
        for fixed, each in costs.prompt_linear.tangents():
            at_most(0.0, [(prompts.passes, fixed), (prompts.prompt, each), (prompts.linear_s, -1.0)])
        at_most(0.0, [(prompts.prompt, 1.0), (prompts.passes, -costs.batch)])
        for fixed, each in squares:
            riders = [(kind.rider_context, each) for kind in passes]
            at_most(0.0, [*((kind.passes, fixed) for kind in passes), *riders, (rider_square, -1.0)])
        # Own passes: beside those of the GPU batch, and apart from them.
        at_most(0.0, [*((kind.own, 1.0) for kind in passes), (beside.rows, -1.0)])
        at_most(0.0, [(beside.rows, 1.0), *((kind.own, -1.0) for kind in passes)])
        at_most(0.0, [*((kind.own_context, 1.0) for kind in passes), (beside.context, -1.0)])
        at_most(0.0, [(beside.context, 1.0), *((kind.own_context, -1.0) for kind in passes)])
        at_most(0.0, [(apart.rows, contexts[0]), (apart.context, -1.0)])
        at_most(0.0, [(apart.context, 1.0), (apart.rows, -contexts[1])])
        for own in (beside, apart):
            for fixed, each in costs.own_linear.tangents():
                at_most(0.0, [(own.passes, fixed), (own.rows, each), (own.linear_s, -1.0)])
            for fixed, each in squares:
                at_most(0.0, [(own.passes, fixed), (own.context, each), (own.context_square, -1.0)])
        for fixed, each in costs.own_linear.row_tangents(costs.top):
            at_most(0.0, [(apart.passes, fixed), (apart.rows, each), (apart.rows_s, -1.0)])

        # The GPU, the GPU batch, and the CPU.
        own_row_s = end_slope + costs.hand_over_row
        gpu: list[Term] = [(attention_s[i], 1.0), (beside.linear_s, 1.0), (beside.rows, own_row_s)]
        lane: list[Term] = [(prompts.linear_s, 1.0), (prompts.passes, costs.host_s), (apart_s, 1.0)]
        for kind in passes:
            lane += [(kind.linear_s, 1.0), (kind.ends_s, 1.0), (kind.passes, costs.host_s)]
        # A pass with GPU decodes has one call of their attention, and attends to what the tier holds at most.
        gpu_context_s = costs.gpu_context + costs.gpu_fixed / max(costs.gpu_tokens, 1e-9)
        gpu += lane
        for kind, of_kind in zip(passes, costs.kinds, strict=True):
            gpu += [(kind.on_gpu, costs.gpu_row), (kind.gpu_context, gpu_context_s)]
            gpu += [(kind.passes, -of_kind.saved_s)]
            gpu += [(kind.riders, costs.hand_over_row), (kind.late, costs.hand_over_row)]
            lane = [*lane, (kind.riders, costs.cpu_row), (kind.rider_context, costs.cpu_context)]
        own_cpu = [
            [(own.passes, costs.cpu_fixed), (own.rows, costs.cpu_row), (own.context, costs.cpu_context)]
            for own in (beside, apart)
        ]
        cpu: list[Term] = [*own_cpu[0], *own_cpu[1]]
        for kind in passes:
            cpu += [(kind.riders, costs.cpu_row), (kind.late, costs.cpu_row)]
            cpu += [(kind.rider_context, costs.cpu_context), (kind.late_context, costs.cpu_context)]
        at_most(interval_s, gpu)
        at_most(interval_s, lane)
        at_most(interval_s, cpu)
        at_most(0.0, [(apart.linear_s, 1.0), (apart.rows, own_row_s), (apart_s, -1.0)])
        at_most(0.0, [*own_cpu[1], (apart_s, -1.0)])
        # Who is late rides once a pass: it stays behind the GPU batch from then on, since it crosses one layer at most
        # while that does. To ride again it needs its attention before the next stage of the GPU batch, as riders do.
        once = [(kind.passes, -1.0 / layers) for kind in passes]
        all_late: list[Term] = [(kind.late, 1.0) for kind in passes]
        late_contexts: list[Term] = [(kind.late_context, 1.0) for kind in passes]
        at_most(0.0, [*all_late, *times(once, rows)])
        at_most(0.0, [*late_contexts, *times(once, held_at_once)])

        # Requests at once: seconds of each decode, and seconds of each weighted with its context.
        apart_row_s = costs.cpu_fixed + costs.cpu_row + costs.cpu_context * least
        busy: list[Term] = [(apart.rows_s, 1.0), (apart.rows, apart_row_s)]
        apart_held: list[Term] = [(apart.context, costs.linear(1) + costs.cpu_fixed)]
        apart_held += [(apart.context_square, costs.cpu_context)]
        held: list[Term] = [*apart_held, (beside.context, costs.linear(1) + costs.cpu_fixed)]
        held += [(beside.context_square, costs.cpu_context), (rider_square, costs.cpu_context)]
        on_gpu: list[Term] = []
        at_most(0.0, [*busy, (apart_s, -rows)])
        at_most(0.0, [*apart_held, (apart_s, -held_at_once)])
        for kind, of_kind in zip(passes, costs.kinds, strict=True):
            pass_s = costs.host_s + costs.ends(1)
            busy += [(kind.rows_s, 1.0), *((v, pass_s) for v in (kind.on_gpu, kind.riders, kind.late, kind.own))]
            busy += [(kind.riders, costs.cpu_row + costs.cpu_context * least), (kind.on_gpu, costs.gpu_fixed)]
            least_s = of_kind.linear(0)
            held += [(kind.rider_context, least_s), (kind.late_context, least_s + costs.cpu_fixed)]
            on_gpu += [(kind.gpu_context, least_s + pass_s)]
        at_most(rows * interval_s * (1 + 1 / layers), busy)
        at_most(0.0, [*busy, *((n, -interval_s * (1 + 1 / layers)) for n in started[: i + 1].ravel())])
        at_most(costs.cpu_tokens * interval_s, held)

        # Who starts, and who gets tokens.
        tokens = [program.variables(i + 1) for _ in classes]
        given.append(tokens)
        kv: list[Term] = [(p, 1.0) for p in prompt_tokens[: i + 1]]
        kv += [(y, 1.0) for earlier in given for of_class in earlier for y in of_class]
        at_most(0.0, [*held, *on_gpu, *times(kv, -interval_s / costs.unit)])
        computed: list[Term] = [*((kind.prompt, 1.0) for kind in passes), (prompts.prompt, 1.0)]
        at_most(0.0, [(prompt_tokens[i], 1.0), *times(computed, -1.0)])
        at_most(0.0, [(prompt_tokens[i], costs.least_prompt_attention), (attention_s[i], -1.0)])
        where: dict[str, list[Term]] = {"beside": [(beside.rows, 1.0)], "apart": [(apart.rows, 1.0)]}
        where |= {"beside context": [(beside.context, 1.0)], "apart context": [(apart.context, 1.0)]}
        for name, count in (("gpu", "on_gpu"), ("rider", "riders"), ("late", "late")):
            where[name] = [(getattr(kind, count), 1.0) for kind in passes]
            where[f"{name} context"] = [(getattr(kind, f"{name}_context"), 1.0) for kind in passes]
        attended.append(where)
        everywhere = [term for name in PLACES for term in where[name]]
        at_most(0.0, [*((y, 1.0) for of_class in tokens for y in of_class), *times(everywhere, -1.0)])
        at_most(0.0, [*everywhere, *((y, -1.0) for of_class in tokens for y in of_class)])
        of_classes = list(zip(classes, tokens, strict=True))
        context = [term for name in PLACES for term in where[f"{name} context"]]
        shortest = [(y, each.contexts[0] / costs.unit) for each, those in of_classes for y in those]
        longest = [(y, each.contexts[1] / costs.unit) for each, those in of_classes for y in those]
        at_most(0.0, [*shortest, *times(context, -1.0)])
        at_most(0.0, [*context, *times(longest, -1.0)])
        for c, _ in enumerate(classes):
            for s in range(i + 1):
                at_most(0.0, [(tokens[c][s], 1.0), (started[s, c], -interval_s / costs.token_s)])
        needed = program.variables(len(classes))
        at_most(0.0, [*((n, 1.0) for n in needed), *((p, -1.0) for p in prompt_tokens[: i + 1])])
        for c, each in enumerate(classes):
            here: list[Term] = [(n, 1.0) for n in started[: i + 1, c]]
            for fixed, slope in prompt_cuts(each.sorted_prompts):
                at_most(0.0, [(part, fixed * whole), *times(here, slope), (needed[c], -1.0)])

    # Contexts: no choice of so many decodes has less than those with the shortest ones. A request's decodes so far have
    # shorter contexts than all of its decodes.
    for name in PLACES:
        here = [term for where in attended for term in where[name]]
        context = [term for where in attended for term in where[f"{name} context"]]
        for fixed, each in workload.shortest_contexts:
            at_most(0.0, [(part, fixed * whole / costs.unit), *times(here, each / costs.unit), *times(context, -1.0)])
    for i in range(len(shares)):
        here = [term for where in attended[: i + 1] for name in PLACES for term in where[name]]
        context = [term for where in attended[: i + 1] for name in PLACES for term in where[f"{name} context"]]
        for fixed, each in workload.shortest_contexts:
            at_most(0.0, [(part, fixed * whole / costs.unit), *times(here, each / costs.unit), *times(context, -1.0)])
        for fixed, each in workload.longest_means:
            at_most(0.0, [*context, (part, -fixed * whole / costs.unit), *times(here, -each / costs.unit)])
    # All work is done, as far as the part says.
    for c, each in enumerate(classes):
        equal(program, [(n, 1.0) for n in started[:, c]], (part, each.count * whole))
        equal(program, [(y, 1.0) for of in given for y in of[c]], (part, each.decodes * whole))
        for s in range(len(shares)):
            here = [(given[i][c][s], 1.0) for i in range(s, len(shares))]
            at_most(0.0, [*here, (started[s, c], -each.most_decodes)])
            at_most(0.0, [*times(here, -1.0), (started[s, c], each.least_decodes)])
    equal(program, [(p, 1.0) for p in prompt_tokens], (part, workload.prompt_tokens * whole))
    at_most(0.0, [(part, costs.prompt_attention * whole), *((a, -1.0) for a in attention_s)])
    context = [term for where in attended for name in PLACES for term in where[f"{name} context"]]
    at_most(0.0, [(part, workload.attended * whole / costs.unit), *times(context, -1.0)])
    return program


def equal(program: Program, terms: Sequence[Term], to: Term) -> None:
    """The terms are in sum what ``to`` is."""
    program.at_most(0.0, [*terms, (to[0], -to[1])])
    program.at_most(0.0, [*times(terms, -1.0), to])


def times(terms: Iterable[Term], factor: float) -> list[Term]:
    return [(variable, coefficient * factor) for variable, coefficient in terms]


PLACES = ("gpu", "rider", "late", "beside", "apart")
"""Where decodes are done."""


@dataclass(slots=True)
class PassVariables:
    """Of the passes of the GPU batch of one kind, in one interval, in sum.

    Riders have ridden the stage before, too; those that are late have not. ``own``: decodes of the CPU tier that take
    own stages meanwhile. ``linear_s`` and ``ends_s``: seconds. ``rows_s``: each decode's seconds of its pass.
    """

    passes: int
    prompt: int
    on_gpu: int
    riders: int
    late: int
    own: int
    gpu_context: int
    rider_context: int
    late_context: int
    own_context: int
    linear_s: int
    ends_s: int
    rows_s: int

    @property
    def places(self) -> list[tuple[int, int]]:
        """Decodes, and their context."""
        gpu, riders = (self.on_gpu, self.gpu_context), (self.riders, self.rider_context)
        return [gpu, riders, (self.late, self.late_context), (self.own, self.own_context)]


@dataclass(slots=True)
class OwnVariables:
    """Of own passes of CPU batches in one interval. ``context_square``: the squares of each pass's context, in sum."""

    passes: int
    rows: int
    context: int
    linear_s: int
    rows_s: int
    context_square: int


@dataclass(slots=True)
class PromptVariables:
    """Of passes of the GPU batch without decodes, in one interval."""

    passes: int
    prompt: int
    linear_s: int


@dataclass(frozen=True)
class Solved:
    """A program at one makespan, solved: the part of the workload that is done by then, and what its rows are worth."""

    part: float
    makespan_s: float
    values: NDArray[np.float64]
    prices: NDArray[np.float64]
    program: Program


def solve(machine: BoundMachine, workload: BoundWorkload, makespan_s: float, shares: Sequence[float]) -> Solved:
    """The most of the workload that is done in a makespan whose intervals have these shares."""
    from scipy.optimize import linprog

    program = program_of(machine, workload, makespan_s, shares)
    objective = np.zeros(program.num_variables)
    objective[0] = -1.0
    for method in ("highs-ipm", "highs-ds"):  # the first is faster, and fails on some programs
        found = linprog(objective, program.matrix(), program.limits, bounds=(0, None), method=method)
        if not found.status:
            break
    else:
        raise RuntimeError(f"the linear program of the bound was not solved: {found.message}")
    return Solved(-found.fun, makespan_s, found.x, -found.ineqlin.marginals, program)


# -- the bound --------------------------------------------------------------------------------------------------------

RESOURCES: Mapping[str, tuple[str, str]] = {
    "GPU": ("gpu_speed", "a GPU that is 10% faster"),
    "CPU": ("cpu_speed", "CPU attention that reads 10% faster"),
    "GPU memory": ("gpu_tokens", "10% more KV cache on the GPU"),
    "CPU memory": ("cpu_tokens", "10% more KV cache on the host"),
    "link": ("link_speed", "a link between them that is 10% faster"),
    "requests": ("more_requests", "10% more requests"),
}
"""Each resource: the field of a machine that scales it, and in words what 10% more of it is."""
MORE, STEP = 0.1, 1e-4
"""Gains are of so much more, by prices that are taken at a step of so much."""


@dataclass(frozen=True)
class Bound:
    """No schedule makes more output tokens per second than ``tokens_per_s``.

    ``gains``: for each of ``RESOURCES`` the tokens per second by which 10% more of it raises the bound, by the prices
    of the program, which are true for small changes.
    """

    tokens_per_s: float
    gains: Mapping[str, float]

    def lines(self) -> list[str]:
        """What 10% more of each resource would raise it by, in words; the one that raises it most first."""
        by_gain = sorted(self.gains.items(), key=lambda item: -item[1])
        return [f"{RESOURCES[name][1]}: {gain:+,.1f} tok/s" for name, gain in by_gain]

    @property
    def binding(self) -> str:
        """The resource of which more raises the bound most."""
        return max(self.gains, key=lambda name: self.gains[name])


def why_no_bound(
    *,
    weights_off_gpu: bool,
    several_hosts: bool,
    windows: bool,
    arrivals: bool,
    prefixes: bool,
    is_cut: bool = False,
    one_token: bool = False,
) -> str:
    """Which part of a machine or workload the program does not have, in a sentence; empty if it has all."""
    missing = {
        "weights that are not all on the GPU": weights_off_gpu,
        "CPU attention on several hosts": several_hosts,
        "attention windows": windows,
        "requests that arrive one after another": arrivals,
        "prompts that share beginnings": prefixes,
        "a run that ends before its requests do": is_cut,
        "outputs of one token, which are no decodes": one_token,
    }
    found = [what for what, is_there in missing.items() if is_there]
    return f"the bound is not made for {' and '.join(found)}" if found else ""


def bound(machine: BoundMachine, workload: BoundWorkload) -> Bound:
    """The bound of a workload on a machine, when all requests are there at once. Takes 10 to 30 seconds."""
    _, nearly_s = _solve_near(machine, workload, _first_guess_s(machine, workload), COARSE, 0.05)
    solved, makespan_s = _solve_near(machine, workload, nearly_s, SHARES, PRECISION)
    rate = workload.output_tokens / makespan_s
    later = program_of(machine, workload, solved.makespan_s * (1 + STEP), SHARES)
    by_time = _more_done(solved, later)
    gains = {name: rate * _faster(machine, workload, solved, name) / by_time for name in RESOURCES}
    gains["requests"] += rate * MORE  # which are more tokens, too
    return Bound(rate, gains)


def _first_guess_s(machine: BoundMachine, workload: BoundWorkload) -> float:
    """Seconds in which GPU and CPU could do all that is to do, one after the other."""
    costs = Costs(machine, workload)
    tokens = workload.prompt_tokens + workload.output_tokens
    return tokens * costs.linear(costs.batch) / costs.batch + workload.attended / costs.unit * costs.cpu_context / 2


def _solve_near(
    machine: BoundMachine, workload: BoundWorkload, makespan_s: float, shares: Sequence[float], precision: float
) -> tuple[Solved, float]:
    """A program in whose makespan all is done, and a makespan in which it is not, shorter by ``precision`` at most.

    A schedule for a makespan also gives one for a longer makespan, in which all amounts are larger in proportion. So
    the part that is done grows at least as the makespan does.
    """
    impossible_s, possible_s, possible = 0.0, math.inf, None
    while possible is None or possible_s > impossible_s * (1 + precision):
        solved = solve(machine, workload, makespan_s, shares)
        if solved.part < 1.0:
            impossible_s = max(impossible_s, makespan_s)
        else:
            possible_s, possible = makespan_s, solved
            impossible_s = max(impossible_s, makespan_s / solved.part)
        makespan_s /= (max(solved.part, 0.05) / (1 + precision / 2)) ** 0.85
        if not impossible_s < makespan_s < possible_s:
            makespan_s = (impossible_s + possible_s) / 2
    return possible, impossible_s


def _faster(machine: BoundMachine, workload: BoundWorkload, solved: Solved, name: str) -> float:
    """The further part of the workload that is done with more of a resource.

    By the prices of its rows a program that differs a little does so much more of the workload as its limits are
    higher, and its coefficients lower, at the amounts that were found.
    """
    field = RESOURCES[name][0]
    richer = replace(machine, **{field: getattr(machine, field) * (1 + STEP)})
    return MORE * _more_done(solved, program_of(richer, workload, solved.makespan_s, SHARES))


def _more_done(solved: Solved, other: Program) -> float:
    """The further part of the workload that another program does, per ``STEP``, by the prices of the solved one."""
    less_used = (solved.program.matrix() - other.matrix()) @ solved.values
    higher = np.array(other.limits) - np.array(solved.program.limits)
    return float(solved.prices @ (less_used + higher)) / STEP
