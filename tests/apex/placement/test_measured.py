"""The placement that an engine finds for its weights, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from quantise import write_folder

from apex.build import build_system
from apex.perf.machine_profile import profile_identity, with_copies
from apex.perf.model import PerfModel
from apex.placement import measured
from apex.placement.measured import WeightsPlan, place_weights
from apex.strategy import StrategyConfig
from swiftllm.config import EngineConfig
from swiftllm.machine import GIB
from swiftllm.model.config import ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.placement import Place, Placement, all_resident
from swiftllm.runtime.memory import embedding_bytes, stage_bytes, weight_bytes
from swiftllm.systems import systems
from tests.apex.placement.placements import give_times
from tests.reference.fake_engine import flat_table
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.wide_residuals import make_wide
from tests.swiftllm.runtime.test_streams import prompts, serve

LAYERS = 5
SIZES = {
    "block_size": 4, "num_gpu_blocks": 16, "num_cpu_blocks": 20, "max_num_batched_tokens": 24, "max_num_seqs": 8,
    "max_model_len": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS)


def config_for(model_dir: Path, stages: float, **options) -> EngineConfig:
    """With GPU memory for so many stages beside what stays there."""
    model = ModelConfig.from_folder(model_dir)
    sizes = stage_bytes(model, torch.float32)
    stays = weight_bytes(model, torch.float32) - sum(sizes) - embedding_bytes(model, torch.float32)
    num_bytes = stays + stages * max(sizes)
    return EngineConfig(str(model_dir), dtype="float32", weights_gpu_memory=num_bytes / GIB, **SIZES, **options)


@pytest.mark.parametrize(
    ("system", "stages"),
    [("neo", 0.0), ("apex", 4.0), ("adaptive", 0.0), ("adaptive", 4.0), *((name, 2.5) for name in systems())],
)
def test_an_engine_with_less_memory_gives_the_same_tokens(model_dir, system, stages):
    config = config_for(model_dir, stages)
    some_prompts, profile = prompts((7, 19, 3, 22)), flat_table(cpu_token_s=2e-6)
    resident = replace(config, weights_gpu_memory=None)
    expected = serve(build_system("swiftllm", resident), some_prompts)
    with fake_gpu(1):
        admits_all = StrategyConfig(disable_admission_control=True)
        engine = build_system(system, config, admits_all, profile=profile)
        placement, description = engine.backend.placement, engine.describe()
        identity = profile_identity(config, engine.backend)
        assert serve(engine, some_prompts) == expected
    sizes = stage_bytes(engine.backend.model_config, torch.float32)
    assert not placement.is_all_resident
    assert placement.gpu_bytes(sizes) <= stages * max(sizes)
    assert description["weights_placement"].startswith(placement.describe())
    assert "ms an iteration" in description["weights_placement"]
    assert identity["weights_placement"] == " ".join(placement.places)


def test_memory_for_all_weights_places_none_elsewhere(model_dir):
    with fake_gpu(0):
        assert place_weights(config_for(model_dir, LAYERS + 1)) == WeightsPlan()
        assert place_weights(EngineConfig(str(model_dir), dtype="float32")) == WeightsPlan()


def test_the_embedding_leaves_the_gpu_before_other_weights_unless_it_is_tied(model_dir, tmp_path, monkeypatch):
    give_times(monkeypatch, gpu=1e-3, cpu=0.1, stream=0.1)
    tied_dir = make_tiny_llama(tmp_path, num_hidden_layers=LAYERS, tie_word_embeddings=True)
    with fake_gpu(0):
        plan, fewer, tied = (
            place_weights(config_for(folder, stages))
            for folder, stages in ((model_dir, LAYERS + 0.05), (model_dir, 3.0), (tied_dir, 3.0))
        )
        assert place_weights(config_for(tied_dir, LAYERS + 0.05)) == WeightsPlan()
    assert plan.placement == replace(all_resident(LAYERS), embedding_on_host=True)
    assert "6 resident; the embedding in host memory; " in plan.describe()
    assert fewer.placement.embedding_on_host and not fewer.placement.is_all_resident
    assert not tied.placement.embedding_on_host


def test_a_slow_cpu_computes_nothing_and_a_slow_link_copies_nothing(model_dir, monkeypatch):
    def choice(**slow: float):
        give_times(monkeypatch, **{"gpu": 1e-3, "cpu": 1e-3, "stream": 1e-3, **slow})
        with fake_gpu(0):
            return place_weights(config_for(model_dir, 3.0)).placement

    assert choice(cpu=100.0).count(Place.CPU) == 0
    assert choice(stream=100.0).count(Place.STREAMED) == 0


def test_4_bit_weights_take_their_packed_bytes_where_the_cpu_computes(model_dir, tmp_path, monkeypatch):
    """A host that holds them packed, and no more, is enough."""
    write_folder(model_dir, tmp_path / "awq", "awq", 32)
    give_times(monkeypatch, gpu=1e-3, cpu=1e-3, stream=100.0)
    config = replace(config_for(tmp_path / "awq", 2.0), max_num_seqs=1)
    sizes = stage_bytes(ModelConfig.from_folder(config.model), torch.float32)
    counts = []
    with fake_gpu(0):
        for free_bytes in (8 * sum(sizes), sum(sizes)):
            monkeypatch.setattr(measured, "available_host_bytes", lambda free=free_bytes: GIB // 2 + free)
            placement = place_weights(config).placement
            counts.append((placement.count(Place.CPU) > 0, placement.count(Place.STREAMED) > 0))
    assert counts == [(True, False)] * 2


def test_rows_of_a_timed_stage_differ_so_that_experts_would_too():
    crossed = []
    config = SimpleNamespace(num_heads=2, head_dim=4, hidden_size=8)
    about = {"config": config, "rotary_table": torch.zeros(1, 2, 4), "residual_dtype": torch.float64}
    model = SimpleNamespace(**about, states=None, stage=lambda *rows, **how: crossed.extend(rows))
    measured._crossing(model, SimpleNamespace(torch_device=torch.device("cpu")), torch.float32, 5)()
    _, attention_out, residual, _ = crossed
    assert len(attention_out.unique(dim=0)) == len(residual.unique(dim=0)) == 5
    assert (attention_out.dtype, residual.dtype) == (torch.float32, torch.float64)


def test_a_stage_is_timed_with_the_residuals_of_the_engine(tmp_path, monkeypatch):
    """In float32 where a checkpoint in bfloat16 runs in float16: their norms read twice the bytes."""
    residuals = []
    stage = LlamaModel.stage
    monkeypatch.setattr(
        LlamaModel,
        "stage",
        lambda model, *given, **how: (residuals.append(given[2].dtype), stage(model, *given, **how))[1],
    )
    wide = make_wide(tmp_path / "wide", 1.0)
    model = ModelConfig.from_folder(wide)
    num_bytes = weight_bytes(model, torch.float16) - 2 * max(stage_bytes(model, torch.float16))
    for name, expected in (("float16", torch.float32), ("bfloat16", torch.bfloat16)):
        residuals.clear()
        with fake_gpu(0, can_capture=False):
            place_weights(EngineConfig(str(wide), dtype=name, weights_gpu_memory=num_bytes / GIB, **SIZES))
        assert residuals and set(residuals) == {expected}


def test_schedulers_know_how_long_copies_take():
    table = flat_table()
    assert with_copies(table, None, 0.0) is table
    placement = Placement((Place.RESIDENT, Place.STREAMED, Place.CPU, Place.STREAMED, Place.STREAMED))
    slow = with_copies(table, placement, 8.0)
    assert slow == replace(table, stream_s=2.0, streamed_layers=3.0)
    model = PerfModel(slow, placement.num_layers)
    assert (model.layer_s(1.5), model.layer_s(2.5)) == (2.0, 2.5)


def test_what_cannot_be_placed_is_refused(model_dir, monkeypatch):
    with pytest.raises(ValueError, match="without a GPU"):
        place_weights(config_for(model_dir, 1.0, device="cpu"))
    with fake_gpu(0):
        with pytest.raises(ValueError, match=r"give at least 0\.01, or take a smaller model"):
            place_weights(replace(config_for(model_dir, 1.0), weights_gpu_memory=0.0))
        monkeypatch.setattr(measured, "available_host_bytes", lambda: GIB // 2 + 1000)
        with pytest.raises(ValueError, match="take 4-bit weights, a host with more memory"):
            place_weights(config_for(model_dir, 1.0))
    with pytest.raises(ValueError, match="from 0 on"):
        EngineConfig("m", weights_gpu_memory=-1.0)
    with pytest.raises(ValueError, match="tensor_parallel do not work together"):
        EngineConfig("m", weights_gpu_memory=1.0, tensor_parallel=2)
