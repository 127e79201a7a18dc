"""Measures which division of the cores between the GPU batch and CPU attention decodes fastest.

Future requests are unknown, so two loads count alike: the GPU tier full, and both tiers full. With both tiers full the
scheduler may leave the CPU tier alone, so the faster of the two rates counts for that load. Whole iterations are run: a
profile table times single operations and does not show how a GPU batch and a worker slow each other on the same cores.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from apex.perf.profile_cache import make_workbench, profile_identity, profile_path
from apex.perf.progress import progress_bar
from apex.perf.workbench import Workbench
from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.files import is_kept, keep
from swiftllm.kv.layer_groups import LayerGroups
from swiftllm.runtime.build import scheduler_limits
from swiftllm.runtime.cores import CoreDivision, counted
from swiftllm.runtime.torch_backend import TorchBackend
from swiftllm.scheduling.admission import SchedulerLimits

THREADS = ("gpu_batch_threads", "cpu_threads")

ROUNDS = 5
MOST_REQUESTS = 64
"""Larger batches are cut down to this size: beyond it, time grows in proportion."""
ENOUGH_S = 5.0
"""Seconds after which no further round begins."""


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
    """Tokens per second with the GPU tier full, and with both tiers full; 0 where a tier has no request."""

    gpu_tier: float = 0.0
    both_tiers: float = 0.0

    @property
    def score(self) -> float:
        """Both loads count alike: twice as fast with one of them makes up for half as fast with the other."""
        return (self.gpu_tier or self.both_tiers) * max(self.gpu_tier, self.both_tiers)

    def by_load(self) -> dict[str, float]:
        return {load: rate for load, rate in (("GPU tier", self.gpu_tier), ("both tiers", self.both_tiers)) if rate}


def full_load(num_blocks: Mapping[Tier, int], groups: LayerGroups, limits: SchedulerLimits) -> DecodeMix:
    """As many requests as may run at once, long enough to fill the tiers where the model allows it."""
    gpu, cpu = num_blocks[Tier.GPU], num_blocks[Tier.CPU]
    longest = groups.blocks_for(limits.max_model_len)
    blocks_each = max(groups.growth, min((gpu + cpu) // limits.max_num_seqs, longest, max(gpu, cpu)))
    on_gpu = min(gpu // blocks_each, limits.max_num_seqs)
    on_cpu = min(cpu // blocks_each, limits.max_num_seqs - on_gpu)
    part = min(1.0, MOST_REQUESTS / (on_gpu + on_cpu))
    context = min(groups.tokens_in(blocks_each), limits.max_model_len)
    return DecodeMix(math.ceil(part * on_gpu), math.ceil(part * on_cpu), context)


def division_rates(
    config: EngineConfig, backend: TorchBackend, divisions: Sequence[CoreDivision], measure_again: bool
) -> list[DecodeRates]:
    """How fast this machine and model decode under each division: from the cache, else measured and cached."""
    identity = {name: value for name, value in profile_identity(config, backend).items() if name not in THREADS}
    identity["max_num_seqs"] = str(config.max_num_seqs)
    identity["divisions"] = ", ".join(f"{d.gpu_batch_threads} and {d.cpu_threads}" for d in divisions)
    path = profile_path(identity).with_suffix(".cores.json")
    if is_kept(path) and not measure_again:
        return [DecodeRates(**rates) for rates in json.loads(path.read_text())["rates"]]
    bench, limits = make_workbench(config, backend), scheduler_limits(config, backend)
    load = full_load(bench.num_blocks, bench.layer_groups, limits)
    with progress_bar("dividing the cores") as progress:
        rates = measure_divisions(backend.use_cores, bench, divisions, load, progress)
    measured = {"identity": identity, "load": asdict(load), "rates": [asdict(rate) for rate in rates]}
    keep(path, json.dumps(measured, indent=1))
    return rates


def measure_divisions(
    use: Callable[[CoreDivision], None],
    bench: Workbench,
    divisions: Sequence[CoreDivision],
    load: DecodeMix,
    progress: Callable[[float, str], None],
) -> list[DecodeRates]:
    """The rates of each division; ``use`` puts one into effect.

    The divisions are measured in interleaved rounds, so that other work on the machine slows all of them alike.
    """
    batches = load.batches()
    seconds: list[dict[str, list[float]]] = [{name: [] for name in batches} for _ in divisions]
    start_s = time.monotonic()
    with bench.in_use():
        samplers = {name: bench.decodes(*batch, load.context) for name, batch in batches.items()}
        for done in range(ROUNDS + 1):  # the first round warms up
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
    gpu_batches_differ = len({division.gpu_batch_threads for division in divisions}) > 1

    def named(division: CoreDivision) -> str:
        return counted(division.gpu_batch_threads if gpu_batches_differ else division.cpu_threads)

    best = max(range(len(divisions)), key=lambda i: rates[i].score)
    winner = [f"{load} full {rate:.0f} tokens/s" for load, rate in rates[best].by_load().items()]
    others = [
        f"with {named(division)} " + " and ".join(f"{rate:.0f}" for rate in rates[i].by_load().values())
        for i, division in enumerate(divisions)
        if i != best
    ]
    measured = f"measured: {', '.join(winner)}; {', '.join(others)}"
    if not gpu_batches_differ:
        measured = f"{divisions[best].reason}; CPU attention has {named(divisions[best])}, {measured}"
    return replace(divisions[best], reason=measured)
