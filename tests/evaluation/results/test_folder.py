"""Result folders: what they hold, which points run again, and what a crash or a change of configuration leaves."""

from __future__ import annotations

import errno
import itertools
import json
import os
import tempfile
from pathlib import Path

import pytest

from apex.replay.metrics import compute_metrics
from apex.replay.records import RequestRecord
from evaluation.results import folder as results
from evaluation.results.folder import (
    SUMMARY_FIELDS,
    ResultFolder,
    flat_record,
    markdown_table,
    median_record,
    read_records,
    records_file,
    span_of,
)
from evaluation.run import Point, PointResult
from evaluation.study import Study
from swiftllm import files
from swiftllm.files import write_atomically

REQUIRED = {
    "system", "backend", "gpu", "model", "workload", "output_tokens_per_s", "requests_per_s",
    "per_token_latency_s_mean", "per_token_latency_s_p99", "completed", "failed", "wall_s",
}  # fmt: skip


class Counting:
    """Runs points by counting; ``broken`` are keys that raise."""

    def __init__(self, broken=()):
        self.ran: list[str] = []
        self.broken = set(broken)

    def __call__(self, point, label, console):
        self.ran.append(point.key)
        if point.key in self.broken:
            raise RuntimeError("no such luck")
        tokens = float(point.task)
        records = [RequestRecord("a", 0.0, 5, 2, (1.0, 2.0)), RequestRecord("b", 0.0, 5, 2, failure="refused: long")]
        values = {"system": "apex", "workload": "osc", "backend": "fake", "model": "m", "output_len": 2.0}
        metrics = {**compute_metrics(records, 2.0), "output_tokens_per_s": tokens}
        return PointResult({**values, **metrics}, records, {"engine": {"device": "cpu"}})


def points(*tasks):
    return [Point(f"p{i}", f"p{i}", f"point {i}", task) for i, task in enumerate(tasks)]


def run(tmp_path, runner, the_points=None, configuration=None):
    described = {"seed": 1} if configuration is None else configuration
    experiment = Study("exp", run_point=runner, describe=lambda points: described)
    return experiment.run(the_points or points(10, 20), tmp_path, 1)


def test_folder_holds_everything(tmp_path):
    outcome = run(tmp_path, Counting())
    assert outcome.failed == [] and outcome.folder.parent == tmp_path / "exp"
    summary = json.loads((tmp_path / "exp" / "latest" / "summary.json").read_text())
    assert summary == outcome.summary and len(summary) == 2
    for record in summary:
        assert set(record) >= REQUIRED and set(SUMMARY_FIELDS) >= REQUIRED
        assert all(value is None or isinstance(value, (str, int, float, bool)) for value in record.values())
    assert summary[0]["gpu"] is None and summary[0]["failed"] == 1
    records = read_records(records_file(outcome.folder, "p0"))
    assert [record["request_id"] for record in records] == ["a", "b"]
    assert records[0]["token_times_s"] == [1.0, 2.0]
    assert (outcome.folder / "summary.md").read_text().count("\n") == 4


def test_finished_points_are_not_run_again(tmp_path):
    first = run(tmp_path, Counting())
    again = Counting()
    second = run(tmp_path, again)
    assert again.ran == [] and second == first
    provenance = json.loads((second.folder / "provenance.json").read_text())
    assert len(provenance["invocations"]) == 2


def test_interrupted_run_says_what_is_kept_and_goes_on_where_it_stopped(tmp_path, capsys):
    class Interrupted(Counting):
        def __call__(self, point, label, console):
            if point.key == "p1":
                raise KeyboardInterrupt
            return super().__call__(point, label, console)

    with pytest.raises(SystemExit, match="130"):
        run(tmp_path, Interrupted())
    assert "interrupted: 1 of 2 points are kept" in capsys.readouterr().out
    runner = Counting()
    outcome = run(tmp_path, runner)
    assert runner.ran == ["p1"] and len(outcome.summary) == 2
    printed = capsys.readouterr().out
    assert "1/2 point 0: finished before" in printed and "to run: 1 points one after the other" in printed


@pytest.mark.parametrize("what", ["configuration", "source", "machine"])
def test_any_change_starts_a_new_folder(tmp_path, monkeypatch, what):
    first = run(tmp_path, Counting())
    configuration = {"seed": 2 if what == "configuration" else 1}
    if what == "source":
        monkeypatch.setattr(results, "source_hash", lambda: "other code")
    if what == "machine":
        monkeypatch.setattr(results, "machine_identity", lambda: {"cpu": "another"})
    runner = Counting()
    second = run(tmp_path, runner, configuration=configuration)
    assert second.folder != first.folder and runner.ran == ["p0", "p1"]
    assert os.readlink(tmp_path / "exp" / "latest") == second.folder.name
    assert (first.folder / "summary.json").is_file()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "exp").write_text("in the way")
    runner = Counting()
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, runner)
    assert "choose another folder with --results-dir" in capsys.readouterr().out and runner.ran == []


def test_failed_point_leaves_the_others_and_is_tried_again(tmp_path):
    outcome = run(tmp_path, Counting(broken={"p0"}))
    assert outcome.failed == ["point 0"] and len(outcome.summary) == 1
    assert "no such luck" in (outcome.folder / "errors" / "p0.txt").read_text()
    runner = Counting()
    healed = run(tmp_path, runner)
    assert runner.ran == ["p0"] and healed.failed == [] and len(healed.summary) == 2
    assert not (outcome.folder / "errors" / "p0.txt").exists()


