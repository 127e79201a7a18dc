"""A CPU tier over several hosts sends each part to the host where it lies, and waits for the last. No host runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swiftllm.device import HostDevice
from swiftllm.engine.backend import AttentionTimes, HostDied
from swiftllm.remote.tier import AttentionHosts, JoinedFuture
from swiftllm.runtime.cpu_tier import AttentionTask, BlocksRead, BlocksWrite, HostRead, HostWrite, RowsWrite

ARRIVED = HostDevice.compute


@dataclass
class AttentionFuture:
    """Done at once."""

    seconds: float = 0.0
    error: Exception | None = None
    is_ready: bool = True
    at: tuple[float, float] = (0.0, 0.0)

    def ready(self) -> bool:
        return self.is_ready

    def wait(self) -> float:
        if self.error is not None:
            raise self.error
        return self.seconds

    def times(self) -> AttentionTimes:
        return AttentionTimes(*self.at, self.at[1] + 9.0)


@dataclass
class Tier:
    """A host's blocks: ``[layers, blocks, slots]``. An attention gives the first block of each row."""

    name: str
    num_blocks: int
    fetched: list[int] = field(default_factory=list)
    has_died: bool = False
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.pool = torch.full((2, self.num_blocks, 4), -1.0)
        self.channel = SimpleNamespace(is_dead=self.has_died, name=self.name)
        self.threads = 3

    def open(self, tables: torch.Tensor, lens: torch.Tensor, window: int | None = None) -> Any:
        return tables, lens, window

    def attend(self, task: AttentionTask, arrived: Any, send_back: Callable[[], None] | None = None) -> AttentionFuture:
        if self.error is not None:
            raise self.error
        tables, lens, _ = task.rows
        task.out.copy_(tables[:, :1] * 1000 + lens[:, None] * 100 + task.qkv)
        if send_back is not None:
            send_back()
        return AttentionFuture(seconds=float(self.num_blocks))

    def write(self, write: HostWrite, arrived: Any) -> None:
        if isinstance(write, RowsWrite):
            self.pool[write.layer, write.blocks, write.offsets] = write.content
        else:
            self.pool[write.layers.start : write.layers.stop, write.blocks] = write.content

    def read(self, read: HostRead, send_back: Callable[[], None] | None = None) -> AttentionFuture:
        read.out.copy_(self.pool[read.layers.start : read.layers.stop, read.blocks])
        if send_back is not None:
            send_back()
        return AttentionFuture()

    def fetch(self, blocks: list[int]) -> None:
        self.fetched += blocks

    def has_fetched(self, blocks: list[int]) -> bool:
        return set(blocks) <= set(self.fetched)

    def drop_fetched(self, blocks: list[int]) -> None:
        self.fetched = [block for block in self.fetched if block not in blocks]

    def take_died(self) -> bool:
        return self.has_died


@pytest.fixture
def tiers() -> list[Tier]:
    """Blocks 0 to 3 are here, 4 to 8 on the next host, 9 and 10 on the last."""
    return [Tier("here", 4), Tier("next", 5), Tier("last", 2)]


@pytest.fixture
def hosts(tiers: list[Tier]) -> AttentionHosts:
    return AttentionHosts(tiers[0], 4, tiers[1:], lambda: None)


BLOCKS = torch.tensor([5, 8, 1, 3, 9, 4])
CONTENT = torch.arange(2 * 6 * 4.0).view(2, 6, 4)


def test_blocks_of_several_hosts_are_written_and_read_where_they_lie(hosts, tiers) -> None:
    hosts.write(BlocksWrite(range(2), CONTENT, BLOCKS), ARRIVED)
    here, second, last = (tier.pool for tier in tiers)
    for place, (pool, block) in enumerate([(second, 1), (second, 4), (here, 1), (here, 3), (last, 0), (second, 0)]):
        assert torch.equal(pool[:, block], CONTENT[:, place])
    assert sum((pool == -1).sum().item() for pool in (here, second, last)) == (11 - 6) * 8, "nothing else is written"
    sent: list[int] = []
    out = torch.empty(2, 6, 4)
    assert hosts.read(BlocksRead(range(2), BLOCKS, out), lambda: sent.append(1)).ready()
    assert torch.equal(out, CONTENT) and sent == [1]
    one_layer = torch.empty(1, 6, 4)
    hosts.read(BlocksRead(range(1, 2), BLOCKS, one_layer)).wait()
    assert torch.equal(one_layer, CONTENT[1:])


