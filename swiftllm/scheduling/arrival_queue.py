"""Requests in order of arrival. All schedulers serve in this order and preempt in the reverse order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from operator import attrgetter

from swiftllm.core.request import Request

arrival_order = attrgetter("arrival_index")


class ArrivalQueue(list[Request]):
    """A list of requests, sorted by arrival."""

    def insert_request(self, request: Request) -> None:
        insort(self, request, key=arrival_order)

    def remove_request(self, request: Request) -> None:
        index = bisect_left(self, request.arrival_index, key=arrival_order)
        assert self[index] is request, f"{request.request_id} is not in this queue"
        del self[index]

    def younger_than(self, request: Request) -> list[Request]:
        return self[bisect_right(self, request.arrival_index, key=arrival_order) :]
