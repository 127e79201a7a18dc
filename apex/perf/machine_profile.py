"""Profile tables of this machine, and the division of its cores that decodes fastest."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path

import pacpu
from apex.perf.model import TABLE_VERSION, ProfileTable, attention_rate, flat_from_tokens
from apex.perf.profiler import MOST_BLOCKS, SizeGrid, Workbench, measure_seconds, table_from_seconds
from apex.progress import progress_bar
from swiftllm.build import scheduler_limits
from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.files import cache_dir, is_kept, keep
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.machine import cpu_model, usable_cores
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import Place, Placement
from swiftllm.runtime.execution_context import CoreDivision, counted
from swiftllm.runtime.torch_backend import TorchBackend
from swiftllm.scheduling.validation import SchedulerLimits

# -- profile tables ----------------------------------------------------------------------------------------------------
# Profile tables of this machine: what each depends on, and where it is cached.

logger = logging.getLogger(__name__)

_not_kept: dict[Path, ProfileTable] = {}
"""Tables of this process that could not be written, by the file that each belongs into."""


def load_or_measure(config: EngineConfig, backend: TorchBackend, path: Path | None = None) -> ProfileTable:
    """The profile table of this machine and model: ``path``, else the cached one, else measured now and cached."""
    identity = profile_identity(config, backend)
    if path is not None:
        return ProfileTable.load(path, identity)
    cached = profile_path(identity)
    if is_kept(cached):
        return ProfileTable.load(cached, identity)
    if cached not in _not_kept:
        table = measure_profile(config, backend)
        if keep(cached, table.as_json()):
            logger.info("profile table written to %s", cached)
            return table
        _not_kept[cached] = table
    return _not_kept[cached]


def with_copies(table: ProfileTable, placement: Placement | None, stream_s: float) -> ProfileTable:
    """The table where the link copies weights for ``stream_s`` seconds in an iteration. Measured times leave it out."""
    if placement is None or not placement.count(Place.STREAMED):
        return table
    streamed = placement.count(Place.STREAMED)
    return replace(table, stream_s=stream_s / placement.num_layers, streamed_layers=float(streamed))


def measure_profile(config: EngineConfig, backend: TorchBackend) -> ProfileTable:
    """Profile the backend now, with a progress bar."""
    with progress_bar("profiling this machine") as progress:
        bench, most = make_workbench(config, backend), config.max_num_batched_tokens
        (seconds,) = measure_seconds(bench, most, SizeGrid(), progress=progress)
        table = table_from_seconds(seconds, profile_identity(config, backend))
        heads = backend.model_config.num_heads, backend.model_config.num_kv_heads
        experts = backend.model_config.experts
        return replace(
            table,
            flat_from_tokens=1.0 if experts is None else flat_from_tokens(experts.num_experts, experts.per_token),
            shared_row_cost=pacpu.shared_row_cost(backend.dtype, "GQA" if heads[0] > heads[1] else "MHA"),
            rows_per_read=float(pacpu.rows_per_read(*heads)),
        )


def make_workbench(config: EngineConfig, backend: TorchBackend) -> Workbench:
    if backend.kv_pools.num_written < MOST_BLOCKS:
        with progress_bar("touching the KV cache's memory") as progress:
            backend.write_blocks(MOST_BLOCKS, progress)
    return Workbench(backend, scheduler_limits(config, backend).max_model_len)


def profile_identity(config: EngineConfig, backend: TorchBackend) -> dict[str, str]:
    """What a profile table depends on; a table is refused wherever one of these differs."""
    # What a model has beyond Llama: tables of models that lack it keep their hash.
    defaults = {field.name: field.default for field in fields(ModelConfig) if field.name != "quantisation"}
    model = {
        name: value for name, value in asdict(backend.model_config).items() if value != defaults.get(name, MISSING)
    }
    # Not part of the hash, but told by name: tables of other weights keep their hash.
    quantised = {"weights": backend.weights_name} if model.pop("quantisation") else {}
    placement = backend.placement
    placed = {} if placement.is_all_resident else {"weights_placement": " ".join(placement.places)}
    if Place.EXPERTS in placement.places:  # a power of two: the number is measured anew at each start
        placed["most_cpu_rows"] = str(1 << placement.most_cpu_rows.bit_length())
    return {
        "format": str(TABLE_VERSION),
        "device": backend.device_name,
        "cpu": f"{cpu_model()} x{usable_cores()}",
        "gpu_batch_threads": str(backend.cores.gpu_batch_threads),
        "cpu_threads": str(backend.cores.cpu_threads),
        "cpu_kernel": backend.cpu_kernel,
        "model": hashlib.sha256(json.dumps(model, sort_keys=True, default=str).encode()).hexdigest()[:16],
        "dtype": str(backend.dtype).removeprefix("torch."),
        **({} if backend.cpu_kv_format.is_exact else {"cpu_kv_dtype": backend.cpu_kv_format.name}),
        **quantised,
        **placed,
        "tensor_parallel": str(config.tensor_parallel),
        "block_size": str(backend.block_size),
        # The sizes that can be measured depend on the pools; a power of two tells pools apart well enough.
        "gpu_pool": f"2^{backend.num_gpu_blocks.bit_length()} blocks",
        "cpu_pool": f"2^{backend.num_cpu_blocks.bit_length()} blocks",
        "max_num_batched_tokens": str(config.max_num_batched_tokens),
        "max_model_len": str(scheduler_limits(config, backend).max_model_len),
        "cpu_worker": "inline" if config.synchronous else "thread",
    }


def profile_path(identity: Mapping[str, str]) -> Path:
    """Where the table of this machine and model is cached."""
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / "profiles" / f"{key}.json"


def cpu_attention_gbps(table: ProfileTable, backend: TorchBackend) -> float | None:
    """GB/s at which the CPU kernel reads K and V, at the best size of the table; None if the tier was too small to
    measure."""
    rate = attention_rate(table.cpu_attention)
    bytes_per_token = backend.cpu_kv_bytes_per_block / backend.block_size / backend.layer_groups.pool_layers
    return rate and rate * bytes_per_token / 1e9


# -- the division of the cores -----------------------------------------------------------------------------------------
# Measures which division of the cores between the GPU batch and CPU attention decodes fastest.
#
# Future requests are unknown, so two loads count alike: the GPU tier full, and both tiers full. With both tiers full
# the scheduler may leave the CPU tier alone, so the faster of the two rates counts for that load. Whole iterations are
# run: a profile table times single operations and does not show how a GPU batch and a worker slow each other on the
# same cores.

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
