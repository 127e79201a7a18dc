"""NEO's figures from the command to the files, and what is read from their curves."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from matplotlib import pyplot as plt
from rich.console import Console

from apex.simulator.hardware.files import load_host
from apex.simulator.paper_settings import load_setting
from evaluation.grid import setting_of
from evaluation.options import experiment_settings
from evaluation.plots.papers import HOST_COLOURS, draw_panels, per_token_latencies_s
from evaluation.reproduce_neo import Options, main
from evaluation.results.claims import load_claims
from evaluation.results.folder import records_file
from evaluation.studies.figures import ALL_FIGURES, crossing, neo_jobs, with_rates_at_latency
from evaluation.studies.papers import ROW_AT_LATENCY, FigureOptions, figure_grid, simulated_points
from tests.evaluation.papers_machines import A10G, T4, NamedMachine, on_machine

SETTINGS = experiment_settings("neo")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    """The experiment file, with a few small points of every kind of panel."""
    few = {"at-rates": {"request_rate": [0.2, 2.5]}, "at-lengths": {"output_len": [20, 60]}}
    small = {}
    for figure, section in SETTINGS.items():
        if figure in ("fig6", "fig7", "fig10a"):
            panels = [panel | {"num_requests": 60} for panel in section["panels"]]
            if figure == "fig6":
                panels = [panel | few["at-rates"] for panel in panels if panel["setting"] == "neo-t4"]
            if figure == "fig10a":
                panels = [panel | few["at-lengths"] | {"host": ["g5-4xlarge", "g5-16xlarge"]} for panel in panels]
            small[figure] = section | {"panels": panels}
    path = tmp_path_factory.mktemp("config") / "neo.yaml"
    path.write_text(yaml.safe_dump(small))
    return path


@pytest.fixture(scope="module")
def results(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert main(Options(figure=("6", "7", "10a"), config=config, results_dir=folder, jobs=1)) == 0
    return folder


def rows_of(results: Path, figure: str) -> list[dict]:
    return json.loads((results / figure / "latest" / "summary.json").read_text())


def test_rows_name_what_is_swept_and_say_simulated(results):
    for figure in ("neo-fig6", "neo-fig7", "neo-fig10a"):
        folder = results / figure / "latest"
        assert (folder / "figure.png").stat().st_size > 10_000 and (folder / "figure.pdf").is_file()
        assert len(plt.imread(folder / "figure.png")) > 500
        for row in rows_of(results, figure):
            assert row["backend"] == "simulated" and row["failed"] == 0 and row["completed"] == 60
    assert {row["request_rate"] for row in rows_of(results, "neo-fig6")} == {0.2, 2.5}
    hosts = {(row["host"].split()[0], row["output_len"], row["cpu_kv_gb"]) for row in rows_of(results, "neo-fig10a")}
    assert hosts == {("g5.4xlarge", 20, 30), ("g5.4xlarge", 60, 30), ("g5.16xlarge", 20, 120), ("g5.16xlarge", 60, 120)}
    bandwidths = {r["host"]: r["cpu_bandwidth_gb_s"] for r in rows_of(results, "neo-fig10a") if r["system"] == "neo"}
    assert sorted(bandwidths.values()) == [bandwidths[load_host(h).name] for h in ("g5-4xlarge", "g5-16xlarge")]


def test_figure_is_drawn_again_without_running(results, config, tmp_path, capsys):
    folder = (results / "neo-fig7" / "latest").resolve()
    (folder / "figure.png").unlink()
    assert main(Options(from_folder=folder, config=config)) == 0
    assert (folder / "figure.png").is_file()
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert main(Options(from_folder=moved, config=config)) == 0
    (moved / "provenance.json").unlink()
    assert main(Options(from_folder=moved, config=config)) == 2 and "no provenance.json" in capsys.readouterr().out


def test_distribution_is_that_of_the_records(results):
    folder = (results / "neo-fig7" / "latest").resolve()
    rows = rows_of(results, "neo-fig7")
    (panel,) = draw_panels(rows, rows, folder)
    for row, line in zip(rows, panel.series, strict=True):
        latencies = per_token_latencies_s(records_file(folder, row["point"]))
        assert len(latencies) == 60
        assert sum(latencies) / 60 == pytest.approx(row["per_token_latency_s_mean"], rel=1e-4)
        assert dict((percent, latency) for latency, percent in line.points)[50] == pytest.approx(
            row["per_token_latency_s_p50"], rel=1e-4
        )


def test_each_host_is_held_against_the_baseline_on_it(results):
    rows = rows_of(results, "neo-fig10a")
    panel, own = draw_panels(rows, rows, results)
    assert "neo by host" in panel.title and "adaptive by host" in own.title
    assert (panel.y_from, panel.y_to) == (own.y_from, own.y_to)
    assert [line.label for line in panel.series] == ["swiftllm", "g5.4xlarge", "g5.16xlarge"]
    assert [line.colour for line in panel.series[1:]] == list(HOST_COLOURS[:2])
    big = {
        row["system"]: row["output_tokens_per_s"] for row in rows if "16x" in row["setting"] and row["output_len"] == 60
    }
    assert dict(panel.series[2].points)[60] == pytest.approx(big["neo"] / big["swiftllm"])
    assert dict(own.series[2].points)[60] == pytest.approx(big["adaptive"] / big["swiftllm"])


def test_curves_are_read_where_they_first_cross():
    assert crossing([(2, 3.0), (1, 1.0), (4, 4.0)], 2.0) == pytest.approx(1.5)
    assert crossing([(1, 1.0), (2, 3.0), (3, 1.0), (4, 3.0)], 2.0) == pytest.approx(1.5)
    assert crossing([(1, 1.0), (2, 1.5)], 2.0) is None and crossing([(1, 3.0), (2, 4.0)], 2.0) is None


def test_rate_at_latency_stands_in_one_row_of_a_curve():
    def row(system: str, rate: float, latency: float, at: float | None = 2.0) -> dict:
        where = {"setting": "s", "system": system, "request_rate": rate, "point": f"{system}-{rate}-{at}"}
        return {**where, "at_latency_s": at, "per_token_latency_s_mean": latency}

    rows = with_rates_at_latency([row("neo", 1, 1), row("vllm", 1, 1), row("neo", 3, 3), row("vllm", 3, 1.5)])
    assert [r["request_rate_at_latency"] for r in rows] == [2.0, None, None, None]
    assert with_rates_at_latency([row("neo", 1, 1, None), row("neo", 3, 3, None)])[0]["request_rate_at_latency"] is None


def test_cpu_cache_follows_the_cores():
    setting = load_setting("neo-a10")
    small, same = (setting_of({"setting": "neo-a10", "host": host}) for host in ("g5-2xlarge", "g5-4xlarge"))
    assert small["cpu_kv_gb"] == setting["cpu_kv_gb"] / 2 and small.num_gpu_blocks == setting.num_gpu_blocks
    assert (small.name, small.title) == ("neo-g5-2xlarge", "A10G + Llama-3.1-8B (g5.2xlarge)")
    assert same.num_cpu_blocks == setting.num_cpu_blocks


def test_every_claim_has_its_machine_and_points():
    for figure in ALL_FIGURES:
        section = SETTINGS[f"fig{figure}"]
        claims = load_claims(f"neo-fig{figure}")
        assert claims
        # One length and rate of each panel suffice.
        first = {"output_len": slice(0, 1), "request_rate": slice(0, 2 if figure != "7" else 1)}
        panels = [{k: v[first[k]] if k in first else v for k, v in panel.items()} for panel in section["panels"]]
        points = simulated_points(
            figure_grid(section | {"panels": panels}, FigureOptions(num_requests=8)), ROW_AT_LATENCY
        )
        there = {(p.task.values["setting"], p.task.lengths.spec.name, p.task.system) for p in points}
        for claim in claims:
            assert {(claim.setting, claim.workload, system) for system in claim.systems} <= there
        assert len({point.key for point in points}) == len(points)


def chosen_jobs(**options):
    return {job.name: job.points for job in neo_jobs(SETTINGS, Options(num_requests=8, **options), None, None)}


def test_options_choose_points():
    only_t4 = chosen_jobs(gpu="t4")
    assert list(only_t4) == ["neo-fig6", "neo-fig9"]
    assert {point.task.values["setting"] for points in only_t4.values() for point in points} == {"neo-t4"}
    varied = chosen_jobs(gpu="a10", sensitivity="cpu_bandwidth=10..100")
    assert list(varied) == ["neo-fig9_sensitivity"]
    rates = {point.task.values["cpu_bandwidth_gb_s"] for point in varied["neo-fig9_sensitivity"]}
    assert {None, 10, 100} <= rates and len(rates) > 5
    with pytest.raises(ValueError, match="no panel on t4"):
        chosen_jobs(figure=("7",), gpu="t4")


def test_misfitting_options_are_refused(tmp_path, capsys):
    assert main(Options(systems=("neo",), results_dir=tmp_path)) == 2
    assert "add it to --systems" in capsys.readouterr().out
    assert main(Options(from_folder=tmp_path)) == 2
    assert "no results in" in capsys.readouterr().out


QUIET = Console(file=io.StringIO(), width=200)


def jobs_on(monkeypatch, cache: Path, card, host_gib: float, machine, **options):
    on_machine(monkeypatch, cache, card, host_gib)
    return {job.name: job for job in neo_jobs(SETTINGS, Options(num_requests=20, jobs=1, **options), QUIET, machine)}


def measured_panels_of(job) -> set[tuple[str, str]]:
    places = job.measured.grid.places() if job.measured else ()
    return {(place["panel"], setting_of(place).name) for place in places}


@pytest.mark.parametrize(
    ("card", "host_gib", "measured"),
    [
        (
            A10G,
            61.0,
            {"neo-fig6": {("b", "neo-a10")}, "neo-fig7": {("a", "neo-a10")}, "neo-fig8": set(),
             "neo-fig9": {("b", "neo-a10")}, "neo-fig10a": {("a", "neo-g5-4xlarge")}},
        ),
        (
            T4,
            61.0,
            {"neo-fig6": {("c", "neo-t4")}, "neo-fig7": set(), "neo-fig8": set(), "neo-fig9": {("c", "neo-t4")},
             "neo-fig10a": set()},
        ),
    ],
    ids=["A10G", "T4"],
)  # fmt: skip
def test_a_card_measures_its_own_panels(monkeypatch, tmp_path, card, host_gib, measured):
    machine = NamedMachine("apex-t4" if card is T4 else "apex-a10")
    jobs = jobs_on(monkeypatch, tmp_path, card, host_gib, machine)
    assert {name: measured_panels_of(job) for name, job in jobs.items()} == measured
    alone = {job.name: job for job in neo_jobs(SETTINGS, Options(num_requests=20, backend="simulated"), QUIET, None)}
    for name, job in jobs.items():
        assert dict(job.configuration) == dict(alone[name].configuration), "the simulated half depends on the card"
        assert len(job.points) == len(alone[name].points)
    settings = {engine.model.rpartition("/")[2] for engine in machine.profiled}
    assert settings == ({"llama-2-7b"} if card is T4 else {"llama-3.1-8b"})


@pytest.mark.parametrize(
    ("host_gib", "host"),
    [
        (30.0, "g5-2xlarge"),
        (61.0, "g5-4xlarge"),
        (124.0, "g5-8xlarge"),
        (249.0, "g5-16xlarge"),
        (90.0, None),
        (4.0, None),
    ],
)
def test_the_host_with_this_machine_s_memory_is_measured(monkeypatch, tmp_path, host_gib, host):
    if host is None:
        options = {"backend": "torch", "setting": "neo-a10"}
        with pytest.raises(ValueError, match="no panel"):
            jobs_on(monkeypatch, tmp_path, A10G, host_gib, NamedMachine("neo-a10"), figure=("10a",), **options)
        return
    jobs = jobs_on(monkeypatch, tmp_path, A10G, host_gib, NamedMachine("neo-a10"), figure=("10a",))
    planner = jobs["neo-fig10a"].measured
    assert set(planner.settings) == {f"neo-{host}"}
    grid = planner.grid.with_(output_len=10, system=["swiftllm", "neo"], scale=0.1)
    plan = replace(planner, grid=grid).plan_with([16])
    cores = {"g5-2xlarge": 15, "g5-4xlarge": 30, "g5-8xlarge": 60, "g5-16xlarge": 120}
    for point in plan.points:
        assert point.task.values["setting"] == f"neo-{host}" and "at_latency_s" in point.task.values
        here_gb = point.task.engine.num_cpu_blocks * (2 << 20) / 1e9
        assert here_gb == pytest.approx(min(cores[host], host_gib * 1.0737), rel=0.03)


def test_neo_has_no_small_setting(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="NEO's figures are measured in its settings: give --setting"):
        jobs_on(monkeypatch, tmp_path, None, 61.0, None, backend="torch")
