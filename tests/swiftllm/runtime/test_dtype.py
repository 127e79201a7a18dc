"""The dtype that a model runs in."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from swiftllm.config import EngineConfig
from swiftllm.model.folder import tell
from swiftllm.runtime.execution_context import resolve_dtype, resolve_residual_dtype

CUDA = torch.device("cuda")
TEXT = {"text_config": {"dtype": "bfloat16"}, "torch_dtype": "float32"}


@pytest.mark.parametrize(
    ("fields", "capability", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, (8, 0), torch.bfloat16),
        ({"dtype": "bfloat16"}, (9, 0), torch.bfloat16),
        ({"dtype": "torch.bfloat16"}, (8, 6), torch.bfloat16),
        (TEXT, (8, 6), torch.bfloat16),
        ({"torch_dtype": "float16"}, (9, 0), torch.float16),
        ({"torch_dtype": "float32"}, (8, 6), torch.float16),  # as vLLM
        ({"torch_dtype": None}, (8, 6), torch.float16),
        ({}, (8, 6), torch.float16),
        ({"torch_dtype": "bfloat16"}, (7, 5), torch.float16),
    ],
)
def test_on_a_gpu_it_is_the_checkpoints_of_the_two_in_16_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog, fields, capability, expected
) -> None:
    """Numbers of a model trained in bfloat16 may be beyond those of float16. A T4 (sm_75) has no bfloat16."""
    (tmp_path / "config.json").write_text(json.dumps(fields))
    properties = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    tell.cache_clear()
    assert resolve_dtype(EngineConfig(str(tmp_path)), CUDA) is expected
    is_told = capability < (8, 0) and expected is torch.float16
    assert ("which sm_75 does not compute: it runs in float16" in caplog.text) == is_told
    assert resolve_dtype(EngineConfig(str(tmp_path), dtype="float32"), CUDA) is torch.float32


@pytest.mark.parametrize(
    ("fields", "dtype", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, torch.float16, torch.float32),
        (TEXT, torch.float16, torch.float32),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16, torch.bfloat16),
        ({"torch_dtype": "bfloat16"}, torch.float32, torch.float32),
        ({"torch_dtype": "float16"}, torch.float16, torch.float16),
        ({"torch_dtype": "float32"}, torch.float16, torch.float16),
        ({}, torch.float16, torch.float16),
    ],
)
def test_residuals_are_float32_where_a_checkpoint_in_bfloat16_runs_in_float16(
    tmp_path: Path, fields, dtype, expected
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert resolve_residual_dtype(str(tmp_path), dtype) is expected
