"""The clients of bench_server_overhead.py: read all streams at once, with the arrival time of every part."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import re
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field

PROMPT_LEN = 16
TIMEOUT_S = 30.0
SO_TIMESTAMPNS = 35  # Linux: arrival times of received data; Python has no name for it
TIMESTAMP = struct.Struct("qq")
EVENT = re.compile(rb"data: (\{.*?\})\n\n")
LAST_EVENT = b"data: [DONE]"


@dataclass
class ClientStream:
    """A connection and the parts read from it, each with the arrival time of its last byte."""

    connection: socket.socket
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    parts: list[bytes] = field(default_factory=list)

    def is_over(self) -> bool:
        return LAST_EVENT in b"".join(self.parts[-2:])

    def read(self) -> bool:
        """Read the available data. Returns False at the end of the stream."""
        part, stamps, _, _ = self.connection.recvmsg(65_536, socket.CMSG_SPACE(TIMESTAMP.size))
        seconds, nanoseconds = TIMESTAMP.unpack(stamps[0][2]) if stamps else (time.time(), 0)  # the end has no stamp
        self.parts.append(part)
        self.times_s.append(seconds + 1e-9 * nanoseconds)
        return bool(part) and not self.is_over()

    def arrivals(self) -> tuple[str, list[float]]:
        """The engine's id of the request, and the arrival time of each token."""
        ends = list(itertools.accumulate(map(len, self.parts)))
        arrived_s: list[float] = []
        name = ""
        for match in EVENT.finditer(b"".join(self.parts)):
            event = json.loads(match[1])
            if event["choices"]:
                name = f"{event['id']}-0"
                new = event["usage"]["completion_tokens"] - len(arrived_s)
                arrived_s += [self.times_s[bisect.bisect_left(ends, match.end())]] * new
        return name, arrived_s


def completion_request(prompt: list[int], output_len: int, **fields: object) -> bytes:
    """A request for a stream of so many tokens. ``fields`` go into its body, too."""
    body = {
        "prompt": prompt, "max_tokens": output_len, "ignore_eos": True, "temperature": 0.0, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True}, **fields,
    }  # fmt: skip
    data = json.dumps(body).encode()
    kind = "Content-Type: application/json"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{kind}\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def stream_all(port: int, num_streams: int, output_len: int) -> list[ClientStream]:
    """Send all requests and read until all streams end. Nothing else runs meanwhile.

    Raises:
        RuntimeError: nothing has arrived for TIMEOUT_S.
    """
    data = completion_request([5] * PROMPT_LEN, output_len)
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as selector:
        streams = []
        for _ in range(num_streams):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            streams.append(ClientStream(connection))
            selector.register(connection, selectors.EVENT_READ, streams[-1])
        for stream in streams:
            stream.sent_s = time.time()
            stream.connection.sendall(data)
        left = num_streams
        while left:
            ready = selector.select(TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"{left} of {num_streams} streams got nothing for {TIMEOUT_S:g} s")
            for key, _ in ready:
                if not key.data.read():
                    selector.unregister(key.fileobj)
                    left -= 1
    return streams
