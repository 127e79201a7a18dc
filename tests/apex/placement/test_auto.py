"""The GPU memory that an engine gives to weights by itself."""

from __future__ import annotations

import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apex.build import build_system
from apex.cli.bench import Bench
from apex.cli.options import BestEffortFlags
from apex.cli.simulate import Simulate
from apex.placement import measured
from apex.placement.measured import ASSUMED_INPUT_LEN, ASSUMED_OUTPUT_LEN, EngineMemory, assumed_workload, place_weights
from apex.placement.search import UniformLoad, estimate_budget
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.device import cublas_workspace_bytes
from swiftllm.llm import LLM
from swiftllm.machine import GIB
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import Place, all_resident
from tests.apex.placement.placements import give_times
from tests.reference.fake_engine import flat_table
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_linear import make_tiny_linear
from tests.reference.tiny_model import make_tiny_llama
from tests.swiftllm.runtime.test_streams import prompts, serve

LAYERS = 5
LIMITS = {"block_size": 4, "max_num_batched_tokens": 24, "max_num_seqs": 8, "max_model_len": 64}
FAST_LINK = {"gpu": 1e-3, "cpu": 100.0, "stream": 0.1e-3}
SLOW_LINK = {"gpu": 1e-3, "cpu": 100.0, "stream": 100.0}
LONG = UniformLoad(8, 40, 16)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def little_is_read(monkeypatch):
    monkeypatch.setattr("apex.placement.measured.ATTENDED_BYTES", 1 << 20)
    monkeypatch.setattr("swiftllm.runtime.cpu_tuning.read_limit_bytes", lambda: 1 << 20)


def config_for(model_dir: Path, **options) -> EngineConfig:
    return EngineConfig(str(model_dir), dtype="float32", weights_gpu_memory="auto", **LIMITS, **options)


def memory_of(config: EngineConfig, free_bytes: float = 0) -> EngineMemory:
    return EngineMemory(config, ModelConfig.from_folder(config.model), torch.float32, int(free_bytes))


def card_bytes(config: EngineConfig, stages: float, tokens: float = 0.0, *, embeds: bool = False) -> int:
    """Of a card with room for so many stages beside what stays there, and the KV cache of so many tokens; for the
    embedding too if it ``embeds``."""
    empty = memory_of(config)
    weights = empty.other_bytes + stages * max(empty.stage_bytes) + embeds * empty.embedding_bytes
    free = (weights + tokens * empty.kv_bytes_per_token - empty.usable_bytes) / 0.95 + 2  # the headroom is 5%
    assert memory_of(config, free).usable_bytes == pytest.approx(weights + tokens * empty.kv_bytes_per_token, abs=4)
    return int(free)


@pytest.mark.parametrize("system", ["swiftllm", "vllm", "neo", "adaptive"])
def test_an_engine_on_a_small_card_gives_the_same_tokens(model_dir, system):
    config = config_for(model_dir, num_gpu_blocks=16, num_cpu_blocks=20)
    some_prompts = prompts((7, 19, 3, 22))
    expected = serve(build_system("swiftllm", replace(config, weights_gpu_memory=None)), some_prompts)
    with fake_gpu(1) as cuda:
        cuda.total_bytes = card_bytes(config, 3.0, tokens=64)
        engine = build_system(system, config, profile=flat_table(cpu_token_s=2e-6))
        assert serve(engine, some_prompts) == expected
    sizes = memory_of(config).stage_bytes
    placement, words = engine.backend.placement, engine.describe()["weights_placement"]
    assert not placement.is_all_resident and placement.gpu_bytes(sizes) <= 3.0 * max(sizes)
    assert words.startswith(placement.describe()) and "tokens/s predicted" in words and "auto: " in words
    assert "all on the GPU do not fit" in words


