"""Profile tables of this machine: what each depends on, and where it is cached."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path

import pacpu
from apex.perf.experts import flat_from_tokens
from apex.perf.model import TABLE_VERSION, ProfileTable, attention_rate
from apex.perf.profiler import SizeGrid, measure_seconds, table_from_seconds
from apex.perf.progress import progress_bar
from apex.perf.workbench import MOST_BLOCKS, Workbench
from swiftllm.config import EngineConfig
from swiftllm.files import cache_dir, is_kept, keep
from swiftllm.machine import cpu_model, usable_cores
from swiftllm.model.config.model_config import ModelConfig
from swiftllm.model.stages.placement import Place, Placement
from swiftllm.runtime.build import scheduler_limits
from swiftllm.runtime.torch_backend import TorchBackend

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
    if placement is None:
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
