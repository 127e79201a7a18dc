"""A point that runs out of GPU memory names a pool that fits, and the others go on."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console

from evaluation.measure.live_systems import EngineHere, LiveSystems, advice, explained
from evaluation.study import Study
from swiftllm.config import EngineConfig
from swiftllm.machine import InsufficientMemory
from tests.apex.replay.fake_engine import FakeEngine
from tests.evaluation.papers_machines import live_point
from tests.reference.tiny_model import TINY, make_tiny_llama

MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.17 GiB. GPU 0 has a total capacity of 14.56 GiB of which 300.00 MiB is "
    "free. Including non-PyTorch memory, this process has 14.26 GiB memory in use.\nSee documentation"
)
MISSING = 1.17 * 2**30 - 300 * 2**20
BLOCK = 2 * 3 * 2 * 16 * 16 * 2
"""Bytes of K and V in the tiny model: two of 3 layers, 2 heads, 16 numbers, for 16 tokens in two bytes each."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("model"))


def config(model, num_gpu_blocks: int | None) -> EngineConfig:
    return EngineConfig(str(model), dtype="float16", block_size=16, num_gpu_blocks=num_gpu_blocks)


def test_the_pool_that_fits_is_named(model):
    assert TINY["num_hidden_layers"] == 3 and TINY["hidden_size"] // TINY["num_attention_heads"] == 16
    fewer = int(-(-MISSING // BLOCK))
    text = advice(MESSAGE, config(model, 200_000))
    assert f"beside 200,000 KV blocks; a pool of {200_000 - fewer:,} would fit: " in text
    assert f"--num-gpu-blocks {200_000 - fewer}. CUDA out of memory. Tried to allocate 1.17 GiB." in text
    assert text.endswith("in use."), "the first line of torch's message alone"
    freed = fewer * BLOCK
    assert freed >= MISSING > freed - BLOCK, "not one block too few, and not one too many"


def test_a_message_without_the_free_memory_counts_none_as_free(model):
    text = advice("CUDA out of memory. Tried to allocate 20.00 MiB", config(model, 20_000))
    assert f"a pool of {20_000 - -(-(20 << 20) // BLOCK):,} would fit" in text


@pytest.mark.parametrize("blocks", [100, int(-(-MISSING // BLOCK))])
def test_a_pool_too_small_to_help_is_not_advised(model, blocks):
    text = advice(MESSAGE, config(model, blocks))
    assert f"a smaller pool than {blocks:,} KV blocks does not help: lower --max-num-batched-tokens" in text
    assert "--num-gpu-blocks" not in text


@pytest.mark.parametrize(("message", "blocks"), [("CUDA error: out of memory", 54), (MESSAGE, None), ("", 54)])
def test_without_numbers_the_advice_has_none(model, message, blocks):
    text = advice(message, config(model, blocks))
    assert text.startswith("the GPU's memory did not suffice: give a smaller --num-gpu-blocks. CUDA ")


def test_other_errors_pass(model):
    with pytest.raises(ZeroDivisionError), explained(config(model, 54)):
        raise ZeroDivisionError


@pytest.mark.parametrize("when", ["start", "run"])
def test_the_others_go_on_with_an_engine_of_their_own(model, tmp_path, when):
    """The engine that ran out of memory is closed: it holds the card's memory."""
    built = []

    def factory(system, engine_config):
        if system == "neo" and when == "start":
            raise torch.OutOfMemoryError(MESSAGE)
        engine = FakeEngine()
        if system == "neo":
            engine.step = out_of_memory
        built.append(engine)
        return engine

    def out_of_memory():
        raise torch.OutOfMemoryError(MESSAGE)

    made = [live_point(system, config(model, 200_000)) for system in ("swiftllm", "neo", "apex")]
    console = Console(file=io.StringIO())
    with LiveSystems(tmp_path / "logs", console, lambda: EngineHere(factory)) as live:
        experiment = Study("x", run_point=live.run_point, describe=lambda points: {})
        outcome = experiment.run(made, tmp_path, console=console)
    assert outcome.failed == ["neo"] and [row["system"] for row in outcome.summary] == ["swiftllm", "apex"]
    told = (outcome.folder / "errors" / "neo.txt").read_text()
    assert f"{InsufficientMemory.__name__}: the GPU's memory did not suffice beside 200,000 KV blocks" in told
    assert len(built) == (3 if when == "run" else 2) and all(engine.closed for engine in built)
