"""4-bit models on two ranks: greedy tokens are those of transformers on the dequantised weights (float32)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from quantise import write_folder

from tests.apex.rank_group import Group, run
from tests.reference.tiny_model import make_tiny_llama

SLOW = pytest.mark.skipif(not os.environ.get("APEX_SLOW_TESTS"), reason="APEX_SLOW_TESTS is not set: a group each")
LAYOUTS = {  # name: layout, symmetric, act-order
    "gptq act-order": ("gptq", False, True),
    "awq": ("awq", False, False),
    "gptq v2": ("gptq-v2", False, False),
    "gptq symmetric": ("gptq", True, False),
    "compressed-tensors": ("compressed-tensors", True, False),
    "compressed-tensors act-order": ("compressed-tensors", False, True),
}


@pytest.mark.parametrize("name", [name if i == 0 else pytest.param(name, marks=SLOW) for i, name in enumerate(LAYOUTS)])
def test_two_ranks_give_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    layout, symmetric, act_order = LAYOUTS[name]
    source = make_tiny_llama(tmp_path / "source")
    for folder, written in (("quantised", layout), ("dequantised", "dequantised")):
        write_folder(source, tmp_path / folder, written, 16, symmetric, act_order)
    group = Group(tmp_path / "quantised", 2, judged_by=tmp_path / "dequantised")
    try:
        assert len(set(group.expected)) > 1
        for variant in ("swiftllm", "apex-overlap"):
            engine = group.engine(variant)
            requests = group.add(engine)
            run(engine)
            group.check(requests)
    finally:
        group.close()
