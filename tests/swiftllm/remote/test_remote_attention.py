"""What goes with rows to another host: windows and sinks, and answers that are not what was asked for."""

from __future__ import annotations

import socket

import pytest
import torch

from swiftllm.device import HostDevice
from swiftllm.engine.backend import HostDied
from swiftllm.remote.protocol import HEADER, FrameKind, Header, KVShape, send_frame
from swiftllm.remote.tier import Channel, RemoteCpuTier, RemoteRows
from swiftllm.runtime.cpu_tier import AttentionTask, BlocksRead, BlocksWrite, OpenedRows, RowsWrite, TaskRunner
from tests.swiftllm.remote.hosts import SECRET, host_in_thread

ARRIVED = HostDevice.compute
SHAPE = KVShape(2, 8, 2, 32, 16, "float32", "auto")


def test_windows_and_sinks_count_on_another_host_as_here() -> None:
    generator = torch.Generator().manual_seed(5)
    content = torch.randn(2, 6, *SHAPE.block, generator=generator)
    tables, lens = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32), torch.tensor([35, 48], dtype=torch.int32)
    qkv, sinks = torch.randn(2, 12, 32, generator=generator), torch.randn(8, generator=generator)
    with host_in_thread() as host:
        tier = RemoteCpuTier(lambda: host.address, SECRET, SHAPE, 4000)
        local = TaskRunner(content.clone(), kernel="native", num_threads=1)
        results = []
        for window in (None, 20):
            for of_layer in (None, sinks):
                tier.write(BlocksWrite(range(2), content, torch.arange(6)), ARRIVED)
                here, there = (torch.empty(2, 8, 32) for _ in range(2))
                tier.attend(AttentionTask(1, tier.open(tables, lens, window), qkv, there, of_layer), ARRIVED).wait()
                local.run_task(AttentionTask(1, OpenedRows(tables, lens, window), qkv, here, of_layer))
                torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)
                results.append(there)
        assert len({tuple(out.flatten().tolist()) for out in results}) == 4, "each of them changes the result"
        tier.close()


def test_the_first_block_beyond_a_hosts_pool_is_refused() -> None:
    with host_in_thread() as host:
        tier = RemoteCpuTier(lambda: host.address, SECRET, SHAPE, 10)
        out = torch.empty(2, 1, *SHAPE.block)
        for block in (tier.num_blocks, -1):
            with pytest.raises(RuntimeError, match="not all in the pool of 10"):
                tier.read(BlocksRead(range(2), torch.tensor([block]), out)).wait()
        tier.read(BlocksRead(range(2), torch.tensor([tier.num_blocks - 1]), out)).wait()
        tier.close()


def test_an_answer_of_another_size_ends_the_connection() -> None:
    for num_bytes in (2, 6):
        here, there = socket.socketpair()
        channel = Channel(here, "peer")
        future = channel.ask(Header(FrameKind.ECHO), out=torch.empty(4, dtype=torch.uint8))
        there.sendall(HEADER.pack(*Header(FrameKind.ECHO, sequence=1, num_bytes=num_bytes)) + bytes(num_bytes))
        with pytest.raises(HostDied, match=f"an answer of {num_bytes} bytes came for one of 4"):
            future.wait()
        assert channel.wait_dead(30.0)
        channel.close()
        there.close()


def test_a_death_in_a_swap_is_known_as_such() -> None:
    """What a swap has moved is then unknown; attention leaves nothing unknown."""
    with host_in_thread() as host:
        tier = RemoteCpuTier(lambda: host.address, SECRET, SHAPE, 10)
    assert tier.channel.wait_dead(30.0)
    block, content = torch.tensor([1]), torch.zeros(2, 1, *SHAPE.block)
    rows = RowsWrite(0, torch.zeros(1, 4, 32), block, block)
    for swaps_incomplete, work in (
        (True, lambda: tier.write(BlocksWrite(range(2), content, block), ARRIVED)),
        (True, lambda: tier.read(BlocksRead(range(2), block, content))),
        (False, lambda: tier.write(rows, ARRIVED)),
        (False, lambda: tier.attend(AttentionTask(0, RemoteRows(1), content, content), ARRIVED)),
    ):
        with pytest.raises(HostDied) as death:
            work()
        assert death.value.swaps_incomplete is swaps_incomplete
    tier.close()


class SlowSocket:
    """Takes at most 7 bytes at once."""

    def __init__(self) -> None:
        self.sent = b""

    def sendmsg(self, buffers: list[memoryview]) -> int:
        some = b"".join(map(bytes, buffers))[:7]
        self.sent += some
        assert len(self.sent) < 1000, "the same bytes are sent again and again"
        return len(some)


def test_a_frame_that_is_sent_in_pieces_is_whole() -> None:
    connection, buffers = SlowSocket(), [bytes(range(10)), b"", bytes(range(50, 53)), bytes(range(100, 130))]
    header = Header(FrameKind.ECHO, 1, 2, 3)
    assert send_frame(connection, header, buffers) == len(connection.sent) == HEADER.size + 43
    assert connection.sent == HEADER.pack(*header._replace(num_bytes=43)) + b"".join(buffers)
