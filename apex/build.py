"""Builds any named system on this machine, for the CLI, the server and the harness."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from apex.perf.machine_profile import cpu_attention_gbps, division_rates, fastest, load_or_measure, with_copies
from apex.perf.model import PerfModel, ProfileTable
from apex.placement.measured import place_weights
from apex.placement.search import UniformLoad
from apex.strategy import StrategyConfig
from swiftllm.build import build_gpu_only, closed_on_failure, connect_hosts, make_backend, this_machine
from swiftllm.config import EngineConfig
from swiftllm.engine.engine import Engine
from swiftllm.model.placement import Placement
from swiftllm.runtime.cpu_tier import CpuWorker, InlineWorker
from swiftllm.runtime.cpu_tuning import use_fastest_attention
from swiftllm.runtime.execution_context import core_divisions
from swiftllm.runtime.torch_backend import TorchBackend
from swiftllm.systems import build, find_system


def build_system(
    name: str,
    config: EngineConfig,
    strategy: StrategyConfig | None = None,
    *,
    profile: Path | ProfileTable | None = None,
    workload: UniformLoad | None = None,
) -> Engine:
    """Build an engine of a named system.

    Args:
        name: one of :func:`swiftllm.systems.systems`.
        config: model, device, pools.
        strategy: how the CPU is used; by default the system's own rule.
        profile: the file of a profile table, or a table, which is used unchecked; by default the table cached for this
            machine and model, measured now if there is none.
        workload: the requests that ``weights_gpu_memory="auto"`` chooses for; by default assumed ones.

    Raises:
        ValueError: no such system, or options that contradict each other.
        ProfileMismatch: the table of the given file was measured on something else.
    """
    system = find_system(name)
    use_fastest_attention()  # first, since what is measured from here on depends on it
    plan = place_weights(system.resolved(config), workload, offloads=system.needs_predictions)
    placed = {"weights_placement": plan.describe()} if plan.describe() else {}
    if not system.needs_predictions:
        return build_gpu_only(system, config, plan.placement, placed)
    strategy = strategy or StrategyConfig()
    backend = open_backend(system.resolved(config), plan.placement)
    with closed_on_failure(backend):
        if config.attention_hosts is not None:
            backend.use_hosts(connect_hosts(config, backend))
        platform = this_machine(system, config, backend)
        table = profile if isinstance(profile, ProfileTable) else load_or_measure(config, backend, profile)
        table = with_copies(table, plan.placement, plan.stream_s)
        details = {
            "strategy": asdict(strategy),
            "profile": dict(table.identity),
            "attention_hosts": [] if backend.attention_hosts is None else backend.attention_hosts.describe(),
            **placed,
            "cpu_attention_gbps": cpu_attention_gbps(table, backend),
        }
        return build(system, platform, (PerfModel(table, backend.num_layers), strategy), details)


def open_backend(
    config: EngineConfig, placement: Placement | None = None, *, measure_again: bool = False
) -> TorchBackend:
    """A backend with the CPU worker that will serve, and the cores divided between worker and GPU batch.

    ``config`` may give the division. Otherwise it is the one that decodes fastest, from the cache or measured now.
    ``measure_again``: that, and how CPU attention is fastest.
    """
    if measure_again:
        use_fastest_attention(measure_again=True)
    # The profile times CPU attention while the GPU batch computes, so the worker needs its own thread here too.
    backend = make_backend(config, InlineWorker if config.synchronous else CpuWorker, placement=placement)
    with closed_on_failure(backend):
        without_gpu = backend.device.type == "cpu"
        divisions = core_divisions(config, without_gpu=without_gpu)
        if len(divisions) > 1 and (backend.num_cpu_blocks or (without_gpu and backend.num_gpu_blocks)):
            backend.use_cores(fastest(divisions, division_rates(config, backend, divisions, measure_again)))
    return backend
