"""Models whose layers have attention windows, in whole engines: greedy tokens are those of transformers (float32)."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig, Qwen2Config, Qwen3Config

from tests.apex.test_architectures import greedy, some_prompts
from tests.apex.test_end_to_end import VARIANTS, serve
from tests.reference.tiny_architectures import tiny_judge
from tests.reference.tiny_model import make_tiny_llama

WINDOW = 8
ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, dict[str, Any]] = {
    "alternating": {"kind": Qwen3Config, "use_sliding_window": True, "layer_types": ALTERNATING, "head_dim": 16},
    "in halves": {"kind": Qwen2Config, "use_sliding_window": True, "max_window_layers": 2},
    "alike": {"kind": MistralConfig, "head_dim": 16},
}
BLOCKS = ({"block_size": 4}, {"block_size": 16})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    more = {"num_hidden_layers": 4, "sliding_window": WINDOW}
    return {name: make_tiny_llama(tmp_path_factory.mktemp("tiny"), **what, **more) for name, what in MODELS.items()}


def test_tokens_equal_transformers_under_every_system(folders) -> None:
    """In pools so small that requests are preempted and swapped, with cohorts under way; NaN where nobody wrote."""
    variants, prompts = cycle(VARIANTS), some_prompts(12)
    for name, folder in folders.items():
        expected = greedy(tiny_judge(folder, ""), prompts, 14)
        for variant in islice(variants, len(VARIANTS)):
            pools = {"block_size": 4, "num_gpu_blocks": 28, "num_cpu_blocks": 40}
            tokens, stats = serve(folder, variant, prompts, 14, **pools)
            assert tokens == expected, (name, variant)
            print(name, variant, stats.preemptions, stats.cpu_busy_s > 0)
