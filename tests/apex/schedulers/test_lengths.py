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


# -- the end of a batch -----------------------------------------------------------------------------------------------


def pace(on_gpu: np.ndarray, on_cpu: np.ndarray, prompt_tokens: np.ndarray, context: float) -> tuple:
    """An iteration takes 10 ms, and 1 ms for each prompt token; a CPU decode gets a token in every second one."""
    assert context == 7.0
    iteration_s = 0.01 + 0.001 * prompt_tokens
    return (on_gpu + on_cpu / 2) / iteration_s, iteration_s


def to_the_end(chunk: float, output: int, gpu_seats: float = 10.0) -> tuple[float, float]:
    last = LastRequests(
        waiting=10,
        decoding=0,
        prompt_tokens=1000.0,
        output_tokens=10.0 * output,
        mean_output=float(output),
        mean_context=7.0,
        gpu_seats=gpu_seats,
    )
    seconds, share = seconds_to_the_end(last, np.array([chunk]), pace)
    return float(seconds[0]), float(share[0])


def test_the_last_to_begin_has_all_of_its_tokens_left() -> None:
    """10 prompts of 100 tokens in one iteration or in ten, and then 100 iterations of 10 ms."""
    assert to_the_end(1000.0, 100) == pytest.approx((1.01 + 1.0, 1.0))
    assert to_the_end(100.0, 100) == pytest.approx((10 * 0.11 + 1.0, 1.0))


def test_where_requests_end_before_all_have_begun_few_are_left() -> None:
    """A hundred iterations of 20 ms, of which a request decodes in four. The last one then needs its 4 tokens."""
    assert to_the_end(10.0, 4) == pytest.approx((100 * 0.02 + 0.04, 0.04))


def test_what_does_not_fit_the_gpu_decodes_at_the_pace_of_the_cpu() -> None:
    assert to_the_end(1000.0, 100, gpu_seats=0.0) == pytest.approx((1.01 + 2.0, 1.0), rel=0.01)
