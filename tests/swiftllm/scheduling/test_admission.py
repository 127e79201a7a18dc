"""Bad values are refused at the door, in words; none reaches a running engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from swiftllm.config import EngineConfig
from swiftllm.core.request import Request, SamplingParams
from swiftllm.model.config import ModelConfig
from swiftllm.sampling.sampler import Sampler
from tests.reference.tiny_model import make_tiny_llama


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": 2.5},
        {"max_tokens": "3"},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_k": -1},
        {"top_k": 1.5},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 1.01},
        {"min_p": -0.1},
        {"min_p": float("nan")},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": "1"},
        {"min_tokens": -1},
        {"min_tokens": 17},
        {"bad_words": [[]]},
        {"bad_words": [["a"]]},
        {"bad_words": 5},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [1.5]},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("inf")},
        {"logit_bias": 5},
        {"logit_bias": [5]},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: None}},
        {"logit_bias": {5.5: 1}},
        {"seed": 2**70},
        {"seed": "a"},
        {"logprobs": -1},
        {"logprobs": 21},
        {"logprobs": 1.5},
        {"stop_token_ids": 5},
        {"stop_token_ids": [1.5]},
    ],
)
def test_sampling_params_refuse(bad: dict) -> None:
    (name,) = bad
    with pytest.raises(ValueError, match=name):
        SamplingParams(**bad)


def test_sampling_params_take_numpy_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(3), seed=np.int64(4), top_k=np.int32(5), stop_token_ids=[np.int64(6)])
    assert (params.max_tokens, params.seed, params.top_k, params.stop_token_ids) == (3, 4, 5, (6,))
    assert type(params.seed) is int


def test_biases_become_pairs() -> None:
    params = SamplingParams(logit_bias={np.int64(5): 1, 6: -2.5})
    assert params.logit_bias == ((5, 1.0), (6, -2.5)) and params == SamplingParams(logit_bias=params.logit_bias)


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-6])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(1, 64)
    request = Request("a", (1,), SamplingParams(temperature=temperature, seed=1))
    assert Sampler().sample(logits, [request]) == [int(logits.argmax())]


@pytest.mark.parametrize(
    "bad",
    [
        {"dtype": "fp16"},
        {"dtype": torch.float32},
        {"device": "tpu"},
        {"load_format": "zzz"},
        {"num_gpu_blocks": 4.5},
        {"num_cpu_blocks": -1},
        {"block_size": 0},
        {"max_model_len": 0},
        {"cpu_threads": 0},
        {"cpu_kv_dtype": "int4"},
        {"block_size": 24, "cpu_kv_dtype": "int8"},
        {"cpu_kernel": "llamafile", "cpu_kv_dtype": "int8"},
    ],
)
def test_engine_config_refuses(bad: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        EngineConfig("folder", **bad)


@pytest.mark.parametrize(("field", "value"), [("num_hidden_layers", 0), ("num_hidden_layers", "x"), ("vocab_size", -1)])
def test_senseless_model_configs_are_refused(tmp_path: Path, field: str, value: object) -> None:
    folder = make_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, field: value}))
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_folder(folder)
