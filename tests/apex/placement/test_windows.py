"""Placed weights of models whose layers have windows: tokens, and the memory that their K and V leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import MistralConfig, Qwen3Config

from apex.build import build_system
from apex.perf.model import Curve
from apex.placement.measured import EngineMemory, MeasuredCosts, StageTimes, place_weights
from apex.placement.search import UniformLoad, estimate_budget
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.model.config import ModelConfig
from tests.apex.placement.test_auto import card_bytes, config_for, memory_of
from tests.reference.fake_engine import flat_table
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_gpt_oss import make_folders
from tests.reference.tiny_model import make_tiny_llama
from tests.swiftllm.runtime.test_streams import prompts, serve

LAYERS, WINDOW = 4, 8
ALTERNATING = ["sliding_attention", "full_attention"] * 2
LONG = UniformLoad(8, 39, 15)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, more = tmp_path_factory.mktemp("windows"), {"num_hidden_layers": LAYERS, "sliding_window": WINDOW}
    half = {"kind": Qwen3Config, "use_sliding_window": True, "layer_types": ALTERNATING, "head_dim": 16}
    return {
        "all": make_tiny_llama(root / "all", kind=MistralConfig, head_dim=16, **more),
        "half": make_tiny_llama(root / "half", **half, **more),
        "gpt-oss": make_folders(root)["packed"],
    }


@pytest.fixture(autouse=True)
def little_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apex.placement.measured.ATTENDED_BYTES", 1 << 18)
    monkeypatch.setattr("swiftllm.runtime.cpu_tuning.read_limit_bytes", lambda: 1 << 20)


def test_an_engine_on_a_small_card_gives_the_same_tokens(folders) -> None:
    """Also with experts in MXFP4, streamed or computed by the CPU."""
    some_prompts = prompts((7, 19, 3, 22))
    for (name, folder), system in zip(folders.items(), ("swiftllm", "neo", "adaptive"), strict=True):
        config = config_for(folder, num_gpu_blocks=20, num_cpu_blocks=24)
        expected = serve(build_system("swiftllm", replace(config, weights_gpu_memory=None)), some_prompts)
        with fake_gpu(1) as cuda:
            cuda.total_bytes = card_bytes(config, 3.0, tokens=80)
            engine = build_system(system, config, profile=flat_table(cpu_token_s=2e-6))
            assert not engine.backend.placement.is_all_resident
            assert serve(engine, some_prompts) == expected, name


def test_a_card_has_room_for_the_blocks_that_windows_need(folders) -> None:
    """Of requests of 54 tokens: 14 blocks of 4 for each of eight without a window, 3 with one of 8."""
    blocks = {"all": 3, "half": 14 + 3, "gpt-oss": 14 + 3}
    for name, each in blocks.items():
        config = config_for(folders[name])
        free = card_bytes(config, LAYERS, tokens=8 * 4 * each, embeds=True)
        assert memory_of(config, free).holds_all(LONG), name
        assert not memory_of(config, free - 8 * 4).holds_all(LONG), name


def test_as_many_requests_are_foreseen_as_have_room_for_their_windows(folders) -> None:
    config = replace(config_for(folders["half"], num_cpu_blocks=0), max_num_seqs=100)
    model = ModelConfig.from_folder(config.model)
    assert LayerGroups.of(model, 4).slots(LONG.context) == LONG.context + 12
    tokens = 3 * (LONG.context + 12)
    memory = memory_of(config, card_bytes(config, LAYERS, tokens, embeds=True))
    curve = Curve((1, 2), (1e-3, 1e-3))
    times = StageTimes(max(memory.stage_bytes), curve, curve, 1e-3, read_bytes_per_s=1.0)
    costs = MeasuredCosts(memory, times, gpu_attention=1e6, cpu_attention=1e6)
    found = estimate_budget(costs, memory.weight_bytes, UniformLoad(100, 39, 15), offloads=False)
    assert found.requests == pytest.approx(3, rel=1e-2)
    assert costs.other_s(3, LONG.context, 3) > costs.kv_bytes_per_token * tokens / 1e6
    assert EngineMemory(config, replace(model, windows=None), torch.float32, 0).kv_bytes_per_token == (
        2 * memory.kv_bytes_per_token
    )
    with fake_gpu(0) as cuda:
        cuda.total_bytes = card_bytes(config, LAYERS, tokens=8 * 4 * 17, embeds=True)
        assert "has room for 8 requests" in place_weights(config, LONG).describe()
