"""The rows of the ablation: each differs from every other, and `adaptive` stands there without each of its ideas."""

from __future__ import annotations

import pytest

from apex.strategy import StrategyConfig
from evaluation.studies.ablation import ROWS, TO_BASELINE, TO_UNCHANGED, chosen_rows, with_ratios


def test_every_row_differs_from_every_other():
    changes = {(row.system, str(row.strategy), row.synchronous, str(row.axes)) for row in ROWS.values()}
    assert len(changes) == len(ROWS) == len({(row.group, row.words) for row in ROWS.values()})
    assert {row.system for row in ROWS.values()} == {"swiftllm", "neo", "fastdecode", "apex", "adaptive"}


def test_adaptive_goes_without_each_of_its_ideas():
    without = {name: row.strategy for name, row in ROWS.items() if name.startswith("adaptive-no-")}
    assert without == {
        "adaptive-no-prompt-chunks": StrategyConfig(disable_prompt_chunks=True),
        "adaptive-no-free-running": StrategyConfig(disable_asynchronous_overlap=True),
        "adaptive-no-lockstep": StrategyConfig(disable_asymmetric_pipelining=True),
    }


def test_rows_are_chosen_by_name_and_those_of_another_machine_are_only_simulated():
    assert [row.name for row in chosen_rows(("apex", "swiftllm"), simulated=True)] == ["apex", "swiftllm"]
    assert [row.name for row in chosen_rows(None, simulated=True)] == list(ROWS)
    only_simulated = {"ispc-kernel", "whole-swaps", "neo-llamafile-kernel", "neo-whole-swaps"}
    assert {row.name for row in chosen_rows(None, simulated=False)} == ROWS.keys() - only_simulated
    with pytest.raises(ValueError, match="no rows whole-swaps: only --backend simulated has them; there are swiftllm"):
        chosen_rows(("whole-swaps",), simulated=False)


def test_ratios_are_to_the_baseline_and_to_the_row_without_the_change_of_one_machine():
    rates = {"a": {"swiftllm": 10.0, "apex": 20.0, "no-overlap": 15.0}, "b": {"apex": 8.0, "no-overlap": 4.0}}
    rows = [
        {"case": case, "row": name, "output_tokens_per_s": rate}
        for case, here in rates.items()
        for name, rate in here.items()
    ]
    over = {(row["case"], row["row"]): (row[TO_BASELINE], row[TO_UNCHANGED]) for row in with_ratios(rows)}
    assert over["a", "apex"] == (2.0, None) and over["a", "no-overlap"] == (1.5, 0.75)
    assert over["b", "no-overlap"] == (None, 0.5)
