"""Engines of several ranks: other architectures, three ranks, and no thread for CPU attention."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from apex.build import build_system
from apex.perf.profiler import Workbench
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.files import cache_dir
from tests.apex.rank_group import POOLS, TOKENS, Group, run, run_on
from tests.apex.test_end_to_end import (
    FOR_BEST_EFFORT,
    GPU_ONLY,
    MADE_UP_PROFILE,
    VARIANTS,
    judge,
    offloading_iterations,
)
from tests.reference.ranks import fill_with_nan, tell_ranks
from tests.reference.tiny_linear import make_tiny_linear
from tests.reference.tiny_model import make_tiny_llama

SLOW = bool(os.environ.get("APEX_SLOW_TESTS"))
SYSTEMS = [name for name in VARIANTS if not name.endswith("-synchronous")]  # a group of its own each: slow

LINEAR = {
    "Qwen3_5": ["fastdecode", "neo", "adaptive-free-running"],
    "Qwen3_5Moe": ["fastdecode", "apex"],
    "Qwen3Next": ["fastdecode", "apex-overlap", "adaptive-lockstep"],
}
"""Systems with CPU batches that a model with linear attention runs under."""


@pytest.mark.parametrize(
    "kind, variants", [(Qwen2Config, SYSTEMS[::4]), (Qwen3Config, SYSTEMS[2::4])], ids=["qwen2", "qwen3"]
)
def test_other_architectures(tmp_path: Path, kind: type[PretrainedConfig], variants: list[str]) -> None:
    """Biases, and norms of Q and K."""
    group = Group(make_tiny_llama(tmp_path, kind=kind), 2)
    for variant in variants:
        engine = group.engine(variant)
        requests = group.add(engine)
        run(engine)
        group.check(requests)
    group.close()


@pytest.mark.parametrize("kind, variants", LINEAR.items(), ids=LINEAR)
def test_linear_attention(tmp_path: Path, kind: str, variants: list[str]) -> None:
    """With CPU batches and preemption. A rank that is replaced has lost its states."""
    pattern = ["linear_attention", "full_attention"]
    folder = make_tiny_linear(tmp_path, kind, num_hidden_layers=4, layer_types=2 * pattern)
    group, preemptions = Group(folder, 2, num_gpu_blocks=16, num_cpu_blocks=16, max_num_seqs=6), 0
    group.backend.write_blocks(16, lambda *_: None)
    bench = Workbench(group.backend, max_model_len=64)
    with bench.in_use():
        assert bench.decodes(2, 2, 8)() > 0  # raises if logits are NaN, as of states that nobody wrote on either rank
    fill_with_nan(group.backend)
    tell_ranks(group.backend, "fill_with_nan")
    for variant in SYSTEMS if SLOW else variants:
        engine = group.engine(variant)
        requests = group.add(engine)
        run(engine)
        group.check(requests)
        stats = engine.stats()
        assert offloading_iterations(stats) or VARIANTS[variant][0] in (*GPU_ONLY, *FOR_BEST_EFFORT)
        preemptions += stats.preemptions
    assert preemptions
    if kind == "Qwen3_5Moe" or SLOW:
        engine = group.engine("apex-overlap")
        requests = group.add(engine)
        while not any(request.output_len > 1 and request.cpu_batch_id is not None for request in requests):
            engine.step()
        os.kill(group.peers()[0].process.pid, signal.SIGKILL)
        run_on(engine)
        run(engine)
        group.check(requests)
    group.close()


def test_snapshots_of_linear_attention(tmp_path: Path) -> None:
    """Each rank saves and restores the states of its own heads; after a rank was replaced nothing is found."""
    group = Group(make_tiny_linear(tmp_path, "Qwen3_5", num_hidden_layers=4), 2, num_gpu_blocks=60)
    engine = group.engine("vllm")
    for found in (False, True):
        requests = group.add(engine)
        run(engine)
        group.check(requests)
        assert (sum(engine.stats().prefix_hits.values()) > 0) == found
    os.kill(group.peers()[0].process.pid, signal.SIGKILL)
    requests = group.add(engine)
    run_on(engine)
    assert not engine.kv.snapshots.num_used
    run(engine)
    group.check(requests)
    group.close()


@pytest.mark.skipif(not SLOW, reason="set APEX_SLOW_TESTS=1")
def test_three_ranks_and_the_two_that_stay(tmp_path: Path) -> None:
    """Tied embeddings, biases of every matrix; one of two other ranks dies."""
    overrides = {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    group = Group(make_tiny_llama(tmp_path, kind=LlamaConfig, **overrides, **heads), 3)
    for victim in range(2):
        engine = group.engine("apex-overlap")
        requests = group.add(engine)
        for _ in range(5):
            engine.step()
        pids = [peer.process.pid for peer in group.peers()]
        os.kill(pids[victim], signal.SIGKILL)
        run_on(engine)
        run(engine)
        group.check(requests)
        assert [peer.process.pid == pid for peer, pid in zip(group.peers(), pids, strict=True)].count(True) == 1
    group.close()


@pytest.mark.skipif(not SLOW, reason="set APEX_SLOW_TESTS=1")
def test_smollm2_on_three_ranks() -> None:
    """Nine heads on three KV heads."""
    model_dir = cache_dir() / "models" / "SmolLM2-135M-Instruct"
    if not (model_dir / "model.safetensors").is_file():
        pytest.skip(f"{model_dir} is not there: run scripts/prepare_model.py")
    group = Group(model_dir, 3)
    for variant in SYSTEMS:
        engine = group.engine(variant)
        requests = group.add(engine)
        run(engine)
        group.check(requests)
    group.close()


@pytest.mark.skipif(not SLOW, reason="set APEX_SLOW_TESTS=1")
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.endswith("-synchronous")])
def test_without_a_thread_for_cpu_attention(tmp_path: Path, variant: str) -> None:
    model_dir = make_tiny_llama(tmp_path)
    system, strategy, _ = VARIANTS[variant]
    group_config = {"device": "cpu", "dtype": "float32", "tensor_parallel": 2, "synchronous": True, **POOLS}
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 128) for _ in range(30)] for _ in range(9)]
    engine = build_system(system, EngineConfig(str(model_dir), **group_config), strategy, profile=MADE_UP_PROFILE)
    requests = [
        engine.add(engine.make_request(str(i), prompt, SamplingParams(TOKENS))) for i, prompt in enumerate(prompts)
    ]
    run(engine)
    engine.close()
    assert [tuple(request.output_token_ids) for request in requests] == judge(model_dir, prompts, TOKENS)
