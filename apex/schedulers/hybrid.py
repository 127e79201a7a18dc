"""What schedulers that decode on the CPU share: predictions, patience with requests left out, and plans of known
form.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from apex.perf.model import Floats, GpuBatchLoad, PerfModel, context_tokens
from apex.perf.online_correction import OnlineCorrection
from apex.schedulers.formulas import pipelined_layer_s
from apex.strategy import StrategyConfig
from swiftllm.core.plan import ALONE, JOINED, IterationPlan, StepResult
from swiftllm.core.request import Request, Tier
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.scheduling.scheduler import PlanBuilder, Scheduler, one_tier, two_tiers
from swiftllm.scheduling.state import CpuBatch, SchedulerState, SchedulingRules, arrival_order

# -- the queue of CPU decodes ------------------------------------------------------------------------------------------
# The queue of CPU decodes that fill the batches of a pipeline: which come next, and how many at once.

MAX_GUESSES = 6  # interpolations of a search; 3 to 5 suffice where predictions are straight


class CpuDecodes:
    """CPU decodes, oldest first, and their lengths.

    ``tokens`` is int64 ``[len(requests)]``. It is read once: reading the lengths of a thousand requests takes longer
    than most of their uses. ``overdue`` is the request that must be served whatever the model predicts.
    """

    def __init__(self, requests: list[Request], overdue: Request | None = None) -> None:
        self.requests = requests
        self.overdue = overdue
        self.tokens = np.fromiter([request.num_tokens for request in requests], np.int64, len(requests))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def context_tokens(self) -> int:
        return int(self.tokens.sum())

    def requests_at(self, positions: Sequence[int]) -> list[Request]:
        requests = self.requests
        return [requests[position] for position in positions]


class CpuDecodeQueue:
    """CPU decodes that wait for a place in a batch, oldest first."""

    def __init__(self, decodes: CpuDecodes) -> None:
        self._decodes = decodes
        self._start_with(np.arange(len(decodes)))

    def _start_with(self, positions: np.ndarray) -> None:
        """Restart the queue with the decodes at these positions."""
        self._positions = positions
        self._tokens = self._decodes.tokens[positions]
        self._sums = [0, *self._tokens.cumsum().tolist()]
        self._next = 0

    def __len__(self) -> int:
        return len(self._positions) - self._next

    def context_of_next(self, count: int) -> int:
        """Context of the next ``count`` requests, summed, in tokens."""
        return self._sums[self._next + count] - self._sums[self._next]

    def take_requests(self, count: int) -> list[Request]:
        start, self._next = self._next, self._next + count
        return self._decodes.requests_at(self._positions[start : self._next].tolist())

    def skip_too_long(self, fits: Callable[[int], bool]) -> None:
        """Go on to the next request whose length ``fits``; drop every request no shorter than one that does not fit.

        Only a request shorter than all before it can be the next that fits, so only those are tested.
        """
        tokens = self._tokens[self._next :]
        shortest_so_far = np.minimum.accumulate(tokens)
        shorter = np.flatnonzero(shortest_so_far[1:] < shortest_so_far[:-1]) + 1
        too_long = bisect_left(shorter, True, key=lambda position: fits(tokens.item(position)))
        if too_long == len(shorter):
            self._next += len(tokens)
            return
        first = shorter[too_long]
        rest = np.flatnonzero(tokens[first:] < shortest_so_far[first - 1]) + first
        self._start_with(self._positions[self._next + rest])


def longest_run(seconds: Callable[[int], float], limit_s: float, most: int) -> int:
    """The largest count up to ``most`` for which ``seconds(count) <= limit_s``; ``seconds`` must not decrease.

    Predictions are expensive, and nearly linear in the count. So the search interpolates between the ends of the
    remaining range, and bisects after ``MAX_GUESSES`` attempts.
    """
    if most < 1 or (low_s := seconds(1)) > limit_s:
        return 0
    if most == 1 or (high_s := seconds(most)) <= limit_s:
        return most
    low, high, guesses = 1, most, 0
    while high - low > 1:
        middle = (low + high) // 2
        if guesses < MAX_GUESSES:
            guesses += 1
            crossing = low + int((limit_s - low_s) / (high_s - low_s) * (high - low))
            middle = min(max(crossing, low + 1), high - 1)
        middle_s = seconds(middle)
        if middle_s <= limit_s:
            low, low_s = middle, middle_s
        else:
            high, high_s = middle, middle_s
    return low


# -- the two batches of asymmetric pipelining --------------------------------------------------------------------------
# The two batches of asymmetric pipelining, and how CPU decodes are assigned to them (NEO section 3.2, step 4).
#
# In each layer the GPU works for one batch while the CPU attends for the other one, and then the roles change. CPU
# attention that *hides* fits into the GPU's time beside it, its *window* (a time, no attention window): the GPU batch
# does not wait for it. So whoever hides costs the GPU batch the linear work of its rows alone.

Window = tuple[Callable[[int, int], float], float]
"""The CPU's seconds for a batch, by its size and its context in tokens, and the GPU's seconds beside them, into which
they must fit."""


@dataclass
class PipelineBatch:
    """CPU decodes of one batch, and the sum of their context in tokens."""

    requests: list[Request] = field(default_factory=list)
    context_tokens: int = 0
    num_under_way: int = 0  # requests of CPU batches under way, which run alone as the batch does

    @property
    def size(self) -> int:
        return len(self.requests) + self.num_under_way

    def add_requests(self, requests: Sequence[Request], tokens: int) -> None:
        """Add requests whose context is ``tokens`` in total."""
        self.requests += requests
        self.context_tokens += tokens


class Pipeline:
    """A GPU batch and two CPU batches, with the times that the model predicts for one layer."""

    def __init__(self, model: PerfModel, load: GpuBatchLoad) -> None:
        self.model = model
        self.batches = (PipelineBatch(), PipelineBatch())
        self.set_load(load)

    def set_load(self, load: GpuBatchLoad) -> None:
        self.load = load
        self._gpu_batch_attention_s = load.gpu_attention_s(self.model)

    def add_under_way(self, requests: Sequence[Request]) -> None:
        """Add requests that are part of the way through their token; they run alone, with batch-1.

        They may stand at any stage, and what joins must be where the GPU batch is.
        """
        self.batches[1].num_under_way += len(requests)
        self.batches[1].context_tokens += context_tokens(requests)

    @property
    def num_requests(self) -> int:
        return self.load.requests + self.batches[0].size + self.batches[1].size

    def hides(self, batch: PipelineBatch, size: int, context: int) -> bool:
        """Whether the CPU attention of a layer fits one of the batch's windows if the batch has these sizes."""
        return any(seconds(size, context) <= window_s for seconds, window_s in self._windows(batch))

    def hides_cpu(self) -> bool:
        """Whether the GPU batch never waits for CPU attention."""
        return all(self.hides(batch, batch.size, batch.context_tokens) for batch in self.batches)

    def _windows(self, batch: PipelineBatch) -> list[Window]:
        """What must fit into what: T_c0 into T_l1 + T_ga0 for batch-0, T_c1 into T_l0 for batch-1.

        Where weights are copied to the GPU in each iteration, the GPU batch waits for a layer's before batch-0's
        stage. So batch-1's attention is also hidden if it ends with the wait: T_c1 + T_l1 + T_ga0 within the time
        between layers. One window is enough.
        """
        model, (first, second) = self.model, self.batches
        cpu_attention_s = model.cpu_attention_s
        # The windows rest on the GPU batch and the other batch alone, so that adding to a batch cannot narrow its own.
        if batch is first:
            return [(cpu_attention_s, model.linear_s(second.size) + self._gpu_batch_attention_s)]
        windows: list[Window] = [(cpu_attention_s, model.linear_s(self.load.tokens + first.size))]
        if model.stream_s:
            # The wait follows batch-1's own stage, which takes longer with its size: so the stage is on the CPU's side.

            def with_stage_s(size: int, context: int) -> float:
                return cpu_attention_s(size, context) + model.linear_s(size)

            windows.append((with_stage_s, model.stream_s - self._gpu_batch_attention_s))
        return windows

    def iteration_s(self) -> float:
        """All layers and the end stages of GPU batch and batch-1; the host's fixed work counts once."""
        model, (first, second) = self.model, self.batches
        layer_s = pipelined_layer_s(
            linear_0_s=model.linear_s(self.load.tokens + first.size),
            linear_1_s=model.linear_s(second.size),
            gpu_attention_0_s=self._gpu_batch_attention_s,
            cpu_attention_0_s=model.cpu_attention_s(first.size, first.context_tokens),
            cpu_attention_1_s=model.cpu_attention_s(second.size, second.context_tokens),
        )
        gpu_batch_rows = self.num_requests - second.size
        ends_s = model.outside_layers_s(gpu_batch_rows) + model.outside_layers_s(second.size)
        if gpu_batch_rows and second.size:  # both have it in what they take outside the layers
            ends_s -= model.host_work_s(0)
        return model.num_layers * model.layer_s(layer_s) + ends_s

    def add_hidden(self, startable: CpuDecodes) -> None:
        """Add each request to batch-1 or batch-0 if the CPU stays hidden there; leave it out otherwise.

        One more request makes its batch's CPU time longer. It also makes the batch's linear time longer, which hides
        more of the other batch. So only its own batch's inequality can break. The batches alternate: each takes the
        longest run that keeps its inequality, until neither can take the next request. Batches never shrink, so any
        request as long as one left out is left out too.
        """
        queue = CpuDecodeQueue(startable)
        while queue:
            # Batch-1 first: its window, the linear time of the GPU batch, is there before any request is added, while
            # batch-0's grows with batch-1.
            runs = [self._take_hidden_run(batch, queue) for batch in reversed(self.batches)]
            if not any(runs):  # the next request is too long for both; a shorter one behind it may still fit
                queue.skip_too_long(self._fits_a_batch())

    def _take_hidden_run(self, batch: PipelineBatch, queue: CpuDecodeQueue) -> int:
        """Add as many of the next requests to a batch as stay hidden there; returns how many."""
        context, size, tokens, run = queue.context_of_next, batch.size, batch.context_tokens, 0
        for seconds, window_s in self._windows(batch):
            longest = longest_run(lambda n, s=seconds: s(size + n, tokens + context(n)), window_s, len(queue))
            run = max(run, longest)
        if run:
            run_tokens = context(run)
            batch.add_requests(queue.take_requests(run), run_tokens)
        return run

    def _fits_a_batch(self) -> Callable[[int], bool]:
        """A test of lengths: whether a request of n tokens stays hidden in either batch."""
        grown = [
            (seconds, batch.size + 1, batch.context_tokens, window_s)
            for batch in self.batches
            for seconds, window_s in self._windows(batch)
        ]
        return lambda n: any(seconds(size, tokens + n) <= window_s for seconds, size, tokens, window_s in grown)

    def add_overdue(self, request: Request) -> None:
        """Add a request to batch-1 unless a batch has it, even if the GPU batch then waits for it."""
        if not any(request in batch.requests for batch in self.batches):
            self.batches[1].add_requests([request], request.num_tokens)

    def split_evenly(self, startable: CpuDecodes) -> None:
        """Add every request, the longest first, to the batch with less context, even if the GPU batch then waits."""
        first, second = self.batches
        ahead = first.context_tokens - second.context_tokens
        longest_first = np.argsort(-startable.tokens, kind="stable")
        to_first: list[int] = []
        to_second: list[int] = []
        for position, tokens in zip(longest_first.tolist(), startable.tokens[longest_first].tolist(), strict=True):
            if ahead <= 0:
                to_first.append(position)
                ahead += tokens
            else:
                to_second.append(position)
                ahead -= tokens
        first.requests += startable.requests_at(to_first)
        second.requests += startable.requests_at(to_second)
        total = first.context_tokens + second.context_tokens + startable.context_tokens
        first.context_tokens = (total + ahead) // 2  # their sum and their difference are known
        second.context_tokens = (total - ahead) // 2


