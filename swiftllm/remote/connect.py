"""Connects an engine to the attention hosts that its configuration names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from swiftllm.config import EngineConfig
from swiftllm.remote.frames import parse_address, shared_secret
from swiftllm.remote.homes import AttentionHosts
from swiftllm.remote.host import KVShape
from swiftllm.remote.tier import FindAddress, RemoteCpuTier

if TYPE_CHECKING:
    from swiftllm.runtime.torch_backend import TorchBackend


def connect_hosts(config: EngineConfig, backend: TorchBackend) -> AttentionHosts:
    """The backend's CPU tier, extended by the hosts that ``config.attention_hosts`` names.

    Raises:
        ValueError: an address is none, a host has too little memory, or there is no Ray or no cluster.
        OSError: a host cannot be reached or refuses; the message has its address.
    """
    if config.ray_address is not None:
        from swiftllm.ray.hosts import RayHosts  # Ray takes seconds to import, and is optional

        ray_hosts = RayHosts(config.ray_address, int(config.attention_hosts))
        try:
            return _join_hosts(config, backend, ray_hosts.finders, ray_hosts.secret, ray_hosts.close)
        except BaseException:
            ray_hosts.close()
            raise
    addresses = [parse_address(text) for text in config.attention_hosts.split(",")]
    return _join_hosts(config, backend, [lambda address=address: address for address in addresses], shared_secret())


def _join_hosts(
    config: EngineConfig,
    backend: TorchBackend,
    finders: Sequence[FindAddress],
    secret: bytes,
    on_close: Callable[[], None] | None = None,
) -> AttentionHosts:
    model, hosts = backend.model_config, []
    shape = KVShape(
        model.num_layers, model.num_heads, model.num_kv_heads, model.head_dim, backend.block_size, backend.dtype_name
    )
    longest = -(-(config.max_model_len or model.max_position_embeddings) // backend.block_size)
    needed = min(longest, backend.num_cpu_blocks)  # any request of the CPU tier may live on any host
    try:
        for home, find_address in enumerate(finders, start=1):
            hosts.append(host := RemoteCpuTier(home, find_address, secret, shape, config.max_num_seqs * longest))
            if host.num_blocks < needed:
                raise ValueError(
                    f"attention host {host.channel.name} has memory for {host.num_blocks:,} KV blocks, and a request "
                    f"may need {needed:,}: give it more memory, or lower max_model_len"
                )
    except BaseException:
        for host in hosts:
            host.close()
        raise
    return AttentionHosts(backend.cpu_tier, backend.num_cpu_blocks, hosts, on_close)
