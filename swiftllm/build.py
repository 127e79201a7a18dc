"""Builds engines on this machine: the parts that every system needs, and the GPU-only systems whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pacpu
from swiftllm.config import EngineConfig
from swiftllm.engine.engine import Engine
from swiftllm.kv.block_pool import Snapshots, StateSlots
from swiftllm.kv.kv_cache_manager import KVCacheManager
from swiftllm.machine import GIB
from swiftllm.model.placement import Placement
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.remote.protocol import KVShape, parse_address, shared_secret
from swiftllm.remote.tier import AttentionHosts, RemoteCpuTier
from swiftllm.runtime.cpu_tier import InlineWorker, MakeWorker
from swiftllm.runtime.cpu_tuning import use_fastest_attention
from swiftllm.runtime.torch_backend import TorchBackend, open_torch_backend
from swiftllm.scheduling.validation import SchedulerLimits
from swiftllm.systems import Platform, System, build, find_system, plugin_builder

if TYPE_CHECKING:
    from swiftllm.runtime.torch_backend import TorchBackend

# -- engines -----------------------------------------------------------------------------------------------------------


def build_engine(name: str, config: EngineConfig, strategy: Mapping[str, Any] | None = None) -> Engine:
    """An engine of the named system on this machine. ``strategy``: fields of its strategy, by default its own.

    Raises:
        ValueError: no such system; the message lists those there are. Or an option is out of its range.
        TypeError: the system's strategy has no such field.
    """
    system, strategy = find_system(name), strategy or {}
    if strategy and not system.needs_predictions:
        raise TypeError(
            f"system={name!r} has no option {', '.join(strategy)}: it uses the GPU only and has no strategy"
        )
    if (builder := plugin_builder()) is not None:
        return builder(system, config, strategy)
    if config.weights_gpu_memory is not None:
        raise ValueError("weights_gpu_memory needs the package apex, which places weights: install it or drop it")
    return build_gpu_only(system, config)


def make_backend(
    config: EngineConfig, make_worker: MakeWorker = InlineWorker, placement: Placement | None = None
) -> TorchBackend:
    """The backend of one process, or of several ranks, which keep all weights on their GPUs.

    See :class:`~swiftllm.runtime.torch_backend.TorchBackend`.
    """
    if config.ray_address is not None:
        from swiftllm.remote.ray_hosts import check_listening  # Ray takes seconds to import, and is optional

        check_listening(config.ray_address)  # before weights are loaded
    use_fastest_attention()
    if config.tensor_parallel == 1:
        return open_torch_backend(config, make_worker, placement=placement)
    from swiftllm.parallel.backend import open_sharded_backend  # not needed by one process

    return open_sharded_backend(config, make_worker)


def scheduler_limits(config: EngineConfig, backend: TorchBackend) -> SchedulerLimits:
    longest = backend.model_config.longest_request(config.max_model_len)
    return SchedulerLimits(config.max_num_batched_tokens, config.max_num_seqs, longest)


def this_machine(system: System, config: EngineConfig, backend: TorchBackend) -> Platform:
    """The platform that a backend is for a system. The backend reads the block tables of its two pools from here.

    Raises:
        ValueError: there is no KV cache at all.
    """
    if backend.num_gpu_blocks + backend.num_cpu_blocks == 0:
        raise ValueError("the KV cache has no blocks in either tier: raise num_gpu_blocks or num_cpu_blocks")
    limits, hosts = scheduler_limits(config, backend), backend.attention_hosts
    host_blocks = () if hosts is None else hosts.num_blocks
    groups = backend.layer_groups
    states = None if backend.model_config.linear is None else StateSlots(config.max_num_seqs)
    num_snapshots = backend.kv_plan.num_snapshots
    cached = system.caching_tiers(config) if groups.are_exact and (states is None or num_snapshots) else ()
    snapshots = Snapshots(num_snapshots) if cached and num_snapshots else None
    sizes = backend.num_gpu_blocks, backend.num_cpu_blocks, backend.block_size
    kv = KVCacheManager(*sizes, host_blocks, cached, groups, states, snapshots)
    kv.host_pools.fetcher = hosts
    backend.block_tables = kv.block_tables
    backend.state_slots = None if states is None else states.of_request
    tokenizer = Tokenizer.from_folder(config.model, backend.model_config.vocab_size)
    description = {
        "model": config.model,
        "device": backend.device_name,
        "device_type": backend.device.type,
        "dtype": str(backend.dtype).removeprefix("torch."),
        "weights": backend.weights_name,
        "num_gpu_blocks": backend.num_gpu_blocks,
        "num_cpu_blocks": backend.num_cpu_blocks,
        "tensor_parallel": config.tensor_parallel,
        "block_size": backend.block_size,
        "kv_bytes_per_block": backend.kv_bytes_per_block,
        "cpu_kv_dtype": backend.cpu_kv_format.name,
        "cpu_kv_bytes_per_block": backend.cpu_kv_bytes_per_block,
        "prefix_cache": [tier.value for tier in cached],
        "kv_cache": [
            *backend.kv_plan.describe(limits.max_model_len, groups),
            *_about_states(config, backend),
            *_about_ranks(config, backend),
        ],
        "cpu_kernel": backend.cpu_kernel,
        "cpu_isa": pacpu.isa(),
        "gpu_batch_threads": backend.cores.gpu_batch_threads,
        "cpu_threads": backend.cores.cpu_threads,
        "gpu_batch": backend.cores.gpu_batch_input(),
    }
    return Platform(
        backend,
        limits,
        kv,
        description,
        vocab_size=backend.model_config.vocab_size,
        eos_token_ids=backend.model_config.end_tokens(None if tokenizer is None else tokenizer.eos_token_id),
        tokenizer=tokenizer,
        hosts=hosts,
    )


def _about_states(config: EngineConfig, backend: TorchBackend) -> list[str]:
    each = backend.model_config.shard(config.tensor_parallel).state_bytes(backend.dtype.itemsize)
    if not each:
        return []
    slots = config.max_num_seqs
    where = "the device" if config.tensor_parallel == 1 else "each device"
    held = f"states of {slots:,} requests (max_num_seqs), {slots * each / GIB:.2f} GiB on {where}"
    if not (kept := backend.kv_plan.num_snapshots):
        return [f"Linear attention: {held}; no prefix is cached"]
    return [f"Linear attention: {held}; {kept:,} of prefixes, {kept * each / GIB:.2f} GiB of host memory"]


def _about_ranks(config: EngineConfig, backend: TorchBackend) -> list[str]:
    if config.tensor_parallel == 1:
        return []
    from swiftllm.parallel.backend import ShardedBackend  # not needed by one process

    assert isinstance(backend, ShardedBackend)
    return [
        f"Tensor parallelism: {config.tensor_parallel} ranks; GiB and threads are those of each",
        f"Cores of the ranks: {backend.team.describe_cores()}",
    ]


def build_gpu_only(
    system: System,
    config: EngineConfig,
    placement: Placement | None = None,
    details: Mapping[str, Any] | None = None,
) -> Engine:
    """An engine of a system that needs no predictions; ``details`` are part of its description.

    Raises:
        ValueError: other hosts are asked for, which would compute nothing.
    """
    if config.attention_hosts is not None:
        raise ValueError(f"attention_hosts has no effect on {system.name}, which decodes on the GPU only: drop it")
    backend = make_backend(system.resolved(config), placement=placement)
    with closed_on_failure(backend):
        return build(system, this_machine(system, config, backend), details=details)


@contextmanager
def closed_on_failure(backend: TorchBackend) -> Iterator[None]:
    """Close the backend if the start fails or is interrupted: at exit Python aborts threads in native code."""
    try:
        yield
    except BaseException:
        backend.close()
        raise


# -- attention hosts ---------------------------------------------------------------------------------------------------
# Connects an engine to the attention hosts that its configuration names.


def connect_hosts(config: EngineConfig, backend: TorchBackend) -> AttentionHosts:
    """The backend's CPU tier, extended by the hosts that ``config.attention_hosts`` names.

    Raises:
        ValueError: an address is none, a host has too little memory, or there is no Ray or no cluster.
        OSError: a host cannot be reached or refuses; the message has its address.
    """
    model = backend.model_config
    shape = KVShape(
        backend.layer_groups.pool_layers,
        model.num_heads,
        model.num_kv_heads,
        model.head_dim,
        backend.block_size,
        backend.dtype_name,
        config.cpu_kv_dtype,
    )
    longest = backend.layer_groups.blocks_for(config.max_model_len or model.max_position_embeddings)
    needed = min(longest, backend.num_cpu_blocks)  # any request of the CPU tier may live on any host
    assert config.attention_hosts is not None
    with ExitStack() as opened:
        if config.ray_address is not None:
            from swiftllm.remote.ray_hosts import RayHosts  # Ray takes seconds to import, and is optional

            ray_hosts = RayHosts(config.ray_address, int(config.attention_hosts))
            opened.callback(ray_hosts.close)
            finders, secret = ray_hosts.finders, ray_hosts.secret
        else:
            addresses = [parse_address(text) for text in config.attention_hosts.split(",")]
            finders, secret = [lambda address=address: address for address in addresses], shared_secret()
        hosts = []
        for find_address in finders:
            hosts.append(host := RemoteCpuTier(find_address, secret, shape, config.max_num_seqs * longest))
            opened.callback(host.close)
            if host.num_blocks < needed:
                raise ValueError(
                    f"attention host {host.channel.name} has memory for {host.num_blocks:,} KV blocks, and a request "
                    f"may need {needed:,}: give it more memory, or lower max_model_len"
                )
        return AttentionHosts(backend.cpu_tier, backend.num_cpu_blocks, hosts, opened.pop_all().close)
