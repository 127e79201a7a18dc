"""Predicts seconds of operations from a profile table: monotone interpolation, and linear extrapolation, flagged.

A table belongs to one machine, model and kernel. It carries their identity and is refused on any other.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import pairwise
from math import ceil, hypot, log
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swiftllm.core.plan import GpuBatchItem, IterationPlan
from swiftllm.core.request import Request, Tier
from swiftllm.scheduling.scheduler import PlanBuilder

# -- tables and predictions --------------------------------------------------------------------------------------------

# -- tables and predictions --------------------------------------------------------------------------------------------

TABLE_VERSION = 6


def total_s(seconds: Iterable[float]) -> float:
    """The sum, added from left to right. From Python 3.12 on ``sum`` compensates for rounding: plans and simulated
    times would depend on the version in their last bits."""
    return reduce(add, seconds, 0.0)


class ProfileMismatch(ValueError):
    """The profile table is unreadable, or belongs to another machine, model or kernel."""


@dataclass(frozen=True)
class Curve:
    """Seconds over one size, piecewise linear. Sizes and seconds ascend: a larger job is never faster."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    if TYPE_CHECKING:  # set by __post_init__, and no field: a table's identity is made of fields
        _slopes: tuple[float, ...] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or list(self.sizes) != sorted(set(self.sizes)):
            raise ValueError(f"a curve needs at least two ascending sizes, got {self.sizes}")
        seconds = tuple(_ascending(self.seconds))
        knots = pairwise(zip(self.sizes, seconds, strict=True))
        slopes = tuple([(end_s - start_s) / (end - start) for (start, start_s), (end, end_s) in knots])
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "_slopes", slopes)

    def __call__(self, size: float) -> float:
        sizes = self.sizes
        i = bisect_right(sizes, size, 1, len(sizes) - 1) - 1  # beyond the ends: the line through the two sizes there
        result = self.seconds[i] + self._slopes[i] * (size - sizes[i])
        return result if result > 0.0 else 0.0

    def times(self, factor: float) -> Curve:
        return Curve(self.sizes, tuple([seconds * factor for seconds in self.seconds]))


def _ascending(values: Sequence[float]) -> list[float]:
    """The least-squares ascending sequence (isotonic regression): neighbours in the wrong order get their mean."""
    runs: list[tuple[float, int]] = []  # (mean, how many)
    for value in values:
        run = (value, 1)
        while runs and runs[-1][0] > run[0]:
            mean, count = runs.pop()
            total = count + run[1]
            run = ((mean * count + run[0] * run[1]) / total, total)
        runs.append(run)
    return [mean for mean, count in runs for _ in range(count)]


@dataclass(frozen=True)
class Surface:
    """Seconds over two sizes: one curve over the second size for each first size, interpolated between them."""

    firsts: tuple[float, ...]
    curves: tuple[Curve, ...]

    def __call__(self, first: float, second: float) -> float:
        firsts = self.firsts
        i = bisect_right(firsts, first, 1, len(firsts) - 1) - 1
        low, high = self.curves[i](second), self.curves[i + 1](second)
        share = (first - firsts[i]) / (firsts[i + 1] - firsts[i])
        result = low + share * (high - low)
        return result if result > 0.0 else 0.0

    def times(self, factor: float) -> Surface:
        return Surface(self.firsts, tuple([curve.times(factor) for curve in self.curves]))


FREE = Curve((1, 2), (0.0, 0.0))
"""For operations that cost nothing or could not be measured."""


def attention_rate(surface: Surface) -> float | None:
    """Context tokens per second in one layer, at the fastest measured size; None if the tier was too small."""
    rates = [
        requests * context / seconds
        for requests, curve in zip(surface.firsts, surface.curves, strict=True)
        for context, seconds in zip(curve.sizes, curve.seconds, strict=True)
        if seconds > 0
    ]
    return max(rates, default=None)


def covers(sizes: Sequence[float], size: float) -> bool:
    return sizes[0] <= size <= sizes[-1]


