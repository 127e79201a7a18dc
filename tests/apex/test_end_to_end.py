"""Greedy tokens are the same under every system and strategy, and the same as transformers' (float32)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

import swiftllm
from apex.build import build_system
from apex.strategy import StrategyConfig
from swiftllm.config import EngineConfig
from swiftllm.core.plan import Strategy
from swiftllm.core.request import Request, SamplingParams, ServiceClass, TokenLogprob
from swiftllm.engine.engine import EngineStats
from swiftllm.files import cache_dir
from swiftllm.model.tokenizer import Tokenizer
from swiftllm.sampling.grammar import GrammarCompiler
from swiftllm.sampling.sampler import Sampler
from tests.reference.fake_engine import flat_table
from tests.reference.int8_tier import poison_of
from tests.reference.logit_rules import by_the_rules, plain
from tests.reference.tiny_model import make_tiny_llama
from tests.reference.tiny_tokenizer import make_tiny_tokenizer

OVERLAP = StrategyConfig(strategy="asynchronous-overlap")
WITHIN_TARGETS = StrategyConfig(disable_admission_control=True)  # real requests at made-up speed would be refused
MADE_UP_PROFILE = flat_table(cpu_token_s=2e-6)  # decisions must not depend on how busy this machine is
VARIANTS = {
    "vllm": ("vllm", StrategyConfig(), False),
    "swiftllm": ("swiftllm", StrategyConfig(), False),
    "neo": ("neo", StrategyConfig(strategy="asymmetric-pipelining"), False),
    "neo-synchronous": ("neo", StrategyConfig(strategy="asymmetric-pipelining"), True),
    "fastdecode": ("fastdecode", StrategyConfig(), False),
    "apex": ("apex", StrategyConfig(), False),
    "apex-pipelining": ("apex", StrategyConfig(strategy="asymmetric-pipelining"), False),
    "apex-overlap": ("apex", OVERLAP, False),
    "apex-overlap-synchronous": ("apex", OVERLAP, True),
    "adaptive": ("adaptive", StrategyConfig(), False),
    "adaptive-lockstep": ("adaptive", StrategyConfig(strategy="asymmetric-pipelining"), False),
    "adaptive-free-running": ("adaptive", OVERLAP, False),
    "adaptive-free-running-synchronous": ("adaptive", OVERLAP, True),
    "sarathi": ("sarathi", WITHIN_TARGETS, False),
    "omniserve": ("omniserve", WITHIN_TARGETS, False),
    "omniserve-synchronous": ("omniserve", WITHIN_TARGETS, True),
    "omniserve-stepping": ("omniserve-stepping", WITHIN_TARGETS, False),
    "omniserve-stepping-synchronous": ("omniserve-stepping", WITHIN_TARGETS, True),
}


GPU_ONLY = ("vllm", "swiftllm", "sarathi")
FOR_BEST_EFFORT = ("omniserve", "omniserve-stepping")
"""Systems that offload best-effort requests only."""


def offloading_iterations(stats: EngineStats) -> int:
    return sum(stats.strategy_iterations[s.value] for s in Strategy if s is not Strategy.GPU_ONLY)


def judge(model_dir: Path, prompts: Sequence[Sequence[int]], max_tokens: int, **how: float) -> list[tuple[int, ...]]:
    """Greedy continuations by transformers, stopping after the end-of-sequence token."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    eos = model.generation_config.eos_token_id
    outputs = []
    for prompt in prompts:
        with torch.inference_mode():
            tokens = model.generate(
                torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=eos, **how
            )
        outputs.append(tuple(tokens[0, len(prompt) :].tolist()))
    return outputs


def judge_sampling(model_dir: Path, prompts: Sequence[Sequence[int]], samplings: Sequence[SamplingParams]):
    """Requests that are done: transformers' logits, changed token by token as each wants them, and log-probabilities
    of the prompts."""
    model, sampler, requests = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), Sampler(), []
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        request = Request(str(number), tuple(prompt), sampling)
        while not request.is_finished:
            with torch.inference_mode():
                logits = model(torch.tensor([request.token_ids(0, request.num_tokens)])).logits[0]
            request.append_token(sampler.sample(by_the_rules(logits[-1], request)[None], [plain(request)])[0], 0.0)
        logprobs = logits.log_softmax(-1)[range(len(prompt) - 1), prompt[1:]].tolist()
        request.prompt_logprobs = list(map(TokenLogprob, prompt[1:], logprobs))
        requests.append(request)
    return requests


