"""The checks of tokens on a GPU machine, of models with windows and of gpt-oss: on a CPU they find faults alone."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from swiftllm.ops.cpu import CpuOps
from tests.gpu import tokens

HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the prompts and the systems."""
    monkeypatch.setattr(tokens, "VARIANTS", {"apex, overlap": tokens.VARIANTS["apex, overlap"]})
    monkeypatch.setattr(tokens, "make_prompts", partial(tokens.make_prompts, 16))
    monkeypatch.setattr(tokens, "MAX_TOKENS", 12)


def test_a_window_off_by_one_and_a_dropped_sink_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = CpuOps.decode_attention

    def wider(*given: object) -> None:
        *rest, window, sinks = given
        attend(*rest, window and window + 1, sinks)

    faults = ((tokens.check_tokens_windows, wider), (tokens.check_tokens_gpt_oss, lambda *given: attend(*given[:-1])))
    for check, fault in faults:
        check(HOST)
        with monkeypatch.context() as patch:
            patch.setattr(CpuOps, "decode_attention", fault)
            with pytest.raises(AssertionError, match="below the best"):
                check(HOST)