# -- lengths of prompts and outputs ------------------------------------------------------------------------------------
# How many prompt tokens belong to an output token in the long run, estimated from the requests so far.
#
# Early on, those that have finished are the short ones. So unfinished requests count too, by the survival estimate of
# statistics: at each length, how many of the requests that got so far ended there.

PRIOR_OUTPUT_TOKENS = 512
"""Mean output assumed of requests about which nothing is known."""
MEMORY = 512
"""Requests after which the older ones count half, so that a change of the workload is noticed."""
EDGES = np.unique(np.concatenate(([0], np.round(1.2 ** np.arange(80))))).astype(float)
"""Output lengths between which requests are taken to end at a constant rate, in tokens."""
WIDTHS = np.diff(EDGES)


class LengthsSeen:
    """Prompt and output lengths of the requests so far, and the mean of their own limits on output tokens."""

    def __init__(self) -> None:
        self.num_seen = 0
        self._output_limits = 0.0
        self._num_prompts = self._prompt_tokens = 0.0
        intervals = len(EDGES) - 1
        self._ended = np.zeros(intervals)  # requests that ended in each interval of lengths
        self._tokens = np.zeros(intervals)  # output tokens in each interval, of all requests, ended or not
        self._counted = np.zeros(intervals)  # those counted so far, without forgetting
        self._of_gone = np.zeros(intervals)  # those of requests that have finished or were aborted

    def add_prompt(self, tokens: int, most_output: int) -> None:
        """Count a request that came, with its own limit of output tokens."""
        self.num_seen += 1
        self._prompt_tokens += tokens
        self._output_limits += most_output
        self._num_prompts += 1
        if self._num_prompts > MEMORY:
            self._prompt_tokens /= 2
            self._output_limits /= 2
            self._num_prompts /= 2

    def add_output(self, tokens: int, *, aborted: bool = False) -> None:
        """Count a request with an output of ``tokens``, which has finished by itself or was ``aborted``."""
        self._of_gone += _tokens_between_edges(np.array([tokens]))
        if aborted:
            return
        self._ended[min(int(EDGES.searchsorted(tokens)), len(self._ended)) - 1] += 1
        if self._ended.sum() > MEMORY:
            self._ended /= 2
            self._tokens /= 2

    @property
    def mean_prompt(self) -> float:
        """Mean prompt of all requests, in tokens."""
        return self._prompt_tokens / self._num_prompts if self._num_prompts else 0.0

    @property
    def mean_limit(self) -> float:
        """Mean of the requests' own limits of output tokens."""
        return self._output_limits / self._num_prompts

    def mean_output(self, unfinished: Sequence[int]) -> float:
        """Expected output of a request in tokens; ``unfinished`` are the outputs so far of those that go on.

        A request that outlives all others so far is expected to double its length, and to reach the prior mean.
        """
        running = np.array(unfinished)
        counted = self._of_gone + _tokens_between_edges(running)
        self._tokens += counted - self._counted
        self._counted = counted
        tokens = np.maximum(self._tokens, self._ended)  # each that ended in an interval had a token there
        seen = np.flatnonzero(tokens > WIDTHS / 2)  # beyond, there is less than half a request
        reached = int(seen[-1]) + 1 if len(seen) else 0
        widths = WIDTHS[:reached]
        exponents = self._ended[:reached] / np.maximum(tokens[:reached], 1e-9) * widths
        alive = np.exp(-np.concatenate(([0.0], np.cumsum(exponents))))
        shares = np.where(exponents > 1e-9, -np.expm1(-exponents) / np.maximum(exponents, 1e-9), 1.0)
        longest = EDGES[reached]
        beyond = max(PRIOR_OUTPUT_TOKENS - longest, longest)
        if reached:  # with hardly anyone left who could go on beyond, the longest output has been seen
            going_on = np.count_nonzero(running > EDGES[reached - 1])
            beyond *= going_on / max(1.0, going_on + self._ended[reached - 1])
        return max(1.0, float((alive[:-1] * widths * shares).sum() + alive[-1] * beyond))


