"""Simulated points: what a row says, arrivals in virtual time, refusals; and validation against made-up machines."""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from apex.perf.model import Curve, ProfileTable, Surface
from apex.replay.records import RequestRecord
from apex.simulator.links import Interconnect
from apex.strategy import StrategyConfig
from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, WorkloadSpec, load_prompt_tokens
from evaluation import validate
from evaluation.drivers import SimulatedHardware, SimulatedTask, build_simulated_engine, run_simulated_point
from evaluation.measure.live_systems import ProfiledMachine
from evaluation.results.folder import SUMMARY_FIELDS
from evaluation.run import Point
from evaluation.validation import this_machine
from evaluation.validation.this_machine import mean_table, operation_error
from swiftllm.core.request import ServiceClass
from swiftllm.scheduling.validation import SchedulerLimits
from swiftllm.systems import systems


def make_table() -> ProfileTable:
    def over_context(token_s: float) -> Surface:
        return Surface((1, 2), (Curve((0, 1000), (0.0, 1000 * token_s)), Curve((0, 1000), (0.0, 2000 * token_s))))

    return ProfileTable(
        identity={"device": "Imaginary card", "cpu_kernel": "ispc"},
        linear=Curve((1, 1001), (1e-3, 2e-3)),
        ends=Curve((1, 2), (1e-3, 1e-3)),
        swap=Curve((1, 2), (1e-5, 2e-5)),
        prefill_attention=Surface((1, 2), (Curve((0, 1000), (1e-6, 1e-6)), Curve((0, 1000), (2e-6, 2e-6)))),
        gpu_attention=over_context(1e-6),
        cpu_attention=over_context(2e-6),
    )


HARDWARE = SimulatedHardware("Imaginary card", "Tiny-Llama", "float16", make_table(), num_layers=4)


def make_task(system: str = "apex", arrivals: tuple[float, ...] = (0.0,) * 12, **changes: object) -> SimulatedTask:
    rows = tuple(TraceRow(20 + 7 * i, 5 + 3 * i, arrival) for i, arrival in enumerate(arrivals))
    lengths = Lengths(WorkloadSpec("osc", len(rows)), "OSC", Origin("fitted", "made up"), rows)
    limits = SchedulerLimits(256, 64, 1024)
    return replace(SimulatedTask(system, HARDWARE, 20, 200, lengths, limits, values={"panel": "a"}), **changes)


def run(task: SimulatedTask):
    console = Console(file=io.StringIO())
    return run_simulated_point(Point("key", "group", "label", task), "label", console)


@pytest.mark.parametrize("system", systems())
def test_a_simulated_row_says_what_it_is(system: str) -> None:
    result = run(make_task(system, strategy=StrategyConfig(disable_admission_control=True)))
    values = result.values
    assert set(SUMMARY_FIELDS) <= set(values)
    assert (values["backend"], values["gpu"], values["system"]) == ("simulated", "Imaginary card", system)
    assert values["panel"] == "a" and values["cpu_kernel"] == "ispc"
    assert (values["completed"], values["failed"]) == (12, 0)
    assert values["output_tokens"] == sum(5 + 3 * i for i in range(12))
    assert values["wall_s"] == pytest.approx(values["makespan_s"])
    assert 0 < values["gpu_busy_fraction"] <= 1
    assert values["gpu_batch_busy_fraction"] <= 1 and values["cpu_busy_fraction"] <= 1
    assert result.details["engine"]["backend"] == "simulated"
    json.dumps(result.details, allow_nan=False)


def test_a_task_travels_to_another_process_and_gives_the_same_there() -> None:
    task = make_task(strategy=StrategyConfig(strategy="asynchronous-overlap"))
    assert run(pickle.loads(pickle.dumps(task))).records == run(task).records


def test_arrivals_are_waited_for_in_virtual_time() -> None:
    """An hour between requests takes no real time, and each request finds the engine idle."""
    records = run(make_task(arrivals=tuple(3600.0 * i for i in range(3)), stall_timeout_s=20.0)).records
    assert [record.arrival_s for record in records] == [0.0, 3600.0, 7200.0]
    iteration_s = 4 * (1e-3 + 1e-6 * 40) + 1e-3
    for record in records:
        assert record.token_times_s[0] - record.arrival_s == pytest.approx(iteration_s, rel=0.1)


def test_a_run_of_fixed_duration_counts_the_tokens_of_each_class() -> None:
    rows = [TraceRow(30, 20, float(i)) for i in range(4)]
    rows += [TraceRow(40, 900, 0.0, ServiceClass.BEST_EFFORT) for _ in range(3)]
    lengths = replace(make_task().lengths, rows=tuple(rows), best_effort=WorkloadSpec("longbench", 3))
    result = run(make_task("vllm", lengths=lengths, num_gpu_blocks=400, duration_s=3.5))
    values = result.values
    assert values["window_s"] == 3.5 and values["best_effort_workload"] == "longbench"
    assert (values["latency_sensitive_arrived"], values["latency_sensitive_completed"]) == (4, 4)
    assert (values["best_effort_arrived"], values["best_effort_completed"]) == (3, 0)
    tokens = sum(time_s <= 3.5 for record in result.records[4:] for time_s in record.token_times_s)
    assert values["best_effort_output_tokens"] == tokens > 1000
    assert values["best_effort_tokens_per_s"] == tokens / 3.5
    unlimited = run(make_task("vllm", lengths=lengths, num_gpu_blocks=400))
    assert unlimited.values["best_effort_completed"] == 3 and "window_s" not in unlimited.values


