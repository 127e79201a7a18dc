"""Attention hosts as Ray actors: one on each of several nodes, and another in the place of one that is gone.

Ray places and replaces the hosts. The data goes over sockets of its own: an actor call takes milliseconds.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from swiftllm.remote.protocol import SECRET_VARIABLE

try:
    import ray
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ModuleNotFoundError as error:
    raise ValueError(
        f"attention hosts on a Ray cluster need the package {error.name}: type `pip install 'apex-llm-serving[ray]'`, "
        "or start `apex attention-host` on each host and name their addresses"
    ) from error

CONNECT_TIMEOUT_S = 5.0  # to the cluster's address; Ray itself tries for minutes
START_TIMEOUT_S = 120.0  # of the first hosts: a node may import torch from a cold disk
REPLACE_TIMEOUT_S = 15.0
CALL_TIMEOUT_S = 3.0


class HostActor:
    """Runs an attention host in its own process; :meth:`address` is the proof that it listens."""

    def __init__(self, secret: bytes) -> None:
        # Ray sets OMP_NUM_THREADS=1 for actors without cores of their own; attention has threads of its own.
        os.environ.pop("OMP_NUM_THREADS", None)
        from swiftllm.remote.host import AttentionHost

        address = ray.util.get_node_ip_address()
        self._host = AttentionHost((address, 0), secret)
        threading.Thread(target=self._host.serve_forever, daemon=True).start()

    def address(self) -> tuple[str, int]:
        return self._host.address


def check_listening(address: str) -> None:
    """Try to reach a cluster, without Ray."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdigit():  # such as auto: Ray knows where its own nodes are
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"no Ray cluster answers at ray_address={address}: {error}; type `ray start --head` on that host, or give "
            "the address that it prints"
        ) from error


class RayHosts:
    """So many attention hosts on the cluster's nodes, each on another node while there are enough.

    Nodes other than this one come first, and of these the ones with fewest of our hosts.

    Attributes:
        secret: what engine and hosts share; $APEX_HOST_SECRET, else made up.
        finders: one function for each host that gives its address, and that places it again if it is gone.
    """

    def __init__(self, address: str, num_hosts: int) -> None:
        """Connect to the cluster at ``address``. Nothing is placed before a finder is called."""
        check_listening(address)
        self.secret = os.environ.get(SECRET_VARIABLE, "").encode() or secrets.token_bytes(32)
        self._actors: dict[int, Any] = {}
        self._nodes: dict[int, str] = {}
        self._lock = threading.Lock()
        self._owns_connection = not ray.is_initialized()
        try:
            if self._owns_connection:
                ray.init(address, log_to_driver=False, logging_level="warning")
        except (ConnectionError, RayError, RuntimeError, ValueError) as error:
            raise ValueError(f"no Ray cluster answers at ray_address={address}: {error}") from error
        self._own_node = ray.get_runtime_context().get_node_id()
        if num_hosts < 1 or not self._other_nodes():
            problem = "must be at least 1" if num_hosts < 1 else "finds no node beside this one in the Ray cluster"
            self.close()
            raise ValueError(
                f"attention_hosts={num_hosts} {problem}: type `ray start --address=...` on another host to add one"
            )
        self.finders: list[Callable[[], tuple[str, int]]] = [partial(self._find, n) for n in range(num_hosts)]

    def _other_nodes(self) -> list[str]:
        alive = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return sorted(node for node in alive if node != self._own_node)

    def _find(self, number: int) -> tuple[str, int]:
        """The address of this host, which is placed if it is new or gone."""
        with self._lock:  # two hosts that are replaced at once must see each other's nodes
            actor = self._actors.get(number)
            if actor is not None:
                try:
                    return tuple(ray.get(actor.address.remote(), timeout=CALL_TIMEOUT_S))
                except (RayError, TimeoutError):
                    ray.kill(actor)
            try:
                timeout_s = START_TIMEOUT_S if actor is None else REPLACE_TIMEOUT_S
                actor = self._place(number)
                found = tuple(ray.get(actor.address.remote(), timeout=timeout_s))
            except (RayError, TimeoutError) as error:
                self._nodes.pop(number, None)
                raise ConnectionError(f"Ray could not start attention host {number + 1}: {error}") from error
            self._actors[number] = actor
            return found

    def _place(self, number: int) -> Any:
        nodes = self._other_nodes()
        if not nodes:
            raise ConnectionError("the Ray cluster has no node beside this one")
        failed = self._nodes.pop(number, None)  # a node that froze still counts as alive for a minute
        taken = list(self._nodes.values())
        node = min(nodes, key=lambda node: (node == failed and len(nodes) > 1, taken.count(node)))
        self._nodes[number] = node
        strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(HostActor).options(num_cpus=0, scheduling_strategy=strategy, max_restarts=0)
        return actor.remote(self.secret)

    def close(self) -> None:
        """End the hosts, and the connection to the cluster if it was made here."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()
        if self._owns_connection:
            ray.shutdown()