def _tokens_between_edges(lengths: np.ndarray) -> np.ndarray:
    """Of outputs of these lengths together, the tokens in each interval between two edges; float64 [intervals]."""
    ordered = np.sort(lengths)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    below = ordered.searchsorted(EDGES)
    up_to = sums[below] + EDGES * (len(ordered) - below)  # the tokens at most as far in as each edge
    return np.diff(up_to)


# -- the end of a batch ------------------------------------------------------------------------------------------------
# Steady rates charge prompts at their steady share: as many requests begin as end. Where all that are left fit the
# tiers, there may be no such state, as nobody ends before all have begun. So what is left is played through, in two
# phases.

WHOLE_BUDGET_GAIN = 0.94
"""Prompts take the whole budget if that ends everything within this share of the time of chunks. The two phases err by
some percent, so a smaller gain says nothing."""
LEAST_SHARE = 0.5
"""Where fewer of all requests decode at the end of the prompts, most have ended: there is a steady state, and its
rates hold."""


@dataclass(frozen=True)
class LastRequests:
    """What is left to compute; tokens are sums over all requests."""

    waiting: int
    """Requests before their first token."""
    decoding: int
    prompt_tokens: float
    output_tokens: float
    mean_output: float
    """Of a request, with the tokens that it has already."""
    mean_context: float
    gpu_seats: float
    """Requests that the GPU pool holds at their full length."""