def serve(model_dir: Path, variant: str, prompts: Sequence[Sequence[int]], max_tokens: int, **how: Any):
    requests, stats = run(model_dir, variant, prompts, [SamplingParams(max_tokens)] * len(prompts), **how)
    return [tuple(request.output_token_ids) for request in requests], stats


def run(
    model_dir: Path,
    variant: str,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    classes: Iterable[ServiceClass] = itertools.repeat(ServiceClass.LATENCY_SENSITIVE),
    dtype: str = "float32",
    **pools: int,
):
    system, strategy, synchronous = VARIANTS[variant]
    config = EngineConfig(
        str(model_dir), device="cpu", dtype=dtype, max_num_batched_tokens=48, synchronous=synchronous, **pools
    )
    engine = build_system(system, config, strategy, profile=MADE_UP_PROFILE)
    for tensor in engine.backend.kv_pools.tensors.values():
        tensor.fill_(poison_of(tensor))  # whoever reads a slot that nobody wrote gets no tokens
    requests = [
        engine.add(engine.make_request(str(i), prompt, sampling, service_class=service_class))
        for i, prompt, sampling, service_class in zip(itertools.count(), prompts, samplings, classes, strict=False)
    ]
    for _ in range(20_000):
        if not engine.has_unfinished():
            break
        engine.step()
    assert not engine.has_unfinished(), engine.status()
    engine.kv.check_blocks()
    assert all(pool.num_used == 0 for pool in engine.kv.block_pools.values())
    stats = engine.stats()
    engine.close()
    return requests, stats


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    model_dir = make_tiny_llama(tmp_path_factory.mktemp("tiny"))
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 128) for _ in range(rng.randint(1, 60))] for _ in range(32)]
    return model_dir, prompts, judge(model_dir, prompts, 24)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tiny_model_equals_transformers(tiny, variant: str) -> None:
    model_dir, prompts, expected = tiny
    outputs, stats = serve(model_dir, variant, prompts, 24, block_size=4, num_gpu_blocks=60, num_cpu_blocks=1000)
    assert outputs == expected
    if VARIANTS[variant][0] not in (*GPU_ONLY, *FOR_BEST_EFFORT):
        assert offloading_iterations(stats) > 20


@pytest.mark.parametrize("variant", VARIANTS)
def test_requests_of_both_classes_equal_transformers(tiny, variant: str) -> None:
    model_dir, prompts, expected = tiny
    classes = random.Random(7).choices(list(ServiceClass), k=len(prompts))
    pools = {"block_size": 4, "num_gpu_blocks": 60, "num_cpu_blocks": 1000}
    requests, stats = run(model_dir, variant, prompts, [SamplingParams(24)] * len(prompts), classes, **pools)
    assert [tuple(request.output_token_ids) for request in requests] == expected
    assert [request.service_class for request in requests] == classes
    if VARIANTS[variant][0] not in GPU_ONLY:
        assert offloading_iterations(stats) > 20


def test_generate_takes_a_class_for_all_prompts_or_for_each(tiny) -> None:
    model_dir, prompts, expected = tiny
    llm = swiftllm.LLM(model_dir, device="cpu", dtype="float32", num_gpu_blocks=20, num_cpu_blocks=20)
    seen = []
    add = llm.engine.add
    llm.engine.add = lambda request, **how: seen.append(request.service_class) or add(request, **how)
    sampling = SamplingParams(24)
    for given in (ServiceClass.BEST_EFFORT, "best-effort", ["best-effort", ServiceClass.LATENCY_SENSITIVE]):
        outputs = llm.generate(prompts[:2], sampling, service_class=given)
        assert [output.token_ids for output in outputs] == expected[:2]
    assert [service_class.rank for service_class in seen] == [1, 1, 1, 1, 1, 0]
    for wrong, words in (("urgent", "urgent"), (["best-effort"], "2 prompts but 1 service classes")):
        with pytest.raises(ValueError, match=words):
            llm.generate(prompts[:2], sampling, service_class=wrong)
    llm.close()


