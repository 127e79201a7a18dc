"""4-bit models: greedy tokens are those of transformers on the dequantised weights, under every system (float32).

SmolLM2 takes minutes, and runs where APEX_SLOW_TESTS is set.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from quantise import write_folder

from apex.build import build_system
from apex.cli.serve import start_message
from apex.perf.machine_profile import profile_identity
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.files import cache_dir
from swiftllm.runtime.torch_backend import open_torch_backend
from swiftllm.server.engine_process import EngineService
from swiftllm.server.settings import ServerSettings
from tests.apex.test_end_to_end import judge, serve
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_model import make_tiny_llama

SMOLLM2 = cache_dir() / "models" / "SmolLM2-135M-Instruct"
SLOW = pytest.mark.skipif(
    not os.environ.get("APEX_SLOW_TESTS") or not SMOLLM2.exists(),
    reason="APEX_SLOW_TESTS is not set, or there is no SmolLM2: takes minutes",
)
SYSTEMS = ("vllm", "swiftllm", "neo", "fastdecode", "apex")
LAYOUTS = {  # name: layout, symmetric, act-order
    "awq": ("awq", False, False),
    "gptq v1": ("gptq", True, False),
    "gptq v2": ("gptq-v2", False, False),
    "gptq act-order": ("gptq", False, True),
    "compressed-tensors": ("compressed-tensors", True, False),
}
NUM_TOKENS = 32


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def check(source: Path, group_size: int, vocab: tuple[int, int], name: str, folder: Path, **pools: int) -> None:
    layout, symmetric, act_order = LAYOUTS[name]
    write_folder(source, folder / "quantised", layout, group_size, symmetric, act_order)
    write_folder(source, folder / "dequantised", "dequantised", group_size, symmetric, act_order)
    draw = random.Random(5)
    prompts = [[draw.randrange(*vocab) for _ in range(draw.randint(3, 40))] for _ in range(8)]
    expected = judge(folder / "dequantised", prompts, NUM_TOKENS)
    assert len(set(expected)) == len(prompts)
    for system in SYSTEMS:
        tokens, stats = serve(folder / "quantised", system, prompts, NUM_TOKENS, **pools)
        assert tokens == expected, system
        assert (stats.cpu_busy_s > 0) == (system in ("neo", "fastdecode", "apex")), system


@pytest.mark.parametrize("name", LAYOUTS)
def test_tiny_model_equals_transformers(tiny, name, tmp_path) -> None:
    check(tiny, 32, (3, 128), name, tmp_path, block_size=4, num_gpu_blocks=60, num_cpu_blocks=400)


def test_engine_banner_and_profile_tell_of_the_weights(tiny, tmp_path) -> None:
    write_folder(tiny, tmp_path / "awq", "awq", 32)
    seen = {}
    for folder in (tiny, tmp_path / "awq"):
        config = EngineConfig(str(folder), device="cpu", dtype="float32", num_gpu_blocks=20, num_cpu_blocks=20)
        engine = build_system("swiftllm", config)
        client = SimpleNamespace(ready=EngineService(engine).ready(), tokenizer=None)
        banner = start_message(client, ServerSettings(), {})
        seen[folder] = engine.describe()["weights"], profile_identity(config, engine.backend), banner
        engine.close()
    (weights, identity, banner), (ours, our_identity, our_banner) = seen.values()
    assert (weights, ours) == ("float32", "4-bit AWQ, groups of 32")
    assert our_identity == identity | {"weights": ours}
    assert "(float32) on" in banner and "(float32, weights: 4-bit AWQ, groups of 32) on" in our_banner


@pytest.mark.parametrize("name", ["awq", "gptq act-order"])
def test_captured_graphs_change_no_token(tiny, name, tmp_path) -> None:
    """On a made-up GPU, which dequantises in every call; the GPU batch on the CPU multiplies codes."""
    layout, symmetric, act_order = LAYOUTS[name]
    write_folder(tiny, tmp_path / "model", layout, 32, symmetric, act_order)

    def tokens() -> list[list[int]]:
        sizes = {"num_gpu_blocks": 16, "num_cpu_blocks": 16, "max_num_seqs": 4, "max_model_len": 64}
        driver = BackendDriver(open_torch_backend(EngineConfig(str(tmp_path / "model"), dtype="float32", **sizes)))
        sampling = SamplingParams(max_tokens=4, ignore_eos=True)
        requests = [driver.admit(tier.value, list(range(3, 12)), tier, sampling) for tier in Tier]
        driver.prefill(requests, 5)
        for _ in range(3):
            driver.decode(requests)
        return [request.output_token_ids for request in requests]

    expected = tokens()
    with fake_gpu(0) as cuda:
        assert tokens() == expected
    assert cuda.replays


@SLOW
@pytest.mark.parametrize("name", LAYOUTS)
def test_smollm2_equals_transformers(name, tmp_path) -> None:
    check(SMOLLM2, 64, (1000, 40_000), name, tmp_path, num_gpu_blocks=14, num_cpu_blocks=100)
