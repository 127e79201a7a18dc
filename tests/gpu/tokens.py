"""Greedy tokens of every strategy on the GPU, against a plain forward pass on the CPU."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from apex.build import build_system
from apex.placement.measured import WeightsPlan
from apex.placement.search import TimedPlacement
from apex.strategy import StrategyConfig
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams
from swiftllm.device import CudaDevice, Device, open_device
from swiftllm.engine.engine import Engine
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import spread
from tests.gpu.judge import CODED, CONFIG, GPT_OSS, LINEAR, SEED, WINDOWS, Judge, tiny_model
from tests.reference.fake_engine import flat_table

# System, strategy, synchronous CPU attention.
VARIANTS = {
    "vllm": ("vllm", "auto", False),
    "swiftllm": ("swiftllm", "auto", False),
    "fastdecode": ("fastdecode", "auto", False),
    "neo": ("neo", "asymmetric-pipelining", False),
    "neo, synchronous": ("neo", "asymmetric-pipelining", True),
    "apex": ("apex", "auto", False),
    "apex, overlap": ("apex", "asynchronous-overlap", False),
    "apex, overlap, synchronous": ("apex", "asynchronous-overlap", True),
    "adaptive": ("adaptive", "auto", False),
}
NUM_PROMPTS = 24
MAX_TOKENS = 24
POOLS = {"block_size": 16, "num_gpu_blocks": 20, "num_cpu_blocks": 300}
# How far below the judge's highest logit a token may lie, in standard deviations of its float32 logits.
NEAR_TIE = 0.02
# As NEAR_TIE, for rounding alone: float32 logits differ by up to 1e-5 from machine to machine, and of a hundred
# thousand tokens some lie that near to the next.
ROUNDING = 1e-4
# As NEAR_TIE, for codes of int8: twice as far as they take tokens of this model on a CPU.
INT8_NEAR_TIE = 0.1


def make_prompts(count: int = NUM_PROMPTS, seed: int = 5) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 128) for _ in range(draw.randint(1, 90))] for _ in range(count)]


def build(model: Path, variant: str, device: torch.device, dtype: str, **more: Any) -> Engine:
    """An engine whose rules see a made-up profile, so that they don't hang on the machine, and pools full of NaN;
    ``more`` of its configuration."""
    system, strategy, synchronous = VARIANTS[variant]
    options = {"max_num_batched_tokens": 48, "gpu_batch_threads": 1, "synchronous": synchronous, **POOLS, **more}
    config = EngineConfig(str(model), device.type, dtype, "dummy", seed=SEED, **options)
    engine = build_system(system, config, StrategyConfig(strategy=strategy), profile=flat_table(cpu_token_s=2e-6))
    for pool in engine.backend.kv_pools.tensors.values():
        pool.fill_(torch.nan if pool.is_floating_point() else 255)
    if (states := engine.backend.model.states) is not None:
        states.recurrent.fill_(torch.nan)
        states.conv.fill_(torch.nan)
    return engine


def generate(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    requests = [engine.add(engine.make_request(str(index), prompt, sampling)) for index, prompt in enumerate(prompts)]
    while engine.has_unfinished():
        engine.step()
    engine.kv.check_blocks()
    return [request.output_token_ids for request in requests]


def check_graphs(device: torch.device) -> None:
    """Where nothing can be captured a backend warns and computes all the same, slower: no other check would tell."""
    with tiny_model() as model, closing(build(model, "swiftllm", device, "float16")) as engine:
        if engine.backend.hardware.can_capture:
            assert len(engine.backend.graphs) > 0, "nothing was captured: the warning says why"


def check_tokens_float32(device: torch.device) -> None:
    """The same tokens under every strategy, each of them the judge's own choice, up to rounding."""
    check_tokens(device, "float32", near_tie=ROUNDING)


def check_tokens_float16(device: torch.device) -> None:
    """Up to near-ties of the judge's logits."""
    check_tokens(device, "float16", near_tie=NEAR_TIE)