@dataclass(frozen=True)
class ProfileTable:
    """Measured seconds of operations.

    Per layer:
        ``linear`` over tokens; ``prefill_attention`` over (new tokens, tokens cached before), of chunks whose K and V
        go to the GPU tier; ``prefill_attention_cpu_tier`` of chunks for the CPU tier, with their transfers as far as
        the GPU batch waits for them. None: as for the GPU tier, as in a simulation, which has transfers of its own.
        ``gpu_attention`` and ``cpu_attention`` over (requests, context tokens of each), the latter with the way to the
        worker and back; ``hand_over`` over requests: what submitting an attention task costs the GPU batch.
    Per iteration:
        ``ends`` over sampled rows: embedding, logits, sampling; ``iteration`` over requests: the host's work, which is
        scheduling, opening batches and taking tokens in.
    Other:
        ``swap`` over blocks; ``first_share``: the part of a layer's linear work before its attention (norm, QKV,
        rotary). The first stage is that part for all tokens, the last one the rest for the sampled rows.
        ``prefill_shared_s``: the part of a prefill's attention that a GPU batch pays once, however many chunks it has.
        ``stream_s``: how often a layer's weights arrive, on average, where some are streamed to the GPU. Layers of the
        GPU batch are no faster; ``linear`` does not include the wait. ``streamed_layers``: how many layers are
        streamed. ``shared_row_cost``: a further row's part of the time of a CPU block that rows share;
        ``rows_per_read``: how many rows the CPU kernel attends with one read of it. ``flat_from_tokens``: from so many
        on, ``linear`` grows little until it is bound by multiplying; see :func:`apex.perf.model.flat_from_tokens`.
    """

    identity: Mapping[str, str]
    linear: Curve
    ends: Curve
    swap: Curve
    prefill_attention: Surface
    gpu_attention: Surface
    cpu_attention: Surface
    first_share: float = 0.5
    prefill_shared_s: float = 0.0
    hand_over: Curve = FREE
    iteration: Curve = FREE
    stream_s: float = 0.0
    streamed_layers: float = 0.0
    shared_row_cost: float = 1.0
    rows_per_read: float = 1.0
    flat_from_tokens: float = 1.0
    prefill_attention_cpu_tier: Surface | None = None

    def as_json(self) -> str:
        return json.dumps({"version": TABLE_VERSION, **asdict(self)}, indent=1)

    @staticmethod
    def load(path: Path, identity: Mapping[str, str]) -> ProfileTable:
        """Read a table.

        Raises:
            ProfileMismatch: it cannot be read, or its identity differs; the message names the differences.
        """
        try:
            raw = json.loads(path.read_text())
        except OSError as error:
            raise ProfileMismatch(f"no profile table in {path} ({error.strerror}): run `apex profile` first") from None
        except json.JSONDecodeError as error:
            raise ProfileMismatch(f"{path} is no profile table ({error}): run `apex profile` again") from None
        if raw.pop("version", None) != TABLE_VERSION:
            raise ProfileMismatch(f"{path} has another format: run `apex profile` again")
        found = raw.pop("identity")
        differing = [k for k in {**identity, **found} if identity.get(k) != found.get(k)]
        if differing:
            details = "; ".join(f"{k}: table {found.get(k)!r}, here {identity.get(k)!r}" for k in sorted(differing))
            raise ProfileMismatch(f"{path} was measured on something else ({details}): run `apex profile` here")
        times: dict[str, Any] = {name: _from_json(value) for name, value in raw.items()}
        return ProfileTable(found, **times)


def _from_json(value: dict[str, Any] | float | None) -> Curve | Surface | float | None:
    if not isinstance(value, dict):
        return value
    if "curves" in value:
        return Surface(tuple(value["firsts"]), tuple(map(_curve_from_json, value["curves"])))
    return _curve_from_json(value)


def _curve_from_json(value: Mapping[str, Any]) -> Curve:
    return Curve(tuple(value["sizes"]), tuple(value["seconds"]))


@dataclass(frozen=True)
class SharedContext:
    """Tokens with which the contexts of several rows of one CPU task begin, in the same blocks."""

    rows: int
    tokens: int


def saved_tokens(shared: Iterable[SharedContext], row_cost: float, rows_per_read: float) -> float:
    """Context tokens, of a row alone, whose time CPU attention saves since it reads shared blocks once.

    The first row of each read costs what a row alone costs: the bytes and its arithmetic. A further one costs
    ``row_cost`` of that, its arithmetic. Runs too short to be shared save little, and are counted as if they were.

    Args:
        row_cost: part of the time of a row's own block, see :func:`pacpu.shared_row_cost`.
        rows_per_read: see :func:`pacpu.rows_per_read`.
    """
    further = [(run.rows - ceil(run.rows / rows_per_read)) * run.tokens for run in shared]
    return (1.0 - row_cost) * total_s(further)


