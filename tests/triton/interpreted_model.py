"""A two-layer model on interpreted Triton kernels generates what transformers would, as it does on the torch reference.

The judge keeps no cache and knows no tiers, so that a wrong swap shows as well as a wrong kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantise import write_folder
from transformers import LlamaForCausalLM, PreTrainedModel

from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.ops.interface import Ops
from swiftllm.ops.triton.ops import TritonOps
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.tiny_linear import linear_judge, make_tiny_linear
from tests.reference.tiny_model import make_tiny_llama
from tests.triton.interpreter import repair_bfloat16
from tests.triton.memory_check import watch_memory

repair_bfloat16()
watch_memory()

NUM_TOKENS = 5
PROMPT_LENS = (1, 17, 37, 5)
CHUNK = 16
# How far below the highest logit a chosen token's may lie, in standard deviations of the judge's float32 logits. Two
# layers in float16 move logits by some thousandths of that.
NEAR_TIE = {"float32": 0.0, "float16": 0.02}
FEW_HEADS = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny_llama"), num_hidden_layers=2)


@pytest.fixture
def generate(model_folder, monkeypatch) -> Callable[..., list[Request]]:
    """Requests join one by one, in chunks, while the others decode, join and change tiers at random."""

    def run(ops: Ops, dtype: str, model_folder: Path = model_folder, most: int | None = None) -> list[Request]:
        monkeypatch.setattr("swiftllm.runtime.execution_context.select_ops", lambda *_: ops)
        config = EngineConfig(str(model_folder), device="cpu", dtype=dtype, num_gpu_blocks=20, num_cpu_blocks=20)
        driver, rng = BackendDriver(open_torch_backend(config)), random.Random(3)
        if driver.backend.model.states is not None:
            driver.backend.state_slots = {f"r{index}": 7 - 2 * index for index in range(len(PROMPT_LENS))}
        sampling = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        requests: list[Request] = []
        for index, length in enumerate(PROMPT_LENS[:most]):
            prompt = [rng.randrange(3, 128) for _ in range(length)]
            request = driver.admit(f"r{index}", prompt, list(Tier)[index % 2], sampling)
            for start in range(0, length, CHUNK):
                running = [r for r in requests if r.output_len < NUM_TOKENS]
                lane = [GpuBatchItem(r, r.num_tokens - 1, 1, Tier.GPU, False) for r in running if r.tier is Tier.GPU]
                lane.append(GpuBatchItem(request, start, min(CHUNK, length - start), request.tier, True))
                driver.run(lane, [r for r in running if r.tier is Tier.CPU])
            requests.append(request)
        while running := [r for r in requests if r.output_len < NUM_TOKENS]:
            driver.move([r for r in running if rng.random() < 0.5])
            driver.decode(running)
        return requests

    return run


OPS = {
    "reference": Ops(),
    "Triton, tensor cores": TritonOps(torch.device("cpu"), capability=80, num_multiprocessors=16),
    "Triton, no tensor cores": TritonOps(torch.device("cpu"), capability=75, num_multiprocessors=16),
}


@pytest.mark.parametrize(
    "ops, dtype",
    [
        ("reference", "float32"),
        ("Triton, tensor cores", "float16"),
        ("Triton, no tensor cores", "float16"),
    ],
)
@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(generate, model_folder, ops, dtype):
    check(generate(OPS[ops], dtype), model_folder, dtype)


@pytest.mark.parametrize("ops, dtype", [("reference", "float32"), ("Triton, tensor cores", "float16")])
@torch.inference_mode()
def test_so_are_those_of_a_quantised_model(generate, model_folder, tmp_path, ops, dtype):
    """With act-order, so that each product takes its inputs in an order of its own, and Q, K and V stay apart."""
    for layout in ("gptq", "dequantised"):
        write_folder(model_folder, tmp_path / layout, layout, 32, act_order=True)
    check(generate(OPS[ops], dtype, tmp_path / "gptq", most=2), tmp_path / "dequantised", dtype)


@torch.inference_mode()
def test_so_are_those_of_linear_attention(generate, tmp_path):
    folder = make_tiny_linear(tmp_path, "Qwen3_5", num_hidden_layers=4, **FEW_HEADS)
    judge_tokens(generate(OPS["Triton, no tensor cores"], "float32", folder, most=2), linear_judge(folder), "float32")


def check(requests: list[Request], model_folder: Path, dtype: str) -> None:
    judge_tokens(requests, LlamaForCausalLM.from_pretrained(model_folder, dtype=torch.float32), dtype)


def judge_tokens(requests: list[Request], judge: PreTrainedModel, dtype: str) -> None:
    for request in requests:
        text = torch.tensor([request.token_ids(0, request.num_tokens)])
        logits = judge(text, use_cache=False).logits[0, request.prompt_len - 1 : -1]
        chosen = logits.gather(1, torch.tensor(request.output_token_ids)[:, None])[:, 0]
        assert len(chosen) == NUM_TOKENS
        below = (logits.max(-1).values - chosen) / logits.std(-1)
        assert (below <= NEAR_TIE[dtype]).all(), f"{request.request_id}: {request.output_token_ids}, below by {below}"