def check_streamed_tokens(device: torch.device) -> None:
    """As float32's, with the weights of all stages crossing to the device in every iteration."""
    with tiny_model() as model:
        count = ModelConfig.from_folder(str(model)).num_layers + 1
    streamed = WeightsPlan(TimedPlacement(spread(count, count, 0), 0.0, 0.0, 0.0, 0.0))
    with patch("apex.build.place_weights", lambda *_, **__: streamed):
        check_tokens(device, "float32", near_tie=ROUNDING)


def check_eager_tokens(device: torch.device) -> None:
    """As float32's, with every kernel launched on its own: without graphs."""

    opened: list[Device] = []

    def without_graphs(name: str) -> Device:
        opened.append(CudaDevice(can_capture=False) if name == "cuda" else open_device(name))
        return opened[-1]

    with patch("swiftllm.runtime.torch_backend.open_device", without_graphs):
        check_tokens(device, "float32", near_tie=ROUNDING)
    assert len(opened) == len(VARIANTS) and not any(device.can_capture for device in opened)


def check_tokens_windows(device: torch.device) -> None:
    """As float32's, with attention windows that are shorter than most prompts."""
    for config in WINDOWS.values():
        check_tokens(device, "float32", near_tie=ROUNDING, config=config)


def check_tokens_linear(device: torch.device) -> None:
    """As float32's, with linear attention in three layers of four, whose states are NaN where nobody has written."""
    check_tokens(device, "float32", near_tie=ROUNDING, config=LINEAR)


def check_tokens_gpt_oss(device: torch.device) -> None:
    """As float32's: experts in MXFP4, sinks, and windows of half of the layers."""
    check_tokens(device, "float32", near_tie=ROUNDING, config=GPT_OSS)


def check_tokens_4_bit(device: torch.device) -> None:
    """As float16's, with matrices in 4 bits: the judge multiplies by them written out."""
    check_tokens(device, "float16", near_tie=NEAR_TIE, config=CODED)


def check_tokens_int8(device: torch.device) -> None:
    """As float32's, with a CPU tier of int8, whose codes move the logits."""
    check_tokens(device, "float32", near_tie=INT8_NEAR_TIE, cpu_kv_dtype="int8")


def check_tokens_prefixes(device: torch.device) -> None:
    """As float32's, of prompts that begin with cached tokens, in either tier."""
    beginnings = [prompt * 3 for prompt in make_prompts(3, seed=7)]
    prompts = [[*beginnings[index % 3][:64], *prompt] for index, prompt in enumerate(make_prompts())]
    with tiny_model() as model:
        judge = Judge(model)
        for variant in VARIANTS:
            with closing(build(model, variant, device, "float32", prefix_cache_tiers="both")) as engine:
                check_outputs(judge, beginnings, generate(engine, beginnings), ROUNDING, variant)
                check_outputs(judge, prompts, generate(engine, prompts), ROUNDING, variant)
                if not any(engine.stats().prefix_hits.values()):
                    raise AssertionError(f"{variant}: no prefix was found in the cache, so nothing was checked")


def check_tokens(
    device: torch.device, dtype: str, near_tie: float, config: Mapping[str, Any] = CONFIG, **options: Any
) -> None:
    with tiny_model(config) as model:
        judge, prompts = Judge(model), make_prompts()
        for variant in VARIANTS:
            with closing(build(model, variant, device, dtype, **options)) as engine:
                outputs = generate(engine, prompts)
                if engine.stats().cpu_busy_s == 0 and variant not in ("vllm", "swiftllm"):
                    raise AssertionError(f"{variant}: no attention ran on the CPU, so nothing was checked")
            check_outputs(judge, prompts, outputs, near_tie, f"{variant}, {dtype}")


def check_outputs(
    judge: Judge, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], near_tie: float, where: str
) -> None:
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        below = judge.distance_below_best(prompt, output)
        assert below <= near_tie, f"{where}, prompt {index}: {below:.4f} below the best: {output}"