class PerfModel:
    """Predictions for the schedulers. Sizes count tokens, requests or blocks; results are seconds."""

    FLAT_RATIO = 1.25

    def __init__(self, table: ProfileTable, num_layers: int) -> None:
        self.table = table
        self.num_layers = num_layers
        self.extrapolated: set[str] = set()
        self.stream_s = table.stream_s
        floor_s = max(table.linear(table.flat_from_tokens), self.stream_s) * self.FLAT_RATIO
        flat = [size for size, s in zip(table.linear.sizes, table.linear.seconds, strict=True) if s <= floor_s]
        self.flat_linear_tokens = int(max(flat, default=1))
        """Up to this many tokens a stage costs about the same: reading weights, or waiting for them, dominates."""
        self._linear_s: dict[int, float] = {}  # a cache; it has at most one entry per size of a GPU batch

    def with_table(self, table: ProfileTable) -> PerfModel:
        """The same predictions from another table. Both list what they extrapolate in one place."""
        model = PerfModel(table, self.num_layers)
        model.extrapolated = self.extrapolated
        return model

    def linear_s(self, tokens: int) -> float:
        """One stage (T_l) of a batch of ``tokens``; 0 for an empty batch."""
        seconds = self._linear_s.get(tokens)
        if seconds is None:
            seconds = self._linear_s[tokens] = self._curve("linear", self.table.linear, tokens)
        return seconds

    def layer_s(self, busy_s: float) -> float:
        """A layer in which the GPU batch is busy for so long, and no shorter than the weights need to arrive."""
        return max(busy_s, self.stream_s)

    def prefill_attention_s(
        self, chunks: Sequence[tuple[int, int]], cpu_tier_chunks: Sequence[tuple[int, int]] = ()
    ) -> float:
        """One layer's attention of prefill chunks: (new tokens, tokens already cached) each.

        ``cpu_tier_chunks``: those of them whose K and V go to the CPU tier. They have a launch of their own.
        """
        in_cpu_tier = self.table.prefill_attention_cpu_tier
        if not cpu_tier_chunks or in_cpu_tier is None:
            return self._chunks_s("prefill_attention", self.table.prefill_attention, chunks)
        on_gpu = (Counter(chunks) - Counter(cpu_tier_chunks)).elements()
        seconds = self._chunks_s("prefill_attention", self.table.prefill_attention, list(on_gpu))
        return seconds + self._chunks_s("prefill_attention_cpu_tier", in_cpu_tier, cpu_tier_chunks)

    def _chunks_s(self, name: str, surface: Surface, chunks: Sequence[tuple[int, int]]) -> float:
        if not chunks:
            return 0.0
        alone_s = [self._surface(name, surface, n, c) for n, c in chunks]
        return max(max(alone_s), total_s(alone_s) - self.table.prefill_shared_s * (len(chunks) - 1))

    def gpu_attention_s(self, requests: int, context_tokens: float) -> float:
        """One layer's decode attention in the GPU batch (T_g); the context is summed over the requests."""
        if requests <= 0:
            return 0.0
        return self._surface("gpu_attention", self.table.gpu_attention, requests, context_tokens / requests)

    def gpu_batch_attention_s(
        self,
        decodes: int,
        decode_context: int,
        chunks: Sequence[tuple[int, int]],
        longest_context: int = 0,
        cpu_tier_chunks: Sequence[tuple[int, int]] = (),
    ) -> float:
        """One layer's attention in the GPU batch. ``longest_context``: of the decodes, in tokens; 0 takes them as
        equal. ``cpu_tier_chunks``: see :meth:`prefill_attention_s`."""
        return self.gpu_attention_s(decodes, decode_context) + self.prefill_attention_s(chunks, cpu_tier_chunks)

    def cpu_attention_s(self, requests: float, context_tokens: float, shared: Sequence[SharedContext] = ()) -> float:
        """One layer's decode attention on the CPU worker (T_c), hand-over included; context summed as above.

        ``shared``: the part of the context that is in blocks of several requests.
        """
        if requests <= 0:
            return 0.0
        if shared:
            context_tokens -= saved_tokens(shared, self.table.shared_row_cost, self.table.rows_per_read)
        return self._surface("cpu_attention", self.table.cpu_attention, requests, context_tokens / requests)

    def outside_layers_s(self, rows: int) -> float:
        """The part of an iteration beside its layers: the host's work, embedding, logits and sampling."""
        return self.host_work_s(rows) + self.logits_s(rows) if rows > 0 else 0.0

    def first_stage_s(self, tokens: int) -> float:
        """Stage -1, before all layers."""
        return self.table.first_share * self.linear_s(tokens)

    def last_stage_s(self, rows: int, sampled: int | None = None) -> float:
        """The stage after all layers; the embedding's time counts here. Only the ``rows`` that get a token run it,
        unless ``sampled`` says how many do."""
        sampled = rows if sampled is None else sampled
        return (1.0 - self.table.first_share) * self.linear_s(sampled) + self.logits_s(rows)

    def logits_s(self, rows: int) -> float:
        """Embedding, logits and sampling of the rows that get a token."""
        return self._curve("ends", self.table.ends, rows)

    def hand_over_s(self, requests: int) -> float:
        """What submitting a CPU batch of ``requests`` to the CPU worker costs the GPU batch, in one layer."""
        return self._curve("hand_over", self.table.hand_over, requests)

    def host_work_s(self, requests: int) -> float:
        """The host's work in an iteration of ``requests``; with 0 the fixed part of every iteration."""
        return self.table.iteration(requests)

    def swap_s(self, blocks: int) -> float:
        return self._curve("swap", self.table.swap, blocks)

    def _curve(self, name: str, curve: Curve, size: float) -> float:
        if size <= 0 or curve == FREE:
            return 0.0
        if not covers(curve.sizes, size):
            self.extrapolated.add(name)
        return curve(size)

    def _surface(self, name: str, surface: Surface, first: float, second: float) -> float:
        if not covers(surface.firsts, first) or not covers(surface.curves[0].sizes, second):
            self.extrapolated.add(name)
        return surface(first, second)


