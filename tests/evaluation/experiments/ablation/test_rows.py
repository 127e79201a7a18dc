"""The rows of the ablation: each differs from every other, and `adaptive` stands there without each of its ideas."""

from __future__ import annotations

import pytest

from apex.strategy import StrategyConfig
from evaluation.experiments.ablation.rows import ROWS, chosen_rows


def test_every_row_differs_from_every_other():
    assert len({(row.system, str(row.strategy), row.synchronous) for row in ROWS.values()}) == len(ROWS)
    assert {row.system for row in ROWS.values()} == {"swiftllm", "neo", "fastdecode", "apex", "adaptive"}


def test_adaptive_goes_without_each_of_its_ideas():
    without = {name: row.strategy for name, row in ROWS.items() if name.startswith("adaptive-no-")}
    assert without == {
        "adaptive-no-prompt-chunks": StrategyConfig(disable_prompt_chunks=True),
        "adaptive-no-free-running": StrategyConfig(disable_asynchronous_overlap=True),
        "adaptive-no-lockstep": StrategyConfig(disable_asymmetric_pipelining=True),
    }


def test_rows_are_chosen_by_name_and_inline_attention_is_not_simulated():
    assert [row.name for row in chosen_rows(("apex", "swiftllm"), simulated=True)] == ["apex", "swiftllm"]
    assert [row.name for row in chosen_rows(None, simulated=False)] == list(ROWS)
    assert {row.name for row in chosen_rows(None, simulated=True)} == ROWS.keys() - {
        "synchronous",
        "adaptive-synchronous",
    }
    with pytest.raises(ValueError, match="no rows synchronous that can be simulated; there are swiftllm, neo"):
        chosen_rows(("synchronous",), simulated=True)
