"""A CPU tier of int8 beside a slow one, and what stays of a request that travels."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import Qwen2Config

from swiftllm.config import EngineConfig
from swiftllm.core.plan import Swap
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.ops.interface import pack, unpack
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu
from tests.reference.int8_tier import SlowInt8Runner, poison_of
from tests.reference.tiny_gpt_oss import make_tiny_gpt_oss

NUM_TOKENS = 10
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
LENGTHS = (1, 5, 16, 17, 40, 70)


def backend_of(model_dir, **options):
    defaults = {"device": "cpu", "dtype": "float32", "num_gpu_blocks": 40, "num_cpu_blocks": 40}
    return open_torch_backend(EngineConfig(str(model_dir), **defaults | options))


def generate(driver: BackendDriver, chunk: int | None, moves: bool) -> list[Request]:
    """Requests of both tiers, which change them between tokens if asked for; the first ones' prompts twice."""
    rng = random.Random(3)
    texts = [[rng.randrange(3, 128) for _ in range(length)] for length in LENGTHS]
    requests = [driver.admit(f"r{i}", text, list(Tier)[i % 3 > 0], SAMPLING) for i, text in enumerate(texts)]
    driver.prefill(requests, chunk)
    while requests[0].output_len < NUM_TOKENS:
        if moves:
            driver.move([request for request in requests if rng.random() < 0.4])
        driver.decode(requests)
    return requests


def test_tokens_are_those_of_attention_over_the_dequantised_cache(tiny_model_dir, tmp_path, monkeypatch):
    """Of prompts in chunks, whose earlier tokens come back from the tier, of decodes there, and of requests that
    travel; their logits tell an int8 tier from an exact one. With attention windows and sinks, too."""
    windows = {"kind": Qwen2Config, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2}
    windows["initializer_range"] = 0.25  # its logits tell more
    llama, windowed = tiny_model_dir(), tiny_model_dir(num_hidden_layers=4, **windows)
    # Each row goes to all experts: rounding would choose others.
    gpt_oss = make_tiny_gpt_oss(tmp_path / "gpt-oss", num_local_experts=3)
    cases = (llama, None, False), (llama, 7, False), (llama, 20, True), (windowed, 7, False), (windowed, 50, True)
    for model_dir, chunk, moves in (*cases, (gpt_oss, 7, False), (gpt_oss, 20, True)):
        found = generate(BackendDriver(backend_of(model_dir, cpu_kv_dtype="int8")), chunk, moves)
        exact = generate(BackendDriver(backend_of(model_dir)), chunk, moves)
        with monkeypatch.context() as patch:
            patch.setattr("swiftllm.runtime.torch_backend.TaskRunner", SlowInt8Runner)
            slow = generate(BackendDriver(backend_of(model_dir)), chunk, moves)
        assert [r.output_token_ids for r in found] == [r.output_token_ids for r in slow]
        logprobs, theirs, others = (
            torch.tensor([entry.logprob for r in requests for entry in r.logprobs]) for requests in (found, slow, exact)
        )
        # Rounding moves single codes to their neighbours.
        assert (logprobs - theirs).abs().max() < 0.01 < (logprobs - others).abs().mean()


def test_a_request_that_travels_keeps_its_bits_after_the_first_time(tiny_model_dir):
    """In both tiers, on a host and, in 16 bits, beside a GPU; it holds what the slow reference packs."""
    model_dir = tiny_model_dir()
    print("seed", torch.seed())
    there, back = (9, 3, 0, 7), (5, 8, 11, 0)
    out, home = (Swap(Request("r", (1,), SAMPLING), *way) for way in ((Tier.GPU, there, back), (Tier.CPU, back, there)))
    for dtype in ("float32", "float16", "bfloat16"):
        for on_gpu in (False, True)[: 1 + (dtype != "float32")]:
            with fake_gpu(1) if on_gpu else pytest.MonkeyPatch.context():
                sizes = {"num_gpu_blocks": 10, "num_cpu_blocks": 12, "cpu_kv_dtype": "int8"}
                device = "auto" if on_gpu else "cpu"
                backend = backend_of(model_dir, dtype=dtype, device=device, **sizes)
                gpu, cpu = (backend.kv_pools.tensors[tier] for tier in (Tier.GPU, Tier.CPU))
                content = torch.randn(gpu.shape) * 4 ** torch.randn(*gpu.shape[:-1], 1)
                content[:, 0, 0, :, 3] = 0  # a row of zeros has the least scale
                content = content.to(gpu.dtype)
                gpu.copy_(content)
                held, elements = [], []
                for _ in range(20):
                    cpu.fill_(poison_of(cpu))
                    backend.swap([out])
                    backend.await_swaps()
                    if on_gpu:
                        torch.cuda.synchronize()
                    held.append(cpu.clone())
                    gpu.fill_(torch.nan)
                    backend.swap([home])
                    backend.await_swaps()
                    if on_gpu:
                        torch.cuda.synchronize()
                    elements.append(gpu.cpu().clone())
                backend.close()
            expected = pack(content)[:, list(there)]
            assert torch.equal(held[0][:, list(back)], expected)
            others = [block for block in range(12) if block not in back]
            assert (held[0][:, others] == 255).all()
            dequantised = unpack(expected, gpu.shape[-1]).to(content.dtype)
            assert torch.equal(elements[0][:, list(there)], dequantised)
            for again, twice in zip(held, elements, strict=True):
                assert torch.equal(again, held[0])
                torch.testing.assert_close(twice, elements[0], rtol=0, atol=0, equal_nan=True)
