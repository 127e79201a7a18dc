"""The simulated figures from the command to the files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
from matplotlib.figure import Figure

from evaluation import reproduce_fig5, reproduce_fig6, reproduce_fig7, reproduce_neo, validate
from evaluation.options import experiment_settings
from evaluation.results.folder import read_records, records_file
from evaluation.results.paths import REPO_ROOT
from evaluation.run import Point
from evaluation.studies.figures import make_job, measured_requests, with_gains
from evaluation.studies.papers import FigureOptions
from evaluation.study import Study

SYSTEMS = ("swiftllm", "neo", "apex")


def options(tmp_path, **changes):
    base = {"backend": "simulated", "num_requests": 8, "systems": SYSTEMS, "jobs": 1, "results_dir": tmp_path}
    return FigureOptions(**{**base, **changes})


def latest(tmp_path, name):
    folder = (tmp_path / name / "latest").resolve()
    return folder, json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize(
    ("figure", "gpu", "swept"),
    [
        (reproduce_fig5, "t4", "output_len"),
        (reproduce_fig6, "a10", "request_rate"),
        (reproduce_fig7, "a10", "output_len"),
    ],
)
def test_a_figure_from_its_command_to_its_files(tmp_path, capsys, figure, gpu, swept):
    assert figure.main(options(tmp_path, gpu=gpu)) == 0
    folder, summary = latest(tmp_path, figure.FIGURE.name)
    panels = experiment_settings(figure.FIGURE.name)["simulated"]["panels"]
    here = [panel for panel in panels if panel["setting"].startswith(f"apex-{gpu}")]
    assert [panel["setting"] for panel in here] == [f"apex-{gpu}-as-measured", f"apex-{gpu}"]
    assert [r[swept] for r in summary] == [value for panel in here for value in panel[swept] for _ in SYSTEMS]
    assert {r["backend"] for r in summary} == {"simulated"} and {r["paper_setting"] for r in summary} == {f"apex-{gpu}"}
    assert [*dict.fromkeys(r["reading"] for r in summary)] == ["as APEX measured", "with today's kernels"]
    assert all(r["failed"] == 0 and r["num_requests"] == 8 for r in summary)
    assert all((r["cpu_bandwidth_gb_s"] is None) is (r["system"] == "swiftllm") for r in summary)
    assert (folder / "figure.png").stat().st_size > 20_000
    records = read_records(records_file(folder, next((folder / "points").iterdir()).stem))
    assert len(records) == 8 and records[0]["output_len"] > 0 and "token_times_s" not in records[0]
    printed = capsys.readouterr().out
    assert "SIMULATED" in printed and "MEASURED" not in printed and "look first at the GPU's KV pool" in printed
    command = f"reproduce_{figure.FIGURE.name}.py --gpu {gpu} --sensitivity gpu_blocks="
    assert printed.count(command) == 2 and "(or cpu_bandwidth=5..300)" in printed
    assert "CPU attention of apex (llamafile kernel)" in printed and "APEX Figure 1b" in printed.split("to run:")[0]
    assert "ours," in printed and "the launches of NEO's own code are not charged" in printed


@pytest.mark.parametrize("figure", [reproduce_fig5, reproduce_fig6, reproduce_fig7])
def test_the_papers_systems_and_our_own_are_compared_by_default(figure):
    settings = experiment_settings(figure.FIGURE.name)
    assert settings["simulated"]["system"] == ["vllm", "swiftllm", "neo", "apex", "adaptive"]
    assert settings["torch"]["system"] == ["swiftllm", "neo", "apex", "adaptive"]


def test_the_result_is_the_same_with_any_number_of_jobs(tmp_path, capsys):
    chosen = options(tmp_path / "one", gpu="t4")
    assert reproduce_fig5.main(chosen) == 0
    assert reproduce_fig5.main(options(tmp_path / "two", gpu="t4", jobs=2)) == 0
    one, two = (latest(tmp_path / name, "fig5") for name in ("one", "two"))
    assert (
        one[0].name == two[0].name and (one[0] / "summary.json").read_bytes() == (two[0] / "summary.json").read_bytes()
    )
    for drawn in ("figure.png", "figure.pdf"):
        assert (one[0] / drawn).read_bytes() == (two[0] / drawn).read_bytes()
    for part in ("points", "records"):
        for file in (one[0] / part).iterdir():
            assert file.read_bytes() == (two[0] / part / file.name).read_bytes()


def test_a_failing_point_leaves_the_others_in_their_processes(tmp_path):
    job = make_job(reproduce_fig5.FIGURE, options(tmp_path, gpu="t4"), None, None)
    made, configuration = list(job.points), job.configuration
    made[1] = Point("broken", "broken", "broken", "no task", concurrent=True)
    outcome = Study("x", describe=lambda points: configuration).run(made[:4], tmp_path, 2)
    assert outcome.failed == ["broken"] and len(outcome.summary) == 3
    assert "nothing runs a str" in (outcome.folder / "errors" / "broken.txt").read_text()


def test_a_folder_reproduces_its_figure_without_running(tmp_path, capsys, monkeypatch):
    assert reproduce_fig7.main(options(tmp_path)) == 0
    folder, _ = latest(tmp_path, "fig7")
    first = (folder / "figure.png").read_bytes()
    moved = tmp_path / "elsewhere"
    shutil.move(folder, moved)
    (moved / "figure.png").unlink()
    printed = capsys.readouterr().out
    assert reproduce_fig7.main(FigureOptions(from_folder=moved)) == 0
    assert (moved / "figure.png").read_bytes() == first
    table = printed[printed.index("Figure 7") : printed.index("figure:")]
    printed_again = capsys.readouterr().out
    assert table in printed_again and "to run:" in printed and "to run:" not in printed_again
    assert reproduce_fig7.main(FigureOptions(from_folder=tmp_path)) == 2
    assert "no results in" in capsys.readouterr().out
    for other in (lambda: reproduce_fig6.main(FigureOptions(from_folder=moved)), lambda: draw_neo_of(moved)):
        assert other() == 2 and "holds results of fig7" in capsys.readouterr().out
    assert (moved / "figure.png").read_bytes() == first

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied", "figure.png")

    monkeypatch.setattr(Figure, "savefig", refused)
    assert reproduce_fig7.main(FigureOptions(from_folder=moved)) == 2
    assert "copy the folder to a writable place" in capsys.readouterr().out


def draw_neo_of(folder):
    return reproduce_neo.main(reproduce_neo.Options(from_folder=folder))


def test_a_workload_can_be_had_alone(tmp_path, capsys):
    assert reproduce_fig5.main(options(tmp_path, workloads=("livebench",))) == 0
    _, summary = latest(tmp_path, "fig5")
    assert {r["workload"] for r in summary} == {"livebench"} and len(summary) == 2 * len(SYSTEMS)


@pytest.mark.thorough
def test_repeats_of_a_simulation_have_seeds_of_their_own(tmp_path, capsys):
    chosen = {"gpu": "a10", "workloads": ("livebench",)}
    alone = {}
    for seed in (3, 4, 5):
        assert reproduce_fig5.main(options(tmp_path, **chosen, seed=seed)) == 0
        alone[seed] = [row["output_tokens_per_s"] for row in latest(tmp_path, "fig5")[1]]
    assert reproduce_fig5.main(options(tmp_path, **chosen, seed=3, repeats=3)) == 0
    folder, summary = latest(tmp_path, "fig5")
    for place, row in enumerate(summary):
        low, middle, high = sorted(rates[place] for rates in alone.values())
        assert row["output_tokens_per_s"] == middle and row["repeats"] == 3
        assert (row["output_tokens_per_s_low"], row["output_tokens_per_s_high"]) == (low, high) and low < high
    assert len(list((folder / "points").iterdir())) == 2 * 3 * len(SYSTEMS)  # readings, seeds


def test_sensitivity_varies_the_cpu_and_nothing_else(tmp_path, capsys):
    assert reproduce_fig7.main(options(tmp_path, num_requests=3, sensitivity="cpu_bandwidth=50..200")) == 0
    folder, summary = latest(tmp_path, "fig7_sensitivity")
    assert {r["cpu_bandwidth_gb_s"] for r in summary if r["system"] == "swiftllm"} == {None}
    for system in ("neo", "apex"):
        bandwidths = [
            r["cpu_bandwidth_gb_s"]
            for r in summary
            if (r["system"], r["output_len"], r["setting"]) == (system, 1000, "apex-a10")
        ]
        assert bandwidths == [50, 61, 74, 91, 110, 130, 160, 200]
    assert {r["sensitivity"] for r in summary} == {"cpu_bandwidth"} and (folder / "figure.png").is_file()


@pytest.mark.thorough
def test_sensitivity_varies_the_gpu_pool_of_every_system(tmp_path, capsys):
    assert reproduce_fig7.main(options(tmp_path, num_requests=3, sensitivity="gpu_blocks=1280..4000")) == 0
    folder, summary = latest(tmp_path, "fig7_sensitivity")
    blocks = [1280, 1500, 1800, 2100, 2500, 2900, 3400, 4000]
    for system in SYSTEMS:
        here = [r for r in summary if (r["system"], r["output_len"], r["setting"]) == (system, 1000, "apex-a10")]
        assert [r["num_gpu_blocks"] for r in here] == blocks
        assert len({r["cpu_bandwidth_gb_s"] for r in here}) == 1  # nothing else is varied
    assert {r["sensitivity"] for r in summary} == {"gpu_blocks"} and (folder / "figure.png").is_file()
    printed = capsys.readouterr().out
    baselines = [line.split() for line in printed.splitlines() if " swiftllm " in line and "%" in line]
    assert len(baselines) == 2 * 3 * len(blocks)  # readings, output lengths
    assert {line[4] for line in baselines} == {"1.00"}  # each ratio is to the same pool


@pytest.mark.thorough
def test_sensitivity_of_the_pool_changes_what_a_gpu_only_system_reaches(tmp_path, capsys):
    """The ratios on the T4 depend on the pool: a larger one raises the baseline, not the offloading systems."""
    systems = ("swiftllm", "apex")
    chosen = options(tmp_path, gpu="t4", num_requests=24, systems=systems, sensitivity="gpu_blocks=54..200")
    assert reproduce_fig5.main(chosen) == 0
    _, summary = latest(tmp_path, "fig5_sensitivity")
    here = [r for r in summary if (r["output_len"], r["setting"]) == (100, "apex-t4")]
    rates = {(r["system"], r["num_gpu_blocks"]): r["output_tokens_per_s"] for r in here}
    assert rates["swiftllm", 200] > 2 * rates["swiftllm", 54]
    assert rates["apex", 200] < 1.5 * rates["apex", 54]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workloads": ("osc",)}, "there are input-1000"),
        ({"scale": 0.5, "cpu_threads": 3}, "--scale, --cpu-threads: only --backend torch or http takes that"),
        ({"url": ("a=http://127.0.0.1:1",), "backend": "torch"}, "--url: only --backend http takes that"),
        ({"systems": ("swiftllm", "orca")}, "unknown system 'orca'; there are vllm"),
        ({"systems": ("apex",)}, "add it to --systems"),
        ({"gpu": "t4"}, "no gpu t4 in the experiment file; there are a10"),
        ({"sensitivity": "cpu_bandwidth"}, "cpu_bandwidth=20..300"),
        ({"sensitivity": "gpu=1..2"}, "cpu_bandwidth, gpu_blocks"),
        ({"sensitivity": "gpu_blocks=54..400"}, "needs 1280 blocks"),
        ({"sensitivity": "cpu_bandwidth=300..20"}, "must rise"),
        ({"sensitivity": "cpu_bandwidth=20..300", "backend": "torch"}, "--backend simulated"),
        ({"backend": "torch", "systems": ("orca",)}, "unknown system 'orca'"),
    ],
)
def test_an_option_that_does_not_fit_is_one_line(tmp_path, capsys, changes, words):
    assert reproduce_fig7.main(options(tmp_path, **changes)) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("error: ") and words in printed


@pytest.mark.parametrize("name", ["num_requests", "repeats", "gpu_requests", "jobs"])
def test_no_count_below_one_passes_for_the_default(name):
    with pytest.raises(ValueError, match=f"{name}=0 must be at least 1"):
        FigureOptions(**{name: 0})


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [(["--systems", "orca"], 2, "swiftllm"), (["--repeats", "0"], 2, "repeats=0 must be at least 1")],
)
def test_validation_refuses_before_it_runs(tmp_path, capsys, flags, status, words):
    try:
        ended = validate.command([*flags, "--results-dir", str(tmp_path)])
    except SystemExit as end:
        ended = end.code
    printed = capsys.readouterr()
    assert ended == status and words in printed.out + printed.err
    assert not list(tmp_path.iterdir()), "it ran"


def test_beside_a_simulation_the_measured_half_keeps_its_size(tmp_path):
    assert measured_requests(options(tmp_path, backend=None, num_requests=2000)) is None
    assert measured_requests(options(tmp_path, backend="torch", num_requests=2000)) == 2000


def test_help_is_for_newcomers():
    command = [sys.executable, str(REPO_ROOT / "evaluation" / "reproduce_fig7.py"), "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for word in ("--backend", "--gpu", "--systems", "--num-requests", "--seed", "--jobs", "--results-dir", "--from"):
        assert word in printed
    assert "SIMULATED" in printed and "cpu_bandwidth=20..300" in printed and "gpu_blocks=54..400" in printed
    assert "None" not in printed and "--num-requests INT" in printed and "--systems NAME ..." in printed


def test_gains_of_figure_7_over_their_theory() -> None:
    shared = {"backend": "simulated", "reading": None, "gpu_attention_gb_s": 500.0, "cpu_bandwidth_gb_s": 50.0}
    rates = {
        600: {"swiftllm": 100.0, "neo": 100.0, "apex": 120.0},
        1000: {"swiftllm": 100.0, "neo": 80.0, "apex": 100.0},
    }
    rows = [
        {**shared, "output_len": length, "system": system, "output_tokens_per_s": rate}
        for length, here in rates.items()
        for system, rate in here.items()
    ]
    at_600, at_1000 = (row for row in with_gains(rows) if row["system"] == "apex")
    assert at_600["gain_over_600"] == 1.0 and at_1000["gain_over_600"] == pytest.approx(1.25 / 1.2)
    assert at_600["gain_over_b_a"] == pytest.approx(0.2 * 10) and at_1000["gain_over_b_a"] == 0.0
