"""Which claim holds in which cell, against ratios by hand."""

from __future__ import annotations

import pytest

from evaluation.results.claims import Claim
from evaluation.studies.claims_map import PlaneCell, judge_cells, nearest_words, table_row, why_not_mapped

OWN = PlaneCell(100.0, 50)


def claim(ratio: float | None = 1.5, **changes) -> Claim:
    fields = {
        "figure": "fig5", "section": "APEX 5.2", "hardware": "T4 + 7B", "workload": "osc", "setting": "apex-t4",
        "metric": "output_tokens_per_s", "systems": ("apex", "neo"), "ratio": ratio, "up_to": False,
    }  # fmt: skip
    return Claim(**{**fields, **changes})


def row(system: str, rate: float, machine: PlaneCell, output_len: float = 50.0, **changes) -> dict:
    return {
        "figure": "fig5", "setting": "apex-t4", "workload": "osc", "output_len": output_len, "request_rate": None,
        "system": system, "output_tokens_per_s": rate, "num_gpu_blocks": machine.gpu_blocks,
        "reference_cpu_gb_s": machine.cpu_gb_s if system in ("neo", "apex") else None,
        "own_cpu_gb_s": OWN.cpu_gb_s, "own_gpu_blocks": OWN.gpu_blocks, **changes,
    }  # fmt: skip


RATIOS = {PlaneCell(10.0, 50): 1.0, OWN: 1.2, PlaneCell(10.0, 100): 1.6, PlaneCell(100.0, 100): 1.4}
ROWS = [row("neo", 10.0, machine) for machine in RATIOS] + [row("apex", 10 * r, m) for m, r in RATIOS.items()]


def test_a_claim_that_holds_in_some_cells() -> None:
    (item,) = judge_cells([claim()], ROWS)
    assert item.own == OWN and item.ours == pytest.approx(1.2)
    assert {cell.machine: cell.ours for cell in item.cells} == pytest.approx(RATIOS)
    assert {cell.machine for cell in item.holding} == {PlaneCell(10.0, 100), PlaneCell(100.0, 100)}  # 1.35 to 1.65
    assert item.nearest.machine == PlaneCell(100.0, 100)  # twice the pool, against a tenth of the speed as well
    assert table_row(item) == {
        "claim": "APEX 5.2: T4, osc", "about": "apex/neo", "says": "1.50", "ours": "1.20", "holds": "2 of 4",
        "nearest": "1.40 at 100 GB/s, 100 blocks",
    }  # fmt: skip


def test_a_claim_that_holds_at_the_setting_and_one_that_holds_nowhere() -> None:
    there, nowhere = judge_cells([claim(1.2), claim(3.0)], ROWS)
    assert nearest_words(there) == "there" and len(there.holding) == 1
    assert nowhere.nearest is None and nowhere.holding == []
    assert nearest_words(nowhere) == "nowhere; closest 1.60 at 10 GB/s, 100 blocks"


def test_an_up_to_takes_the_best_point_and_another_claim_the_mean() -> None:
    longer = [row("neo", 10.0, machine, 200.0) for machine in RATIOS] + [row("apex", 20.0, m, 200.0) for m in RATIOS]
    best, mean = judge_cells([claim(2.0, up_to=True), claim(2.0)], ROWS + longer)
    assert best.ours == pytest.approx(2.0) and mean.ours == pytest.approx(1.6)
    assert len(best.holding) == 4 and mean.holding == [
        cell for cell in mean.cells if cell.machine == PlaneCell(10.0, 100)
    ]


def test_a_gpu_only_system_counts_at_every_speed() -> None:
    rows = [*ROWS, *(row("vllm", 8.0, PlaneCell(0.0, blocks)) for blocks in (50, 100))]
    (item,) = judge_cells([claim(2.0, systems=("apex", "vllm"))], rows)
    assert {cell.machine: cell.ours for cell in item.cells} == pytest.approx({m: r / 0.8 for m, r in RATIOS.items()})


def test_a_cell_without_all_its_points_is_not_judged() -> None:
    longer = [row(system, 15.0, machine, 200.0) for machine in RATIOS for system in ("neo", "apex")]
    (item,) = judge_cells([claim(1.25)], ROWS + longer[:-2])
    assert [cell.machine for cell in item.cells if cell.ours is None] == [PlaneCell(100.0, 100)]
    assert not any(cell.holds for cell in item.cells if cell.ours is None)


def test_rows_of_another_figure_are_of_another_claim() -> None:
    assert judge_cells([claim(figure="fig7"), claim(setting="apex-a10")], ROWS) == []


def test_why_a_claim_is_not_mapped() -> None:
    assert why_not_mapped(claim(None)) == "states no number"
    assert "mean per-token latency" in why_not_mapped(claim(metric="per_token_latency_s_mean"))
    assert judge_cells([claim(None), claim(metric="per_token_latency_s_mean")], ROWS) == []
