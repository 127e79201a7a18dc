"""`apex simulate --workload` answers as an experiment's point with the same setting does, to the bit."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from apex.cli import main
from apex.placement.search import UniformLoad
from apex.replay.metrics import Targets, compute_metrics
from apex.simulator.predicted_machine import PlacedMachine, PredictedMachine, WeightPlacer, predict_machine
from apex.strategy import StrategyConfig
from evaluation.drivers import SimulatedHardware, SimulatedTask, run_simulated_point
from evaluation.grid import lengths_of
from evaluation.run import Point
from swiftllm.scheduling.validation import SchedulerLimits
from swiftllm.systems import find_system

RATES, REQUESTS, SEED, BLOCK = (1.0, 4.0), 12, 3, 16
STRATEGY = StrategyConfig(ttft_slo_s=3.0, tpot_slo_s=0.15)
LIMITS = {"max_num_batched_tokens": 1024, "max_num_seqs": 100}
METRICS = compute_metrics((), 0.0, targets=Targets())


@pytest.fixture
def placed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a placement takes seconds: the same machine is placed once for the same question."""
    found: list[tuple[PredictedMachine, Any, PlacedMachine]] = []
    search = WeightPlacer.place_for_rate

    def place(placer: WeightPlacer, *asked: Any, offloads: bool) -> PlacedMachine:
        for machine, question, placed in found:
            if question == (asked, offloads) and machine == placer.machine:
                return placed
        found.append((placer.machine, (asked, offloads), search(placer, *asked, offloads=offloads)))
        return found[-1][-1]

    monkeypatch.setattr(WeightPlacer, "place_for_rate", place)


def command_rows(tmp_path: Path, model: str, systems: tuple[str, ...]) -> list[dict[str, Any]]:
    path = tmp_path / "rows.json"
    flags = ["--gpu", "t4", "--host", "g4dn-4xlarge", "--host-memory-gib", "32", "--model", model, "--seed", str(SEED)]
    flags += ["--workload", "sharegpt", "--num-requests", str(REQUESTS), "--request-rate", *map(str, RATES)]
    flags += ["--slo-ttft", "3", "--slo-tpot", "0.15", "--max-num-batched-tokens", "1024", "--max-num-seqs", "100"]
    assert main(["simulate", *flags, "--system", *systems, "--output", str(path)]) == 0
    return json.loads(path.read_text())


def experiment_row(machine: PredictedMachine, system: str, rate: float) -> dict[str, Any]:
    lengths = lengths_of({"workload": "sharegpt", "num_requests": REQUESTS, "request_rate": rate, "seed": SEED})
    known = (machine.gpu.name, machine.model_name, machine.dtype)
    believed = None
    if machine.budget(BLOCK).max_gpu_blocks:
        hardware = SimulatedHardware(*known, machine.table, machine.model.num_layers)
        blocks = machine.num_blocks(None, None, BLOCK)
    else:
        load = UniformLoad(REQUESTS, lengths.mean_input_tokens, lengths.mean_output_tokens)
        offloads = find_system(system).needs_predictions
        wanted = lengths.total_output_tokens / lengths.rows[-1].start_s  # tokens/s
        placed = WeightPlacer(machine, BLOCK).place_for_rate("auto", load, wanted, offloads=offloads)
        path = {"interconnect": placed.interconnect, "weights": placed.weights}
        hardware = SimulatedHardware(*known, placed.table, machine.model.num_layers, **path)
        blocks, believed = placed.num_blocks(None, None), placed.scheduler_table
    limits = SchedulerLimits(**LIMITS, max_model_len=machine.model.most_positions)
    task = SimulatedTask(system, hardware, *blocks, lengths, limits, strategy=STRATEGY, believed=believed)
    return run_simulated_point(Point("one", "one", "one", task), "", Console(file=io.StringIO())).values


@pytest.mark.usefixtures("placed_once")
@pytest.mark.parametrize("model", ["qwen2.5-3b", "qwen2.5-7b"])  # all weights on the GPU, and not all
def test_rows_equal_those_of_an_experiments_points(tmp_path: Path, model: str) -> None:
    systems = ("swiftllm", "neo", "apex", "omniserve")
    machine = predict_machine(
        "t4",
        "g4dn-4xlarge",
        model,
        "float16",
        host_memory_gib=32,
        cpu_kernel="native",
        block_size=BLOCK,
        max_tokens=1024,
        max_num_seqs=LIMITS["max_num_seqs"],
    )
    rows = command_rows(tmp_path, model, systems)
    assert [(row["request_rate"], row["system"]) for row in rows] == [(rate, s) for rate in RATES for s in systems]
    for row in rows:
        expected = experiment_row(machine, row["system"], row["request_rate"])
        assert {name: row[name] for name in METRICS} == {name: expected[name] for name in METRICS}
        assert (row["num_gpu_blocks"], row["num_cpu_blocks"]) == (
            expected["num_gpu_blocks"],
            expected["num_cpu_blocks"],
        )
        assert row["preemptions"] == expected["preemptions"] and row["completed"] + row["failed"] == REQUESTS
        assert row["trace_note"] == expected["trace_note"] and row["trace_origin"] == expected["trace_origin"]
