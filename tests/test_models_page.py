"""docs/serving/models.md: every architecture is there, and bytes and tokens are those of the arithmetic it names."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from swiftllm.model.architectures import ARCHITECTURES, WRAPPERS
from swiftllm.model.config import ModelConfig
from swiftllm.runtime.memory import SIMULATED_GPU_SHARE, WeightSizes

ROOT = Path(__file__).parent.parent
MODELS = ROOT / "configs/models"
ORIGINS = yaml.safe_load((MODELS / "origins.yaml").read_text())
PAGE = (ROOT / "docs/serving/models.md").read_text()
CARDS_GB = (16, 24)  # T4, A10


def row(name: str) -> str:
    """A line of the table of what fits; tokens in whole hundreds, none where the weights do not fit."""
    model = replace(ModelConfig.from_folder(MODELS / name), quantisation=None)
    sizes = WeightSizes.of(model, torch.float16)
    assert sizes.four_bit is not None
    tokens = []
    for card_gb in CARDS_GB:
        for weights in (sizes.total, sizes.four_bit):
            room = card_gb * 1e9 * SIMULATED_GPU_SHARE - weights
            fit = int(room // model.kv_bytes_per_token(2)) // 100 * 100
            tokens.append(f"{fit:,}" if room > 0 else "no")
    kib = model.kv_bytes_per_token(2) // 1024
    return (
        f"| {ORIGINS[name]} | {model.num_parameters / 1e9:.1f} | {sizes.total / 1e9:.1f} | {sizes.four_bit / 1e9:.1f} "
        f"| {kib} | {' | '.join(tokens)} |"
    )


@pytest.mark.parametrize("name", sorted(ORIGINS))
def test_a_model_of_configs_is_there_with_its_bytes(name: str) -> None:
    assert row(name) in PAGE.splitlines()


def test_every_architecture_is_there_and_no_other() -> None:
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert named == {*ARCHITECTURES, *WRAPPERS}


def test_the_test_that_a_row_names_has_a_model_of_the_architecture() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(tests/[\w/]+\.py)` \| `?([\w.-]*)`? ?\|$", PAGE, re.MULTILINE)
    assert len(rows) == len({*ARCHITECTURES, *WRAPPERS})
    for architecture, test, config in rows:
        name = architecture.partition("For")[0]
        text = (ROOT / test).read_text()
        used = re.findall(r"from tests\.reference\.(tiny_\w+) import", text)
        text += "".join((ROOT / f"tests/reference/{module}.py").read_text() for module in used)
        assert re.search(rf"{name}(Text)?Config", text), f"{test} has no model of {name}"
        if config:
            assert json.loads((MODELS / config / "config.json").read_text())["architectures"] == [architecture]


def test_an_example_of_configs_stands_at_its_architecture() -> None:
    examples = dict(re.findall(r"^\| `(\w+)` \| ([\w./-]+) \|", PAGE, re.MULTILINE))
    names = {
        origin: json.loads((MODELS / name / "config.json").read_text())["architectures"]
        for name, origin in ORIGINS.items()
    }
    for architecture, example in examples.items():
        assert names.get(example, [architecture]) == [architecture], example
