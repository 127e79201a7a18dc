"""The mean output, estimated while most requests still run."""

from __future__ import annotations

import numpy as np
import pytest

from apex.schedulers.hybrid import MEMORY, LastRequests, LengthsSeen, seconds_to_the_end


def estimate_at(age: int, outputs: np.ndarray, lengths: LengthsSeen | None = None) -> float:
    """The estimate when requests that began together have this many tokens, or have ended before."""
    lengths = lengths or LengthsSeen()
    for output in outputs[outputs <= age].tolist():
        lengths.add_output(output)
    return lengths.mean_output([age] * int((outputs > age).sum()))


def test_nothing_is_known_at_first() -> None:
    assert LengthsSeen().mean_output([]) == 512
    assert estimate_at(100, np.full(50, 900)) == pytest.approx(512, rel=0.01)
    assert estimate_at(800, np.full(50, 900)) > 1500  # those that outlive all others are expected to double


def test_early_finishers_do_not_stand_for_all() -> None:
    """After 100 tokens, those that have finished are the short ones: their own mean is below 60."""
    outputs = np.round(np.random.default_rng(0).exponential(300, 400)) + 1
    early = outputs[outputs <= 100].mean()
    assert early < 60
    assert estimate_at(100, outputs) == pytest.approx(300, rel=0.35)


@pytest.mark.parametrize("spread", [10, 200])
def test_at_the_end_it_is_the_mean(spread: int) -> None:
    outputs = np.random.default_rng(1).integers(300 - spread, 300 + spread, 400)
    assert estimate_at(1000, outputs) == pytest.approx(outputs.mean(), rel=0.06)


def test_a_change_is_noticed() -> None:
    lengths = LengthsSeen()
    for output in (1000, 50):
        for _ in range(8 * MEMORY):
            lengths.add_output(output)
            lengths.mean_output([])
        assert lengths.mean_output([]) == pytest.approx(output, rel=0.2)


def test_aborted_requests_have_not_ended() -> None:
    """Whoever hangs up after 10 tokens says nothing about where outputs end."""
    lengths = LengthsSeen()
    for _ in range(100):
        lengths.add_output(400)
        lengths.add_output(10, aborted=True)
    assert lengths.mean_output([]) == pytest.approx(400, rel=0.15)


def test_prompts() -> None:
    lengths = LengthsSeen()
    assert lengths.mean_prompt == 0
    for tokens in (10, 30):
        lengths.add_prompt(tokens, 2 * tokens)
    assert lengths.mean_prompt == 20