# -- times of many sizes -----------------------------------------------------------------------------------------------
# Predicted seconds of operations for many sizes at once: the tables of the performance model over numpy arrays.

Floats = NDArray[np.float64]


class _CurveArray:
    """:class:`~apex.perf.model.Curve` over arrays."""

    def __init__(self, curve: Curve) -> None:
        self._sizes = np.array(curve.sizes, float)
        self._seconds = np.array(curve.seconds, float)
        self._slopes = np.diff(self._seconds) / np.diff(self._sizes)
        self._inner = self._sizes[1:-1]

    def __call__(self, sizes: Floats) -> Floats:
        i = self._inner.searchsorted(sizes, "right")  # beyond the ends: the line through the two sizes there
        return np.maximum(self._seconds.take(i) + self._slopes.take(i) * (sizes - self._sizes.take(i)), 0.0)


class _SurfaceArray:
    """:class:`~apex.perf.model.Surface` over arrays of both sizes, which must broadcast."""

    def __init__(self, surface: Surface) -> None:
        sizes = sorted({size for curve in surface.curves for size in curve.sizes})
        self._firsts, self._sizes = np.array(surface.firsts, float), np.array(sizes, float)
        self._seconds = np.array([[curve(size) for size in sizes] for curve in surface.curves])
        self._slopes = np.diff(self._seconds, axis=1) / np.diff(self._sizes)
        self._inner_firsts, self._inner = self._firsts[1:-1], self._sizes[1:-1]
        self._widths = np.diff(self._firsts)

    def __call__(self, firsts: Floats, seconds: Floats) -> Floats:
        i = self._inner_firsts.searchsorted(firsts, "right")
        j = self._inner.searchsorted(seconds, "right")
        beyond = seconds - self._sizes[j]
        if np.ndim(seconds):
            low, high = (np.maximum(self._seconds[k, j] + self._slopes[k, j] * beyond, 0.0) for k in (i, i + 1))
        else:  # one second size for all: a curve over the first ones
            curve = np.maximum(self._seconds[:, j] + self._slopes[:, j] * beyond, 0.0)
            low, high = curve.take(i), curve.take(i + 1)
        share = (firsts - self._firsts.take(i)) / self._widths.take(i)
        return np.maximum(low + share * (high - low), 0.0)


