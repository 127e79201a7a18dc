"""CPU attention on several hosts: which of them holds how much of the CPU tier, and how long an attention task takes.

As in OmniServe's section 4, requests go to the GPUs' own host while its memory has room, then evenly to remote hosts.
Each attention task is taken to be divided among the hosts as the tier is; a request stays whole. The hosts compute at
the same time, so an attention task takes as long as the slowest of them. What goes to remote hosts and back shares the
network of the GPUs' host. Left out: moving KV cache to remote hosts, which takes place beside the work of the GPU
batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from apex.perf.model import PerfModel, ProfileTable, SharedContext, saved_tokens
from swiftllm.core.request import Tier
from swiftllm.kv.blocks import KVCacheManager


@dataclass(frozen=True)
class RemoteHosts:
    """CPU hosts across a network, each equal to the GPUs' own host in memory and speed."""

    count: int
    bytes_per_s: float
    """Network bandwidth of the GPUs' host, in each direction."""
    latency_s: float
    """Of a round trip."""
    bytes_per_row: int
    """Q, K, V and attention output of one request in one layer."""


def host_shares(used_blocks: int, local_blocks: int, remote_count: int) -> tuple[float, float]:
    """Parts of the used blocks in the local host and in each remote one (section 4): local first, then evenly."""
    if used_blocks <= local_blocks:
        return 1.0, 0.0
    local = local_blocks / used_blocks
    return local, (1.0 - local) / remote_count


def network_s(hosts: RemoteHosts, remote_rows: float) -> float:
    """An attention task's way to remote hosts and back, in one layer."""
    return hosts.latency_s + remote_rows * hosts.bytes_per_row / hosts.bytes_per_s


class SeveralHostsModel(PerfModel):
    """Predicts CPU attention on several hosts from the profile table of one, by how full the CPU tier is now."""

    def __init__(self, table: ProfileTable, num_layers: int, hosts: RemoteHosts, kv: KVCacheManager) -> None:
        super().__init__(table, num_layers)
        self._hosts = hosts
        self._kv = kv

    def with_table(self, table: ProfileTable) -> SeveralHostsModel:
        model = SeveralHostsModel(table, self.num_layers, self._hosts, self._kv)
        model.extrapolated = self.extrapolated
        return model

    def cpu_attention_s(self, requests: float, context_tokens: float, shared: Sequence[SharedContext] = ()) -> float:
        """T_c of the whole: the slowest host's. What shared blocks save is counted as on one host."""
        if requests <= 0:
            return 0.0
        context_tokens -= saved_tokens(shared, self.table.shared_row_cost, self.table.rows_per_read)
        capacity = self._kv.capacity(Tier.CPU)
        used = capacity - self._kv.num_free(Tier.CPU)
        local, remote = host_shares(used, capacity // (self._hosts.count + 1), self._hosts.count)
        local_s = self._share_s(local, requests, context_tokens)
        if not remote:
            return local_s
        remote_rows = max(1.0, requests * (1.0 - local))
        return max(local_s, self._share_s(remote, requests, context_tokens) + network_s(self._hosts, remote_rows))

    def _share_s(self, share: float, requests: float, context_tokens: float) -> float:
        """T_c of a host with this share of an attention task, of which it has one request at least."""
        rows = max(1.0, share * requests)
        return super().cpu_attention_s(rows, rows * (context_tokens / requests))
