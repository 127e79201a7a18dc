"""Ports for servers that are started later, and perhaps by others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def reserved_port(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """The port, or a free one for 0. While it is reserved, the system gives it to nobody who asks for any free port.

    A server that is told the number may listen there, as servers allow an address to be used again.

    Raises:
        socket.gaierror: there is no such host.
        OSError: another program listens there, or this machine has no such address.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as holder:  # which never listens: clients are refused until the server does
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(address)
        yield holder.getsockname()[1]
