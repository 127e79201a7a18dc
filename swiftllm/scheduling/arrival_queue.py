"""Requests in order of arrival, the latency-sensitive before the best-effort ones.

All schedulers serve in this order and preempt in the reverse order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from operator import attrgetter

from swiftllm.core.request import Request, ServiceClass

arrival_order = attrgetter("arrival_order")


class ArrivalQueue(list[Request]):
    """A list of requests, sorted by class and arrival."""

    def insert_request(self, request: Request) -> None:
        insort(self, request, key=arrival_order)

    def remove_request(self, request: Request) -> None:
        index = bisect_left(self, request.arrival_order, key=arrival_order)
        assert self[index] is request, f"{request.request_id} is not in this queue"
        del self[index]

    def younger_than(self, request: Request) -> list[Request]:
        return self[bisect_right(self, request.arrival_order, key=arrival_order) :]

    def of_class(self, service_class: ServiceClass, most: int | None = None) -> list[Request]:
        """The requests of one class, in order; of these the first ``most``."""
        if most is None and (not self or self[0].service_class is self[-1].service_class is service_class):
            return self[:]
        start, stop = self._range_of(service_class)
        return self[start : stop if most is None else min(stop, start + most)]

    def num_of_class(self, service_class: ServiceClass) -> int:
        """The number of requests of one class, without a copy of them."""
        start, stop = self._range_of(service_class)
        return stop - start

    def _range_of(self, service_class: ServiceClass) -> tuple[int, int]:
        rank = service_class.rank
        start = bisect_left(self, (rank,), key=arrival_order)
        return start, bisect_left(self, (rank + 1,), start, key=arrival_order)

    def above_class(self, service_class: ServiceClass) -> list[Request]:
        """The requests of more urgent classes, in order."""
        return self[: bisect_left(self, (service_class.rank,), key=arrival_order)] if service_class.rank else []

    def below_class(self, service_class: ServiceClass) -> list[Request]:
        """The requests of less urgent classes, in order."""
        if not self or self[-1].arrival_order[0] <= service_class.rank:  # the usual case: there are none
            return []
        return self[bisect_left(self, (service_class.rank + 1,), key=arrival_order) :]
