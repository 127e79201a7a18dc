"""Connects an engine to the attention hosts that its configuration names."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from swiftllm.config import EngineConfig
from swiftllm.remote.frames import KVShape, parse_address, shared_secret
from swiftllm.remote.hosts import AttentionHosts
from swiftllm.remote.tier import RemoteCpuTier

if TYPE_CHECKING:
    from swiftllm.runtime.torch_backend import TorchBackend


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
            from swiftllm.ray.hosts import RayHosts  # Ray takes seconds to import, and is optional

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
