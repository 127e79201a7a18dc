"""Measures which division of the cores decodes fastest, where a CPU computes the lane as well as CPU attention.

What requests will come is not known beforehand, so two loads count alike: as many as the GPU tier holds, and as many as
both tiers hold together. Of the second the scheduler may leave the CPU tier alone, so the faster of the two counts for
it. Whole iterations are run, not predicted: a profile table times operations one by one, and says nothing of what a
lane and a worker on the same cores take from each other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from apex.perf.workbench import Workbench
from swiftllm.core.request import Tier
from swiftllm.runtime.cores import CoreDivision, counted
from swiftllm.scheduling.scheduler import SchedulerLimits

ROUNDS = 5
MOST_REQUESTS = 64
"""A larger batch is cut down to this: from here on it takes longer in proportion."""
ENOUGH_S = 5.0
"""Of a model so slow that this has passed, fewer rounds must do."""


@dataclass(frozen=True)
class DecodeMix:
    """Requests that decode in each tier, and the tokens that each attends to."""

    on_gpu: int
    on_cpu: int
    context: int

    def batches(self) -> dict[str, tuple[int, int]]:
        """What is run: requests of the GPU tier and of the CPU tier, by the field of DecodeRates that it gives."""
        batches = {}
        if self.on_gpu:
            batches["gpu_tier"] = (self.on_gpu, 0)
        if self.on_cpu:
            batches["both_tiers"] = (self.on_gpu, self.on_cpu)
        return batches


@dataclass(frozen=True)
class DecodeRates:
    """Tokens per second of the GPU tier's requests by themselves, and of both tiers' together; 0: there are none."""

    gpu_tier: float = 0.0
    both_tiers: float = 0.0

    @property
    def score(self) -> float:
        """Both loads count alike: twice as fast with one of them makes up for half as fast with the other."""
        return (self.gpu_tier or self.both_tiers) * max(self.gpu_tier, self.both_tiers)

    def by_load(self) -> dict[str, float]:
        return {load: rate for load, rate in (("GPU tier", self.gpu_tier), ("both tiers", self.both_tiers)) if rate}


def full_load(num_blocks: Mapping[Tier, int], block_size: int, limits: SchedulerLimits) -> DecodeMix:
    """As many requests as may run at once, so long that they fill the tiers if the model takes that much."""
    gpu, cpu = num_blocks[Tier.GPU], num_blocks[Tier.CPU]
    longest = -(-limits.max_model_len // block_size)
    blocks_each = max(1, min((gpu + cpu) // limits.max_num_seqs, longest, max(gpu, cpu)))
    on_gpu = min(gpu // blocks_each, limits.max_num_seqs)
    on_cpu = min(cpu // blocks_each, limits.max_num_seqs - on_gpu)
    part = min(1.0, MOST_REQUESTS / (on_gpu + on_cpu))
    context = min(blocks_each * block_size, limits.max_model_len)
    return DecodeMix(math.ceil(part * on_gpu), math.ceil(part * on_cpu), context)


def measure_divisions(
    use: Callable[[CoreDivision], None],
    bench: Workbench,
    divisions: Sequence[CoreDivision],
    load: DecodeMix,
    progress: Callable[[float, str], None],
) -> list[DecodeRates]:
    """The rates of each division; ``use`` puts one into effect. All take turns, so that whatever else happens on the
    machine for a while falls on all of them alike."""
    batches = load.batches()
    seconds: list[dict[str, list[float]]] = [{name: [] for name in batches} for _ in divisions]
    start_s = time.monotonic()
    with bench.in_use():
        samplers = {name: bench.decodes(*batch, load.context) for name, batch in batches.items()}
        for done in range(ROUNDS + 1):  # the first one warms up
            progress(done / (ROUNDS + 1), f"round {done + 1} of {ROUNDS + 1}")
            for division, taken in zip(divisions, seconds, strict=True):
                use(division)
                for name, sample in samplers.items():
                    taken[name].append(sample())
            if done and time.monotonic() - start_s > ENOUGH_S:
                break
    return [
        DecodeRates(**{name: sum(batches[name]) / statistics.median(runs[1:]) for name, runs in taken.items()})
        for taken in seconds
    ]


def fastest(divisions: Sequence[CoreDivision], rates: Sequence[DecodeRates]) -> CoreDivision:
    """The division that decodes fastest, with the measurement as its reason."""
    best = max(range(len(divisions)), key=lambda i: rates[i].score)
    told = [f"{load} full {rate:.0f} tokens/s" for load, rate in rates[best].by_load().items()]
    others = [
        f"with {counted(division.lane_threads)} " + " and ".join(f"{rate:.0f}" for rate in rates[i].by_load().values())
        for i, division in enumerate(divisions)
        if i != best
    ]
    return replace(divisions[best], reason=f"measured: {', '.join(told)}; {', '.join(others)}")