def test_blocks_fill_what_the_weights_leave(model_dir, monkeypatch):
    """Without a number of blocks. The estimate of what an iteration takes is made before anything is loaded."""
    give_times(monkeypatch, **FAST_LINK)
    for module in ("apex.placement.measured", "swiftllm.runtime.memory_estimate"):
        monkeypatch.setattr(f"{module}.CONTEXT_BYTES", 0)  # a fake CUDA has none, and its card is small
    # The estimate knows no card's workspace of cuBLAS, and counts the largest.
    monkeypatch.setattr("swiftllm.runtime.memory_estimate.LARGE_WORKSPACE_BYTES", cublas_workspace_bytes(8))
    config = config_for(model_dir, num_cpu_blocks=0)
    with fake_gpu(1) as cuda:
        cuda.total_bytes = card_bytes(config, 5.0, tokens=64)
        engine = build_system("swiftllm", config, workload=LONG)
    sizes = memory_of(config).stage_bytes
    left = 5.0 * max(sizes) + 64 * memory_of(config).kv_bytes_per_token - engine.backend.placement.gpu_bytes(sizes)
    room = engine.backend.num_gpu_blocks * engine.backend.kv_bytes_per_block
    assert 0.7 < room / left < 1.4


@pytest.mark.parametrize("options", [{}, {"num_gpu_blocks": 20}])
def test_all_stay_on_a_card_with_room_for_all_requests_and_nothing_is_measured(model_dir, monkeypatch, options):
    monkeypatch.setattr(measured, "time_stage", None)
    config, load = config_for(model_dir, **options), UniformLoad(8, 39, 15)
    tokens = 80 if options else 8 * 56  # of whole blocks
    with fake_gpu(0) as cuda:
        cuda.total_bytes = card_bytes(config, LAYERS, tokens, embeds=True)
        plan = place_weights(config, load)
        assert plan.placement is None and "has room for 8 requests of 39 in / 15 out beside them" in plan.describe()
        monkeypatch.undo()
        give_times(monkeypatch, **FAST_LINK)
        cuda.total_bytes = card_bytes(config, LAYERS, tokens - 9, embeds=True)
        assert place_weights(config, load).describe() != plan.describe()


def test_the_cpu_tier_takes_half_of_what_weights_leave_of_the_host(model_dir, monkeypatch):
    """As many bytes are left to the host beside that as an engine leaves at its start."""
    config = config_for(model_dir)
    beside = GIB // 2 + memory_of(config).embedding_bytes
    monkeypatch.setattr("apex.placement.measured.available_host_bytes", lambda: beside + 1000)
    assert memory_of(config).cpu_kv_bytes(200) == 400


def test_weights_make_room_only_where_that_is_faster(model_dir, monkeypatch):
    """All weights fit, and the caches of two requests of eight."""
    config = config_for(model_dir, num_cpu_blocks=0)
    found = {}
    with fake_gpu(0) as cuda:
        cuda.total_bytes = card_bytes(config, LAYERS, tokens=2 * 48)
        for name, times in (("fast", FAST_LINK), ("slow", SLOW_LINK)):
            give_times(monkeypatch, **times)
            found[name] = place_weights(config, LONG, offloads=False)
    assert found["slow"].placement == replace(all_resident(LAYERS), embedding_on_host=True)
    assert found["fast"].placement.count(Place.STREAMED) and "with all on the GPU" in found["fast"].describe()


def test_the_budget_is_the_best_of_all(model_dir, monkeypatch):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    config = config_for(model_dir, num_cpu_blocks=draw.choice((0, 30)))
    seconds = {name: draw.uniform(0.5e-3, 5e-3) for name in ("gpu", "cpu", "stream")}
    calls = []

    def record(*arguments, real=measured.best_budget, **options):
        calls.append((arguments, options))
        return real(*arguments, **options)

    monkeypatch.setattr(measured, "best_budget", record)
    give_times(monkeypatch, **seconds, attention=1e-9)
    with fake_gpu(0) as cuda:
        cuda.total_bytes = card_bytes(config, draw.uniform(2.0, 5.0), tokens=100)
        words = place_weights(config, LONG).describe()
    ((costs, at_once), options), *_ = calls
    rates = []
    for number in range(LAYERS + 2):
        try:
            given = costs.other_bytes + number * max(costs.stage_bytes)
            rates.append(estimate_budget(costs, given, at_once, **options).tokens_per_s)
        except ValueError:
            continue
    assert len(rates) >= 2 and f"{max(rates):,.1f} tokens/s predicted" in words


def test_the_cpu_tier_counts_for_systems_that_use_it(model_dir, monkeypatch):
    give_times(monkeypatch, **FAST_LINK, attention=1e-12)
    config = config_for(model_dir, num_cpu_blocks=200)
    with fake_gpu(0) as cuda:
        cuda.total_bytes = card_bytes(config, LAYERS, tokens=50)
        with_tier, without = (place_weights(config, LONG, offloads=offloads) for offloads in (True, False))
    assert with_tier.placement.is_all_resident  # the CPU tier holds the requests; weights need not make room
    assert without.placement.count(Place.STREAMED) > 0


