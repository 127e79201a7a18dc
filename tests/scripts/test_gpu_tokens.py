"""The tokens that a GPU machine checks: nothing is wrong on a CUDA made of Python, and faults are found."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from swiftllm.ops.cpu import CpuOps
from tests.gpu import tokens
from tests.reference.fake_gpu import fake_gpu

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompts, the systems and the captured graphs."""
    monkeypatch.setattr("swiftllm.runtime.graphs.ROW_BUCKETS", (1, 4, 16))
    monkeypatch.setattr(tokens, "VARIANTS", {"apex, overlap": tokens.VARIANTS["apex, overlap"]})
    monkeypatch.setattr(tokens, "make_prompts", partial(tokens.make_prompts, 16))
    monkeypatch.setattr(tokens, "MAX_TOKENS", 12)


def test_windows_and_gpt_oss_are_right_on_a_gpu_that_is_late_and_out_of_order() -> None:
    for check in (tokens.check_tokens_windows, tokens.check_tokens_gpt_oss):
        with fake_gpu(3) as cuda:
            check(HOST)
        assert cuda.replays


def test_a_window_off_by_one_and_a_dropped_sink_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = CpuOps.decode_attention

    def wider(*given: object) -> None:
        *rest, window, sinks = given
        attend(*rest, window and window + 1, sinks)

    faults = ((tokens.check_tokens_windows, wider), (tokens.check_tokens_gpt_oss, lambda *given: attend(*given[:-1])))
    for check, fault in faults:
        with monkeypatch.context() as patch, fake_gpu(3):
            patch.setattr(CpuOps, "decode_attention", fault)
            with pytest.raises(AssertionError, match="below the best"):
                check(HOST)
