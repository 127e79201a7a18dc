"""Every system with a CPU tier of int8: tiny poisoned pools, shared prefixes, aborts, dead workers, several ranks.

Which tokens attend to codes depends on where a request was, so the judge is a margin: each token is the best one of
transformers' float32 logits over the tokens before it, or nearly so.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from apex.build import build_system
from swiftllm.config import EngineConfig
from swiftllm.core.request import FinishReason, Request, SamplingParams, ServiceClass
from swiftllm.engine.backend import WorkerDied
from swiftllm.engine.engine import Engine
from tests.apex.rank_group import Group, run
from tests.apex.test_end_to_end import FOR_BEST_EFFORT, MADE_UP_PROFILE, VARIANTS
from tests.apex.test_prefix_cache import converse, poison
from tests.reference.tiny_model import make_tiny_llama

SYSTEMS = [name for name in VARIANTS if not name.endswith("-synchronous")]
MEAN_BELOW, MOST_BELOW = 0.05, 1.0  # of standard deviations of the logits; a token at random is some 3 below
POOLS = {"num_gpu_blocks": 9, "num_cpu_blocks": 20}  # of 16 tokens


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def engine_of(model_dir: Path, variant: str, **options: object) -> Engine:
    system, strategy, synchronous = VARIANTS[variant]
    config = EngineConfig(
        str(model_dir), device="cpu", dtype="float32", cpu_kv_dtype="int8", max_num_batched_tokens=48,
        synchronous=synchronous, **{**POOLS, **options},
    )  # fmt: skip
    engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
    poison(engine)
    return engine


def below_best(model_dir: Path, requests: Sequence[Request]) -> torch.Tensor:
    """How far each greedy token's logit lies below the highest one."""
    judge, found = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32), []
    for request in requests:
        with torch.inference_mode():
            logits = judge(torch.tensor([request.token_ids(0, request.num_tokens)]), use_cache=False).logits[0]
        logits = logits[request.prompt_len - 1 : -1]
        chosen = logits.gather(1, torch.tensor(request.output_token_ids, dtype=torch.int64)[:, None])[:, 0]
        found.append((logits.max(-1).values - chosen) / logits.std(-1))
    return torch.cat(found)


def check(model_dir: Path, requests: Sequence[Request], what: str) -> None:
    below = below_best(model_dir, requests)
    assert below.mean() < MEAN_BELOW and below.max() < MOST_BELOW, f"{what}: {below.mean()}, {below.max()}"


def run_with_aborts(engine: Engine, seed: int) -> list[Request]:
    """Requests of both classes, some of which are aborted while they wait, prefill or decode in either tier."""
    rng, pool = random.Random(seed), engine.kv.block_pools
    requests = []
    for number in range(16):
        prompt = [rng.randrange(3, 128) for _ in range(rng.randint(1, 60))]
        service_class, sampling = rng.choice(list(ServiceClass)), SamplingParams(24, ignore_eos=True)
        request = engine.make_request(str(number), prompt, sampling, service_class=service_class)
        requests.append(engine.add(request, check_targets=False))
    for step in range(5000):
        if not engine.has_unfinished():
            break
        if step % 7 == 3 and step < 50:
            alive = [request for request in requests if not request.is_finished]
            engine.abort(rng.choice(alive).request_id)
        engine.step()
        poison(engine)
    assert not engine.has_unfinished(), engine.status()
    engine.kv.check_blocks()
    assert all(tier.num_used == 0 for tier in pool.values())
    return requests


def test_every_system_serves_with_tiny_pools_and_aborts(model_dir: Path) -> None:
    moved, ended = 0, []
    for seed, variant in enumerate(SYSTEMS):
        engine = engine_of(model_dir, variant, enable_prefix_caching=False)
        requests = run_with_aborts(engine, seed)
        stats = engine.stats()
        engine.close()
        moved += stats.swapped_blocks + stats.preemptions
        ended += [request.finish_reason for request in requests]
        assert all(r.output_len == 24 for r in requests if r.finish_reason is FinishReason.LENGTH)
        check(model_dir, [request for request in requests if request.output_len], variant)
    assert moved > 100
    assert ended.count(FinishReason.ABORT) > 2 * len(SYSTEMS) < ended.count(FinishReason.LENGTH)


def test_prefixes_are_shared_over_both_tiers(model_dir: Path) -> None:
    """Greedy clients of a conversation; freed blocks are poisoned after each step, cached ones are not."""
    for variant in ("swiftllm", "neo", "apex-overlap", "adaptive", "omniserve"):
        engine = engine_of(model_dir, variant, num_gpu_blocks=12, num_cpu_blocks=40, prefix_cache_tiers="both")
        requests = converse(engine, classes=VARIANTS[variant][0] in FOR_BEST_EFFORT)
        assert sum(engine.stats().prefix_hits.values()) > 0, variant
        engine.close()
        plain = [r for r in requests if r.sampling.temperature == 0.0 and r.sampling.repetition_penalty == 1.0]
        check(model_dir, plain, variant)


def test_a_dead_worker_is_started_again(model_dir: Path) -> None:
    engine = engine_of(model_dir, "apex-overlap", enable_prefix_caching=False)
    sampling = SamplingParams(20, ignore_eos=True)
    requests = [engine.add(engine.make_request(str(i), range(3 + i, 33 + i), sampling)) for i in range(8)]
    deaths = 0
    for step in range(2000):
        if not engine.has_unfinished():
            break
        if step in (6, 17):
            engine.backend.cpu_tier.worker.kill()
        try:
            engine.step()
        except WorkerDied:
            deaths += 1
            for request in engine.recover():
                engine.add(request)
    assert deaths and not engine.has_unfinished()
    assert all(request.output_len == 20 for request in requests)
    assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values())
    engine.close()
    check(model_dir, requests, "after deaths")


def test_two_ranks_have_codes_of_their_own_heads(model_dir: Path) -> None:
    group = Group(model_dir, 2, block_size=16, num_gpu_blocks=8, num_cpu_blocks=40, cpu_kv_dtype="int8")
    try:
        assert group.backend.cpu_kv_bytes_per_block < group.backend.kv_bytes_per_block / 3
        for variant in ("apex-overlap", "swiftllm"):
            engine = group.engine(variant)
            requests = group.add(engine)
            run(engine)
            check(model_dir, requests, variant)
    finally:
        group.close()
