"""The measured points of the figures: the plan, the pools, resuming, and failures; engines run on a virtual clock."""

from __future__ import annotations

import functools
import json

import pytest
from rich.console import Console

from apex.workloads.catalogue import Origin, TraceRow
from apex.workloads.requests import Lengths, WorkloadSpec, load_prompt_tokens
from evaluation import reproduce_fig5, reproduce_fig6, reproduce_fig7
from evaluation.experiments import points
from evaluation.experiments.papers.options import FigureOptions
from evaluation.experiments.papers.small_model import pool_blocks, small_points
from evaluation.experiments.torch_point import run_torch_point
from tests.apex.replay.fake_engine import FakeEngine

SPEEDS = {"swiftllm": 0.5, "neo": 0.4, "apex": 0.25, "adaptive": 0.2}
DEFAULT_SYSTEMS = tuple(SPEEDS)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 500}))
    yield folder
    load_prompt_tokens.cache_clear()


@pytest.fixture
def fake_systems(monkeypatch):
    return use_fakes(monkeypatch)


def use_fakes(monkeypatch, **settings):
    built = []

    def build(system, config):
        built.append((system, config))
        return FakeEngine(step_s=SPEEDS[system], **settings)

    monkeypatch.setattr(points, "run_torch_point", functools.partial(run_torch_point, engine_factory=build))
    return built


def options(model, tmp_path, **changes):
    base = {"model": model, "results_dir": tmp_path / "results", "num_requests": 3, "backend": "torch"}
    return FigureOptions(**{**base, **changes})


def test_pool_holds_the_wanted_requests_and_the_longest():
    def made(*rows):
        return Lengths(WorkloadSpec("osc", len(rows)), "", Origin("fitted", ""), tuple(TraceRow(*row) for row in rows))

    assert pool_blocks(made((10, 6), (20, 12), (40, 8)), 4, 16) == (8, 8)  # 1, 2, 3 blocks: 4 requests of 2
    assert pool_blocks(made((10, 6), (10, 6), (300, 20)), 1, 16) == (20, 32)  # the longest needs 20


def test_default_plan_covers_the_figure(model):
    made, configuration = small_points("fig5", FigureOptions(model=model))
    assert {(p.task.system, p.task.lengths.spec.name) for p in made} == {
        (system, name) for system in DEFAULT_SYSTEMS for name in ("osc", "azure-conv", "livebench", "dolphin-r1")
    }
    assert [p.task.system for p in made[:8]] == [*DEFAULT_SYSTEMS] * 2  # systems interleave
    assert len({p.key for p in made}) == len(made) and not any(p.concurrent for p in made)
    assert [entry["key"] for entry in json.loads(json.dumps(configuration))["points"]] == [p.key for p in made]


def test_options_override_the_file(model):
    made, _ = small_points(
        "fig5",
        FigureOptions(
            model=model, systems=("apex",), workloads=("osc", "livebench"), num_requests=5, scale=0.5,
            output_lens=(10, 20), num_gpu_blocks=7, device="cpu", cpu_threads=3, seed=9, repeats=2,
        ),
    )  # fmt: skip
    specs = [point.task.lengths.spec for point in made]
    assert {(spec.num_requests, spec.scale) for spec in specs} == {(5, 0.5)}
    assert [(spec.name, spec.output_len) for spec in specs[::2]] == [("osc", 10), ("osc", 20), ("livebench", None)]
    assert len(made) == 2 * 3 and {p.task.engine.num_gpu_blocks for p in made} == {7}
    assert {point.task.engine.gpu_batch_threads for point in made} == {1}
    assert made[0].task.engine.cpu_threads == 3 and made[0].task.lengths.spec.seed == 9


def test_run_end_to_end_and_resume(model, tmp_path, fake_systems, capsys):
    chosen = options(model, tmp_path, workloads=("osc", "livebench"), scale=0.02)
    assert reproduce_fig5.main(chosen) == 0
    folder = (tmp_path / "results" / "fig5" / "latest").resolve()
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary) == len(fake_systems) == 4 * len(DEFAULT_SYSTEMS)
    by_system = {r["system"]: r for r in summary if r["workload"] == "livebench"}
    assert by_system["apex"]["output_tokens_per_s"] == pytest.approx(2 * by_system["swiftllm"]["output_tokens_per_s"])
    assert by_system["apex"]["completed"] == 3 and by_system["apex"]["gpu_batch_busy_fraction"] == pytest.approx(0.5)
    assert by_system["apex"]["trace_origin"] in ("measured", "fitted") and by_system["apex"]["gpu"] is None
    assert by_system["apex"]["backend"] == "torch-cpu"
    assert by_system["apex"]["model"] == "Tiny-Llama" and by_system["apex"]["prompts"] == "random token ids"
    lengths = [r["output_len"] for r in summary if r["workload"] == "osc" and r["system"] == "neo"]
    assert lengths == pytest.approx([0.96, 1.92, 3.84])
    assert (folder / "figure.png").stat().st_size > 20_000
    assert (folder / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert len(list((folder / "records").iterdir())) == len(summary)
    printed = capsys.readouterr().out
    assert str(folder) in printed.replace("\n", "") and "MEASURED here" in printed and "SIMULATED" not in printed
    assert reproduce_fig5.main(chosen) == 0
    assert len(fake_systems) == len(summary)  # nothing ran again
    assert reproduce_fig5.main(options(model, tmp_path, workloads=("livebench",), scale=0.03)) == 0
    assert len(fake_systems) == 5 * len(DEFAULT_SYSTEMS)
    assert (tmp_path / "results" / "fig5" / "latest").resolve() != folder


@pytest.mark.parametrize(("figure", "swept"), [(reproduce_fig6, "request_rate"), (reproduce_fig7, "output_len")])
def test_the_other_figures_are_measured_too(model, tmp_path, monkeypatch, figure, swept):
    use_fakes(monkeypatch, idle_tick_s=0.05)
    assert figure.main(options(model, tmp_path, systems=("swiftllm", "apex"))) == 0
    latest = tmp_path / "results" / figure.FIGURE.name / "latest"
    summary = json.loads((latest / "summary.json").read_text())
    values = {record[swept] for record in summary}
    assert len(values) == 3 and None not in values and {record["backend"] for record in summary} == {"torch-cpu"}
    assert (latest / "figure.png").is_file()


def test_missing_model_says_what_to_type(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    assert reproduce_fig5.main(FigureOptions(backend="torch")) == 2
    assert "make setup" in capsys.readouterr().out
    assert reproduce_fig5.main(FigureOptions(backend="torch", model=tmp_path)) == 2
    assert "--model" in capsys.readouterr().out


def test_engine_is_closed_when_a_point_fails(model, tmp_path):
    engine = FakeEngine(stuck=True)
    made, _ = small_points("fig5", options(model, tmp_path, stall_timeout_s=0.1))
    with pytest.raises(RuntimeError, match="no progress"):
        run_torch_point(made[0], "", Console(quiet=True), lambda system, config: engine)
    assert engine.closed
