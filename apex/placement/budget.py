"""The search for a budget: how much GPU memory weights take, so that with the rest for KV cache the rate is highest.

The workload to choose for is that of requests of one size, half-way through their outputs, while others prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from apex.placement.costs import Rates, StageCost, batch_s
from apex.placement.search import PlacementProblem, fastest_placements, least_gpu_bytes
from swiftllm.kv.layer_groups import LayerGroups
from swiftllm.machine import GIB, gib_rounded_up
from swiftllm.model.stages.placement import Place

CPU_SHARES = tuple(i / 8 for i in range(9))  # of the requests that the CPU tier could have: the best one counts


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

    def costs(self, rows: float) -> list[StageCost]:
        """Of the stages, for an iteration of ``rows``."""
        ...

    def other_s(self, on_gpu: float, context: float, requests: float) -> float:
        """GPU time of an iteration beside its stages: attention of ``on_gpu`` requests, logits of ``requests``."""
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

    Raises:
        ValueError: none is possible; the message says why the smallest is not.
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
        # Raises what is in the way of so many, too.
        estimate_budget(model, float(least) * GIB, workload, offloads, cpu_computes)
        raise ValueError(
            f"{weight_bytes / GIB:.2f} GiB of GPU memory for weights do not hold vocabulary and norms, "
            f"which stay on the GPU{'' if cpu_computes else ', and the slots of streamed weights'}: give at "
            f"least {least} (--weights-gpu-memory {least}), or auto"
        )
    gpu_kv_bytes = model.gpu_kv_bytes(weight_bytes)
    gpu_bytes = weight_bytes - model.other_bytes
    slots = model.layer_groups.slots(workload.context)
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


def _estimate(
    model: CostModel, weight_bytes: float, workload: UniformLoad, on_gpu: float, on_cpu: float, cpu_computes: bool
) -> Estimate:
    """The rate with so many requests in each tier, and the placement for them."""
    requests = on_gpu + on_cpu
    problem = PlacementProblem(
        model.costs(workload.rows(requests)),
        weight_bytes - model.other_bytes,
        model.other_s(on_gpu, workload.context, requests),
        model.rates.copy_effect,
        cpu_computes,
    )
    fastest = fastest_placements(problem)[0]
    streamed_bytes = fastest.placement.bytes_at(Place.STREAMED, model.stage_bytes)
    kv_bytes = on_cpu * model.layer_groups.slots(workload.context) * model.cpu_kv_bytes_per_token
    seconds = batch_s(streamed_bytes, kv_bytes, fastest.iteration_s, model.rates, fastest.cpu_s)
    return Estimate(weight_bytes, requests / seconds, requests, problem)
