"""Tokens with and without the prefix cache are the same, of a real model (float32), under every system.

Between any two steps all blocks that are free, and not cached, are poisoned: who reads one gets no tokens.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import pacpu
from apex.build import build_system
from swiftllm.config import EngineConfig
from swiftllm.core.request import Request, SamplingParams, ServiceClass, Tier
from swiftllm.engine.engine import Engine
from tests.apex.test_end_to_end import FOR_BEST_EFFORT, MADE_UP_PROFILE, VARIANTS
from tests.reference.int8_tier import poison_of
from tests.reference.tiny_model import make_tiny_llama

VOCABULARY = range(3, 128)
POOLS = {"ample": (80, 120), "tiny": (12, 24)}  # of 16 tokens
ROUNDS, CLIENTS, TURN = 3, 6, 20


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def sampling_of(client: int) -> SamplingParams:
    """Each pair of clients sends the same prompts and wants other tokens: seeds, penalties, scored prompts."""
    ways = (
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "seed": 2},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"prompt_logprobs": 0},
        {"logprobs": 1},
    )
    return SamplingParams(max_tokens=12, ignore_eos=True, **ways[client])


def poison(engine: Engine) -> None:
    tensors = engine.backend.kv_pools.tensors
    for tier in Tier:
        pool = engine.kv.block_pools[tier]
        tensors[tier][:, torch.tensor(pool._free, dtype=torch.int64)] = poison_of(tensors[tier])


def converse(engine: Engine, classes: bool) -> list[Request]:
    """Rounds of a conversation with some clients, who all begin with the same text; one aborts and asks again."""
    rng, requests = random.Random(4), []
    head = rng.choices(VOCABULARY, k=40)
    texts = [[*head, *rng.choices(VOCABULARY, k=7 * (client // 2))] for client in range(CLIENTS)]
    poison(engine)
    for turn in range(ROUNDS):
        asked = []
        for client, text in enumerate(texts):
            name, urgency = f"{turn}-{client}", list(ServiceClass)[classes and client % 2]
            asked.append(engine.make_request(name, text, sampling_of(client), service_class=urgency))
            if client == 3:
                engine.add(engine.make_request(f"{name}-aborted", text, SamplingParams(max_tokens=30)))
        for request in asked:
            engine.add(request, check_targets=False)
        for step in range(3000):
            if not engine.has_unfinished():
                break
            engine.step()
            if step == 4:
                engine.abort(f"{turn}-3-aborted")
            engine.kv.check_blocks()
            poison(engine)
        assert not engine.has_unfinished(), engine.status()
        texts = [[*r.prompt_token_ids, *r.output_token_ids, *rng.choices(VOCABULARY, k=TURN)] for r in asked]
        requests += asked
    return requests


@pytest.mark.parametrize(("pools", "tiers"), [("ample", "both"), ("tiny", "gpu"), ("tiny", "both")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_without_a_cache(model_dir: Path, variant: str, pools: str, tiers: str) -> None:
    system, strategy, synchronous = VARIANTS[variant]
    num_gpu_blocks, num_cpu_blocks = POOLS[pools]
    outputs, logprobs, stats = {}, {}, None
    for on in (False, True):
        config = EngineConfig(
            str(model_dir),
            device="cpu",
            dtype="float32",
            max_num_batched_tokens=48,
            synchronous=synchronous,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            enable_prefix_caching=on,
            prefix_cache_tiers=tiers,
        )
        engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
        try:
            requests = converse(engine, classes=system in FOR_BEST_EFFORT)
            outputs[on] = [request.output_token_ids for request in requests]
            logprobs[on] = [entry.logprob for request in requests for entry in request.prompt_logprobs]
            stats = engine.stats()
        finally:
            engine.close()
    assert outputs[True] == outputs[False]
    assert logprobs[True] == pytest.approx(logprobs[False], abs=1e-4)
    if tiers == "both" or system != "fastdecode":
        assert sum(stats.prefix_hits.values()) > 0


def take_turns(engine: Engine) -> tuple[list[Request], int]:
    """Agents whose prompts fill most of the GPU tier each; and the most blocks that a plan saves before their reuse."""
    rng, requests, most_saved = random.Random(6), [], 0
    texts = [rng.choices(VOCABULARY, k=120) for _ in range(3)]
    poison(engine)
    for turn in range(3):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        asked = [engine.add(engine.make_request(f"{turn}-{i}", text, sampling)) for i, text in enumerate(texts)]
        for _ in range(3000):
            if not engine.has_unfinished():
                break
            engine.step()
            saved = [
                swap for swap in engine.last_iteration[0].swaps if swap.request is None and swap.source is Tier.GPU
            ]
            most_saved = max(most_saved, sum(len(swap.source_blocks) for swap in saved))
            engine.kv.check_blocks()
            poison(engine)
        assert not engine.has_unfinished(), engine.status()
        texts = [[*r.prompt_token_ids, *r.output_token_ids, *rng.choices(VOCABULARY, k=9)] for r in asked]
        requests += asked
    return requests, most_saved


@pytest.mark.parametrize(
    "variant", ["vllm", "swiftllm", "apex-overlap", "adaptive", "adaptive-free-running-synchronous"]
)
def test_tokens_are_the_same_where_a_prompt_evicts_the_whole_gpu_tier(model_dir: Path, variant: str) -> None:
    """A plan computes 48 tokens at most, three blocks, and copies many more than that. Each turn finds the last one."""
    system, strategy, synchronous = VARIANTS[variant]
    outputs: dict[bool, list[list[int]]] = {}
    for on in (False, True):
        config = EngineConfig(
            str(model_dir),
            device="cpu",
            dtype="float32",
            max_num_batched_tokens=48,
            synchronous=synchronous,
            num_gpu_blocks=13,
            num_cpu_blocks=40,
            enable_prefix_caching=on,
            prefix_cache_tiers="both",
        )
        engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
        try:
            requests, most_saved = take_turns(engine)
        finally:
            engine.close()
        outputs[on] = [request.output_token_ids for request in requests]
    assert outputs[True] == outputs[False]
    assert most_saved > 3
    assert all(request.num_cached_tokens >= 112 for request in requests[3:]), "all but the newest tokens"


@pytest.mark.parametrize("variant", ["apex-overlap", "adaptive", "neo"])
def test_blocks_that_rows_read_together_give_the_same_tokens(model_dir: Path, variant: str) -> None:
    """A further row in a shared block is said to cost next to nothing, so pacpu reads shared blocks once."""
    system, strategy, synchronous = VARIANTS[variant]
    rng, tokens, most_sharers = random.Random(5), {}, 0
    head = rng.choices(VOCABULARY, k=320)
    prompts = [[*head, *rng.choices(VOCABULARY, k=9 * (i + 1))] for i in range(8)]
    measured = pacpu.shared_row_cost("float32", "GQA")
    for cost in (1.0, 1 / 8):
        config = EngineConfig(
            str(model_dir),
            device="cpu",
            dtype="float32",
            synchronous=synchronous,
            num_gpu_blocks=32,
            num_cpu_blocks=200,
            prefix_cache_tiers="both",
        )
        engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
        pacpu.set_shared_row_cost("float32", "GQA", cost)
        try:
            sampling = SamplingParams(max_tokens=24, ignore_eos=True)
            asked = [engine.make_request(str(i), prompt, sampling) for i, prompt in enumerate(prompts)]
            for request in asked:
                engine.add(request)
            while engine.has_unfinished():
                engine.step()
                tables = [engine.kv.block_tables.get(r.request_id) for r in asked if r.tier is Tier.CPU]
                in_cpu_tier = [table[:20] for table in tables if table]
                if in_cpu_tier:
                    most_sharers = max(most_sharers, in_cpu_tier.count(in_cpu_tier[0]))
        finally:
            engine.close()
            pacpu.set_shared_row_cost("float32", "GQA", measured)
        tokens[cost] = [request.output_token_ids for request in asked]
    assert most_sharers >= 4
    assert tokens[1 / 8] == tokens[1.0]