def test_rows_of_several_hosts_are_written_where_their_blocks_lie(hosts, tiers) -> None:
    hosts.write(RowsWrite(1, torch.tensor([1.0, 2.0, 3.0]), torch.tensor([3, 9, 10]), torch.tensor([0, 2, 3])), ARRIVED)
    assert tiers[0].pool[1, 3].tolist() == [1, -1, -1, -1]
    assert tiers[2].pool[1].tolist() == [[-1, -1, 2, -1], [-1, -1, -1, 3]]
    assert (tiers[1].pool == -1).all() and all((tier.pool[0] == -1).all() for tier in tiers)


def attend(hosts: AttentionHosts, firsts: list[int], send_back: Callable[[], None] | None = None):
    tables = torch.tensor([[first, first] for first in firsts], dtype=torch.int32)
    rows = hosts.open(tables, torch.arange(len(firsts), dtype=torch.int32), window=7)
    qkv, out = torch.arange(len(firsts), dtype=torch.float32)[:, None], torch.full((len(firsts), 1), -1.0)
    return rows, out, hosts.attend(AttentionTask(0, rows, qkv, out), ARRIVED, send_back)


def test_attention_is_computed_by_each_host_with_its_own_numbers_of_blocks(hosts) -> None:
    sent: list[int] = []
    rows, out, future = attend(hosts, [2, 6, 4, 10, 0], lambda: sent.append(1))
    assert [opened[2] for _, _, opened in rows] == [7] * 4
    assert out.flatten().tolist() == [2000, 2101, 202, 1303, 404]
    assert sent == [1] and future.ready()
    assert future.wait() == 5.0, "the host that computed longest"
    _, out, future = attend(hosts, [6, 7])
    assert out.flatten().tolist() == [2000, 3101] and future.wait() == 5.0


def test_a_part_that_cannot_be_submitted_fails_the_whole_once_the_others_are_done(hosts, tiers) -> None:
    tiers[2].error = HostDied("last is gone")
    _, out, future = attend(hosts, [2, 10, 6])
    assert out.flatten().tolist() == [2000, -1, 2202]
    with pytest.raises(HostDied, match="last is gone"):
        future.wait()


def test_a_joined_attention_task_is_ready_and_waited_for_as_its_last_part() -> None:
    """Hosts compute beside each other: 1 s and 2 s take 2 s."""
    joined = JoinedFuture(2, None)
    joined.parts += [AttentionFuture(1.0, at=(5.0, 6.0)), AttentionFuture(2.0, at=(4.0, 8.0), is_ready=False)]
    assert joined.wait() == 2.0 and not joined.ready()
    assert joined.times() == AttentionTimes(4.0, 8.0, 8.0)
    joined.parts[1].is_ready = True
    assert joined.ready()
    joined.parts[0].error = ValueError("of a part")
    with pytest.raises(ValueError, match="of a part"):
        joined.wait()


def test_the_result_is_sent_back_once_with_the_last_part() -> None:
    sent: list[int] = []
    joined = JoinedFuture(3, lambda: sent.append(1))
    for left in (2, 1, 0):
        joined.part_done()
        assert sent == ([] if left else [1])


def test_blocks_are_fetched_from_where_they_lie(hosts, tiers) -> None:
    hosts.fetch([5, 10, 8, 2])
    assert [tier.fetched for tier in tiers] == [[2], [1, 4], [1]]
    assert hosts.has_fetched([10, 5]) and not hosts.has_fetched([10, 6]) and not hosts.has_fetched([6, 10])
    hosts.drop_fetched([8, 10])
    assert [tier.fetched for tier in tiers] == [[2], [1], []]


def test_hosts_are_numbered_from_one(hosts, tiers) -> None:
    """This host is number 0, and cannot be lost."""
    assert hosts.take_died() == [] and hosts.num_connected == 2
    tiers[2].has_died = tiers[2].channel.is_dead = True
    assert hosts.take_died() == [2] and hosts.deaths == 1 and hosts.num_connected == 1
    assert hosts.describe() == ["next: 5 blocks, 3 threads", "last: 2 blocks, 3 threads"]