def seconds_to_the_end(
    last: LastRequests, chunks: Floats, pace: Callable[[Floats, Floats, Floats, float], tuple[Floats, Floats]]
) -> tuple[Floats, Floats]:
    """Predicted seconds until all requests have ended, and the share of them that decode at the end of the prompts, for
    each size of prompt chunks.

    Args:
        chunks: prompt tokens of an iteration until no prompt is left; float64 [sizes].
        pace: tokens per second and seconds of an iteration, for GPU decodes, CPU decodes, prompt tokens of an
            iteration, and the mean context of a request in tokens.

    In the first phase requests begin evenly. Where they end before it does, only a share of them decodes at its end. In
    the second phase those left end evenly, over as many tokens as the first is ahead of the last.
    """

    def at(decodes: Floats, prompt_tokens: Floats) -> tuple[Floats, Floats]:
        on_gpu = np.minimum(decodes, last.gpu_seats)
        return pace(on_gpu, decodes - on_gpu, prompt_tokens, last.mean_context)

    number = last.waiting + last.decoding
    iterations = np.ceil(last.prompt_tokens / chunks)
    prompts, midway = last.prompt_tokens / iterations, np.full(len(chunks), last.decoding + last.waiting / 2)
    tokens_per_s, iteration_s = at(midway, prompts)
    made = np.maximum(tokens_per_s * iterations * iteration_s, 1.0)
    share = np.minimum(1.0, last.mean_output * midway / made)
    decodes = np.where(share < 1, number * share * (1 - share / 2), midway)
    left = number * share
    tokens_per_s, iteration_s = at(
        np.concatenate((decodes, left, left / 2)), np.concatenate((prompts, 0 * prompts, 0 * prompts))
    )
    during, after, later = np.split(tokens_per_s, 3)
    prompts_s = iterations * iteration_s[: len(chunks)]
    each = np.clip((last.output_tokens - during * prompts_s) / left, 0.0, last.mean_output)
    spread = 2 * np.minimum(each, last.mean_output - each)
    return prompts_s + (each - spread / 2) * left / after + spread * (left / 2) / later, share


