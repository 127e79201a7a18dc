"""`apex doctor --attention-hosts`: the way to each host, and what it could add."""

from __future__ import annotations

import pytest
import torch

from apex.cli import main
from apex.cli.doctor import host_lines
from swiftllm.engine.backend import HostDied
from swiftllm.remote.probe import WayToHost, probe_host
from swiftllm.remote.protocol import connect
from tests.swiftllm.remote.hosts import SECRET, host_in_thread
from tests.swiftllm.remote.test_protocol import open_tier


def test_the_way_to_a_host_that_serves_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    monkeypatch.setattr("swiftllm.remote.probe.TRANSFER_BYTES", 1 << 20)
    monkeypatch.setattr("swiftllm.runtime.cpu_tuning.read_limit_bytes", lambda: 1 << 20)
    with host_in_thread(num_bytes=64 << 20) as host:
        tier = open_tier(host)  # measuring disturbs it, but needs no blocks
        address = f"127.0.0.1:{host.address[1]}"
        network, about, adds = host_lines(address)
        tier.close()
    assert network[0] == f"{address}, network" and "Gb/s back" in network[1]
    assert "1 threads read" in about[1] and "GB/s" in about[1]
    # What the host lends, not what its machine has: 64 MiB, 128 KiB a token.
    assert adds[1].startswith("0.1 GiB of KV cache, 512 tokens") and adds[1].endswith(("the network", "its memory"))


def test_hosts_that_cannot_be_used_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APEX_HOST_SECRET", "wrong")
    with host_in_thread() as host:
        lines = list(host_lines(f"127.0.0.1:{host.address[1]},nonsense,127.0.0.1:9"))
    assert [status for _, _, status in lines] == ["note"] * 3
    assert (
        "secrets differ" in lines[0][1] and "HOST:PORT" in lines[1][1] and "start `apex attention-host`" in lines[2][1]
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--memory-gib", "1e6"], "exceeds the"),
        (["--listen", "127.0.0.1:PORT"], "another program listens there"),
        (["--listen", "1.2.3.4:0"], "this machine has no such address"),
        (["--listen", "nobody.invalid:0"], "--listen nobody.invalid:0: "),
    ],
)
def test_a_host_that_cannot_start_says_why(capsys, monkeypatch, flags: list[str], message: str) -> None:
    monkeypatch.setenv("APEX_HOST_SECRET", SECRET.decode())
    with host_in_thread() as host:
        port = str(host.address[1])
        assert main(["attention-host", *[flag.replace("PORT", port) for flag in flags]]) == 2
    assert message in capsys.readouterr().err


def test_a_probe_may_not_touch_blocks() -> None:
    from swiftllm.remote.protocol import FrameKind, Header
    from swiftllm.remote.tier import Channel

    with host_in_thread() as host:
        channel = Channel(connect(host.address, SECRET, {})[0], "host")
        with pytest.raises(RuntimeError, match="may only measure"):
            channel.ask(Header(FrameKind.GET, b=1), torch.zeros(1), out=torch.zeros(1)).wait()
        channel.close()
        host.close()
    with pytest.raises((OSError, HostDied)):
        probe_host(host.address, SECRET)


def test_the_bound_is_the_slower_of_network_and_memory() -> None:
    way = WayToHost(1e-4, to_host=1e9, from_host=5e8, host={"read_bytes_per_s": 2e9})
    assert way.rows_per_s(1000, 500, 2000) == (pytest.approx(5e5), True)
    assert way.rows_per_s(1000, 500, 8000) == (pytest.approx(2.5e5), False)
