"""Models whose layers have attention windows, in whole engines: greedy tokens are those of transformers (float32)."""

from __future__ import annotations

import random
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, Qwen2Config, Qwen3Config

from apex.build import build_system
from swiftllm.config import EngineConfig
from swiftllm.core.request import FinishReason, SamplingParams, Tier
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.apex.rank_group import Group, run
from tests.apex.test_architectures import greedy, some_prompts
from tests.apex.test_end_to_end import MADE_UP_PROFILE, VARIANTS, serve
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu
from tests.reference.int8_tier import poison_of
from tests.reference.tiny_architectures import tiny_judge
from tests.reference.tiny_model import make_tiny_llama
from tests.swiftllm.remote.test_tokens import MAX_TOKENS, tokens_beside_a_host

WINDOW = 8
ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, dict[str, Any]] = {
    "alternating": {"kind": Qwen3Config, "use_sliding_window": True, "layer_types": ALTERNATING, "head_dim": 16},
    "in halves": {"kind": Qwen2Config, "use_sliding_window": True, "max_window_layers": 2},
    "alike": {"kind": MistralConfig, "head_dim": 16},
}
# Of the windowed group a request holds 3 blocks of 4 tokens, or 2 of 16. The longest request has 16 blocks of 4 in the
# other one: the GPU tier holds one, and the CPU tier two.
POOLS = (
    {"block_size": 4, "num_gpu_blocks": 19, "num_cpu_blocks": 38},
    {"block_size": 16, "num_gpu_blocks": 6, "num_cpu_blocks": 18},
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    more = {"num_hidden_layers": 4, "sliding_window": WINDOW}
    return {name: make_tiny_llama(tmp_path_factory.mktemp("tiny"), **what, **more) for name, what in MODELS.items()}


def test_tokens_equal_transformers_under_every_system(folders) -> None:
    """In pools so small that requests are preempted and swapped, with CPU batches under way; NaN where nobody wrote."""
    variants, pools, prompts = cycle(VARIANTS), cycle(POOLS), some_prompts(10)
    preemptions = on_cpu = swapped = 0
    for name, folder in folders.items():
        expected = greedy(tiny_judge(folder, name), prompts, 12)
        for variant in islice(variants, len(VARIANTS) if name == "alternating" else 4):
            tokens, stats = serve(folder, variant, prompts, 12, **next(pools))
            assert tokens == expected, (name, variant)
            preemptions += stats.preemptions
            swapped += stats.swapped_blocks
            on_cpu += stats.cpu_busy_s > 0
    assert preemptions > 4 and swapped > 30 and on_cpu > 10, (preemptions, swapped, on_cpu)


def test_requests_that_end_early_leave_the_others_alone(folders) -> None:
    """Some are aborted while they wait, prefill or decode; blocks that come free are poisoned after each step."""
    ends = []
    for seed, variant in enumerate(("swiftllm", "neo", "apex-overlap", "adaptive-free-running")):
        system, strategy, _ = VARIANTS[variant]
        config = EngineConfig(
            str(folders["alternating"]), device="cpu", dtype="float32", max_num_batched_tokens=48, **POOLS[0]
        )
        engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
        pools, draw = engine.backend.kv_pools.tensors, random.Random(seed)
        requests = [
            engine.add(engine.make_request(str(number), prompt, SamplingParams(14)))
            for number, prompt in enumerate(some_prompts(12))
        ]
        for step in range(5000):
            if not engine.has_unfinished():
                break
            if step % 5 == 3:
                engine.abort(draw.choice([request for request in requests if not request.is_finished]).request_id)
            engine.step()
            for tier, pool in pools.items():
                free = set(range(pool.shape[1])) - engine.kv.block_pools[tier]._used
                pool[:, sorted(free)] = poison_of(pool)
        engine.kv.check_blocks()
        assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values())
        engine.close()
        expected = greedy(tiny_judge(folders["alternating"], ""), [list(r.prompt_token_ids) for r in requests], 14)
        for request, tokens in zip(requests, expected, strict=True):
            assert tuple(request.output_token_ids) == tokens[: request.output_len], variant
        ends += [request.finish_reason for request in requests]
    assert 8 < ends.count(FinishReason.ABORT) < len(ends) - 8


