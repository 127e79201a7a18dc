"""Builds engines on predicted hardware: the named systems over a virtual clock, without torch, model or GPU."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from functools import partial

from apex.perf.model import PerfModel, ProfileTable
from apex.perf.operator_tables import model_of
from apex.simulator.backend import OWN_ENGINE, Runtime, SimulatedBackend
from apex.simulator.links import Interconnect, RemoteHosts, SeveralHostsModel, SimulatedStates, SimulatedWeights
from apex.strategy import StrategyConfig
from swiftllm.core.request import Tier
from swiftllm.engine.engine import Engine
from swiftllm.kv.block_pool import LayerGroups, Snapshots, StateSlots
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.scheduling.scheduler import Vllm
from swiftllm.scheduling.validation import SchedulerLimits
from swiftllm.systems import Platform, build, find_system


def build_simulated(
    system: str,
    table: ProfileTable,
    num_layers: int,
    *,
    num_gpu_blocks: int,
    num_cpu_blocks: int,
    block_size: int = 16,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 256,
    max_model_len: int = 8192,
    strategy: StrategyConfig | None = None,
    vocab_size: int = 32_000,
    launch_s: float = 0.0,
    interconnect: Interconnect | None = None,
    remote_hosts: RemoteHosts | None = None,
    scheduler_table: ProfileTable | None = None,
    weights: SimulatedWeights | None = None,
    cached_tiers: Collection[Tier] = (),
    windows: tuple[int | None, ...] | None = None,
    states: SimulatedStates | None = None,
    runtime: Runtime = OWN_ENGINE,
    synchronous: bool = False,
    whole_swaps: bool = False,
) -> Engine:
    """An engine of a named system whose time is predicted from ``table``.

    Its backend is a :class:`~apex.simulator.backend.SimulatedBackend`: a virtual clock from 0, placeholder
    tokens, requests that end by ``max_tokens``. Scheduler and backend predict from the same table, unless
    ``scheduler_table`` is given.

    Args:
        system: one of :func:`swiftllm.systems.systems`.
        num_gpu_blocks, num_cpu_blocks: KV blocks of ``block_size`` tokens in each tier, on all GPUs and all hosts.
        max_num_batched_tokens, max_num_seqs, max_model_len: as in :class:`swiftllm.config.EngineConfig`.
        synchronous, whole_swaps: what does not overlap, see :mod:`apex.simulator.backend`.
        launch_s, interconnect: costs that the table leaves out, see :mod:`apex.simulator.backend`.
        remote_hosts: CPU hosts beside the GPUs' own, see :mod:`apex.simulator.links`.
        weights: where the weights are, if not all on the GPU; needs ``interconnect``.
        cached_tiers: where prefixes are cached; by default nowhere, since simulated prompts are placeholders.
        windows: see :attr:`swiftllm.model.config.ModelConfig.windows`. With any, no prefix is cached.
        states: of linear attention, which ``max_num_seqs`` requests have at most. Without snapshots of them no prefix
            is cached.
        scheduler_table: what the scheduler predicts from in place of ``table``, to see what a wrong one costs.
        runtime: what runs the iterations; with the default `vllm` is what the papers compared with.

    Raises:
        ValueError: no such system, no KV cache at all, or options that contradict each other.
    """
    found = find_system(system)
    if num_gpu_blocks + num_cpu_blocks == 0:
        raise ValueError("the KV cache has no blocks in either tier: raise num_gpu_blocks or num_cpu_blocks")
    strategy = strategy or StrategyConfig()
    usable = max(0, num_gpu_blocks - runtime.null_blocks)
    groups = LayerGroups(block_size, windows or (None,))
    slots = None if states is None else StateSlots(max_num_seqs)
    cached = cached_tiers if groups.are_exact and (states is None or states.num_snapshots) else ()
    snapshots = Snapshots(states.num_snapshots) if states is not None and cached else None
    kv = KVCacheManager(usable, num_cpu_blocks, block_size, (), cached, groups, slots, snapshots)

    def model(times: ProfileTable) -> PerfModel:
        """A model of its own for backend and scheduler: each keeps its own list of extrapolated operations."""
        if remote_hosts is None:
            return model_of(times, num_layers)
        return SeveralHostsModel(times, num_layers, remote_hosts, kv)

    backend = SimulatedBackend(
        model(table),
        launch_s=launch_s,
        interconnect=interconnect,
        weights=weights,
        runtime=runtime,
        groups=groups,
        state_copy_s=0.0 if states is None else states.copy_s,
        synchronous=synchronous,
        whole_swaps=whole_swaps,
    )
    limits = SchedulerLimits(max_num_batched_tokens, max_num_seqs, max_model_len)
    predictions = (model(scheduler_table or table), strategy) if found.needs_predictions else ()
    description = {
        "backend": "simulated",
        "device": table.identity.get("device", "simulated"),
        "num_layers": num_layers,
        "num_gpu_blocks": num_gpu_blocks,
        "num_cpu_blocks": num_cpu_blocks,
        "block_size": block_size,
        "launch_s": launch_s,
        "interconnect": asdict(interconnect) if interconnect else None,
        "remote_hosts": asdict(remote_hosts) if remote_hosts else None,
        "weights": weights.placement.describe() if weights else None,
        "strategy": asdict(strategy),
        "profile": dict(table.identity),
    }
    if found.scheduler is Vllm:
        found = replace(found, scheduler=partial(Vllm, runtime.rules(Vllm.rules)))
    return build(found, Platform(backend, limits, kv, description, vocab_size), predictions)
