"""How many requests of each class are open, and how many may be."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable

from swiftllm.core.request import ServiceClass

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


class Places:
    """The places of open requests."""

    def __init__(self, most_open: Callable[[ServiceClass], int], clock: Callable[[], float]) -> None:
        """``most_open`` is the maximum number of open requests of a class."""
        self._most_open = most_open
        self._clock = clock
        self._num_open: Counter[ServiceClass] = Counter()
        self._end_times_s = {service_class: deque[float](maxlen=64) for service_class in ServiceClass}

    def check(self, classes: Iterable[ServiceClass]) -> None:
        """Check that there is a place for each of these requests.

        Raises:
            QueueFull: there are too few.
        """
        for service_class, count in Counter(classes).items():
            limit = self._most_open(service_class)
            too_many = self._num_open[service_class] + count - limit
            if too_many > 0:
                raise QueueFull(limit, self._retry_after_s(too_many, service_class), service_class)

    def take(self, classes: Iterable[ServiceClass]) -> None:
        """Requests have begun; :meth:`check` has let them pass."""
        self._num_open.update(classes)

    def free(self, service_class: ServiceClass) -> None:
        """A request has ended."""
        self._num_open[service_class] -= 1
        self._end_times_s[service_class].append(self._clock())

    def _retry_after_s(self, num_requests: int, service_class: ServiceClass) -> int:
        """Seconds that so many requests take to end at the rate of the last of their class; 1 before any has ended."""
        end_times_s = self._end_times_s[service_class]
        if not end_times_s:
            return 1
        elapsed_s = self._clock() - end_times_s[0]
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(num_requests * elapsed_s / len(end_times_s))))