def test_two_ranks_and_attention_hosts_change_no_token(folders, monkeypatch) -> None:
    group = Group(folders["alternating"], 2)
    for variant in ("apex-overlap", "neo"):
        engine = group.engine(variant)
        requests = group.add(engine)
        run(engine)
        group.check(requests)
    group.close()
    for name in ("alternating", "alike"):
        expected = greedy(tiny_judge(folders[name], name), some_prompts(8), MAX_TOKENS)
        assert tokens_beside_a_host(folders[name], some_prompts(8), monkeypatch, num_cpu_blocks=22) == expected


def test_neither_graphs_nor_swaps_on_a_gpu_change_a_token(folders) -> None:
    """On a made-up GPU: prompts in chunks that are longer and shorter than the window and the ring, for both tiers;
    requests change tiers between tokens."""
    sizes = {"block_size": 4, "num_gpu_blocks": 40, "num_cpu_blocks": 40, "max_num_seqs": 4, "max_model_len": 64}

    def tokens(folder: Path, chunk: int) -> list[list[int]]:
        config = EngineConfig(str(folder), dtype="float32", **sizes)
        driver = BackendDriver(open_torch_backend(config))
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        requests = [driver.admit(tier.value, list(range(3, 36)), tier, sampling) for tier in Tier]
        driver.prefill(requests, chunk)
        for _ in range(3):
            driver.decode(requests)
            driver.move(requests)
            driver.decode(requests)
        return [request.output_token_ids for request in requests]

    for name, folder in folders.items():
        expected = [list(*greedy(tiny_judge(folder, name), [list(range(3, 36))], 7))] * 2
        for chunk in (3, 17, 33) if name == "alternating" else (17,):
            assert tokens(folder, chunk) == expected, (name, chunk)
            with fake_gpu(chunk) as cuda:
                assert tokens(folder, chunk) == expected, (name, chunk)
            assert cuda.replays


def test_a_window_of_one_token_does_not_hide_the_context_of_other_layers(tmp_path: Path) -> None:
    """A chunk that begins with a block attends to itself alone in such a layer, and to all before it in the next one.

    transformers computes without its cache here: that of a window of one token keeps all tokens.
    """
    for types in (ALTERNATING, ALTERNATING[::-1]):
        more = {**MODELS["alternating"], "layer_types": types, "num_hidden_layers": 4}
        folder = make_tiny_llama(tmp_path / types[0], **more, sliding_window=1)
        sizes = {"block_size": 4, "num_gpu_blocks": 40, "num_cpu_blocks": 40}
        driver = BackendDriver(open_torch_backend(EngineConfig(str(folder), device="cpu", dtype="float32", **sizes)))
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        requests = [driver.admit(tier.value, list(range(3, 24)), tier, sampling) for tier in Tier]
        driver.prefill(requests, 4)
        for _ in range(3):
            driver.decode(requests)
        judge = tiny_judge(folder, "")
        judge.generation_config.use_cache = False
        expected = [list(*greedy(judge, [list(range(3, 24))], 4))] * 2
        assert [request.output_token_ids for request in requests] == expected


def test_prefixes_of_windowed_layers_are_not_cached(folders) -> None:
    for name in folders:
        asked = EngineConfig(str(folders[name]), device="cpu", dtype="float32", prefix_cache_tiers="gpu", **POOLS[0])
        with pytest.raises(ValueError, match="prefix_cache_tiers=gpu needs a model that keeps all K and V"):
            build_system("vllm", asked, profile=MADE_UP_PROFILE)
    config = EngineConfig(str(folders["alternating"]), device="cpu", dtype="float32", **POOLS[1])
    engine = build_system("apex", config, profile=MADE_UP_PROFILE)
    assert engine.describe()["prefix_cache"] == []
    assert engine.describe()["kv_cache"][-1] == (
        "Windows: 2 layers of the last 8 (2 blocks), 2 layers of all tokens; a block is of one such group, and no "
        "prefix is cached"
    )
    engine.close()
