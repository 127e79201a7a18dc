"""Models with linear attention in whole engines: greedy tokens are those of transformers (float32)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from apex.build import build_system
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.engine.engine import Engine
from tests.apex.test_architectures import greedy, some_prompts
from tests.apex.test_end_to_end import MADE_UP_PROFILE, VARIANTS
from tests.reference.tiny_linear import KINDS, linear_judge, make_tiny_linear, make_tiny_wrapped

OUT = 9
SMALL = {"block_size": 4, "num_gpu_blocks": 24, "num_cpu_blocks": 60}
EACH = 6
"""Systems and strategies that a model runs under: others than its neighbours."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: make_tiny_linear(tmp_path_factory.mktemp("tiny"), name, eos_token_id=2) for name in KINDS}


def make_engine(folder: Path, variant: str = "vllm", **how: int) -> Engine:
    """An engine whose blocks and states are NaN where nobody has written."""
    system, strategy, synchronous = VARIANTS[variant]
    how = {"max_num_batched_tokens": 48, **SMALL, **how}
    config = EngineConfig(str(folder), device="cpu", dtype="float32", synchronous=synchronous, **how)
    engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
    for tensor in engine.backend.kv_pools.tensors.values():
        tensor.fill_(torch.nan)
    states = engine.backend.model.states
    states.recurrent.fill_(torch.nan)
    states.conv.fill_(torch.nan)
    return engine


def tokens_of(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int = OUT) -> list[tuple[int, ...]]:
    requests = [
        engine.add(engine.make_request(str(i), prompt, SamplingParams(max_tokens))) for i, prompt in enumerate(prompts)
    ]
    finish(engine)
    return [tuple(request.output_token_ids) for request in requests]


def finish(engine: Engine) -> None:
    """Steps until nothing is left; slots never move, and all are free at the end."""
    held: dict[str, int] = {}
    starts: dict[str, int] = {}
    while engine.has_unfinished():
        engine.step()
        engine.kv.state_slots.check()
        now = dict(engine.kv.state_slots.of_request)
        for request_id, slot in now.items():
            request = engine.state.requests[request_id]
            if starts.get(request_id) == request.num_preemptions and request_id in held:
                assert held[request_id] == slot, "a state has moved"
            starts[request_id] = request.num_preemptions
        held = now
    assert not engine.kv.state_slots.of_request
    engine.kv.check_blocks()


def test_tokens_equal_transformers_under_every_system(folders) -> None:
    """In pools so small that requests are preempted and swapped, with CPU batches under way."""
    variants, prompts = cycle(VARIANTS), some_prompts(7)
    on_cpu = preemptions = swapped = 0
    for name, folder in folders.items():
        expected = greedy(linear_judge(folder), prompts, OUT)
        for variant in islice(variants, EACH):
            engine = make_engine(folder, variant, max_num_seqs=5)
            assert tokens_of(engine, prompts) == expected, (name, variant)
            stats = engine.stats()
            on_cpu += stats.cpu_busy_s > 0
            preemptions += stats.preemptions
            swapped += stats.swapped_blocks
            engine.close()
    assert on_cpu > 6 and preemptions > 6 and swapped > 6
