"""Engines over the fake backend, for tests of scheduling without a model."""

from __future__ import annotations

from collections.abc import Sequence

from apex.perf.model import Curve, PerfModel, ProfileTable, Surface
from apex.strategy import StrategyConfig
from swiftllm.core.request import Tier
from swiftllm.engine.engine import Engine
from swiftllm.kv.block_pool import Snapshots, StateSlots
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.scheduling.validation import SchedulerLimits
from swiftllm.systems import Platform, build, find_system
from tests.reference.fake_backend import EOS, VOCABULARY, FakeBackend
from tests.reference.fake_hosts import BackendOfHosts, FakeHosts


def flat_table(
    linear_s: float = 1e-3, gpu_token_s: float = 1e-6, cpu_token_s: float = 1e-5, linear_token_s: float = 0.0
) -> ProfileTable:
    """A profile table of simple laws: times per layer proportional to context, linear time flat or rising."""

    def over_context(token_s: float) -> Surface:
        return Surface((1, 2), (Curve((0, 1000), (0.0, 1000 * token_s)), Curve((0, 1000), (0.0, 2000 * token_s))))

    return ProfileTable(
        identity={},
        linear=Curve((1, 1001), (linear_s, linear_s + 1000 * linear_token_s)),
        ends=Curve((1, 2), (1e-5, 1e-5)),
        swap=Curve((1, 2), (1e-5, 2e-5)),
        prefill_attention=Surface((1, 2), (Curve((0, 1000), (1e-6, 1e-6)), Curve((0, 1000), (2e-6, 2e-6)))),
        gpu_attention=over_context(gpu_token_s),
        cpu_attention=over_context(cpu_token_s),
    )


def fake_engine(
    system: str,
    *,
    num_gpu_blocks: int,
    num_cpu_blocks: int,
    block_size: int = 4,
    max_tokens: int = 32,
    max_num_seqs: int = 64,
    max_model_len: int = 4096,
    num_layers: int = 3,
    strategy: StrategyConfig | None = None,
    table: ProfileTable | None = None,
    seed: int = 0,
    host_blocks: Sequence[int] = (),
    cached_tiers: Sequence[Tier] = (),
    num_snapshots: int | None = None,
    snapshot_every: int = 12,
) -> Engine:
    """With ``num_snapshots`` the model has linear attention; without any it has no prefix cache. With ``host_blocks``
    the CPU tier has more pools, on fake hosts that may die (``engine.backend.hosts``)."""
    states = None if num_snapshots is None else StateSlots(max_num_seqs)
    snapshots = Snapshots(num_snapshots, snapshot_every) if num_snapshots else None
    sizes = num_gpu_blocks, num_cpu_blocks, block_size
    kv = KVCacheManager(*sizes, host_blocks, cached_tiers, state_slots=states, snapshots=snapshots)
    hosts = FakeHosts(kv.host_pools) if host_blocks else None
    backend = FakeBackend(num_layers, block_size, seed) if hosts is None else BackendOfHosts(hosts, num_layers, seed)
    backend.block_size = block_size
    backend.block_tables, backend.kv = kv.block_tables, kv
    limits = SchedulerLimits(max_tokens, max_num_seqs, max_model_len)
    found, model = find_system(system), PerfModel(table or flat_table(), num_layers)
    predictions = (model, strategy or StrategyConfig(disable_admission_control=True)) if found.needs_predictions else ()
    platform = Platform(backend, limits, kv, {}, VOCABULARY, [EOS], hosts=hosts)
    return build(found, platform, predictions)
