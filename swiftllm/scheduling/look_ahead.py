"""What a plan does not know that is made while the iteration before it runs, as vLLM's asynchronous scheduler does."""

from __future__ import annotations

from swiftllm.core.request import Request
from swiftllm.kv.blocks import KVCacheManager


class LookAhead:
    """Requests that arrive or end during an iteration: the plan of the next one begins without knowing it.

    So what arrives starts one iteration later, and what ends keeps its blocks and its seat for one more iteration. An
    idle engine knows all.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._arriving: set[str] = set()  # since the last plan
        self._arrived: set[str] = set()  # since the one before it
        self._ending: list[Request] = []
        self._ended: list[Request] = []

    @property
    def num_seats(self) -> int:
        """Seats of requests that have ended, and are not known to."""
        return len(self._ended)

    def arrives(self, request: Request) -> None:
        """A request is queued while others run."""
        self._arriving.add(request.request_id)

    def ends(self, request: Request) -> None:
        """A request ends; its blocks are freed later."""
        self._ending.append(request)

    def begin_plan(self, *, is_running: bool) -> None:
        """A plan begins; ``is_running``: beside an iteration, since there are running requests."""
        gone, self._ended, self._ending = self._ended, self._ending, []
        self._arrived, self._arriving = self._arriving, set()
        if not is_running:
            gone, self._ended = gone + self._ended, []
            self._arrived.clear()
        for request in gone:
            self._kv.free_blocks(request)

    def knows(self, request: Request) -> bool:
        """Whether the plan being made can start the request."""
        return request.request_id not in self._arrived
