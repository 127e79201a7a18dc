"""How many prompt tokens belong to an output token in the long run, estimated from the requests so far."""

from __future__ import annotations

PRIOR_OUTPUT_TOKENS = 512
"""Mean output assumed, at least, until enough requests have finished."""
ENOUGH_FINISHED = 8
MEMORY = 512
"""Requests after which the older ones count half, so that a change of the workload is noticed."""


class RunningMean:
    """A mean that forgets: beyond ``MEMORY`` values, the sum and the count are halved."""

    def __init__(self) -> None:
        self.count = 0.0
        self._sum = 0.0

    def add(self, value: float) -> None:
        self._sum += value
        self.count += 1
        if self.count > MEMORY:
            self._sum /= 2
            self.count /= 2

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else 0.0


class LengthsSeen:
    """Prompt and output lengths of the requests so far. A request's own limit of output tokens tells nothing."""

    def __init__(self) -> None:
        self.prompts = RunningMean()
        self.outputs = RunningMean()
        self._produced = 0

    def add_prompt(self, tokens: int) -> None:
        self.prompts.add(tokens)

    def add_output(self, tokens: int) -> None:
        """Count a request that has finished by itself with an output of ``tokens``."""
        self.outputs.add(tokens)

    def add_produced(self, tokens: int) -> None:
        """Count output tokens of requests, finished or not."""
        self._produced += tokens

    @property
    def is_settled(self) -> bool:
        """Whether enough requests have finished to tell the mean output from them."""
        return self.outputs.count >= ENOUGH_FINISHED

    def mean_output(self, num_decoding: int) -> float:
        """Expected output tokens of a request. Before enough have finished: twice what the running ones have so far."""
        if self.is_settled:
            return max(1.0, self.outputs.mean)
        started = num_decoding + self.outputs.count
        return max(PRIOR_OUTPUT_TOKENS, 2 * self._produced / started if started else 0.0)

    def prompt_per_output(self, num_decoding: int) -> float:
        """Prompt tokens per output token (rho)."""
        return self.prompts.mean / self.mean_output(num_decoding)
