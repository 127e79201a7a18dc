"""A model whose numbers are beyond those of float16, as models trained in bfloat16 are (QwenLM/Qwen3 #761)."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from swiftllm.sampling.sampler import LogitsNotFinite
from tests.apex.test_architectures import greedy, some_prompts
from tests.apex.test_end_to_end import serve
from tests.reference.tiny_architectures import tiny_judge
from tests.reference.tiny_model import make_tiny_llama

PROMPTS = some_prompts(3)
POOLS = {"block_size": 4, "num_gpu_blocks": 40, "num_cpu_blocks": 40}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Its embeddings, and so the residual, are beyond 65,504."""
    folder = make_tiny_llama(tmp_path, tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] *= 1e7
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("system", ["swiftllm", "apex"])
def test_a_request_ends_with_an_error_that_names_the_dtype(model: Path, system: str) -> None:
    with pytest.raises(LogitsNotFinite, match=r"not finite in float16 .*give --dtype bfloat16 or float32"):
        serve(model, system, PROMPTS, 4, dtype="float16", **POOLS)
    expected = greedy(tiny_judge(model, ""), PROMPTS, 4)
    assert serve(model, system, PROMPTS, 4, **POOLS)[0] == expected