class OperationTimes:
    """What :class:`~apex.perf.model.PerfModel` predicts, for arrays of sizes. Sizes need not be whole.

    Where a size is 0 there is nothing to do, and the time is 0.
    """

    def __init__(self, model: PerfModel) -> None:
        table = model.table
        self.num_layers = model.num_layers
        self.stream_s, self.streamed_layers = table.stream_s, table.streamed_layers
        self._linear = _CurveArray(table.linear)
        self._ends = _CurveArray(table.ends)
        self._host = _CurveArray(table.iteration)
        self._hand_over = _CurveArray(table.hand_over)
        self._gpu_attention = _SurfaceArray(table.gpu_attention)
        self._cpu_attention = _SurfaceArray(table.cpu_attention)

    def linear_s(self, tokens: ArrayLike) -> Floats:
        """Seconds of one stage (T_l) of a batch of ``tokens``."""
        return _where_any(np.asarray(tokens, float), self._linear)

    def layer_s(self, busy_s: ArrayLike) -> Floats:
        """A layer in which the GPU batch is busy for so long, and no shorter than the weights need to arrive."""
        return np.maximum(busy_s, self.stream_s)

    def gpu_attention_s(self, requests: ArrayLike, context: ArrayLike) -> Floats:
        """Seconds of one layer's decode attention in the GPU batch (T_g); ``context`` tokens are a request's mean."""
        context = np.asarray(context, float)
        return _where_any(np.asarray(requests, float), lambda n: self._gpu_attention(n, context))

    def cpu_attention_s(self, requests: ArrayLike, context: ArrayLike) -> Floats:
        """Seconds of one layer's decode attention on the CPU worker (T_c); ``context`` tokens are a request's mean."""
        context = np.asarray(context, float)
        return _where_any(np.asarray(requests, float), lambda n: self._cpu_attention(n, context))

    def outside_layers_s(self, rows: ArrayLike) -> Floats:
        """Seconds of an iteration beside its layers, for ``rows`` that get a token."""
        return _where_any(np.asarray(rows, float), lambda n: self._host(n) + self._ends(n))

    def alone_stage_s(self, requests: ArrayLike) -> Floats:
        """Seconds of the GPU batch for one stage of a CPU batch on its own, and for submitting its next attention
        task."""
        return _where_any(np.asarray(requests, float), lambda n: self._linear(n) + self._hand_over(n))

    def hand_over_s(self, requests: ArrayLike) -> Floats:
        """Seconds of the GPU batch for submitting an attention task of a CPU batch of ``requests``."""
        return _where_any(np.asarray(requests, float), self._hand_over)


def _where_any(sizes: Floats, predict) -> Floats:
    return np.where(sizes > 0, predict(sizes), 0.0)


# -- experts -----------------------------------------------------------------------------------------------------------
# How long an FFN of experts takes: the weights that are read depend on how many experts the rows pick.

MOSTLY_TOUCHED = 0.95  # of the experts: from so many on, more rows read little more


def touched_experts(rows: float, num_experts: int, per_token: int) -> float:
    """Of a layer's experts, those that some row picks, on average if all are equally likely and rows independent."""
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** rows)


def flat_from_tokens(num_experts: int, per_token: int) -> float:
    """Rows that touch :data:`MOSTLY_TOUCHED` of the experts; 1 where there are none, or all are computed for each."""
    if per_token >= num_experts:
        return 1.0
    return max(1.0, log(1.0 - MOSTLY_TOUCHED) / log(1.0 - per_token / num_experts))


@dataclass(frozen=True)
class ExpertTimes:
    """Of a layer's FFN of experts on one card.

    Attributes:
        fixed_s: sorting of rows and launches.
        read_bytes_per_s, flops_per_s: at which weights are read and rows are multiplied.
    """

    fixed_s: float
    read_bytes_per_s: float
    flops_per_s: float

    def seconds(self, touched: float, expert_bytes: float, pairs: float, expert_elements: float) -> float:
        """Of ``touched`` experts of ``expert_bytes`` and ``expert_elements`` each, and so many pairs of a row and an
        expert. Reading and multiplying are combined as for other matrices
        (:func:`apex.simulator.predicted_profile.gemm_s`)."""
        read_s = touched * expert_bytes / self.read_bytes_per_s
        multiply_s = 2 * pairs * expert_elements / self.flops_per_s
        return self.fixed_s + hypot(read_s, multiply_s)


# -- the load of a GPU batch -------------------------------------------------------------------------------------------
# The load of a GPU batch: the sizes from which its times are predicted and simulated.


