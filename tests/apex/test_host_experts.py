"""Experts in host memory: the tokens of transformers, whether the CPU computes them or they are copied to the GPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from quantise import write_folder

import apex.build
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.device import HostDevice
from swiftllm.machine import InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import SLOTS, Place, Placement, with_experts_on_host
from swiftllm.ops.cpu import CodedExperts, CpuOps
from swiftllm.ops.matrices import ExpertByExpert, ExpertWeights, QuantisedMatrix
from swiftllm.runtime.cpu_tier import InlineWorker
from swiftllm.runtime.memory import check_weights, expert_bytes, stage_bytes, weight_bytes
from swiftllm.runtime.torch_backend import TorchBackend, open_torch_backend
from tests.apex.test_end_to_end import VARIANTS, judge, serve
from tests.apex.test_gpt_oss import PROMPTS as GPT_OSS_PROMPTS
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import FakeWorker, Hazard
from tests.reference.tiny_experts import KINDS, make_tiny_experts
from tests.reference.tiny_gpt_oss import make_folders
from tests.swiftllm.runtime.test_streams import DRIVES, SYSTEMS, make_engine, outputs, prompts
from tests.swiftllm.runtime.test_streams import serve as serve_on_gpu

POOLS = {"num_gpu_blocks": 12, "num_cpu_blocks": 80}
TOKENS = 6
MOST_CPU_ROWS = 5  # so that chunks of prompts are above it, and batches of decodes on both sides
SEVERAL = Placement((Place.RESIDENT, Place.EXPERTS, Place.RESIDENT, Place.EXPERTS, Place.EXPERTS), False, MOST_CPU_ROWS)
CPU_TOO = Placement((Place.CPU, Place.EXPERTS, Place.CPU, Place.EXPERTS, Place.RESIDENT), True, MOST_CPU_ROWS)
ONE = Placement((*[Place.RESIDENT] * 4, Place.EXPERTS), False, MOST_CPU_ROWS)
PLACEMENTS = {"several": SEVERAL, "others on the CPU": CPU_TOO, "one": ONE}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, list, list]]:
    """Folders, prompts, and what transformers makes of them: plain, in 4 bits, and gpt-oss with its biases."""
    root, draw, made = tmp_path_factory.mktemp("experts"), random.Random(7), {}
    some_prompts = [[draw.randrange(3, 128) for _ in range(length)] for length in (1, 17, 60, 40, 3)]
    for name in KINDS:
        folder = make_tiny_experts(root / name, name, num_hidden_layers=4)
        made[name] = folder, some_prompts, judge(folder, some_prompts, TOKENS)
    for layout in ("awq", "dequantised"):
        write_folder(made["Mixtral"][0], root / layout, layout, 32)
    made["in 4 bits"] = root / "awq", some_prompts, judge(root / "dequantised", some_prompts, TOKENS)
    folders = make_folders(root / "gpt-oss")
    for name, judged in (("plain", "plain"), ("packed", "dense")):
        made[f"gpt-oss {name}"] = folders[name], GPT_OSS_PROMPTS, judge(folders[judged], GPT_OSS_PROMPTS, TOKENS)
    return made


@pytest.fixture(autouse=True)
def copies_have_several_chunks(monkeypatch) -> None:
    monkeypatch.setattr("swiftllm.model.stages.CHUNK_BYTES", 10_240)


@contextmanager
def placed(placement: Placement) -> Iterator[list[TorchBackend]]:
    """Engines place their weights so; yields their backends."""
    made: list[TorchBackend] = []
    make = apex.build.make_backend

    def make_placed(config: EngineConfig, make_worker=InlineWorker, **_) -> TorchBackend:
        made.append(make(config, make_worker, placement))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        for module in ("apex.build", "swiftllm.build"):
            patch.setattr(f"{module}.make_backend", make_placed)
        yield made


@pytest.fixture
def computed(monkeypatch) -> list[tuple[int, int]]:
    """Numbers of rows, and of pairs with an expert, that the CPU computes."""
    found: list[tuple[int, int]] = []
    for kind in (CodedExperts, ExpertByExpert):

        def compute(self, x, ids, likelihoods, compute=kind.compute):
            found.append((len(x), int((likelihoods > 0).sum())))
            return compute(self, x, ids, likelihoods)

        monkeypatch.setattr(kind, "compute", compute)
    return found


def test_tokens_are_those_of_transformers_under_every_system(models, computed) -> None:
    """In pools so small that requests are preempted and swapped, with CPU batches under way."""
    names = sorted([*models] * len(VARIANTS))[:: len(models)]
    on_cpu = 0
    for name, variant, placement in zip(names, VARIANTS, [*PLACEMENTS.values()] * len(VARIANTS), strict=False):
        folder, some_prompts, expected = models[name]
        with placed(placement) as made:
            tokens, stats = serve(folder, variant, some_prompts, TOKENS, **POOLS)
        assert tokens == expected, (name, variant)
        on_cpu += stats.cpu_busy_s > 0
        assert made[0].model.weights.host_experts is not None
        assert made[0].model.weights.host_experts.slots.bytes_sent > 0
    assert on_cpu > 4
    assert {rows for rows, _ in computed} >= {1, 2, 3}


@pytest.mark.parametrize("variant", SYSTEMS)
def test_so_they_are_on_a_gpu_with_graphs_swaps_and_cpu_batches(models, computed, variant) -> None:
    some_prompts = prompts((7, 19, 3, 22))
    for name, placement in (("Qwen3Moe", SEVERAL), ("in 4 bits", CPU_TOO), ("gpt-oss packed", SEVERAL)):
        folder = models[name][0]
        expected = serve_on_gpu(make_engine(folder, "swiftllm"), some_prompts)
        computed.clear()
        with placed(placement), fake_gpu(3) as cuda:
            assert serve_on_gpu(make_engine(folder, variant), some_prompts) == expected, name
        assert cuda.replays
        assert computed and (placement is CPU_TOO or max(rows for rows, _ in computed) <= MOST_CPU_ROWS)


def backend(folder: Path, placement: Placement, make_worker=InlineWorker) -> TorchBackend:
    sizes = {"num_gpu_blocks": 20, "num_cpu_blocks": 20, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    config = EngineConfig(str(folder), dtype="float32", max_model_len=64, **sizes)
    return open_torch_backend(config, make_worker, placement=placement)


def test_padding_of_graphs_loads_no_expert(models, computed) -> None:
    """Five rows fill a bucket of eight."""
    with fake_gpu(0) as cuda:
        driver = BackendDriver(backend(models["Qwen3Moe"][0], SEVERAL))
        driver.in_one_go = False
        requests = [driver.admit(str(i), range(3, 8), Tier.GPU, SamplingParams(max_tokens=3)) for i in range(5)]
        driver.prefill(requests)
        computed.clear()
        driver.decode(requests)
    assert cuda.replays and set(computed) == {(5, 5 * 3)}


def test_what_many_rows_need_is_copied_once_however_many_batches_and_pieces(models, monkeypatch) -> None:
    """One after the other the stages are sent, while the one before computes."""
    folder, some_prompts, expected = models["Qwen3Moe"]
    model = ModelConfig.from_folder(folder)
    sizes = expert_bytes(model, torch.float32)
    monkeypatch.setattr("swiftllm.model.llama.FFN_ELEMENTS_AT_ONCE", 20 * model.ffn_width)
    driver = BackendDriver(backend(folder, SEVERAL))
    host_experts = driver.backend.model.weights.host_experts
    assert host_experts is not None
    prompt = some_prompts[3]
    request = driver.admit("0", prompt, Tier.GPU, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    slots, each = host_experts.slots, max(sizes)
    assert slots.bytes_sent == each
    driver.prefill([request])  # one row of it reaches the last stage
    assert slots.bytes_sent == 3 * each
    while request.output_len < TOKENS:
        driver.decode([request])
    assert slots.bytes_sent == 3 * each and tuple(request.output_token_ids) == tuple(expected[3])


def test_a_layer_waits_for_its_rows_once_and_sends_results_once(models, monkeypatch) -> None:
    """Rows and what a router chose cross in one copy."""
    driver, calls = BackendDriver(backend(models["in 4 bits"][0], SEVERAL)), []
    model = driver.backend.model
    attended = torch.randn(3, model.config.num_heads, model.config.head_dim)
    residual, rotary_rows = (
        torch.randn(3, model.config.hidden_size),
        model.rotary_table[torch.zeros(3, dtype=torch.int64)],
    )

    def noted(name: str, do: Callable[..., object]) -> Callable[..., object]:
        return lambda *given: calls.append(name) or do(*given)

    stream = type(HostDevice.compute)
    for name in ("fetch", "mark", "send"):
        monkeypatch.setattr(stream, name, noted(name, getattr(stream, name)))
    with torch.inference_mode():
        for stage in range(3):
            model.stage(stage, attended, residual, rotary_rows)
    assert calls == ["fetch", "mark", "send"] * SEVERAL.places[1:4].count(Place.EXPERTS)


def test_every_wait_is_needed(models) -> None:
    folder = models["in 4 bits"][0]

    def tokens(make_worker=InlineWorker) -> list | None:
        try:
            return outputs(DRIVES["few swaps"](BackendDriver(backend(folder, SEVERAL, make_worker))))
        except (Hazard, ValueError, AttributeError, RuntimeError) as error:
            print(error)
            return None

    expected = tokens()
    with fake_gpu(0, can_capture=False) as cuda:
        assert tokens(partial(FakeWorker, cuda)) == expected
    sites = [site for site in cuda.sites if "WeightSlots." in site or "HostExperts." in site]
    sites = [site for site in sites if "__init__" not in site and "open" not in site]
    assert len(sites) >= 3, cuda.sites

    def is_noticed(site: str) -> bool:
        for seed in range(8):
            with fake_gpu(seed, can_capture=seed % 2 == 0, ignored=site) as cuda:
                if tokens(partial(FakeWorker, cuda)) != expected:
                    return True
        return False

    assert [site for site in sites if not is_noticed(site)] == []


def test_the_device_holds_all_else_and_two_slots_for_experts(models) -> None:
    model = ModelConfig.from_folder(models["in 4 bits"][0])
    stages, experts = stage_bytes(model, torch.float32), expert_bytes(model, torch.float32)
    assert experts[0] == 0 and all(0 < own < stage for own, stage in zip(experts[1:], stages[1:], strict=True))
    needed = weight_bytes(model, torch.float32) - 3 * max(experts) + SLOTS * max(experts)
    check_weights(model, torch.float32, needed, SEVERAL)
    with pytest.raises(InsufficientMemory):
        check_weights(model, torch.float32, needed - 1, SEVERAL)
    assert SEVERAL.host_bytes(stages, experts) == 3 * max(experts)


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ValueError, match="not both"):
        Placement((Place.STREAMED, Place.EXPERTS))
    assert with_experts_on_host(5, 2).places == (Place.RESIDENT, *(Place.RESIDENT, Place.EXPERTS) * 2)
    assert "5 stages: 3 resident, 2 with their experts in host memory (on the CPU up to 0 rows)" in (
        with_experts_on_host(5, 2).describe()
    )
    codes, scales = torch.zeros(16, 2 * 12, dtype=torch.uint8), torch.ones(1, 2 * 12)
    narrow = QuantisedMatrix.from_codes(codes, scales, torch.zeros(1, 2 * 12, dtype=torch.uint8), 16, torch.float32)
    weights = ExpertWeights(torch.zeros(2, 16), narrow, narrow, 1, True)
    with pytest.raises(ValueError, match="outputs in multiples of 8"):
        CpuOps().store_experts(weights, lambda parts: parts)
