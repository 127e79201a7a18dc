from __future__ import annotations

import functools
import json

import pytest
import yaml
from rich.console import Console

from evaluation import figures, reproduce_fig5
from evaluation.claims import compare, load_claims
from evaluation.fig5 import configuration, figure_text, groups, make_points, pool_blocks, print_results
from evaluation.reproduce_fig5 import Options, make_plan
from evaluation.torch_point import run_torch_point
from evaluation.traces import Origin, TraceRow
from evaluation.workloads import Lengths, WorkloadSpec, load_prompt_tokens
from tests.evaluation.fake_engine import FakeEngine

SPEEDS = {"swiftllm": 0.5, "neo": 0.4, "apex": 0.25}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 500}))
    yield folder
    load_prompt_tokens.cache_clear()


@pytest.fixture
def fake_systems(monkeypatch):
    built = []

    def build(system, config):
        built.append((system, config))
        return FakeEngine(step_s=SPEEDS[system])

    monkeypatch.setattr(reproduce_fig5, "run_torch_point", functools.partial(run_torch_point, engine_factory=build))
    return built


def options(model, tmp_path, **changes):
    return Options(**{"model": model, "results_dir": tmp_path / "results", "num_requests": 3, **changes})


def summary_records(systems=("swiftllm", "neo", "apex")):
    records = []
    for workload, panel, lens in (("osc", "a", (16, 32)), ("azure-conv", "b", (8,)), ("livebench", "b", (40,))):
        for length in lens:
            for index, system in enumerate(systems):
                values = {"system": system, "backend": "torch-cpu", "gpu": None, "model": "Tiny-Llama"}
                values |= {"dtype": "bfloat16", "workload": workload, "panel": panel, "num_requests": 40}
                values |= {"input_len": 90.0, "output_len": float(length), "scale": 0.1, "num_gpu_blocks": 36}
                values |= {"output_tokens_per_s": 100.0 + 50 * index, "trace_origin": "fitted"}
                records.append(values)
    return records


def test_pool_holds_the_wanted_requests_and_the_longest():
    def made(*rows):
        return Lengths(WorkloadSpec("osc", len(rows)), "", Origin("fitted", ""), tuple(TraceRow(*row) for row in rows))

    assert pool_blocks(made((10, 6), (20, 12), (40, 8)), 4, 16) == (8, 8)  # 1, 2, 3 blocks: 4 requests of 2
    assert pool_blocks(made((10, 6), (10, 6), (300, 20)), 1, 16) == (20, 32)  # the longest needs 20


def test_default_plan_covers_the_figure(model, tmp_path):
    plan = make_plan(Options(model=model))
    points = make_points(plan)
    assert {(p.task.system, p.task.lengths.spec.name) for p in points} == {
        (system, name)
        for system in ("swiftllm", "neo", "apex")
        for name in ("osc", "azure-conv", "livebench", "dolphin-r1")
    }
    assert [p.task.system for p in points[:6]] == ["swiftllm", "neo", "apex"] * 2  # systems interleave
    assert len({p.key for p in points}) == len(points)
    json.dumps(configuration(plan, points))


def test_options_override_the_file(model, tmp_path):
    plan = make_plan(
        Options(
            model=model, systems=("apex",), workloads=("osc", "livebench"), num_requests=5, scale=0.5,
            output_lens=(10, 20), num_gpu_blocks=7, device="cpu", cpu_threads=3, seed=9, repeats=2,
        )
    )  # fmt: skip
    assert [w.name for w in plan.workloads] == ["osc", "livebench"]
    assert {(w.num_requests, w.scale) for w in plan.workloads} == {(5, 0.5)}
    assert [w.output_lens for w in plan.workloads] == [(10, 20), ()]
    points = make_points(plan)
    assert len(points) == 2 * 3 and {p.task.engine.num_gpu_blocks for p in points} == {7}
    assert points[0].task.engine.cpu_threads == 3 and points[0].task.lengths.spec.seed == 9


