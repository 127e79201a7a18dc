"""`LLM`: what it takes, threads that share it, and its end."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swiftllm import SamplingParams
from swiftllm.llm import LLM
from tests.reference.tiny_model import make_tiny_llama

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("offline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("APEX_CACHE_DIR", str(path / "cache"))
        make_llm(make_tiny_llama(path / "model")).close()  # measures the profile
        yield path / "model"


def make_llm(folder: Path, system: str = "fastdecode", **options: Any) -> LLM:
    sizes = {"num_gpu_blocks": 4, "num_cpu_blocks": 40, "max_num_batched_tokens": 32, "cpu_threads": 1}
    return LLM(folder, system, device="cpu", dtype="float32", gpu_batch_threads=1, **sizes, **options)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    with make_llm(folder) as llm:
        yield llm


def test_prompts_of_every_kind(llm: LLM) -> None:
    ids = [3, 4, 5]
    (expected,) = llm.generate(ids, PARAMS)
    for prompts in ([ids], (ids,), iter([ids]), [tuple(ids)], np.array(ids), np.array([ids])):
        (output,) = llm.generate(prompts, PARAMS)
        assert output.token_ids == expected.token_ids
    assert llm.generate([], PARAMS) == llm.generate(iter([]), PARAMS) == []


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        (None, PARAMS, "not NoneType"),
        (5, PARAMS, "not int"),
        ({"prompt_token_ids": [1]}, PARAMS, "not dict"),
        ([{"prompt_token_ids": [1]}], PARAMS, "token ids, not dict"),
        ([[1], None], PARAMS, "token ids, not NoneType"),
        ([[1]], {"max_tokens": 2}, "must be SamplingParams"),
        ([[1]], [{"max_tokens": 2}], "must be SamplingParams"),
    ],
)
def test_what_is_no_prompt_or_no_parameters_is_named(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        llm.generate(prompts, params)


@pytest.mark.parametrize("service_class", ["latency-sensitive", "best-effort"])
def test_prompts_queue_whatever_the_targets(folder: Path, llm: LLM, service_class: str) -> None:
    """A server would refuse most of them for now, as their first tokens come late."""
    prompts = [[3 + i, 4, 5] for i in range(40)]
    expected = [output.token_ids for output in llm.generate(prompts, PARAMS)]
    with make_llm(folder, "omniserve", ttft_slo_s=1e-3, tpot_slo_s=0.5) as other:
        assert other.engine.describe()["strategy"]["ttft_slo_s"] == 1e-3
        outputs = other.generate(prompts, PARAMS, service_class)
    assert [output.token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("system", "options", "error", "message"),
    [
        ("omniserve", {"tpot_slo": 1.0}, TypeError, "'omniserve' has no option tpot_slo: its own are .*tpot_slo_s"),
        ("omniserve", {"tpot_slo_s": -1.0}, ValueError, "tpot_slo_s=-1.0 must be more than 0"),
        ("vllm", {"tpot_slo_s": 1.0}, TypeError, "system='vllm' has no option tpot_slo_s: it uses the GPU only"),
        ("swiftllm", {"scheduler": "neo"}, TypeError, "system='swiftllm' has no option scheduler: it uses"),
    ],
)
def test_options_that_the_system_does_not_have_are_named(
    folder: Path, system: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make_llm(folder, system, **options)


def test_threads_may_share_it(llm: LLM) -> None:
    prompts = [[3 + i, 4, 5] for i in range(8)]
    expected = [output.token_ids for output in llm.generate(prompts, PARAMS)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        results = pool.map(lambda prompt: llm.generate(prompt, PARAMS)[0].token_ids, prompts)
        assert list(results) == expected


def test_it_ends_when_nothing_refers_to_it_and_takes_no_more(folder: Path) -> None:
    before = set(threading.enumerate())
    llm = make_llm(folder)
    assert set(threading.enumerate()) > before  # the CPU worker's
    engine = llm.engine
    del llm
    gc.collect()
    assert set(threading.enumerate()) == before

    with make_llm(folder) as llm:
        pass
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.generate([1, 2], PARAMS)
    engine.close()