def test_repeats_are_merged_by_median(tmp_path):
    repeats = [Point(f"p-{i}", "p", "point", task) for i, task in enumerate((10, 50, 20))]
    (record,) = run(tmp_path, Counting(), repeats).summary
    assert record["output_tokens_per_s"] == 20 and record["repeats"] == 3 and record["system"] == "apex"
    assert span_of(record, "output_tokens_per_s") == (10, 50)
    assert str(median_record([{"num_requests": 6}, {"num_requests": 6}])["num_requests"]) == "6"
    (alone,) = run(tmp_path, Counting(), points(7)).summary
    assert span_of(alone, "output_tokens_per_s") == (7, 7) and "output_tokens_per_s_low" not in alone
    assert median_record([{"x": None}, {"x": 1.0}])["x"] is None


def test_writing_is_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "points" / "a.json"
    write_atomically(path, "old")

    def power_cut(*_):
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", power_cut)
    with pytest.raises(OSError, match="power cut"):
        write_atomically(path, "new")
    assert path.read_text() == "old" and list(path.parent.iterdir()) == [path]


class InterruptedRun(BaseException):
    """Nothing is done any more."""


def test_point_counts_as_finished_only_after_its_records(tmp_path, monkeypatch):
    """The power is cut before every file in turn."""
    folder, real = ResultFolder("exp", {}, tmp_path), os.replace
    record = RequestRecord("a", 0.0, 5, 2, (1.0, 2.0))
    for files_before in itertools.count():
        left = iter(range(files_before))

        def replace_until_power_cut(source, target, left=left):
            if next(left, None) is None:
                raise InterruptedRun
            real(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace_until_power_cut)
            try:
                folder.save_point("a", {"values": {}}, [record])
                break
            except InterruptedRun:
                assert folder.finished_point("a") is None
    assert files_before == 2 and folder.finished_point("a") == {"values": {}}
    assert len(read_records(records_file(folder.path, "a"))) == 1


def test_summary_must_be_flat_and_keys_unique(tmp_path):
    with pytest.raises(TypeError, match="not flat"):
        flat_record({"system": ["apex"]})
    with pytest.raises(ValueError, match="share keys"):
        run(tmp_path, Counting(), [Point("p", "p", "", 1), Point("p", "p", "", 2)])


def test_provenance_tells_where_a_result_came_from(tmp_path):
    outcome = run(tmp_path, Counting(), configuration={"seed": 1, "trace": {"kind": "fitted"}})
    provenance = json.loads((outcome.folder / "provenance.json").read_text())
    assert provenance["configuration"] == {"experiment": "exp", "seed": 1, "trace": {"kind": "fitted"}}
    machine = provenance["machine"]
    assert machine["cpu"] and machine["cores"] >= machine["usable_cores"] >= 1 and machine["memory_gib"] >= 1
    assert isinstance(machine["gpus"], list)
    assert provenance["versions"]["os"] and provenance["versions"]["python"].startswith("3.")
    assert provenance["versions"]["packages"]["numpy"][0].isdigit()
    assert len(provenance["source_hash"]) == 16
    (invocation,) = provenance["invocations"]
    assert set(invocation["git"]) == {"commit", "dirty"} and invocation["command"] and invocation["date"]
    assert provenance["run"] == outcome.folder.name


def test_summary_table_shows_what_was_swept_and_only_that() -> None:
    records = [{"system": "apex", "gpu": "a10", "request_rate": rate, "failed": 0} for rate in (0.5, 2 / 3)]
    header, _, first, second = markdown_table(records).splitlines()
    assert "| request rate |" in header and "gpu" not in header
    assert "| backend |" in header  # simulated rows must not be mistaken for measured ones
    place = header.split(" | ").index("request rate")
    assert [row.split(" | ")[place] for row in (first, second)] == ["0.5", "0.666667"]


def test_a_prediction_is_a_column_only_where_there_is_one():
    rows = [{"system": "apex", "backend": "torch-cuda", "output_tokens_per_s": 10.0}]
    assert "predicted" not in markdown_table(rows)
    lines = markdown_table([rows[0] | {"predicted_output_tokens_per_s": 12.345}, *rows]).splitlines()
    titles, first, second = ([cell.strip() for cell in lines[at].split("|")] for at in (0, 2, 3))
    place = titles.index("predicted (SIMULATED tok/s)")
    assert titles[place - 1] == "output tok/s"
    assert (first[place - 1], first[place], second[place]) == ("10.0", "12.3", "-")


def test_points_that_cannot_be_written_any_more_are_in_the_summary_and_written_elsewhere(tmp_path, monkeypatch, caplog):
    """The disk is full from the first point on."""

    class FillsTheDisk(Counting):
        def __call__(self, point, label, console):
            for module in (files, results):
                monkeypatch.setattr(module, "write_atomically", full)
            return super().__call__(point, label, console)

    def full(path, content):
        if tmp_path / "results" in path.parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write_atomically(path, content)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runner = FillsTheDisk()
    outcome = run(tmp_path / "results", runner)
    assert runner.ran == ["p0", "p1"] and not outcome.failed
    assert [row["output_tokens_per_s"] for row in outcome.summary] == [10.0, 20.0]
    elsewhere = {path.name: path for path in tmp_path.glob("apex-*/*")}
    assert elsewhere.keys() >= {"p0.json", "p1.json", "p0.jsonl.gz", "summary.json", "summary.md"}
    assert json.loads(elsewhere["summary.json"].read_text()) == outcome.summary
    assert "No space left on device" in caplog.text and str(elsewhere["p1.json"]) in caplog.text


def test_a_folder_that_cannot_be_written_to_stops_the_run_before_its_first_point(tmp_path, capsys):
    runner = Counting()
    with pytest.raises(SystemExit):
        run(Path(os.devnull), runner)
    assert not runner.ran and "choose another folder with --results-dir" in capsys.readouterr().out
