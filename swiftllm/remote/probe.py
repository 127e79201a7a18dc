"""Measures the way to an attention host, and what the host could add to an engine."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from swiftllm.remote.host import MEASURED_JSON_BYTES
from swiftllm.remote.protocol import FrameKind, Header, as_bytes, connect
from swiftllm.remote.tier import Channel

ROUND_TRIPS = 100
TRANSFER_BYTES = 32 << 20
TRANSFERS = 3


@dataclass(frozen=True)
class WayToHost:
    """A host and the network between it and this machine. Times are seconds, rates bytes/s.

    Attributes:
        host: what it says of itself: ``cpu``, ``isa``, ``threads`` of attention, ``read_bytes_per_s`` with these, and
            the ``lent_bytes`` for K and V.
    """

    round_trip_s: float
    to_host: float
    from_host: float
    host: dict[str, Any]

    def rows_per_s(self, bytes_out: int, bytes_back: int, context_bytes: int) -> tuple[float, bool]:
        """Rows of one layer's attention that the host could do in a second if the network and its memory take turns
        perfectly, and whether the network is the bound. All arguments are per row."""
        network_s = bytes_out / self.to_host + bytes_back / self.from_host
        memory_s = context_bytes / self.host["read_bytes_per_s"]
        return 1 / max(network_s, memory_s), network_s > memory_s


def probe_host(address: tuple[str, int], secret: bytes) -> WayToHost:
    """Takes about a second on a fast network.

    Raises:
        OSError: the host cannot be reached or refuses.
        swiftllm.engine.backend.HostDied: it went away meanwhile.
    """
    connection, lent = connect(address, secret, {})
    with closing(Channel(connection, f"{address[0]}:{address[1]}")) as channel:

        def echo(num_out: int, num_back: int) -> float:
            """Seconds of a round trip with so many bytes each way."""
            out, back = (torch.zeros(count, dtype=torch.uint8) for count in (num_out, num_back))
            start_s = time.perf_counter()
            channel.ask(Header(FrameKind.ECHO, b=num_back), out, out=back).wait()
            return time.perf_counter() - start_s

        round_trip_s = statistics.median(echo(0, 8) for _ in range(ROUND_TRIPS))
        to_host = TRANSFER_BYTES / min(echo(TRANSFER_BYTES, 8) for _ in range(TRANSFERS))
        from_host = TRANSFER_BYTES / min(echo(0, TRANSFER_BYTES) for _ in range(TRANSFERS))
        answer = torch.zeros(MEASURED_JSON_BYTES, dtype=torch.uint8)
        channel.ask(Header(FrameKind.MEASURE), out=answer).wait()
    return WayToHost(round_trip_s, to_host, from_host, lent | json.loads(bytes(as_bytes(answer))))