# -- predicting schedulers ---------------------------------------------------------------------------------------------


class Predicting(Scheduler):
    """A scheduler whose decisions rest on times that a performance model predicts, corrected by those of iterations."""

    rules = SchedulingRules(tiers=(Tier.GPU, Tier.CPU))
    _kv: KVCacheManager | None = None

    def __init__(self, model: PerfModel, config: StrategyConfig) -> None:
        self.config = config
        self._correction = None if config.disable_online_correction else OnlineCorrection(model)
        self.use_model(model)

    def use_model(self, model: PerfModel) -> None:
        """Predict with this model from now on. Who keeps predictions must renew them here."""
        self.model = model
        if self._kv is not None:
            self.manage_copies(self._kv)

    def manage_copies(self, kv: KVCacheManager) -> None:
        """Copies of cached prefixes take no more time than computing them again."""
        self._kv, table, layers = kv, self.model.table, self.model.num_layers

        def copying_pays(source: Tier, num_blocks: int) -> bool:
            return table.swap(num_blocks) <= layers * table.linear(num_blocks * kv.block_size)

        kv.copying_pays = copying_pays

    def observe(self, plan: IterationPlan, result: StepResult, stages: Mapping[int, int]) -> None:
        if self._correction is not None and self._correction.observe(plan, result, stages):
            self.use_model(self._correction.model)

    @property
    def prediction_factors(self) -> Mapping[str, float]:
        return self._correction.factors if self._correction else {}


class Hybrid(Predicting):
    """Fills both tiers, the GPU first, and decides what the startable CPU decodes do.

    One that is kept from the CPU predicts nothing, and its plans are those of ``one_tier``.
    """

    def __init__(self, model: PerfModel, config: StrategyConfig, *, can_overlap: bool = True) -> None:
        super().__init__(model, config)
        self.uses_cpu = config.pipelines or (can_overlap and config.overlaps)
        self.patience = Patience(config.max_wait_iterations)
        if not self.uses_cpu:
            self.rules, self._correction = SchedulingRules(), None

    def plan(self, state: SchedulerState) -> IterationPlan:
        if not self.uses_cpu:
            return one_tier(state)
        builder = PlanBuilder(state)
        startable = two_tiers(builder, self.limit_prompts)
        return self.decide(builder, CpuDecodes(startable, self.patience.overdue(startable, state.iteration)))

    def limit_prompts(self, builder: PlanBuilder) -> None:
        """Called once a plan, before the first prompt is added."""

    def decide(self, builder: PlanBuilder, startable: CpuDecodes) -> IterationPlan:
        """The plan for what is in the builder and the CPU decodes that may start a token; it must serve
        ``startable.overdue``."""
        raise NotImplementedError


