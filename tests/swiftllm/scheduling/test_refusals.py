"""What a refused request is told it could change: its prompt, or the tokens it asks for."""

from __future__ import annotations

import pytest

from swiftllm.core.request import Request, RequestRefused, SamplingParams, Tier
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.scheduling.validation import RequestLimits

MAX_MODEL_LEN, BLOCKS, BLOCK_SIZE = 40, 5, 4


def check(prompt_len: int, max_tokens: int) -> None:
    request = Request("a", (2,) * prompt_len, SamplingParams(max_tokens=max_tokens))
    tiers = {request.service_class: (Tier.GPU, Tier.CPU)}
    RequestLimits(50, MAX_MODEL_LEN, LayerGroups(BLOCK_SIZE), {Tier.GPU: BLOCKS, Tier.CPU: 0}, tiers).check(request)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "about"),
    [
        (0, 1, "prompt"),
        (39, 2, "max_tokens"),
        (40, 1, "prompt"),
        (41, 1, "prompt"),
        (20, 2, "max_tokens"),
        (1, 21, "max_tokens"),
        (21, 1, "prompt"),
    ],
)
def test_a_refusal_says_what_of_the_request_is_too_long(prompt_len: int, max_tokens: int, about: str) -> None:
    with pytest.raises(RequestRefused) as refusal:
        check(prompt_len, max_tokens)
    assert refusal.value.about == about


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(20, 1), (1, 20)])
def test_what_just_fits_is_taken(prompt_len: int, max_tokens: int) -> None:
    check(prompt_len, max_tokens)
