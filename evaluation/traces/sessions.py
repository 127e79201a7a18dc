"""Conversations: requests of which each begins with what was said before, and all with the same system prompt.

The history of a turn has the simulated outputs of earlier turns, which are all one token (``PLACEHOLDER_TOKEN``). So a
cache finds the blocks that decodes filled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from apex.simulator.backend import PLACEHOLDER_TOKEN
from evaluation.traces.files import Segments, TraceRow

if TYPE_CHECKING:
    from evaluation.traces.catalogue import Distribution, Origin

SYSTEM_TOKEN = 1 << 30
"""The token of system prompts. Those of messages are counted from 1."""


@dataclass(frozen=True)
class SessionTrace:
    """Conversations of ``turns`` turns. Each turn comes ``think_s`` seconds, on average, after the answer before it.

    The first turns come within the first ``think_s`` seconds. ``inputs`` are of a message, in tokens.
    """

    name: str
    title: str
    origin: Origin
    inputs: Distribution
    outputs: Distribution
    system_tokens: int
    turns: int
    think_s: float

    def window(self, num_requests: int, seed: int) -> list[TraceRow]:
        """All turns of the first conversation, then those of the next one; the last conversation may be cut."""
        rng = np.random.default_rng([seed, 3])
        conversations = -(-num_requests // self.turns)
        shape = (conversations, self.turns)
        waits = rng.exponential(self.think_s, shape)
        waits[:, 0] = rng.permutation(np.linspace(0, self.think_s, conversations))
        lengths = []
        for side in (self.inputs, self.outputs):  # one draw from each of equal slices, as in drawn traces
            levels = rng.permutation((np.arange(waits.size) + rng.random(waits.size)) / waits.size)
            lengths.append(np.maximum(1, np.rint(side.at(levels))).astype(int).reshape(shape).tolist())
        rows: list[TraceRow] = []
        for given, out, gaps in zip(*lengths, waits.tolist(), strict=True):
            said: Segments = ((SYSTEM_TOKEN, self.system_tokens),)
            for turn in range(self.turns):
                said = (*said, (1 + len(rows), given[turn]))
                after = len(rows) - 1 if turn else None
                size = sum(count for _, count in said)
                rows.append(TraceRow(size, out[turn], gaps[turn], segments=said, after=after))
                said = (*said, (PLACEHOLDER_TOKEN, out[turn]))
        return rows[:num_requests]

    def sample(self, num_requests: int, seed: int) -> list[TraceRow]:
        """The same requests, each for itself."""
        return [TraceRow(row.input_tokens, row.output_tokens) for row in self.window(num_requests, seed)]


def turns_of(rows: Sequence[TraceRow]) -> list[int]:
    """The turn of each request, from 1."""
    turns: list[int] = []
    for row in rows:
        turns.append(1 if row.after is None else turns[row.after] + 1)
    return turns