def test_the_offline_api_places_weights_of_every_system(model_dir):
    """Also of those whose scheduler needs no predictions."""
    config = config_for(model_dir, num_gpu_blocks=16, num_cpu_blocks=20)
    options = {**LIMITS, "num_gpu_blocks": 16, "num_cpu_blocks": 20, "dtype": "float32", "device": "cpu"}
    how = SamplingParams(max_tokens=4, ignore_eos=True)
    prompt = [random.Random(4).randrange(64) for _ in range(9)]
    with closing(LLM(model_dir, **options)) as llm:
        expected = llm.generate(prompt, how)[0].token_ids
    with fake_gpu(0) as cuda:
        cuda.total_bytes = card_bytes(config, 3.0, tokens=64)
        on_gpu = {**options, "device": "auto", "weights_gpu_memory": "auto"}
        with closing(LLM(model_dir, **on_gpu)) as llm:
            assert not llm.engine.backend.placement.is_all_resident
            assert llm.generate(prompt, how)[0].token_ids == expected


def test_snapshots_of_states_take_their_share_of_the_host(tmp_path, monkeypatch):
    """So blocks that do not fit beside them are refused before weights are loaded."""
    folder = make_tiny_linear(tmp_path, "Qwen3_5")
    monkeypatch.setattr(measured, "available_host_bytes", lambda: 2 * GIB)
    config = config_for(folder)
    plain = memory_of(replace(config, enable_prefix_caching=False))
    assert memory_of(config).cpu_kv_bytes(0) == pytest.approx(0.8 * plain.cpu_kv_bytes(0))
    all_blocks = int(plain.host_bytes // plain.cpu_block_bytes)
    for number, fits in ((int(0.79 * all_blocks), True), (int(0.81 * all_blocks), False)):
        asked = replace(config, num_cpu_blocks=number)
        assert memory_of(replace(asked, enable_prefix_caching=False)).cpu_kv_bytes(0) == number * plain.cpu_block_bytes
        if fits:
            assert memory_of(asked).cpu_kv_bytes(0) == number * plain.cpu_block_bytes
            continue
        with pytest.raises(ValueError, match="GiB of KV blocks would be the host's"):
            memory_of(asked).cpu_kv_bytes(0)


def test_lengths_are_those_of_a_benchmark_or_assumed(model_dir):
    rest = BestEffortFlags(best_effort_requests=3, best_effort_input_len=100)
    assert Bench("m", num_requests=1, input_len=20, output_len=8, best_effort=rest).workload() == UniformLoad(4, 80, 8)
    model = replace(ModelConfig.from_folder(model_dir), max_position_embeddings=4096)
    config = config_for(model_dir)
    assert assumed_workload(replace(config, max_model_len=None), model) == UniformLoad(8, 1000, 200, assumed=True)
    assert assumed_workload(replace(config, max_model_len=600), model) == UniformLoad(8, 500, 100, assumed=True)
    assert (Simulate().input_len, Simulate().output_len) == (ASSUMED_INPUT_LEN, ASSUMED_OUTPUT_LEN)


def test_a_model_that_fits_neither_tier_is_refused(model_dir, monkeypatch):
    config = config_for(model_dir)
    empty = memory_of(config)
    whole = sum(empty.stage_bytes)
    give_times(monkeypatch, **FAST_LINK)
    with fake_gpu(0) as cuda:
        cuda.total_bytes = card_bytes(config, 3.0)
        for host_bytes, allowed in ((whole, True), (whole / 3, False)):
            monkeypatch.setattr("apex.placement.measured.available_host_bytes", lambda n=host_bytes: GIB // 2 + int(n))
            if allowed:
                assert place_weights(config, UniformLoad(1, 4, 4)).placement is not None
                continue
            with pytest.raises(ValueError, match=r"of which .* stay on the GPU: it has .* take 4-bit weights, a host"):
                place_weights(config, UniformLoad(1, 4, 4))
    with pytest.raises(ValueError, match="without a GPU"):
        place_weights(replace(config, device="cpu"))
    with pytest.raises(ValueError, match="a number of GiB from 0 on, or auto"):
        EngineConfig("m", weights_gpu_memory="all")