@pytest.mark.parametrize(
    "kind, overrides",
    [
        (MistralConfig, {"sliding_window": None}),
        (Qwen2Config, {"hidden_size": 112, "num_attention_heads": 14}),  # biases, and seven heads on each KV head
        (Qwen3Config, {"head_dim": 32}),  # norms of Q and K
    ],
    ids=["mistral", "qwen2", "qwen3"],
)
def test_other_architectures_equal_transformers(tmp_path, kind, overrides) -> None:
    model_dir = make_tiny_llama(tmp_path, kind=kind, **overrides)
    draw = random.Random(5)
    prompts = [[draw.randrange(3, 128) for _ in range(draw.choice([1, 17, 40, 60]))] for _ in range(10)]
    expected = judge(model_dir, prompts, 12)
    tokens, stats = serve(model_dir, "apex-overlap", prompts, 12, num_gpu_blocks=12, num_cpu_blocks=80)
    assert tokens == expected
    assert stats.cpu_busy_s > 0


@pytest.fixture(scope="module")
def sampled(tiny, tmp_path_factory):
    """Requests that choose by other logits than the model's and ask for all that can be told of their prompts."""
    model_dir, prompts, _ = tiny
    prompts = prompts[:22]
    compiler = GrammarCompiler(Tokenizer.from_folder(make_tiny_tokenizer(tmp_path_factory.mktemp("text"))), 128, [2])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", True]}}, "required": ["a"]}
    hows = (
        {
            "grammar": compiler.compile("json_schema", schema),
            "temperature": 1.0,
            "ignore_eos": False,
            "stop_token_ids": (2,),
        },
        {"grammar": compiler.compile("regex", "(ab?c)*[0-9]{30}"), "repetition_penalty": 1.3, "bad_words": ((64,),)},
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 0.9, "repetition_penalty": 0.8, "min_p": 0.02},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.05, "logit_bias": {7: 3.0, 50: -100}},
        {"temperature": 1.2, "top_k": 20, "presence_penalty": 1.0, "frequency_penalty": -0.5},
        {"bad_words": tuple((a, b) for a in range(128) for b in range(128) if (7 * a + b) % 4)},
        {"allowed_token_ids": tuple(range(10, 50)), "temperature": 0.8},
        {"min_tokens": 12, "stop_token_ids": tuple(range(2, 64)), "ignore_eos": False},
        {},
    )
    samplings = [
        SamplingParams(24, **{"ignore_eos": True, "seed": i, "prompt_logprobs": 0} | hows[i % len(hows)])
        for i in range(len(prompts))
    ]
    return model_dir, prompts, samplings, judge_sampling(model_dir, prompts, samplings)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_requests_ask_for_follows_them_wherever_they_go(sampled, variant: str) -> None:
    """Chunked, swapped, preempted, computed again, in CPU batches: penalties count what has been put out, and a
    prompt's log-probabilities come once."""
    model_dir, prompts, samplings, expected = sampled
    requests, stats = run(model_dir, variant, prompts, samplings, block_size=4, num_gpu_blocks=25, num_cpu_blocks=26)
    for request, reference in zip(requests, expected, strict=True):
        assert request.output_token_ids == reference.output_token_ids
        assert [entry.token_id for entry in request.prompt_logprobs] == list(request.prompt_token_ids[1:])
        logprobs = [entry.logprob for entry in reference.prompt_logprobs]
        assert [entry.logprob for entry in request.prompt_logprobs] == pytest.approx(logprobs, abs=1e-4)
    assert stats.preemptions + stats.swapped_blocks > 0


def test_repetition_is_penalised_as_by_transformers(tiny) -> None:
    model_dir, prompts, _ = tiny
    prompts = prompts[:8]
    expected = judge(model_dir, prompts, 24, repetition_penalty=1.5)
    samplings = [SamplingParams(24, repetition_penalty=1.5)] * len(prompts)
    requests, _ = run(model_dir, "swiftllm", prompts, samplings, num_gpu_blocks=300, num_cpu_blocks=0)
    assert [tuple(request.output_token_ids) for request in requests] == expected


def test_vllm_preempts_by_recompute(tiny) -> None:
    model_dir, prompts, expected = tiny
    outputs, stats = serve(model_dir, "vllm", prompts, 24, block_size=4, num_gpu_blocks=25, num_cpu_blocks=26)
    assert outputs == expected
    assert stats.swapped_blocks == 0 and stats.preemptions > 0


