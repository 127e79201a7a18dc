"""All figures in one command: a rehearsal with a failing point, an interruption and a continuation, to its report."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from apex.simulator.paper_settings import load_setting
from evaluation import artifact
from evaluation.artifact import Options, Rehearsal, RehearsedFailure, main, make_jobs
from evaluation.grid import Grid, values_of
from evaluation.measure.live_systems import EngineHere, LiveSystems
from evaluation.options import experiment_settings
from evaluation.run import Point
from evaluation.studies import figures as figure_jobs
from evaluation.studies.figures import FigureJob
from evaluation.studies.papers import FigureOptions
from swiftllm.machine import Card
from tests.evaluation.papers_machines import A10G, RTX_3060, T4, NamedMachine, on_machine, simulated_profile

QUIET = Console(file=io.StringIO(), width=200)


def with_one_panel(settings: dict) -> dict:
    """The first panel of a single card in a section of an experiment file, at one length or rate."""
    there = {panel["setting"]: load_setting(panel["setting"]) for panel in settings["panels"]}
    alone = {name for name, setting in there.items() if setting.tensor_parallel == 1 and setting.like is None}
    (panel, *_) = [panel for panel in settings["panels"] if panel["setting"] in alone]
    few = {name: panel[name][:1] for name in ("output_len", "request_rate") if name in panel}
    return {**settings, "panels": [{**panel, **few}]}


@pytest.fixture
def few_figures(tmp_path, monkeypatch) -> Path:
    """Figure 5 of APEX and Figure 9 of NEO with a panel each, on a small machine without a card."""
    on_machine(monkeypatch, tmp_path / "cache", None, host_gib=4.0)
    profile = simulated_profile(load_setting("apex-t4"))

    def load(config, backend, path=None):
        return profile(config).table

    monkeypatch.setattr(
        "apex.systems.load_or_measure", load
    )  # first: it is loaded here, with the function of that time
    monkeypatch.setattr("apex.perf.profile_cache.load_or_measure", load)
    monkeypatch.setattr(artifact, "LiveSystems", partial(LiveSystems, make_engine=EngineHere))
    monkeypatch.setattr("evaluation.measure.vllm.vllm_program", lambda device: None)

    def few(figure, config=None):
        settings = experiment_settings(figure, config)
        if figure == "neo":
            return {"fig9": with_one_panel(settings["fig9"])}
        return {**settings, "simulated": with_one_panel(settings["simulated"])}

    monkeypatch.setattr(figure_jobs, "experiment_settings", few)
    monkeypatch.setattr(artifact, "experiment_settings", few)
    monkeypatch.setattr(artifact, "FIGURES", (figure_jobs.FIG5,))
    monkeypatch.setattr(artifact, "NeoOptions", partial(figure_jobs.NeoOptions, figure=("9",)))
    return tmp_path / "results"


def test_a_rehearsal_from_start_to_report(few_figures, capsys):
    assert main(Options(rehearse=True, hours=0.5, jobs=1, results_dir=few_figures)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    results = few_figures / "rehearsal"
    planned, failed, interrupted, resumed = (
        printed.index(words)
        for words in (
            "Plan of Figure 5",
            "FAILED: RehearsedFailure: this point fails because this is a rehearsal",
            "interrupted as rehearsed (exit status 130)",
            "1 of 2: Figure 5",
        )
    )
    assert planned < failed < interrupted < resumed
    assert "points are kept in" in printed[failed:interrupted]
    for name, papers in (("fig5", {"vllm", "swiftllm", "neo", "apex"}), ("neo-fig9", {"swiftllm", "neo"})):
        systems = papers | {"adaptive"}
        folder = (results / name / "latest").resolve()
        rows = json.loads((folder / "summary.json").read_text())
        for backend in ("simulated", "torch-cpu"):
            assert {row["system"] for row in rows if row["backend"] == backend} == systems
        assert all(row["failed"] == 0 and row["completed"] == row["num_requests"] for row in rows)
        assert (folder / "figure.png").is_file() and not list((folder / "errors").glob("*"))
    page = (results / "report.html").read_text()
    for claim in ("APEX 5.2", "APEX abstract", "NEO 5.4", "T4 rehearsal"):
        assert claim in page


def test_what_happens_in_a_rehearsal_happens_once():
    ran = []

    def run(point, label, console):
        ran.append(point.key)

    rehearsal = Rehearsal(run)
    happened = []
    rehearsal.run_point(Point("simulated", "", "", None, concurrent=True), "", QUIET)  # here where there is one core
    for number in range(7):
        point = Point(str(number), "", "", None)
        try:
            rehearsal.run_point(point, "", QUIET)
        except RehearsedFailure:
            happened.append((number, "failed"))
        except KeyboardInterrupt:
            happened.append((number, "interrupted"))
    assert happened == [(1, "failed"), (3, "interrupted")] and ran == ["simulated", "0", "2", "4", "5", "6"]


def jobs_on(monkeypatch, cache: Path, card: Card | None, machine, **options) -> dict:
    on_machine(monkeypatch, cache, card, host_gib=61.0)
    chosen = FigureOptions(hours=8.0, jobs=1, num_requests=20, **options)
    return {job.name: job for job in make_jobs(chosen, Console(file=io.StringIO(), width=300), machine)}


@pytest.mark.parametrize(
    ("card", "measured"),
    [
        (A10G, {"fig5": "apex-a10", "fig6": "apex-a10", "fig7": "apex-a10", "neo-fig6": "neo-a10",
                      "neo-fig7": "neo-a10", "neo-fig9": "neo-a10", "neo-fig10a": "neo-g5-4xlarge"}),
        (T4, {"fig5": "apex-t4", "fig6": "apex-t4", "neo-fig6": "neo-t4", "neo-fig9": "neo-t4"}),
    ],
    ids=["A10G", "T4"],
)  # fmt: skip
def test_all_figures_are_simulated_and_those_of_the_card_measured(monkeypatch, tmp_path, card, measured):
    machine = NamedMachine("apex-t4" if card is T4 else "apex-a10")
    jobs = jobs_on(monkeypatch, tmp_path, card, machine)
    assert list(jobs) == [
        "fig5", "fig6", "fig7", "neo-fig6", "neo-fig7", "neo-fig8", "neo-fig9", "neo-fig10a"
    ]  # fmt: skip
    chosen = {name: set(job.measured.settings) for name, job in jobs.items() if job.measured}
    assert chosen == {name: {setting} for name, setting in measured.items()}
    for job in jobs.values():
        assert job.points and {point.task.lengths.spec.num_requests for point in job.points} == {20}
        if job.measured:
            assert all(count > 100 for count in job.measured.most), "--num-requests is the simulation's"


@pytest.mark.thorough
def test_a_card_too_small_is_told_and_everything_is_simulated(monkeypatch, tmp_path, capsys):
    on_machine(monkeypatch, tmp_path, RTX_3060, host_gib=61.0)
    assert main(Options(plan=True, results_dir=tmp_path / "results")) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("setting apex-t4 does not fit here: the GPU has 11.64 GiB of memory") == 2  # Figures 5 and 6
    assert "setting neo-t4 does not fit here: the GPU has 11.64 GiB of memory" in told
    jobs = jobs_on(monkeypatch, tmp_path, RTX_3060, NamedMachine("apex-t4"))
    assert not any(job.measured for job in jobs.values()) and all(job.points for job in jobs.values())


@pytest.mark.thorough
def test_without_a_card_all_is_simulated_whatever_the_hours(monkeypatch, tmp_path, capsys):
    on_machine(monkeypatch, tmp_path, None)
    begun = []
    monkeypatch.setattr(artifact, "run_jobs", lambda jobs, *_: begun.extend(jobs) or 0)
    monkeypatch.setattr(artifact, "write_report", lambda options: 0)
    assert main(Options(hours=8.0, results_dir=tmp_path / "results")) == 0
    assert len(begun) == 8 and not any(job.measured for job in begun)
    assert "no GPU here" in capsys.readouterr().out
    assert main(Options(plan=True, results_dir=tmp_path / "results")) == 2
    assert "--plan: only a measurement in a paper's setting" in " ".join(capsys.readouterr().out.split())


def short(job: FigureJob) -> FigureJob:
    """The job with one short length and the highest rate of each measured panel, and two systems."""
    if job.measured is None:
        return job
    ends = {"output_len": slice(0, 1), "request_rate": slice(-1, None)}
    few = [
        panel | {name: values_of(panel, name)[part] for name, part in ends.items() if name in panel}
        for panel in job.measured.grid.panels
    ]
    grid = Grid(tuple(few)).with_(scale=0.1, system=["vllm", "swiftllm"])
    return replace(job, measured=replace(job.measured, grid=grid))


def test_the_hours_are_shared_by_all_figures(monkeypatch, tmp_path):
    machine = NamedMachine("apex-t4", factor=100.0)
    monkeypatch.setattr(artifact, "FIGURES", (figure_jobs.FIG5,))
    jobs = [short(job) for job in jobs_on(monkeypatch, tmp_path, T4, machine).values()]
    plans = figure_jobs.plan_jobs(jobs, FigureOptions(hours=2.0), QUIET)
    assert set(plans) == {"fig5", "neo-fig6", "neo-fig9"}
    total_s = sum(plan.total_s for plan in plans.values())
    assert 1.0 * 3600 < total_s <= 2.0 * 3600
    most = {job.name: job.measured.most for job in jobs if job.measured}
    shares = [
        plan.points[0].task.lengths.spec.num_requests / most[name][0]
        for name, plan in plans.items()
        if plan.points[0].task.lengths.spec.num_requests > 16
    ]
    assert shares and max(shares) - min(shares) < 0.01
