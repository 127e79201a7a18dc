"""The queue of CPU decodes that fill the batches of a pipeline: which come next, and how many at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import numpy as np

from swiftllm.core.request import Request

MAX_GUESSES = 6  # interpolations of a search; 3 to 5 suffice where predictions are straight


class CpuDecodes:
    """CPU decodes, oldest first, and their lengths.

    ``tokens`` is int64 ``[len(requests)]``. It is read once: reading the lengths of a thousand requests takes longer
    than most of their uses. ``overdue`` is the request that must be served whatever the model predicts.
    """

    def __init__(self, requests: list[Request], overdue: Request | None = None) -> None:
        self.requests = requests
        self.overdue = overdue
        self.tokens = np.fromiter([request.num_tokens for request in requests], np.int64, len(requests))

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def context_tokens(self) -> int:
        return int(self.tokens.sum())

    def requests_at(self, positions: Sequence[int]) -> list[Request]:
        requests = self.requests
        return [requests[position] for position in positions]


class CpuDecodeQueue:
    """CPU decodes that wait for a place in a batch, oldest first."""

    def __init__(self, decodes: CpuDecodes) -> None:
        self._decodes = decodes
        self._start_with(np.arange(len(decodes)))

    def _start_with(self, positions: np.ndarray) -> None:
        """Restart the queue with the decodes at these positions."""
        self._positions = positions
        self._tokens = self._decodes.tokens[positions]
        self._sums = [0, *self._tokens.cumsum().tolist()]
        self._next = 0

    def __len__(self) -> int:
        return len(self._positions) - self._next

    def context_of_next(self, count: int) -> int:
        """Context of the next ``count`` requests, summed, in tokens."""
        return self._sums[self._next + count] - self._sums[self._next]

    def take_requests(self, count: int) -> list[Request]:
        start, self._next = self._next, self._next + count
        return self._decodes.requests_at(self._positions[start : self._next].tolist())

    def skip_too_long(self, fits: Callable[[int], bool]) -> None:
        """Go on to the next request whose length ``fits``; drop every request no shorter than one that does not fit.

        Only a request shorter than all before it can be the next that fits, so only those are tested.
        """
        tokens = self._tokens[self._next :]
        shortest_so_far = np.minimum.accumulate(tokens)
        shorter = np.flatnonzero(shortest_so_far[1:] < shortest_so_far[:-1]) + 1
        too_long = bisect_left(shorter, True, key=lambda position: fits(tokens.item(position)))
        if too_long == len(shorter):
            self._next += len(tokens)
            return
        first = shorter[too_long]
        rest = np.flatnonzero(tokens[first:] < shortest_so_far[first - 1]) + first
        self._start_with(self._positions[self._next + rest])


def longest_run(seconds: Callable[[int], float], limit_s: float, most: int) -> int:
    """The largest count up to ``most`` for which ``seconds(count) <= limit_s``; ``seconds`` must not decrease.

    Predictions are expensive, and nearly linear in the count. So the search interpolates between the ends of the
    remaining range, and bisects after ``MAX_GUESSES`` attempts.
    """
    if most < 1 or (low_s := seconds(1)) > limit_s:
        return 0
    if most == 1 or (high_s := seconds(most)) <= limit_s:
        return most
    low, high, guesses = 1, most, 0
    while high - low > 1:
        middle = (low + high) // 2
        if guesses < MAX_GUESSES:
            guesses += 1
            crossing = low + int((limit_s - low_s) / (high_s - low_s) * (high - low))
            middle = min(max(crossing, low + 1), high - 1)
        middle_s = seconds(middle)
        if middle_s <= limit_s:
            low, low_s = middle, middle_s
        else:
            high, high_s = middle, middle_s
    return low
