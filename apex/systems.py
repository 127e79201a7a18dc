"""The named systems, built in one place for the CLI, the server and the harness."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from apex.executor import OverlapExecutor
from apex.perf.core_division import DecodeRates, fastest, full_load, measure_divisions
from apex.perf.model import TABLE_VERSION, PerfModel, ProfileTable, attention_rate
from apex.perf.profiler import Profiler
from apex.perf.progress import progress_bar
from apex.perf.workbench import MOST_BLOCKS, Workbench
from apex.schedulers import SCHEDULERS
from apex.strategy import StrategyConfig
from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.engine.engine import Engine
from swiftllm.files import cache_dir, write_atomically
from swiftllm.machine import cpu_model, usable_cores
from swiftllm.runtime.cores import CoreDivision, core_divisions
from swiftllm.runtime.torch_backend import TorchBackend
from swiftllm.runtime.workers.inline import InlineWorker
from swiftllm.runtime.workers.thread import CpuWorker
from swiftllm.scheduling.vllm import GPU_ONLY_SCHEDULERS
from swiftllm.systems import assemble, build_gpu_only, make_kv_manager, register_system, scheduler_limits

logger = logging.getLogger(__name__)

THREADS = ("lane_threads", "cpu_threads")


@dataclass(frozen=True)
class SystemInfo:
    name: str
    summary: str
    paper: str


SYSTEMS: Mapping[str, SystemInfo] = {
    info.name: info
    for info in (
        SystemInfo("vllm", "GPU only, as vLLM V1 schedules: chunked prefill, preemption by recompute", "vLLM, SOSP'23"),
        SystemInfo("swiftllm", "GPU only: continuous batching, chunked prefill, paged attention", "SwiftLLM"),
        SystemInfo("neo", "load-aware scheduling, asymmetric pipelining", "NEO, MLSys'25"),
        SystemInfo("fastdecode", "all decode attention on the CPU", "FastDecode+ in NEO, MLSys'25"),
        SystemInfo("apex", "inequality-driven pipelining or asynchronous overlap", "APEX"),
    )
}


def build_system(
    name: str,
    config: EngineConfig,
    strategy: StrategyConfig | None = None,
    *,
    profile: Path | None = None,
) -> Engine:
    """Build an engine of a named system.

    Args:
        name: a key of :data:`SYSTEMS`.
        config: model, device, pools.
        strategy: how the CPU is used; by default the system's own rule.
        profile: a profile table to use; by default the one cached for this machine and model, made if there is none.

    Raises:
        ValueError: no such system, or options that contradict each other.
        ProfileMismatch: the given table was measured on something else.
    """
    if name not in SYSTEMS:
        raise ValueError(f"unknown system {name!r}; there are {', '.join(SYSTEMS)}")
    if name in GPU_ONLY_SCHEDULERS:
        return build_gpu_only(name, config)
    strategy = strategy or StrategyConfig()
    backend = open_backend(config)
    with closed_on_failure(backend):
        limits, kv = scheduler_limits(config, backend), make_kv_manager(backend)
        table = load_or_measure(config, backend, profile)
        model = PerfModel(table, backend.num_layers)
        scheduler = SCHEDULERS[name](limits, kv, backend.now, model, strategy)
        details = {
            "strategy": asdict(strategy),
            "profile": dict(table.identity),
            "cpu_attention_gbps": cpu_attention_gbps(table, backend),
        }
        return assemble(name, config, backend, scheduler, OverlapExecutor(backend), details)


def open_backend(config: EngineConfig, *, measure_again: bool = False) -> TorchBackend:
    """A backend with the CPU worker that serves, and the cores divided between that and the lane: as ``config`` has it,
    else as decodes fastest, which is measured now unless that is cached."""
    # With the worker's own thread: CPU attention is measured while the lane computes, as it will run.
    backend = TorchBackend(config, InlineWorker if config.synchronous else CpuWorker)
    with closed_on_failure(backend):
        divisions = core_divisions(config, lane_on_cpu=backend.device.type == "cpu")
        if len(divisions) > 1 and backend.num_gpu_blocks + backend.num_cpu_blocks:
            backend.use_cores(fastest(divisions, division_rates(config, backend, divisions, measure_again)))
    return backend


@contextmanager
def closed_on_failure(backend: TorchBackend) -> Iterator[None]:
    """Let no worker outlive a start that fails or is interrupted: at exit Python aborts threads in native code."""
    try:
        yield
    except BaseException:
        backend.close()
        raise


def division_rates(
    config: EngineConfig, backend: TorchBackend, divisions: Sequence[CoreDivision], measure_again: bool
) -> list[DecodeRates]:
    """How fast this machine and model decode under each division: from the cache, else measured and cached."""
    identity = {name: value for name, value in profile_identity(config, backend).items() if name not in THREADS}
    identity["max_num_seqs"] = str(config.max_num_seqs)
    identity["divisions"] = ", ".join(f"{d.lane_threads} and {d.cpu_threads}" for d in divisions)
    path = profile_path(identity).with_suffix(".cores.json")
    if path.exists() and not measure_again:
        return [DecodeRates(**rates) for rates in json.loads(path.read_text())["rates"]]
    bench, limits = make_workbench(config, backend), scheduler_limits(config, backend)
    load = full_load(bench.num_blocks, bench.block_size, limits)
    with progress_bar("dividing the cores") as progress:
        rates = measure_divisions(backend.use_cores, bench, divisions, load, progress)
    measured = {"identity": identity, "load": asdict(load), "rates": [asdict(rate) for rate in rates]}
    write_atomically(path, json.dumps(measured, indent=1))
    return rates


def cpu_attention_gbps(table: ProfileTable, backend: TorchBackend) -> float | None:
    """Gigabytes of K and V that the CPU kernel reads in a second, at the best size of the table; None if the tier was
    too small to be measured."""
    rate = attention_rate(table.cpu_attention)
    return rate and rate * backend.kv_bytes_per_block / backend.block_size / backend.num_layers / 1e9


def profile_identity(config: EngineConfig, backend: TorchBackend) -> dict[str, str]:
    """What a profile table depends on; a table is refused wherever one of these differs."""
    model = backend.model_config
    return {
        "format": str(TABLE_VERSION),
        "device": backend.device_name,
        "cpu": f"{cpu_model()} x{usable_cores()}",
        "lane_threads": str(backend.cores.lane_threads),
        "cpu_threads": str(backend.cores.cpu_threads),
        "cpu_kernel": backend.cpu_kernel,
        "model": hashlib.sha256(json.dumps(asdict(model), sort_keys=True, default=str).encode()).hexdigest()[:16],
        "dtype": str(backend.dtype).removeprefix("torch."),
        "tensor_parallel": "1",
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


def load_or_measure(config: EngineConfig, backend: TorchBackend, path: Path | None = None) -> ProfileTable:
    """The profile table of this machine and model: ``path``, else the cached one, else measured now and cached."""
    identity = profile_identity(config, backend)
    if path is not None:
        return ProfileTable.load(path, identity)
    cached = profile_path(identity)
    if cached.exists():
        return ProfileTable.load(cached, identity)
    table = measure_profile(config, backend)
    table.save(cached)
    logger.info("profile table written to %s", cached)
    return table


def measure_profile(config: EngineConfig, backend: TorchBackend) -> ProfileTable:
    """Profile the backend now, with a progress bar."""
    with progress_bar("profiling this machine") as progress:
        return make_profiler(config, backend, progress).measure(profile_identity(config, backend))


def make_profiler(
    config: EngineConfig, backend: TorchBackend, progress: Callable[[float, str], None] = lambda done, what: None
) -> Profiler:
    return Profiler(make_workbench(config, backend), max_tokens=config.max_num_batched_tokens, progress=progress)


def make_workbench(config: EngineConfig, backend: TorchBackend) -> Workbench:
    if backend.kv_pools.num_written < MOST_BLOCKS:
        with progress_bar("bringing in memory of the KV cache") as progress:
            backend.kv_pools.write(MOST_BLOCKS, progress)
    return Workbench(
        backend,
        num_blocks={Tier.GPU: backend.num_gpu_blocks, Tier.CPU: backend.num_cpu_blocks},
        block_size=backend.block_size,
        max_model_len=scheduler_limits(config, backend).max_model_len,
        vocab_size=backend.model_config.vocab_size,
        synchronize=torch.cuda.synchronize if backend.device.type == "cuda" else lambda: None,
    )


def _builder(name: str) -> Callable[[EngineConfig], Engine]:
    return partial(build_system, name)


for _name in SYSTEMS:
    register_system(_name, _builder(_name))