class Patience:
    """Finds the CPU request that was left out longest, if for more than so many iterations: no rule may starve it.

    There is at most one in as many iterations. Otherwise a CPU that takes longer than that for a token of every request
    would be waited for in nearly every iteration.
    """

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations
        self._next_look = 0  # the iteration of the next search

    def overdue(self, startable: Sequence[Request], iteration: int) -> Request | None:
        if iteration < self._next_look or not startable:
            return None
        longest_waiting = min(startable, key=attrgetter("last_served"))
        if iteration - longest_waiting.last_served > self.iterations:
            self._next_look = iteration + self.iterations
            return longest_waiting
        self._next_look = longest_waiting.last_served + self.iterations + 1
        return None

    def look_again(self, iteration: int) -> None:
        """It could not be served: look for it from this iteration on."""
        self._next_look = iteration


def gpu_batch_s(model: PerfModel, load: GpuBatchLoad) -> float:
    """Seconds of an iteration of the GPU batch alone."""
    layer_s = model.layer_s(model.linear_s(load.tokens) + load.gpu_attention_s(model))
    return model.num_layers * layer_s + model.outside_layers_s(load.requests)


def gpu_only(
    builder: PlanBuilder, model: PerfModel, load: GpuBatchLoad, predicted: Mapping[str, float] | None = None
) -> IterationPlan:
    return builder.plan(predicted={"iteration_s": gpu_batch_s(model, load), **(predicted or {})})


def pipelined(
    builder: PlanBuilder,
    pipeline: Pipeline,
    under_way: Sequence[CpuBatch] = (),
    predicted: Mapping[str, float] | None = None,
) -> IterationPlan:
    """Asymmetric pipelining: batch-0's CPU decodes join the GPU batch; batch-1 and CPU batches ``under_way`` run
    alone."""
    plans = [cpu_batch.plan(ALONE) for cpu_batch in under_way]
    batches = zip(pipeline.batches, (JOINED, ALONE), strict=True)
    plans += [builder.state.cpu_batches.batch(batch.requests, mode) for batch, mode in batches if batch.requests]
    return builder.plan(plans, {"iteration_s": pipeline.iteration_s(), **(predicted or {})})


def add_cpu_decodes(pipeline: Pipeline, startable: CpuDecodes, config: StrategyConfig) -> None:
    """NEO's step 4: fill the batches with CPU decodes whose attention stays hidden, and the overdue one.

    With the limit disabled, or with an empty GPU batch, take all of them: then the two batches hide each other.
    """
    if config.disable_cpu_decode_limit or not pipeline.load.requests:
        pipeline.split_evenly(startable)
        return
    pipeline.add_hidden(startable)
    if startable.overdue is not None:
        pipeline.add_overdue(startable.overdue)


def put_off_cpu_prompts(builder: PlanBuilder, pipeline: Pipeline, config: StrategyConfig) -> None:
    """NEO's step 5: postpone prefills bound for the CPU, the youngest first, while the CPU stays hidden without them.

    The batches stay as they are. So do prefills within the flat part of the linear time, since they cost the GPU batch
    nothing, and the last one of all: otherwise the CPU would never get any work. In one iteration of
    ``max_wait_iterations`` none waits for a younger one: short prompts that always find room on the GPU would starve a
    long one.
    """
    if config.disable_postponed_cpu_prompts:
        return
    in_order = builder.state.iteration % config.max_wait_iterations == 0
    on_gpu = [item.request for item in builder.prefills if item.tier is Tier.GPU]
    for item in reversed([item for item in builder.prefills if item.tier is Tier.CPU]):
        if in_order and any(arrival_order(item.request) < arrival_order(request) for request in on_gpu):
            break
        # Without the item the GPU batch is shorter, and so are the CPU's windows: it may be what hides the CPU.
        load = pipeline.load
        pipeline.set_load(load.without(item))
        gpu_batch_tokens = pipeline.load.tokens + pipeline.batches[0].size
        if len(load.chunks) == 1 or gpu_batch_tokens < pipeline.model.flat_linear_tokens or not pipeline.hides_cpu():
            pipeline.set_load(load)
            break
        builder.put_off(item)