@dataclass(frozen=True)
class GpuBatchLoad:
    """The work of a GPU batch, in tokens and requests. ``decode_context`` is summed over the decodes, in tokens."""

    tokens: int
    requests: int
    decodes: int
    decode_context: int
    chunks: tuple[tuple[int, int], ...]  # (new tokens, tokens cached before) of each prefill
    open_chunks: int = 0  # those of the chunks after which their prompt goes on, so that they sample no token
    longest_context: int = 0  # of the decodes; 0 where they count as equal
    cpu_tier_chunks: tuple[tuple[int, int], ...] = ()  # those of the chunks whose K and V go to the CPU tier

    @property
    def sampled(self) -> int:
        """Rows that get a token."""
        return self.requests - self.open_chunks

    @staticmethod
    def from_items(gpu_batch: Sequence[GpuBatchItem]) -> GpuBatchLoad:
        prefills = [item for item in gpu_batch if item.is_prefill]
        starts = [item.start for item in gpu_batch if not item.is_prefill]
        return GpuBatchLoad._from_parts(len(starts), sum(starts) + len(starts), prefills, max(starts, default=-1) + 1)

    @staticmethod
    def from_builder(builder: PlanBuilder | IterationPlan) -> GpuBatchLoad:
        context = builder.decode_context if isinstance(builder, PlanBuilder) else context_tokens(builder.decodes)
        return GpuBatchLoad._from_parts(len(builder.decodes), context, builder.prefills)

    @staticmethod
    def _from_parts(
        num_decodes: int, decode_context: int, prefills: Sequence[GpuBatchItem], longest_context: int = 0
    ) -> GpuBatchLoad:
        return GpuBatchLoad(
            tokens=num_decodes + sum([item.num_tokens for item in prefills]),
            requests=num_decodes + len(prefills),
            decodes=num_decodes,
            decode_context=decode_context,
            chunks=tuple([(item.num_tokens, item.start) for item in prefills]),
            open_chunks=sum([not item.samples for item in prefills]),
            longest_context=longest_context,
            cpu_tier_chunks=tuple([(item.num_tokens, item.start) for item in prefills if item.tier is Tier.CPU]),
        )

    def without(self, chunk: GpuBatchItem) -> GpuBatchLoad:
        """The load without one of its prefills."""
        chunks, cpu_tier_chunks = list(self.chunks), list(self.cpu_tier_chunks)
        for those in (chunks, cpu_tier_chunks) if chunk.tier is Tier.CPU else (chunks,):
            those.remove((chunk.num_tokens, chunk.start))
        return replace(
            self,
            tokens=self.tokens - chunk.num_tokens,
            requests=self.requests - 1,
            chunks=tuple(chunks),
            cpu_tier_chunks=tuple(cpu_tier_chunks),
            open_chunks=self.open_chunks - (not chunk.samples),
        )

    def gpu_attention_s(self, model: PerfModel) -> float:
        """Seconds of one layer's attention in the GPU batch, prefills and decodes."""
        return model.gpu_batch_attention_s(
            self.decodes, self.decode_context, self.chunks, self.longest_context, self.cpu_tier_chunks
        )

    def prefill_attention_s(self, model: PerfModel) -> float:
        """The same of the prefills alone."""
        return model.prefill_attention_s(self.chunks, self.cpu_tier_chunks)


def context_tokens(requests: Sequence[Request]) -> int:
    """Tokens that a decode of all these requests attends to."""
    return sum([request.num_tokens for request in requests])


# -- a bound on all schedules ------------------------------------------------------------------------------------------
# What no schedule of a predicted machine exceeds by much: decodes alone, GPU and CPU fully overlapped.

STEPS = 200


def decode_bound(
    table: ProfileTable,
    num_layers: int,
    context_tokens: float,
    tier_tokens: tuple[float, float],
    max_requests: int,
) -> tuple[float, int, int]:
    """Output tokens a second at most, and the requests in GPU and CPU tier with which that is reached.

    Every request has ``context_tokens``; prompts and the host's work are left out, and so is all waiting. A tier holds
    so many tokens (``tier_tokens``, of GPU and CPU).
    """
    model = PerfModel(table, num_layers)
    on_gpu, on_cpu = (min(int(tokens / context_tokens), max_requests) for tokens in tier_tokens)
    best = (0.0, 0, 0)
    for gpu in {on_gpu, 0}:
        most = min(on_cpu, max_requests - gpu)
        for cpu in range(0, most + 1, max(1, most // STEPS)):
            rows = gpu + cpu
            if not rows:
                continue
            gpu_batch_s = model.linear_s(rows) + model.gpu_attention_s(gpu, gpu * context_tokens)
            gpu_batch_s += model.hand_over_s(cpu) if cpu else 0.0
            cpu_s = model.cpu_attention_s(cpu, cpu * context_tokens)
            rate = rows / (num_layers * max(gpu_batch_s, cpu_s, model.stream_s) + model.logits_s(rows))
            best = max(best, (rate, gpu, cpu))
    return best
