"""A port kept for a server: nobody else gets it, and the server does."""

import socket

import pytest

from swiftllm.processes import reserved_port


def test_a_reserved_port_is_the_servers_alone() -> None:
    with reserved_port() as port:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port)).close()
            with pytest.raises(OSError):
                reserved_port(port=port).__enter__()
