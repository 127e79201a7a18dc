"""How many prompt tokens belong to an output token in the long run, estimated from the requests so far.

Early on, those that have finished are the short ones. So unfinished requests count too, by the survival estimate of
statistics: at each length, how many of the requests that got so far ended there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PRIOR_OUTPUT_TOKENS = 512
"""Mean output assumed of requests about which nothing is known."""
ENOUGH_FINISHED = 8
MEMORY = 512
"""Requests after which the older ones count half, so that a change of the workload is noticed."""
EDGES = np.unique(np.concatenate(([0], np.round(1.2 ** np.arange(80))))).astype(float)
"""Output lengths between which requests are taken to end at a constant rate, in tokens."""
WIDTHS = np.diff(EDGES)


class LengthsSeen:
    """Prompt and output lengths of the requests so far. A request's own limit of output tokens tells nothing."""

    def __init__(self) -> None:
        self.num_finished = 0
        self._num_prompts = self._prompt_tokens = 0.0
        intervals = len(EDGES) - 1
        self._ended = np.zeros(intervals)  # requests that ended in each interval of lengths
        self._tokens = np.zeros(intervals)  # output tokens in each interval, of all requests, ended or not
        self._counted = np.zeros(intervals)  # those counted so far, without forgetting
        self._of_gone = np.zeros(intervals)  # those of requests that have finished or were aborted

    def add_prompt(self, tokens: int) -> None:
        self._prompt_tokens += tokens
        self._num_prompts += 1
        if self._num_prompts > MEMORY:
            self._prompt_tokens /= 2
            self._num_prompts /= 2

    def add_output(self, tokens: int, *, aborted: bool = False) -> None:
        """Count a request with an output of ``tokens``, which has finished by itself or was ``aborted``."""
        self._of_gone += _tokens_between_edges(np.array([tokens]))
        if aborted:
            return
        self.num_finished += 1
        self._ended[min(int(EDGES.searchsorted(tokens)), len(self._ended)) - 1] += 1
        if self._ended.sum() > MEMORY:
            self._ended /= 2
            self._tokens /= 2

    @property
    def mean_prompt(self) -> float:
        """Mean prompt of all requests, in tokens."""
        return self._prompt_tokens / self._num_prompts if self._num_prompts else 0.0

    @property
    def is_settled(self) -> bool:
        """Whether enough requests have finished to tell the mean output from them."""
        return self.num_finished >= ENOUGH_FINISHED

    def mean_output(self, unfinished: Sequence[int]) -> float:
        """Expected output of a request in tokens; ``unfinished`` are the outputs so far of those that go on.

        A request that outlives all others so far is expected to double its length, and to reach the prior mean.
        """
        running = np.array(unfinished)
        counted = self._of_gone + _tokens_between_edges(running)
        self._tokens += counted - self._counted
        self._counted = counted
        tokens = np.maximum(self._tokens, self._ended)  # each that ended in an interval had a token there
        seen = np.flatnonzero(tokens > WIDTHS / 2)  # beyond, there is less than half a request
        reached = int(seen[-1]) + 1 if len(seen) else 0
        widths = WIDTHS[:reached]
        exponents = self._ended[:reached] / np.maximum(tokens[:reached], 1e-9) * widths
        alive = np.exp(-np.concatenate(([0.0], np.cumsum(exponents))))
        shares = np.where(exponents > 1e-9, -np.expm1(-exponents) / np.maximum(exponents, 1e-9), 1.0)
        longest = EDGES[reached]
        beyond = max(PRIOR_OUTPUT_TOKENS - longest, longest)
        if reached:  # with hardly anyone left who could go on beyond, the longest output has been seen
            going_on = np.count_nonzero(running > EDGES[reached - 1])
            beyond *= going_on / max(1.0, going_on + self._ended[reached - 1])
        return max(1.0, float((alive[:-1] * widths * shares).sum() + alive[-1] * beyond))


def _tokens_between_edges(lengths: np.ndarray) -> np.ndarray:
    """Of outputs of these lengths together, the tokens in each interval between two edges; float64 [intervals]."""
    ordered = np.sort(lengths)
    sums = np.concatenate(([0.0], np.cumsum(ordered)))
    below = ordered.searchsorted(EDGES)
    up_to = sums[below] + EDGES * (len(ordered) - below)  # the tokens at most as far in as each edge
    return np.diff(up_to)
