"""Two classes over HTTP: the points, what the machine's own run decides, and what must hold of the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from apex.replay.records import REFUSED, RequestRecord
from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, PromptTokens, WorkloadSpec, make_workload
from evaluation.experiments.experiment import Experiment
from evaluation.experiments.omniserve.refusals import BURST, refusals
from evaluation.experiments.omniserve.served import contract, found_here, median_gap_s, most_blocks
from evaluation.experiments.options import experiment_settings
from evaluation.experiments.runner import Point, Run
from evaluation.measure.http import replay_workload
from evaluation.measure.server import connect_server
from evaluation.reproduce_omniserve import Options, served_points
from tests.evaluation.fake_server import FakeServer, token_by_token

SETTINGS = experiment_settings("omniserve")


def record(arrival_s: float, prompt: int, *times_s: float) -> RequestRecord:
    return RequestRecord(f"{arrival_s}", arrival_s, prompt, len(times_s), times_s, times_s[0], times_s[-1])


def test_a_run_alone_decides_the_target_and_the_pool() -> None:
    # Blocks of 16 tokens: 3 of the first (33 + 3 - 1 tokens), 1 of the second, 4 of the third after the first.
    records = [record(0.0, 33, 1.0, 1.1, 1.3), record(0.5, 4, 0.9, 1.2), record(2.0, 60, 2.5, 2.6, 3.0)]
    assert most_blocks(records) == 4
    assert median_gap_s(records) == pytest.approx(0.2)  # of 0.1, 0.1, 0.2, 0.3, 0.4
    here = found_here(SETTINGS["http"], {"latency_sensitive_gap_s_p50": 0.0131, "latency_sensitive_blocks": 41})
    assert here == {"tpot_slo_s": 0.0262, "num_gpu_blocks": 62}


def test_points_share_targets_pool_and_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = []

    def run_alone(self: Experiment, points: list[Point], results_dir: Path) -> Run:
        first.extend(points)
        return Run(tmp_path, None, [{"latency_sensitive_gap_s_p50": 0.015, "latency_sensitive_blocks": 33}], {})

    monkeypatch.setattr(Experiment, "run", run_alone)
    points = served_points(Options(quick=True, results_dir=tmp_path), SETTINGS, tmp_path)
    names = ["alone-sarathi", "both-sarathi", "both-omniserve", "both-omniserve-stepping", "queued-omniserve"]
    assert [point.key for point in points] == names
    (alone,) = first
    assert alone.key == "ample-sarathi" and alone.task.flags["tpot_slo_s"] == 0.2
    urgent = set(alone.task.lengths.rows)
    assert len(urgent) > 20 and alone.task.flags["num_gpu_blocks"] == SETTINGS["http"]["ample_blocks"]
    for point in points:
        task = point.task
        assert urgent <= set(task.lengths.rows) and task.duration_s == SETTINGS["http"]["quick"]["duration_s"]
        assert (task.targets.ttft_s, task.targets.tpot_s) == (2, 0.03)
        command = " ".join(task.arguments)
        assert f"--system {task.system} " in command and "--num-gpu-blocks 50" in command
        assert "--tpot-slo-s 0.03" in command and "--ttft-slo-s 2" in command and "--slo-margin 0.2" in command
        assert ("--num-cpu-blocks 3000" in command) is (task.values["panel"] != "alone")
    assert len(points[-1].task.lengths.rows) == 5000 + len(urgent) and points[-1].task.tries_refusals
    assert not any(point.task.tries_refusals for point in points[:-1])
    chosen = served_points(Options(quick=True, results_dir=tmp_path, systems=("sarathi",)), SETTINGS, tmp_path)
    assert [point.key for point in chosen] == names[:2]


def row(panel: str, system: str, **fields: object) -> dict:
    found = {"slo_attainment": 0.97, "points_over_alone": -1.0, "best_effort_over_baseline": 1.5}
    return {"panel": panel, "system": system, "baseline": "sarathi", **found, **fields}


def test_what_must_hold_is_judged_from_the_rows() -> None:
    refused = {"contradiction_status": 400, "burst": 64, "burst_refused": 9, "burst_least_retry_after_s": 1}
    counts = {"latency_sensitive_refused": 0, "latency_sensitive_arrived": 40, "best_effort_queued": 5000}
    good = [row("alone", "sarathi"), row("both", "sarathi"), row("both", "omniserve")]
    assert [holds for *_, holds in contract([*good, row("queued", "omniserve", **refused, **counts)])] == [True] * 6
    bad = {"slo_attainment": 0.9, "points_over_alone": -4.0, "best_effort_over_baseline": 1.2}
    wrong = refused | counts | {"latency_sensitive_refused": 1, "contradiction_status": 200, "burst_refused": 0}
    lines = contract([row("both", "omniserve", **bad), row("queued", "omniserve", **wrong)])
    assert [holds for *_, holds in lines] == [False] * 6
    assert contract(good[:2]) == []


def answer(exchange, body, index) -> None:
    """Refuses contradictions, and every second prompt of more than one token."""
    if body.get("service_tier") == "flex" and body.get("priority", 0) < 0:
        exchange.refuse(400, {"error": {"message": "contradiction"}})
    elif len(body["prompt"]) > 1 and index % 2:
        exchange.refuse(429, {"error": {"message": "try again later", "code": "slo_unattainable"}})
    else:
        token_by_token(exchange, body, index)


def test_refusals_are_asked_for_and_marked_in_records() -> None:
    spec = WorkloadSpec("x", 4)
    lengths = Lengths(spec, "X", Origin("fitted", "for tests"), (TraceRow(4, 2, 0.0),) * 4)
    with FakeServer(answer) as fake:
        server = connect_server("fake", fake.url, 5.0)
        found = refusals(server, pool_tokens=40)
        records = replay_workload(server, make_workload(lengths, PromptTokens(100))).records
        longest = max(len(body["prompt"]) for _, body in fake.requests)
    assert found["contradiction_status"] == 400 and found["burst"] == BURST == 2 * found["burst_refused"]
    assert found["burst_served"] == BURST / 2 and found["burst_least_retry_after_s"] == 0  # the fake gives no header
    assert longest == 20  # half of the pool
    assert sum(record.refused for record in records) == 2
    assert {record.failure for record in records if record.refused} == {f"{REFUSED}HTTP 429: try again later"}
