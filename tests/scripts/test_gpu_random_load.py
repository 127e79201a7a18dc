"""The random load of a GPU machine: it finds what is wrong, and finds nothing on a CUDA made of Python."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from operator import attrgetter

import pytest
import torch

from swiftllm.core.request import FinishReason, Request, SamplingParams
from swiftllm.engine.engine import Engine
from tests.gpu import random_load
from tests.gpu.judge import Judge, tiny_model
from tests.gpu.tokens import build, make_prompts
from tests.reference.fake_gpu import fake_gpu

HOST = torch.device("cpu")


def finished(engine: Engine, count: int, seed: int) -> list[Request]:
    draw = random.Random(seed)
    requests = [
        engine.add(engine.make_request(str(index), prompt, random_load.random_sampling(draw)))
        for index, prompt in enumerate(make_prompts(count))
    ]
    while engine.has_unfinished():
        engine.step()
    return requests


def test_all_that_requests_ask_for_is_right_on_a_gpu_that_is_late_and_out_of_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swiftllm.runtime.graphs.ROW_BUCKETS", (1, 4, 16))
    with tiny_model() as model, fake_gpu(3), closing(build(model, "apex, overlap", HOST, "float32")) as engine:
        judge, requests = Judge(model), finished(engine, count=8, seed=0)
        for request in requests:
            random_load.check_request(judge, request, "on the fake GPU")
        assert engine.stats().cpu_busy_s > 0
    asked = [request.sampling for request in requests]
    assert any(how.has_penalties for how in asked) and any(how.logprobs is not None for how in asked)
    assert any(how.temperature and how.top_k for how in asked) and any(how.stop_token_ids for how in asked)


def test_the_random_load_finds_what_is_wrong_with_a_request() -> None:
    with tiny_model() as model, closing(build(model, "swiftllm", HOST, "float32")) as engine:
        judge, requests = Judge(model), finished(engine, count=40, seed=0)
        for request in requests:
            random_load.check_request(judge, request, "as it came out")

        def refused(what: str, request: Request, **changes: object) -> None:
            for name, value in changes.items():
                setattr(request, name, value)
            with pytest.raises(AssertionError, match=what):
                random_load.check_request(judge, request, "spoiled")

        def pick(fits: Callable[[SamplingParams], bool], least: int = 6) -> Request:
            return requests.pop(
                next(i for i, r in enumerate(requests) if fits(r.sampling) and len(r.output_token_ids) >= least)
            )

        def other_tokens(request: Request) -> list[int]:
            return [(token + 7) % 128 for token in request.output_token_ids]

        for how, what in (("takes_likeliest", "below the best"), ("has_penalties", "would be right")):
            request = pick(attrgetter(how))
            refused(what, request, output_token_ids=other_tokens(request))
        refused("spoiled", pick(lambda how: how.ignore_eos), finish_reason=FinishReason.STOP)
        request = pick(lambda how: how.logprobs is not None)
        refused("log-probabilities", request, logprobs=request.logprobs[:-1])
        request = pick(lambda how: how.logprobs is not None)
        refused(
            "spoiled", request, logprobs=[replace(entry, logprob=entry.logprob + 0.1) for entry in request.logprobs]
        )
