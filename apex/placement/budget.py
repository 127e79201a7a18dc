"""The search for a budget: how much GPU memory weights take, so that with the rest for KV cache the rate is highest.

The load to choose for is that of requests of one size, half-way through their outputs, while others prefill.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from apex.placement.costs import BoundaryCost, CopyEffect
from apex.placement.formulas import batch_s
from apex.placement.search import Choice, choose_exactly, choose_placement, least_gpu_bytes
from swiftllm.machine import GIB, gib_rounded_up
from swiftllm.model.placement import Place

CPU_SHARES = tuple(i / 4 for i in range(5))  # of the CPU tier, of which the best is taken for an estimate


@dataclass(frozen=True)
class Workload:
    """Requests that an engine will serve: how many at most at once, and the mean tokens of prompt and output."""

    num_requests: int
    input_len: float
    output_len: float
    assumed: bool = False

    def describe(self) -> str:
        lengths = f"{self.input_len:,.0f} in / {self.output_len:,.0f} out"
        return f"{self.num_requests:,} requests of {lengths}{', as assumed' if self.assumed else ''}"


@dataclass(frozen=True)
class Load:
    """Requests of one size: prompt and output tokens, and how many of them may hold KV cache at once."""

    input_len: float
    output_len: float
    max_num_seqs: int
    offloads: bool
    """Whether the system has a CPU tier of KV cache."""
    cpu_computes: bool = True
    """Whether the CPU may compute boundaries."""

    @property
    def context(self) -> float:
        """Tokens of KV cache of a request half-way through its output."""
        return self.input_len + self.output_len / 2

    def rows(self, requests: float) -> float:
        """Rows of an iteration in which each request decodes, and so many prompts prefill as requests end."""
        return requests * (1 + self.input_len / self.output_len)


@dataclass(frozen=True)
class Rates:
    """Bytes a second: of the link, of CPU attention alone, and what both read together."""

    link: float
    cpu_attention: float
    dram: float


class Machine(Protocol):
    """What the search asks of a machine, be it simulated or measured. All sizes are bytes."""

    boundary_bytes: Sequence[float]
    """Of the boundaries from -1 on."""
    other_bytes: float
    """Embedding, vocabulary and norms, which stay on the GPU."""
    kv_bytes_per_token: float
    """In all layers."""
    rates: Rates
    copy_effect: CopyEffect

    def costs(self, rows: float) -> list[BoundaryCost]:
        """Of the boundaries, for an iteration of ``rows``."""

    def other_s(self, on_gpu: float, context: float, requests: float) -> float:
        """GPU time of an iteration beside its boundaries: attention of ``on_gpu`` requests, logits of ``requests``."""

    def gpu_kv_bytes(self, weight_bytes: float) -> float:
        """GPU memory for KV cache beside so many bytes of weights.

        Raises:
            ValueError: there is none.
        """

    def cpu_kv_bytes(self, off_gpu_bytes: float) -> float:
        """Host memory for KV cache beside so many bytes of weights.

        Raises:
            ValueError: the host does not hold them.
        """


@dataclass(frozen=True)
class Estimate:
    """A budget, the predicted rate with it, and what the placement that gives the rate is chosen for."""

    weight_bytes: float
    tokens_per_s: float
    requests: float
    costs: Sequence[BoundaryCost]
    gpu_bytes: float
    other_s: float
    effect: CopyEffect
    cpu_computes: bool

    def choice(self) -> Choice:
        """The placement, improved boundary by boundary."""
        return choose_exactly(self.costs, self.gpu_bytes, self.other_s, self.effect, self.cpu_computes)


def best_budget(machine: Machine, load: Load) -> Estimate:
    """The budget with the highest predicted rate, of all numbers of boundaries' worth of memory from none on.

    Raises:
        ValueError: none is possible; the message says why the smallest is not.
    """
    return max(_candidates(machine, load), key=lambda estimate: estimate.tokens_per_s)


def estimate_budget(machine: Machine, weight_bytes: float, load: Load) -> Estimate:
    """The highest rate with so many bytes of weights on the GPU, over parts of the CPU tier that are in use.

    Raises:
        ValueError: the weights fit neither GPU nor host, or leave no room for a request; or so many bytes are too
            few, and the message names the least that work.
    """
    least_bytes = machine.other_bytes + least_gpu_bytes(machine.boundary_bytes, load.cpu_computes)
    if weight_bytes < least_bytes:
        least = gib_rounded_up(least_bytes)
        estimate_budget(machine, float(least) * GIB, load)  # raises what is in the way of so many, too
        raise ValueError(
            f"{weight_bytes / GIB:.2f} GiB of GPU memory for weights do not hold embedding, vocabulary and norms, "
            f"which stay on the GPU{'' if load.cpu_computes else ', and the slots of streamed weights'}: give at "
            f"least {least} (--weights-gpu-memory {least}), or auto"
        )
    gpu_kv_bytes = machine.gpu_kv_bytes(weight_bytes)
    gpu_bytes = weight_bytes - machine.other_bytes
    request_bytes = machine.kv_bytes_per_token * load.context
    on_gpu = min(load.max_num_seqs, gpu_kv_bytes / request_bytes)
    in_tier = machine.cpu_kv_bytes(sum(machine.boundary_bytes) - max(0.0, gpu_bytes)) / request_bytes
    estimates = []
    for share in CPU_SHARES if load.offloads else CPU_SHARES[:1]:
        on_cpu = min(load.max_num_seqs - on_gpu, share * in_tier)
        if on_gpu + on_cpu < 1:
            continue
        ways = {load.cpu_computes}
        if on_cpu and gpu_bytes >= least_gpu_bytes(machine.boundary_bytes, cpu_computes=False):
            ways.add(False)  # cores that compute boundaries do not attend meanwhile
        estimates += [_estimate(machine, weight_bytes, on_gpu, on_cpu, load, way) for way in sorted(ways)]
    if not estimates:
        raise ValueError(
            f"{weight_bytes / GIB:.2f} GiB of weights leave no room for the KV cache of a request of "
            f"{load.context:g} tokens: take a smaller --weights-gpu-memory, or auto"
        )
    return max(estimates, key=lambda estimate: estimate.tokens_per_s)


def _candidates(machine: Machine, load: Load) -> Iterator[Estimate]:
    found, refused = False, None
    for number in range(len(machine.boundary_bytes) + 1):
        try:
            estimate = estimate_budget(machine, machine.other_bytes + number * max(machine.boundary_bytes), load)
        except ValueError as error:
            refused = refused or error
            continue
        found = True
        yield estimate
    if not found:
        raise refused


def _estimate(
    machine: Machine, weight_bytes: float, on_gpu: float, on_cpu: float, load: Load, cpu_computes: bool
) -> Estimate:
    """The placement for these requests and their rate with it."""
    requests, gpu_bytes = on_gpu + on_cpu, weight_bytes - machine.other_bytes
    costs, other_s = machine.costs(load.rows(requests)), machine.other_s(on_gpu, load.context, requests)
    choice = choose_placement(costs, gpu_bytes, other_s, machine.copy_effect, cpu_computes)
    streamed = choice.placement.bytes_at(Place.STREAMED, machine.boundary_bytes)
    kv_bytes = on_cpu * load.context * machine.kv_bytes_per_token
    rates, lane_s = machine.rates, choice.iteration_s
    seconds = batch_s(streamed, kv_bytes, lane_s, rates.link, rates.cpu_attention, rates.dram, choice.cpu_s)
    return Estimate(
        weight_bytes,
        requests / seconds,
        requests,
        costs,
        gpu_bytes,
        other_s,
        machine.copy_effect,
        cpu_computes,
    )
