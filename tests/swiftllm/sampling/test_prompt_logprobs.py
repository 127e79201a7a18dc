"""Log-probabilities of prompts are those of transformers, in whatever pieces a prompt is computed and how often."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftllm import SamplingParams
from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import Request, Tier
from swiftllm.llm import LLM
from swiftllm.model.llama import LlamaModel
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu

LENGTHS = (1, 2, 16, 17, 40, 70)
COUNTS = (0, 3, None, 20, 1, 2)


def prompts(lengths: Sequence[int] = LENGTHS, vocab: int = 128) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, vocab) for _ in range(length)] for length in lengths]


def judge(model_dir: Path, prompt: Sequence[int]) -> torch.Tensor:
    """Log-probabilities of all tokens, ``[len(prompt), vocab_size]``."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].log_softmax(-1)


def check(found, prompt: Sequence[int], count: int, expected: torch.Tensor) -> None:
    """``found`` against :func:`judge`."""
    assert [entry.token_id for entry in found] == list(prompt[1:])
    own = expected[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:], dtype=torch.int64)]
    assert [entry.logprob for entry in found] == pytest.approx(own.tolist(), abs=2e-4)
    best = expected.topk(max(count, 1)).values.tolist()
    for entry, row, values in zip(found, expected, best, strict=False):
        likelier = [int((row > entry.logprob + tie).sum()) for tie in (1e-3, -1e-3)]
        assert likelier[0] < entry.rank <= likelier[1]
        assert [value for _, value in entry.top] == pytest.approx(values[:count], abs=2e-4)
        assert all(value == pytest.approx(row[token].item(), abs=2e-4) for token, value in entry.top)


@pytest.fixture(scope="module")
def expected(tiny_model_dir) -> list[torch.Tensor]:
    return [judge(tiny_model_dir(), prompt) for prompt in prompts()]


def make_driver(model_dir: Path) -> BackendDriver:
    return BackendDriver(
        open_torch_backend(
            EngineConfig(
                str(model_dir), dtype="float32", num_gpu_blocks=40, num_cpu_blocks=40, max_num_seqs=8, max_model_len=128
            )
        )
    )


def admit_all(driver: BackendDriver) -> list[Request]:
    return [
        driver.admit(f"r{i}", prompt, list(Tier)[i % 2], SamplingParams(prompt_logprobs=count))
        for i, (prompt, count) in enumerate(zip(prompts(), COUNTS, strict=True))
    ]


def check_all(requests: Sequence[Request], expected: Sequence[torch.Tensor]) -> None:
    for request, rows in zip(requests, expected, strict=True):
        if request.sampling.prompt_logprobs is None:
            assert not request.prompt_logprobs
        else:
            check(request.prompt_logprobs, request.prompt_token_ids, request.sampling.prompt_logprobs, rows)


@pytest.mark.parametrize("at_once", [1, 5, 1000])
@pytest.mark.parametrize("chunk", [1, 7, None])
def test_in_chunks_and_pieces(tiny_model_dir, expected, chunk, at_once, monkeypatch):
    monkeypatch.setattr("swiftllm.sampling.sampler.LOGITS_AT_ONCE", at_once * 128)
    driver = make_driver(tiny_model_dir())
    requests = admit_all(driver)
    driver.prefill(requests, chunk)
    check_all(requests, expected)
    driver.decode(requests)
    check_all(requests, expected)


def start_over(requests: Sequence[Request]) -> None:
    for request in requests:
        tier = request.tier
        request.start_over()
        request.tier = tier


def test_a_prompt_computed_again_tells_only_what_is_new(tiny_model_dir, expected, monkeypatch):
    """Preempted in the middle of its prompt, and once more with some output."""
    rows, leave = [], LlamaModel.last_stage

    def noted(model: LlamaModel, attention_out: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        rows.append(len(residual))
        return leave(model, attention_out, residual)

    monkeypatch.setattr(LlamaModel, "last_stage", noted)
    driver = make_driver(tiny_model_dir())
    requests = admit_all(driver)
    driver.run([GpuBatchItem(requests[5], 0, 30, requests[5].tier, True)])
    first = list(requests[5].prompt_logprobs)
    assert len(first) == 30 and rows == [30]
    start_over(requests[5:])
    rows.clear()
    driver.prefill(requests)
    assert requests[5].prompt_logprobs[:30] == first
    to_sample = len(requests)
    assert sorted(rows) == sorted([1, 16, 39, 69 - 30, to_sample])
    rows.clear()
    driver.decode(requests)
    start_over(requests)
    driver.prefill(requests)
    assert rows == [to_sample, to_sample]
    check_all(requests, expected)


def test_on_a_gpus_streams_as_on_a_host(tiny_model_dir, expected):
    for seed in range(2):
        with fake_gpu(seed, can_capture=seed % 2 == 0):
            driver = make_driver(tiny_model_dir())
            requests = admit_all(driver)
            driver.prefill(requests, 11)
            check_all(requests, expected)


def test_offline(tiny_model_dir, expected):
    """Through the engine, with pools that push requests out and out again."""
    options = {"device": "cpu", "dtype": "float32", "block_size": 4, "num_gpu_blocks": 22, "num_cpu_blocks": 0}
    llm = LLM(str(tiny_model_dir()), system="vllm", max_num_batched_tokens=24, **options)
    samplings = [SamplingParams(max_tokens=12, ignore_eos=True, prompt_logprobs=count, logprobs=1) for count in COUNTS]
    outputs = llm.generate(prompts(), samplings)
    assert llm.engine.stats().preemptions > 0
    for output, prompt, count, rows in zip(outputs, prompts(), COUNTS, expected, strict=True):
        assert len(output.token_ids) == 12
        if count is None:
            assert output.prompt_logprobs == ()
        else:
            check(output.prompt_logprobs, prompt, count, rows)
    llm.close()


def test_smollm2(smollm2_dir):
    options = {"device": "cpu", "dtype": "float32", "num_gpu_blocks": 40, "num_cpu_blocks": 0}
    llm = LLM(str(smollm2_dir), max_num_batched_tokens=64, **options)
    some = prompts((150, 3), vocab=49_000)
    outputs = llm.generate(some, SamplingParams(max_tokens=1, prompt_logprobs=2))
    for output, prompt in zip(outputs, some, strict=True):
        check(output.prompt_logprobs, prompt, 2, judge(smollm2_dir, prompt))
    llm.close()