def test_run_end_to_end_and_resume(model, tmp_path, fake_systems, capsys):
    chosen = options(model, tmp_path, workloads=("osc", "livebench"), scale=0.02)
    assert reproduce_fig5.main(chosen) == 0
    folder = (tmp_path / "results" / "fig5" / "latest").resolve()
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary) == len(fake_systems) == 12
    by_system = {r["system"]: r for r in summary if r["workload"] == "livebench"}
    assert by_system["apex"]["output_tokens_per_s"] == pytest.approx(2 * by_system["swiftllm"]["output_tokens_per_s"])
    assert by_system["apex"]["completed"] == 3 and by_system["apex"]["lane_busy_fraction"] == pytest.approx(0.5)
    assert by_system["apex"]["trace_origin"] in ("measured", "fitted") and by_system["apex"]["gpu"] is None
    assert by_system["apex"]["backend"] == "torch-cpu"
    assert by_system["apex"]["model"] == "Tiny-Llama" and by_system["apex"]["prompts"] == "random token ids"
    assert (folder / "figure.png").stat().st_size > 20_000
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert len(list((folder / "records").iterdir())) == 12
    printed = capsys.readouterr().out
    assert str(folder) in printed.replace("\n", "") and "papers' claims" in printed
    assert reproduce_fig5.main(chosen) == 0
    assert len(fake_systems) == 12  # nothing ran again
    assert reproduce_fig5.main(options(model, tmp_path, workloads=("livebench",), scale=0.03)) == 0
    assert len(fake_systems) == 15 and (tmp_path / "results" / "fig5" / "latest").resolve() != folder


def test_missing_model_says_what_to_type(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    assert reproduce_fig5.main(Options()) == 2
    assert "make setup" in capsys.readouterr().out
    assert reproduce_fig5.main(Options(model=tmp_path)) == 2
    assert "--model" in capsys.readouterr().out


def test_engine_is_closed_when_a_point_fails(model, tmp_path):
    engine = FakeEngine(stuck=True)
    plan = make_plan(options(model, tmp_path, stall_timeout_s=0.1))
    with pytest.raises(RuntimeError, match="no progress"):
        run_torch_point(make_points(plan)[0], "", Console(quiet=True), lambda system, config: engine)
    assert engine.closed


def test_figure_draws_what_is_there(tmp_path):
    records = [r for r in summary_records() if (r["system"], r["workload"]) != ("neo", "livebench")]
    text = figure_text(records, "swiftllm", {"cpu": "Some CPU", "usable_cores": 2})
    assert "measured on Some CPU" in text.subtitle and "fitted" in text.notes and "Tiny-Llama" in text.subtitle
    simulated = [r | {"backend": "simulated", "gpu": "T4"} for r in records]
    assert "SIMULATED on T4" in figure_text(simulated, "swiftllm", {}).subtitle
    figure = figures.figure5(
        groups(records, "a"), groups(records, "b"), ("swiftllm", "neo", "apex"), "swiftllm", text, "OSC"
    )
    labels = {note.get_text() for ax in figure.axes for note in ax.texts}
    assert labels == {"100", "1.50\u00d7", "2.00\u00d7"}
    png, pdf = figures.save(figure, tmp_path)
    assert png.stat().st_size > 20_000 and pdf.stat().st_size > 5_000
    with pytest.raises(ValueError, match="nothing to draw"):
        figures.figure5([], [], ("apex",), "swiftllm", text, "OSC")


def test_claims_stand_beside_our_ratios(tmp_path):
    claims = load_claims("fig5")
    assert {claim.workload for claim in claims} == {"osc", "azure-conv", "livebench", "dolphin-r1"}
    found = {(item.claim.workload, item.claim.systems): item for item in compare(claims, summary_records())}
    over_vllm = found["osc", ("apex", "vllm")]
    assert over_vllm.ours == (2.0, 2.0) and over_vllm.systems == ("apex", "swiftllm") and over_vllm.claim.ratio == 1.96
    assert found["livebench", ("apex", "neo")].ours == pytest.approx((200 / 150,))
    assert found["dolphin-r1", ("apex", "neo")].ours == ()
    console = Console(record=True, width=200)
    print_results(summary_records(), "swiftllm", console)
    text = console.export_text()
    assert "2.00 2.00" in text and "up to 1.96" in text and "not run" in text


def test_experiment_file_names_known_workloads():
    settings = yaml.safe_load(Options().config.read_text())
    assert {workload["panel"] for workload in settings["workloads"]} == {"a", "b"}
    assert settings["baseline"] in settings["systems"]