@pytest.mark.parametrize("variant", ["swiftllm", "neo", "apex", "apex-overlap", "adaptive", "adaptive-free-running"])
def test_tiny_pools_preempt_and_swap(tiny, variant: str) -> None:
    model_dir, prompts, expected = tiny
    outputs, stats = serve(model_dir, variant, prompts, 24, block_size=4, num_gpu_blocks=25, num_cpu_blocks=26)
    assert outputs == expected
    assert stats.swapped_blocks > 0


def test_offline_api(tiny) -> None:
    model_dir, prompts, expected = tiny
    for system in ("vllm", "swiftllm", "apex", "adaptive"):
        llm = swiftllm.LLM(
            model_dir, system=system, device="cpu", dtype="float32", num_gpu_blocks=20, num_cpu_blocks=200
        )
        outputs = llm.generate(prompts[:6], SamplingParams(max_tokens=24))
        assert [output.token_ids for output in outputs] == expected[:6]
        with pytest.raises(swiftllm.RequestRefused, match="empty"):
            llm.generate([prompts[0], []])
        assert not llm.engine.state.requests
        llm.close()
    with pytest.raises(ValueError, match="unknown system 'orca'"):
        swiftllm.LLM(model_dir, system="orca")


MODEL = cache_dir() / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def smollm2():
    """Prompts and what the GPU-only system answers, each token of which must be transformers' own choice."""
    if not MODEL.exists():
        pytest.skip("no SmolLM2 folder: `make setup` makes it")
    rng = random.Random(7)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(rng.randint(4, 32))] for _ in range(9)]
    outputs, stats = serve(MODEL, "swiftllm", prompts, NUM_TOKENS, **POOLS)
    assert stats.cpu_busy_s == 0
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *output[:-1]]])).logits[0]
        assert tuple(logits[len(prompt) - 1 :].argmax(-1).tolist()) == output
    return prompts, outputs


NUM_TOKENS = 8
POOLS = {"num_gpu_blocks": 8, "num_cpu_blocks": 60}  # the GPU tier holds about three of the requests


@pytest.mark.parametrize("variant", ["neo", "fastdecode", "apex", "apex-overlap"])
def test_smollm2_equals_transformers_with_forced_offloading(smollm2, variant: str) -> None:
    prompts, expected = smollm2
    outputs, stats = serve(MODEL, variant, prompts, NUM_TOKENS, **POOLS)
    assert outputs == expected
    assert stats.cpu_busy_s > 0


def test_generate_leaves_nothing_behind(tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    model_dir, prompts, expected = tiny
    llm = swiftllm.LLM(model_dir, device="cpu", dtype="float32", num_gpu_blocks=20, num_cpu_blocks=20)
    foreign = llm.engine.add(llm.engine.make_request("foreign", prompts[1], SamplingParams(max_tokens=24)))
    step = llm.engine.step

    def interrupted() -> list:
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts[0], SamplingParams(max_tokens=24))
    monkeypatch.setattr(llm.engine, "step", step)
    with pytest.raises(TypeError):
        llm.generate([prompts[0], None])
    numpy_prompt = np.array(prompts[0])
    for prompt in (prompts[0], numpy_prompt, list(numpy_prompt), [numpy_prompt]):
        (output,) = llm.generate(prompt, SamplingParams(max_tokens=24))
        assert output.token_ids == expected[0]
    while llm.engine.has_unfinished():
        llm.engine.step()
    assert tuple(foreign.output_token_ids) == expected[1]
    assert llm.generate([]) == []


def test_an_aborted_requests_draws_do_not_live_on_in_its_successor(tiny) -> None:
    model_dir, prompts, _ = tiny

    def drawn(abort_first: bool) -> list[int]:
        engine = build_system("swiftllm", EngineConfig(str(model_dir), device="cpu", num_gpu_blocks=40))
        if abort_first:
            engine.add(engine.make_request("x", prompts[0], SamplingParams(max_tokens=20, temperature=1.0, seed=5)))
            for _ in range(3):
                engine.step()
            engine.abort("x")
        sampling = SamplingParams(max_tokens=20, temperature=1.0, seed=7)
        request = engine.add(engine.make_request("x", prompts[0], sampling))
        while engine.has_unfinished():
            engine.step()
        return request.output_token_ids

    assert drawn(abort_first=True) == drawn(abort_first=False)
