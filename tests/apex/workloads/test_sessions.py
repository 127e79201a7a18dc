"""Conversations: what a turn shares with those before it, when it comes, and how long it is."""

from __future__ import annotations

import pytest

from apex.simulator.virtual.backend import PLACEHOLDER_TOKEN
from apex.workloads.catalogue import SYSTEM_TOKEN, Origin, Quantiles, SessionTrace, turns_of
from apex.workloads.files import TraceRow

TRACE = SessionTrace(
    "talks", "Talks", Origin("synthetic", "made up"), Quantiles(((0, 10), (1, 50))), Quantiles(((0, 5), (1, 20))),
    system_tokens=100, turns=3, think_s=30.0,
)  # fmt: skip


def test_a_turn_begins_with_all_that_was_said_before_it() -> None:
    """The system prompt, each message and each answer, as one token that stands for the simulated output."""
    first, second, third, other, *_ = rows = TRACE.window(7, seed=0)
    assert len(rows) == 7 and turns_of(rows) == [1, 2, 3, 1, 2, 3, 1]
    assert [row.after for row in rows] == [None, 0, 1, None, 3, 4, None]
    assert first.segments == ((SYSTEM_TOKEN, 100), (1, first.input_tokens - 100))
    for before, row, message in ((first, second, 2), (second, third, 3)):
        *said, (token, count) = row.segments
        assert tuple(said) == (*before.segments, (PLACEHOLDER_TOKEN, before.output_tokens)) and token == message
        assert row.input_tokens == before.input_tokens + before.output_tokens + count
        assert row.prompt[: before.input_tokens] == before.prompt and len(row.prompt) == row.input_tokens
    assert other.segments[0] == first.segments[0] and other.segments[1][0] == 4, "a message of its own"


def test_lengths_and_waits_are_those_asked_for() -> None:
    rows = TRACE.window(600, seed=1)
    messages = [row.segments[-1][1] for row in rows]
    assert min(messages) >= 10 and max(messages) <= 50 and sum(messages) / 600 == pytest.approx(30, rel=0.02)
    assert sum(row.output_tokens for row in rows) / 600 == pytest.approx(12.5, rel=0.02)
    starts = sorted(row.arrival_s for row in rows if row.after is None)
    assert starts == pytest.approx([30.0 * number / 199 for number in range(200)])
    waits = [row.arrival_s for row in rows if row.after is not None]
    assert sum(waits) / len(waits) == pytest.approx(30.0, rel=0.1)
    assert rows == TRACE.window(600, seed=1) != TRACE.window(600, seed=2)
    assert TRACE.sample(600, seed=1) == [TraceRow(row.input_tokens, row.output_tokens) for row in rows]
