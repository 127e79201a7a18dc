"""What goes over the wire: bytes by formula, who may connect, and what a broken or hostile peer can do."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time

import pytest
import torch

from swiftllm.device import HostDevice
from swiftllm.engine.backend import HostDied
from swiftllm.machine import GIB
from swiftllm.remote.host import AttentionHost
from swiftllm.remote.protocol import (
    HEADER,
    FrameKind,
    Header,
    KVShape,
    as_bytes,
    connect,
    parse_address,
    receive_header,
    send_frame,
    send_json,
)
from swiftllm.remote.tier import Channel, RemoteCpuTier, RemoteFuture, RemoteRows
from swiftllm.runtime.cpu_tier import (
    AttentionTask,
    BlocksRead,
    BlocksWrite,
    ContextRead,
    CpuTask,
    OpenedRows,
    RowsWrite,
    TaskRunner,
)
from swiftllm.runtime.memory import HOST_HEADROOM_BYTES
from tests.swiftllm.remote.hosts import SECRET, host_in_thread

SHAPE = KVShape(
    num_layers=2, num_heads=8, num_kv_heads=2, head_dim=32, block_size=16, dtype="bfloat16", cpu_kv_dtype="auto"
)
THREE_TOKENS = torch.empty(2, 2, 3, 32, dtype=torch.bfloat16)
ARRIVED = HostDevice.compute


@pytest.fixture
def host():
    with host_in_thread() as host:
        yield host


def open_tier(host: AttentionHost, shape: KVShape = SHAPE) -> RemoteCpuTier:
    return RemoteCpuTier(lambda: host.address, SECRET, shape, 4000)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_attention_task_moves_q_k_v_and_the_output_and_64_bytes_at_most(host, rows: int) -> None:
    tier, context = open_tier(host), 40
    tables = torch.arange(rows * 3, dtype=torch.int32).view(rows, 3)
    sent = tier.channel.bytes_sent
    opened = tier.open(tables, torch.full((rows,), context, dtype=torch.int32))
    blocks, content = tables.long().flatten(), torch.zeros(2, rows * 3, 2, 2, 16, 32, dtype=torch.bfloat16)
    tier.write(BlocksWrite(range(2), content, blocks), ARRIVED)
    tier.read(BlocksRead(range(2), blocks, content))  # all before it has been sent
    once = rows * 4 * (3 + 1)
    swapped = content.nbytes + 2 * blocks.nbytes
    assert 0 < tier.channel.bytes_sent - sent - once - swapped <= 3 * 64
    sent, received = tier.channel.bytes_sent, tier.channel.bytes_received
    qkv, out = torch.randn(rows, 8 + 4, 32).bfloat16(), torch.empty(rows, 8, 32, dtype=torch.bfloat16)
    for layer in range(2):
        assert tier.attend(AttentionTask(layer, opened, qkv, out), ARRIVED).wait() > 0
    one = torch.empty(2, 1, 2, 2, 16, 32, dtype=torch.bfloat16)
    tier.read(BlocksRead(range(2), blocks[:1], one))  # for the counters to be final
    asked, answered = 16 + HEADER.size, 2 * 2 * 2 * 16 * 32 * 2 + HEADER.size
    assert 0 < tier.channel.bytes_sent - sent - asked - 2 * qkv.nbytes <= 2 * 64
    assert 0 < tier.channel.bytes_received - received - answered - 2 * out.nbytes <= 2 * 64
    tier.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_was_stored_is_attended_to(host, dtype: str) -> None:
    """Rows and blocks written in each way are read back, and attention over them is the reference's."""
    shape = KVShape(2, 8, 2, 32, 16, dtype, "auto")
    tier, generator = open_tier(host, shape), torch.Generator().manual_seed(3)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).to(shape.torch_dtype)

    content = random(2, 3, 2, 2, 16, 32)
    blocks = torch.tensor([7, 2, 9])
    tier.write(BlocksWrite(range(2), content, blocks), ARRIVED)
    read = torch.empty_like(content)
    tier.read(BlocksRead(range(2), blocks, read))
    assert torch.equal(read, content)
    second = random(1, 2, 2, 2, 16, 32)  # two blocks of layer 1 alone
    tier.write(BlocksWrite(range(1, 2), second, blocks[1:]), ARRIVED)
    content[1, 1:] = second
    read_second = torch.empty(1, 3, 2, 2, 16, 32, dtype=shape.torch_dtype)
    for layer in range(2):
        tier.read(BlocksRead(range(layer, layer + 1), blocks, read_second))
        assert torch.equal(read_second[0], content[layer])
    kv = random(2, 4, 32)  # two more tokens of layer 1, at positions 39 and 40
    tier.write(RowsWrite(1, kv, torch.tensor([9, 9]), torch.tensor([7, 8])), ARRIVED)
    expected = content[1].permute(2, 1, 0, 3, 4).reshape(2, 2, 48, 32)[:, :, :41].clone()
    expected[:, :, 39:41] = kv.view(2, 2, 2, 32).permute(1, 2, 0, 3)
    loaded = torch.empty_like(expected)
    tier.read(ContextRead(1, blocks, loaded)).wait()
    assert torch.equal(loaded, expected)
    qkv, out = random(1, 12, 32), torch.empty(1, 8, 32, dtype=shape.torch_dtype)
    opened = tier.open(torch.tensor([[7, 2, 9, -5]], dtype=torch.int32), torch.tensor([42], dtype=torch.int32))
    tier.attend(AttentionTask(1, opened, qkv, out), ARRIVED).wait()
    k, v = (torch.cat([part, new], dim=1) for part, new in zip(expected, qkv[0, 8:].view(2, 2, 1, 32), strict=True))
    scores = torch.einsum("hgd,htd->hgt", qkv[0, :8].view(2, 4, 32).float(), k.float()) * 32**-0.5
    reference = torch.einsum("hgt,htd->hgd", scores.softmax(-1), v.float()).reshape(8, 32)
    torch.testing.assert_close(out[0].float(), reference, atol=2e-2 if dtype != "float32" else 1e-5, rtol=2e-2)
    tier.close()


