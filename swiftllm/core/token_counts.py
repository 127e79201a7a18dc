"""Which tokens a request has, for those whose next token depends on it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence


class TokenCounts:
    """The distinct tokens of an output that grows, and how often each is in it; those of ``prompt`` are there from the
    beginning, zero times.

    A token costs one look into a dict, once: penalties are needed at every step, and outputs are long.

    Attributes: ``ids`` (int64) and ``counts`` (float32), side by side in the order in which tokens first came.
    """

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self.ids = array("q", self._places)
        self.counts = array("f", bytes(4 * len(self.ids)))
        self._num_counted = 0

    def catch_up(self, output: Sequence[int]) -> None:
        """Count what has been added to the output since the last time."""
        for token in output[self._num_counted :]:
            place = self._places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(1.0)
            else:
                self.counts[place] += 1.0
        self._num_counted = len(output)
