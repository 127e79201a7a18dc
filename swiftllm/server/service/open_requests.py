"""The open requests (accepted, not finished), and the orders of other threads to the engine's thread."""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swiftllm.core.request import Request, RequestRefused, ServiceClass
from swiftllm.server.service.snapshot import Health
from swiftllm.server.service.token_streams import TokenStream

MAX_RETRY_AFTER_S = 60


class QueueFull(RuntimeError):
    """As many requests of a class as allowed are waiting or running.

    ``retry_after_s`` estimates when there is room, from the rate at which the last ones of the class ended.
    """

    def __init__(
        self, limit: int, retry_after_s: int, service_class: ServiceClass = ServiceClass.LATENCY_SENSITIVE
    ) -> None:
        kind = "best-effort requests" if service_class is ServiceClass.BEST_EFFORT else "requests"
        super().__init__(f"{limit} {kind} are waiting or running and no more are accepted: try again later")
        self.limit = limit
        self.retry_after_s = retry_after_s


class ServiceStopping(RuntimeError):
    """The service accepts no new requests: it stops, or its engine is stalled or has failed. The message says which."""


@dataclass(eq=False, slots=True)
class OpenRequest:
    """A request and its client's stream. ``deadline_s`` is a time of the service's clock."""

    request: Request
    stream: TokenStream
    deadline_s: float | None
    num_delivered: int = 0

    def is_overdue(self, now_s: float) -> bool:
        return self.deadline_s is not None and self.deadline_s <= now_s


class ResetPrefixCache:
    """The order to forget all cached prefixes."""


Order = OpenRequest | str | ResetPrefixCache
"""A new request for the engine, the id of one to abort, or a reset of the prefix cache."""


class OpenRequests:
    """Shared by all threads. Hold ``lock`` around any read that a write depends on."""

    def __init__(self, most_open: Callable[[ServiceClass], int], clock: Callable[[], float]) -> None:
        """``most_open`` is the maximum number of open requests of a class."""
        self.lock = threading.Condition(threading.RLock())
        self.entries: dict[str, OpenRequest] = {}
        self.health = Health()
        self.finished: Counter[str] = Counter()
        self.num_refused = 0
        self._most_open = most_open
        self._num_open: Counter[ServiceClass] = Counter()
        self._clock = clock
        self._orders: list[Order] = []
        self._ended: list[tuple[Request, str]] = []
        self._end_times_s = {service_class: deque[float](maxlen=64) for service_class in ServiceClass}
        self._is_closed = False

    # -- from any thread --------------------------------------------------------------------------------------------

    def add(self, entries: Sequence[OpenRequest]) -> None:
        """Accept all of them or none, and order the engine to queue them.

        Raises:
            ServiceStopping, QueueFull, RequestRefused: see :meth:`EngineService.submit`.
        """
        with self.lock:
            if self.health.status != "ok":
                raise ServiceStopping(self.health.reason)
            ids = [entry.request.request_id for entry in entries]
            taken = next((i for n, i in enumerate(ids) if i in self.entries or i in ids[:n]), None)
            if taken is not None:
                raise RequestRefused(f"request id {taken!r} is already in use; ids must be unique")
            new = Counter(entry.request.service_class for entry in entries)
            for service_class, count in new.items():
                limit = self._most_open(service_class)
                too_many = self._num_open[service_class] + count - limit
                if too_many > 0:
                    raise QueueFull(limit, self._retry_after_s(too_many, service_class), service_class)
            self._num_open += new
            self.entries.update(zip(ids, entries, strict=True))
            self._orders += entries
            self.lock.notify_all()

    def has_open(self, service_class: ServiceClass) -> bool:
        """Whether requests of a class are open."""
        return self._num_open[service_class] > 0

    def _retry_after_s(self, num_requests: int, service_class: ServiceClass) -> int:
        """Seconds that so many requests take to end at the rate of the last of their class; 1 before any has ended."""
        end_times_s = self._end_times_s[service_class]
        if not end_times_s:
            return 1
        elapsed_s = self._clock() - end_times_s[0]
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(num_requests * elapsed_s / len(end_times_s))))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Order these requests aborted; unknown and finished ones are ignored."""
        with self.lock:
            self._orders += request_ids
            self.lock.notify_all()

    def reset_prefix_cache(self) -> None:
        """Order the prefix cache emptied, before the requests that are added later."""
        with self.lock:
            self._orders.append(ResetPrefixCache())
            self.lock.notify_all()

    def set_health(self, old_status: str, health: Health) -> None:
        """Change the health if its status is still ``old_status``."""
        if self.health.status == old_status:
            with self.lock:
                if self.health.status == old_status:
                    self.health = health

    def end_request(self, entry: OpenRequest, reason: str) -> bool:
        """Remove an entry; False if another thread has. The caller holds the lock until it has posted to the stream."""
        with self.lock:
            request_id = entry.request.request_id
            if self.entries.get(request_id) is not entry:
                return False
            del self.entries[request_id]
            self.finished[reason] += 1
            self._ended.append((entry.request, reason))
            self._num_open[entry.request.service_class] -= 1
            self._end_times_s[entry.request.service_class].append(self._clock())
            if not self.entries:
                self.lock.notify_all()
            return True

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Whether all requests have ended within ``timeout_s``."""
        with self.lock:
            return self.lock.wait_for(lambda: not self.entries, timeout_s)

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
            orders, self._orders = self._orders, []
            return orders

    def take_ended(self) -> list[tuple[Request, str]]:
        """Requests that have ended since the last call, with their reasons."""
        if not self._ended:
            return []
        with self.lock:
            ended, self._ended = self._ended, []
        return ended