def test_a_store_of_int8_has_the_bits_of_a_local_one(host) -> None:
    shape = KVShape(2, 8, 2, 32, 16, "bfloat16", "int8")
    tier = open_tier(host, shape)
    pool = torch.randint(256, (2, 12, *shape.block), dtype=torch.uint8)
    local = TaskRunner(pool, kernel="native", num_threads=1)
    blocks, kv = torch.tensor([7, 2, 9]), torch.randn(41, 4, 32).bfloat16()
    positions = torch.arange(41)
    rows = RowsWrite(1, kv, blocks[positions // 16], positions % 16)
    tables, lens = torch.tensor([[7, 2, 9]], dtype=torch.int32), torch.tensor([42], dtype=torch.int32)
    qkv = torch.randn(1, 12, 32).bfloat16()
    found, expected = ([], [])
    for target, results in ((tier, found), (local, expected)):

        def carry_out(task: CpuTask, target: object = target, results: list = results) -> None:
            if target is local:
                local.run_task(task)
            elif isinstance(task, RowsWrite | BlocksWrite):
                tier.write(task, ARRIVED)
            else:
                (tier.attend(task, ARRIVED) if isinstance(task, AttentionTask) else tier.read(task)).wait()
            results.extend([task.out] if hasattr(task, "out") else [])

        carry_out(BlocksWrite(range(2), pool[:, [7, 2, 9]].clone(), blocks))
        carry_out(rows)
        carry_out(ContextRead(1, blocks, torch.empty(2, 2, 41, 32, dtype=torch.bfloat16)))
        opened = tier.open(tables, lens) if target is tier else OpenedRows(tables, lens, None)
        carry_out(AttentionTask(1, opened, qkv, torch.empty(1, 8, 32, dtype=torch.bfloat16)))
        carry_out(BlocksRead(range(2), blocks, torch.empty(2, 3, *shape.block, dtype=torch.uint8)))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert len(found) == 3
    tier.fetch([9])
    tier.close()


def test_a_wrong_task_fails_its_attention_task_and_not_the_host(host) -> None:
    tier = open_tier(host)
    rows = tier.open(torch.tensor([[10**6]], dtype=torch.int32), torch.tensor([5], dtype=torch.int32))
    out = torch.empty(1, 8, 32, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"127\.0\.0\.1:\d+: .*block"):
        tier.attend(AttentionTask(0, rows, torch.zeros(1, 12, 32, dtype=torch.bfloat16), out), ARRIVED).wait()
    with pytest.raises(RuntimeError, match="not all in the pool"):
        tier.read(ContextRead(0, torch.tensor([10**6]), THREE_TOKENS)).wait()
    assert not tier.channel.is_dead
    content = torch.zeros(1, 4, 32, dtype=torch.bfloat16)
    tier.write(RowsWrite(0, content, torch.tensor([10**6]), torch.tensor([0])), ARRIVED)
    assert tier.channel.wait_dead(5.0)  # a lost write must not pass for a done one
    with pytest.raises(HostDied, match="not all in the pool"):
        tier.read(ContextRead(0, torch.tensor([0]), THREE_TOKENS))
    tier.close()


def test_rows_that_nobody_holds_are_dropped(host) -> None:
    tier = open_tier(host)
    table, lens = torch.tensor([[1]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    for _ in range(5):
        rows = tier.open(table, lens)
    qkv, out = torch.zeros(1, 12, 32, dtype=torch.bfloat16), torch.empty(1, 8, 32, dtype=torch.bfloat16)
    for number in range(1, rows.number - 1):  # the one before is dropped when the next are opened
        with pytest.raises(RuntimeError, match=f"KeyError: {number}"):
            tier.attend(AttentionTask(0, RemoteRows(number), qkv, out), ARRIVED).wait()
    tier.attend(AttentionTask(0, rows, torch.zeros(1, 12, 32, dtype=torch.bfloat16), out), ARRIVED).wait()
    tier.close()


def test_who_may_connect(host) -> None:
    with pytest.raises(ConnectionError, match=r"secrets differ.*APEX_HOST_SECRET"):
        RemoteCpuTier(lambda: host.address, b"another", SHAPE, 4000)
    first = open_tier(host)
    with pytest.raises(ConnectionError, match="serves another engine"):
        open_tier(host)
    first.close()
    with pytest.raises(ValueError, match="without a secret"):
        AttentionHost(("0.0.0.0", 0), b"")
    with pytest.raises(ConnectionError, match="memory for 0 KV blocks"), host_in_thread(1000) as small:
        open_tier(small)


def test_peers_that_do_not_speak_the_protocol(host) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(b"HTTP/1.1 400 Bad Request" * 9), daemon=True).start()
        with pytest.raises(ConnectionError, match="is that the address of an attention host"):
            connect(other.getsockname(), SECRET, {})
    for rubbish in (os.urandom(4000), b"", HEADER.pack(*Header(FrameKind.HELLO, num_bytes=1 << 60))):
        # The host may hang up before it has read all.
        with socket.create_connection(host.address) as connection, contextlib.suppress(OSError):
            connection.sendall(rubbish)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    with socket.create_connection(host.address) as connection:
        receive_header(connection), connection.recv(100)
        send_json(connection, FrameKind.HELLO, {"shape": {"num_layers": 10**9}, "proof": "0"})
        assert receive_header(connection).kind == FrameKind.FAILED
    open_tier(host).close()


def test_frames_of_many_and_empty_buffers_arrive_whole() -> None:
    here, there = socket.socketpair()
    buffers = [bytes([number % 256]) * (number % 5) for number in range(2000)]
    thread = threading.Thread(target=send_frame, args=[here, Header(FrameKind.ECHO, 1, 2, 3), buffers])
    thread.start()
    header = receive_header(there)
    assert header == Header(FrameKind.ECHO, 1, 2, 3, sum(map(len, buffers)))
    received = b""
    while len(received) < header.num_bytes:
        received += there.recv(1 << 16)
    assert received == b"".join(buffers)
    thread.join()
    assert len(as_bytes(torch.empty(0, 3))) == 0


def test_a_channel_whose_peer_goes_fails_all_that_waits() -> None:
    here, there = socket.socketpair()
    channel = Channel(here, "peer")
    future = channel.ask(Header(FrameKind.ECHO), out=torch.empty(4, dtype=torch.uint8))
    assert not future.ready()
    there.close()
    with pytest.raises(HostDied, match="peer is gone"):
        future.wait()
    assert future.ready()
    with pytest.raises(HostDied):
        channel.post(Header(FrameKind.DROP))
    channel.close()


def test_a_result_may_be_sent_back_into_memory_of_inference_mode(host) -> None:
    """As the engine's tensors on a device are, which the receiving thread writes."""
    tier, failed = open_tier(host), []
    rows = tier.open(torch.tensor([[1]], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    with torch.inference_mode():
        qkv, out = torch.ones(1, 12, 32, dtype=torch.bfloat16), torch.zeros(1, 8, 32, dtype=torch.bfloat16)
        on_device = torch.zeros(1, 8, 32, dtype=torch.bfloat16)
    tier.attend(AttentionTask(0, rows, qkv, out), ARRIVED, lambda: on_device.copy_(out)).wait()
    assert torch.equal(on_device, torch.ones_like(out))
    with pytest.raises(ZeroDivisionError):  # and what it raises is not lost
        tier.attend(AttentionTask(0, rows, qkv, out), ARRIVED, lambda: failed.append(1 / 0)).wait()
    tier.close()


def test_addresses() -> None:
    assert parse_address("10.0.0.7:7300") == ("10.0.0.7", 7300)
    assert parse_address(" [::1]:80") == ("::1", 80)
    for wrong in ("host", "host:", ":80", "host:seven", "host:99999"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            parse_address(wrong)


def test_bytes_that_are_sent_make_room_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty times what may wait to be sent; the peer has answered nothing."""
    monkeypatch.setattr("swiftllm.remote.tier.MAX_QUEUED_BYTES", 64)
    here, there = socket.socketpair()
    channel, posted = Channel(here, "peer"), []

    def post() -> None:
        for number in range(20):
            channel.post(Header(FrameKind.ECHO), torch.zeros(64, dtype=torch.uint8))
            posted.append(number)

    thread = threading.Thread(target=post, daemon=True)
    thread.start()
    thread.join(5.0)
    monkeypatch.undo()  # whoever still waits may end
    channel.close()
    there.close()
    assert len(posted) == 20


def test_layers_of_a_swap_are_taken_from_what_was_fetched_before(host) -> None:
    """Blocks are fetched whole, and swapped a few layers at a time; with the last of these they are dropped."""
    tier, blocks = open_tier(host), torch.tensor([3, 8])
    content = torch.arange(2 * 2 * 2 * 2 * 16 * 32.0).view(2, 2, 2, 2, 16, 32).bfloat16()
    tier.write(BlocksWrite(range(2), content, blocks), ARRIVED)
    tier.fetch(blocks.tolist())
    tier.read(ContextRead(0, blocks, torch.empty_like(THREE_TOKENS))).wait()  # answers come in order
    for layer in range(2):
        assert tier.has_fetched(blocks.tolist())
        sent, out = tier.channel.bytes_sent, torch.empty_like(content[:1])
        tier.read(BlocksRead(range(layer, layer + 1), blocks, out))
        assert torch.equal(out[0], content[layer]) and tier.channel.bytes_sent == sent
    assert not tier._fetched
    tier.close()


def test_a_attention_tasks_computing_ends_with_its_answer_and_begins_no_earlier_than_it_was_asked() -> None:
    """The host says how long it computed; its clock is another."""
    for seconds, computed in ((2.0, 2.0), (50.0, 10.0)):
        future = RemoteFuture(memoryview(b""))
        future.submitted_s -= 10.0
        asked_s = future.submitted_s
        future.answer(seconds)
        times = future.times()
        assert future.wait() == pytest.approx(computed, abs=1.0) == times.done_s - times.start_s
        assert times.start_s == max(asked_s, times.done_s - seconds)


def test_a_host_lends_half_of_its_memory_and_in_anothers_place_all_that_is_needed(monkeypatch) -> None:
    monkeypatch.setattr("swiftllm.remote.host.available_host_bytes", lambda: 10 * GIB)
    host = AttentionHost(("127.0.0.1", 0), SECRET, num_threads=1)
    lent = 10 * GIB - HOST_HEADROOM_BYTES
    assert (host._lendable_bytes(exactly=False), host._lendable_bytes(exactly=True)) == (lent // 2, lent)
    monkeypatch.setattr("swiftllm.remote.host.available_host_bytes", lambda: 1)
    assert host._lendable_bytes(exactly=False) == 0
    host.close()


def test_what_was_fetched_from_a_host_that_is_gone_is_not_its_successors() -> None:
    with host_in_thread() as host:
        tier, blocks = open_tier(host), torch.tensor([3])
        content = torch.ones(2, 1, 2, 2, 16, 32, dtype=torch.bfloat16)
        tier.write(BlocksWrite(range(2), content, blocks), ARRIVED)
        tier.fetch([3])
        tier.read(ContextRead(0, blocks, torch.empty_like(THREE_TOKENS))).wait()  # answers come in order
        assert tier.has_fetched([3])
        tier.channel._connection.shutdown(socket.SHUT_RDWR)
        assert tier.channel.wait_dead(30.0) and tier.take_died()
        end_s = time.monotonic() + 30.0
        while not tier.take_returned():
            assert time.monotonic() < end_s
            time.sleep(0.001)
        tier.write(BlocksWrite(range(2), 2 * content, blocks), ARRIVED)
        found = torch.empty_like(content)
        tier.read(BlocksRead(range(2), blocks, found)).wait()
        assert torch.equal(found, 2 * content)
        tier.close()
