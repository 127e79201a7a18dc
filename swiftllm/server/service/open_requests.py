"""The open requests (accepted, not finished), and the orders of other threads to the engine's thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swiftllm.core.request import Request
from swiftllm.server.service.snapshot import Health


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request and its number in messages. ``deadline_s`` is a time of the service's clock."""

    request: Request
    number: int
    deadline_s: float | None
    num_delivered: int = 0

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and self.deadline_s <= now_s


class ResetOrder:
    """The order to forget all cached prefixes."""


Order = OpenRequest | str | ResetOrder
"""A new request for the engine, the id of one to abort, or a reset of the prefix cache."""


class OpenRequests:
    """Shared by all threads. Hold ``lock`` around any read that a write depends on."""

    def __init__(self, on_health: Callable[[Health], None], clock: Callable[[], float]) -> None:
        """``on_health`` is called with each new health. ``ordered_s``: since when, by ``clock``, an order waits for the
        engine's thread; None if there is none."""
        self.lock = threading.Condition(threading.RLock())
        self.entries: dict[str, OpenRequest] = {}
        self.health = Health()
        self.finished: Counter[str] = Counter()
        self.ordered_s: float | None = None
        self._clock = clock
        self._on_health = on_health
        self._ids: dict[int, str] = {}
        self._orders: list[Order] = []
        self._ended: list[tuple[Request, str]] = []
        self._is_closed = False

    # -- from any thread --------------------------------------------------------------------------------------------

    def add(self, entries: Sequence[OpenRequest]) -> bool:
        """Order the engine to queue these requests; False if it has failed for good."""
        with self.lock:
            if self.health.status == "failed":
                return False
            for entry in entries:
                request_id = entry.request.request_id
                self.entries[request_id], self._ids[entry.number] = entry, request_id
            self._order(entries)
            return True

    def _order(self, orders: Iterable[Order]) -> None:
        with self.lock:
            self._orders += orders
            if self._orders and self.ordered_s is None:
                self.ordered_s = self._clock()
            self.lock.notify_all()

    def numbered(self, number: int) -> OpenRequest | None:
        """The open request of this number, if it is still open."""
        return self.entries.get(self._ids.get(number, ""))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Order these requests aborted; unknown and finished ones are ignored."""
        self._order(request_ids)

    def reset_prefix_cache(self) -> None:
        """Order the prefix cache emptied, before the requests that are added later."""
        self._order([ResetOrder()])

    def set_health(self, old_status: str, health: Health) -> None:
        """Change the health if its status is still ``old_status``."""
        if self.health.status == old_status:
            with self.lock:
                if self.health.status == old_status:
                    self.health = health
                    self._on_health(health)

    def end_request(self, entry: OpenRequest, reason: str) -> bool:
        """Remove an entry; False if another thread has. The caller holds the lock until it has sent what is new."""
        with self.lock:
            request_id = entry.request.request_id
            if self.entries.get(request_id) is not entry:
                return False
            del self.entries[request_id], self._ids[entry.number]
            self.finished[reason] += 1
            self._ended.append((entry.request, reason))
            return True

    def close(self) -> None:
        """End the engine's thread once all orders and other work are done."""
        with self.lock:
            self._is_closed = True
            self.lock.notify_all()

    # -- from the engine's thread -----------------------------------------------------------------------------------

    def wait_for_orders(self, has_work: Callable[[], bool]) -> list[Order] | None:
        """The orders since the last call. Blocks while there are none and ``has_work`` is false.

        Returns None after :meth:`close`, once no orders and no work are left.
        """
        with self.lock:
            self.lock.wait_for(lambda: self._orders or self._is_closed or has_work())
            if self._is_closed and not self._orders and not has_work():
                return None
            orders, self._orders, self.ordered_s = self._orders, [], None
            return orders

    def take_ended(self) -> list[tuple[Request, str]]:
        """Requests that have ended since the last call, with their reasons."""
        if not self._ended:
            return []
        with self.lock:
            ended, self._ended = self._ended, []
        return ended