def test_what_cannot_be_served_is_a_failed_record() -> None:
    task = make_task("swiftllm", num_gpu_blocks=3)  # 48 tokens
    records: tuple[RequestRecord, ...] = run(task).records
    assert [record.completed for record in records] == [20 + 7 * i + 5 + 3 * i - 1 <= 48 for i in range(12)]


def test_hardware_and_strategy_reach_the_engine() -> None:
    link = Interconnect(1e9, 100, 50, dram_bytes_per_s=1e10)
    hardware = replace(HARDWARE, launch_s=0.5, interconnect=link)
    engine = build_simulated_engine(
        make_task(hardware=hardware, strategy=StrategyConfig(max_cpu_batches=7), block_size=8)
    )
    found = engine.describe()
    assert found["launch_s"] == 0.5 and found["interconnect"]["out_bytes_per_row"] == 50
    assert found["strategy"]["max_cpu_batches"] == 7 and found["block_size"] == 8
    assert found["limits"] == {"max_num_batched_tokens": 256, "max_num_seqs": 64, "max_model_len": 1024}


# -- validation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 1}))
    yield folder
    load_prompt_tokens.cache_clear()


@pytest.mark.parametrize(("slowdown", "error"), [(1, 0.0), (2, 1.0)])
def test_validation_of_a_machine_that_keeps_to_its_profile_finds_no_error(
    model, tmp_path, monkeypatch, capsys, slowdown: int, error: float
) -> None:
    """A simulated machine replaces the real one: first as fast as its profile, then half as fast."""
    limits = SchedulerLimits(256, 64, 1024)
    slow = replace(make_table(), **{name: slowed(getattr(make_table(), name), slowdown) for name in TIMES})

    def build(system, config, machine):
        hardware = replace(HARDWARE, table=slow)
        pools = config.num_gpu_blocks, config.num_cpu_blocks
        engine = build_simulated_engine(SimulatedTask(system, hardware, *pools, make_task().lengths, limits))
        engine.backend.device = SimpleNamespace(type="cpu")
        found = {**engine.describe(), "dtype": "float16", "cpu_kernel": "native", "cpu_threads": 1}
        engine.describe = lambda: found
        return engine

    machine = ProfiledMachine(make_table(), 4, limits, "float16", "Imaginary card")
    monkeypatch.setattr(this_machine, "build_profiled", build)
    monkeypatch.setattr(this_machine, "measure_machine", lambda config: machine)
    monkeypatch.setattr(this_machine, "operation_errors", lambda config: [operation_error("linear", [0.1, -0.3, 0.2])])
    options = validate.Options(model=model, num_requests=6, repeats=2, results_dir=tmp_path)
    assert validate.main(options) == 0
    folder = tmp_path / "validate" / "latest"
    summary = json.loads((folder / "summary.json").read_text())
    assert {(record["workload"], record["system"]) for record in summary} == {
        (workload, system) for workload in ("osc", "azure-conv") for system in ("swiftllm", "neo", "apex")
    }
    assert [record["simulated_error"] for record in summary] == pytest.approx([error] * 12, abs=1e-6)
    assert {record["backend"] for record in summary} == {"torch-cpu"}
    assert (folder / "figure.png").stat().st_size > 10_000
    found = json.loads((folder / "comparison.json").read_text())
    assert found["systems"] == pytest.approx(dict.fromkeys(("swiftllm", "neo", "apex"), error), abs=1e-6)
    (linear,) = found["operations"]
    assert (linear["median"], linear["bias"]) == (0.2, 0.1)
    assert f"neo {error:.1%}" in capsys.readouterr().out


def test_the_mean_of_two_profiles_lies_halfway() -> None:
    table = make_table()
    slow = replace(table, **{name: slowed(getattr(table, name), 3) for name in TIMES}, first_share=0.1)
    mean = mean_table(table, slow)
    assert mean.linear(1) == pytest.approx(2 * table.linear(1))
    assert mean.cpu_attention(1, 500) == pytest.approx(2 * table.cpu_attention(1, 500))
    assert (mean.first_share, mean.identity) == (pytest.approx(0.3), table.identity)


TIMES = ("linear", "ends", "swap", "prefill_attention", "gpu_attention", "cpu_attention")


def slowed(part: Curve | Surface, slowdown: int) -> Curve | Surface:
    if isinstance(part, Surface):
        return replace(part, curves=tuple(slowed(curve, slowdown) for curve in part.curves))
    return replace(part, seconds=tuple(slowdown * s for s in part.seconds))


def test_an_unknown_model_is_one_line(tmp_path, capsys):
    assert validate.main(validate.Options(model=tmp_path / "nothing")) == 2
    assert "no model in" in capsys.readouterr().out


def test_errors_of_repeats_do_not_cancel(capsys):
    def record(rate: float, error: float | None, system: str = "neo"):
        row = {"workload": "osc", "output_len": 8.0, "system": system, "output_tokens_per_s": rate, "wall_s": 1.0}
        return {**row, "simulated_output_tokens_per_s": 100.0, "simulated_error": error}

    rows = [record(80.0, 0.25), record(100.0, 0.0), record(400.0, -0.75), record(1.0, None, "apex")]
    this_machine.print_comparison(this_machine.comparison(rows), Console(width=120))
    printed = capsys.readouterr().out
    assert "-75.0% to +25.0%" in printed and "mean absolute error of all runs: neo 33.3%" in printed
