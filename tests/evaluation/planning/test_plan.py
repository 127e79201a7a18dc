"""Plans of Figure 5: as many requests as fit the hours, the same ones for each system, with predictions in the rows."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

from evaluation import reproduce_fig5
from evaluation.grid import values_of
from evaluation.planning import plan as planning
from evaluation.planning.plan import SERVER_START_S, Plan, TooLittleTime, plan_within
from evaluation.studies.figures import FigureJob, make_job, plan_jobs, run_jobs
from evaluation.studies.papers import FigureOptions
from swiftllm.machine import Card
from tests.evaluation.papers_machines import A10G, L4, RTX_3060, START_S, T4, NamedMachine, on_machine

SYSTEMS = ("vllm", "swiftllm", "apex")


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def job_on(machine: NamedMachine, console: Console | None = None, **options) -> FigureJob:
    chosen = {"backend": "torch", "systems": ("swiftllm", "apex"), "jobs": 1, **options}
    return make_job(reproduce_fig5.FIGURE, FigureOptions(**chosen), console or quiet(), machine)


@pytest.fixture
def on_card(tmp_path, monkeypatch):
    """Makes this machine one with a card."""

    def make(card: Card | None, host_gib: float = 256.0) -> None:
        on_machine(monkeypatch, tmp_path / "cache", card, host_gib)

    return make


@pytest.mark.parametrize(
    ("card", "setting", "factor", "options"),
    [
        (T4, "apex-t4", 350.0, {"workloads": ("osc",), "output_lens": (50.0, 100.0)}),
        (A10G, "apex-a10", 170.0, {"workloads": ("azure-conv", "livebench")}),
        (L4, "apex-a10", 600.0, {"workloads": ("azure-conv",)}),
    ],
    ids=["T4", "A10G", "L4"],
)
def test_more_hours_give_more_requests_and_are_not_exceeded(on_card, card, setting, factor, options):
    """On a slow machine with short requests, so that few simulated iterations fill the hours."""
    on_card(card)
    job = job_on(NamedMachine(setting, factor), scale=0.1, **options)
    chosen = []
    for hours in (1.0, 4.0, 12.0):
        (plan,) = plan_within([job.measured], hours * 3600.0)
        assert 0.5 * hours * 3600.0 < plan.total_s <= hours * 3600.0
        assert plan.total_s == pytest.approx(sum(p.task.values["predicted_wall_s"] for p in plan.points) + 2 * START_S)
        chosen.append([point.task.lengths.spec.num_requests for point in plan.points])
    for fewer, more in ((chosen[0], chosen[1]), (chosen[1], chosen[2])):
        assert all(few < many for few, many in zip(fewer, more, strict=True))
    most = {panel["workload"]: panel["num_requests"] for panel in job.measured.grid.panels}
    shares = {p.task.lengths.spec.num_requests / most[p.task.lengths.spec.name] for p in plan.points}
    assert max(shares) - min(shares) < 0.01, "the same share of each panel"


def test_systems_of_a_panel_get_the_same_requests(on_card):
    on_card(T4)
    job = job_on(NamedMachine("apex-t4"), workloads=("osc",), systems=SYSTEMS, output_lens=(50.0, 100.0))
    plan = job.measured.plan_with([16])
    by_length: dict[float, list] = {}
    for point in plan.points:
        by_length.setdefault(point.task.lengths.spec.output_len, []).append(point)
    assert [len(points) for points in by_length.values()] == [3, 3]
    for output_len, points in by_length.items():
        assert tuple(point.task.system for point in points) == SYSTEMS
        assert len({point.task.lengths.digest() for point in points}) == 1
        assert len(points[0].task.lengths.rows) == 16
        assert points[0].task.lengths.mean_output_tokens == pytest.approx(output_len, rel=0.05), "not scaled"
    assert len({point.session for point in plan.points}) == 3, "one start for each system"


def test_our_own_system_shares_the_hours_with_the_papers(on_card):
    """The hours are for all systems of the figure: one more leaves each fewer requests."""
    on_card(T4)
    few = {"workloads": ("osc",), "output_lens": (50.0,), "scale": 0.1}
    papers = ("swiftllm", "neo", "apex")
    counts = []
    for systems in (papers, (*papers, "adaptive")):
        job = job_on(NamedMachine("apex-t4", 350.0), systems=systems, **few)
        (plan,) = plan_within([job.measured], 3600.0)
        assert tuple(point.task.system for point in plan.points) == systems and plan.total_s <= 3600.0
        assert not plan.problems
        counts.append({point.task.lengths.spec.num_requests for point in plan.points})
    (without,), (with_own,) = counts
    assert 0.5 * without < with_own < without
    default = job_on(NamedMachine("apex-t4"), systems=None, **few).measured.grid
    assert values_of(default.panels[0], "system") == ["vllm", *papers, "adaptive"]


def test_rows_hold_the_setting_and_the_prediction(on_card):
    on_card(T4)
    plan = job_on(NamedMachine("apex-t4"), workloads=("osc",), output_lens=(50.0,)).measured.plan_with([16])
    for point in plan.points:
        values = point.task.values
        assert values["predicted_output_tokens_per_s"] > 1.0 and values["predicted_wall_s"] > 1.0
        named = {name: values[name] for name in ("setting", "setting_title", "setting_origin", "weights", "server")}
        assert named == {
            "setting": "apex-t4", "setting_title": "T4 + Llama-2-7B", "setting_origin": "papers", "weights": "dummy",
            "server": None,
        }  # fmt: skip
        assert values["max_model_len"] == 832 and values["cpu_kv_gb"] == pytest.approx(20.0, abs=0.1)
        longest = max(row.input_tokens + row.output_tokens for row in point.task.lengths.rows)
        assert longest <= 832 and "num_clipped" in values
    swiftllm, apex = (point.task.values["predicted_output_tokens_per_s"] for point in plan.points)
    assert apex > 1.2 * swiftllm, "on the paper's machine apex is predicted to be faster"


def test_predictions_are_simulated_once(on_card, monkeypatch):
    on_card(T4)
    planner = job_on(NamedMachine("apex-t4"), workloads=("osc",), output_lens=(50.0,)).measured
    first = planner.plan_with([16])
    monkeypatch.setattr(planning, "simulate", lambda *_: pytest.fail("simulated again"))
    assert planner.plan_with([16]) == first
    slower = job_on(NamedMachine("apex-t4", 2.0), workloads=("osc",), output_lens=(50.0,)).measured
    monkeypatch.setattr(planning, "simulate", lambda *_: "not now")
    assert slower.plan_with([16]).problems == ("not now",), "another machine, the same result"


def test_what_cannot_be_predicted_is_measured_all_the_same(on_card, monkeypatch):
    on_card(T4)
    planner = job_on(NamedMachine("apex-t4"), workloads=("osc",), output_lens=(50.0,)).measured

    def broken(*_):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(planning, "run_simulated_point", broken)
    plan = planner.plan_with([16])
    assert len(plan.points) == 2 and plan.total_s == 2 * START_S
    assert {point.task.values["predicted_wall_s"] for point in plan.points} == {None}
    assert plan.problems == ("RuntimeError: no such luck",)
    monkeypatch.undo()


def printed_plan(job: FigureJob, **options) -> tuple[str, dict[str, Plan]]:
    console = quiet()
    plans = plan_jobs([job], FigureOptions(backend="torch", jobs=1, **options), console)
    return console.file.getvalue(), plans


def test_the_plan_is_printed_before_anything_runs(on_card, monkeypatch):
    on_card(A10G, 64.0)
    monkeypatch.setattr(planning, "vllm_here", lambda *_: "/somewhere/vllm")
    options = {"workloads": ("livebench",), "systems": SYSTEMS, "num_requests": 16}
    machine = NamedMachine("apex-a10")
    job = job_on(machine, **options)
    text, plans = printed_plan(job, **options)
    (plan,) = plans.values()
    assert "setting apex-a10: A10G + Llama-3.1-8B, float16" in text
    assert "GB of KV cache in host memory instead of 120 GB" in text and "random weights" in text
    assert re.search(
        r"NVIDIA A10G: 21\.8 GiB; weights 14\.96 GiB.* 1,650 KV blocks 3\.22 GiB of at most \d,\d\d\d", text
    )
    assert "SIMULATED tok/s" in text and "vllm (server)" in text
    for point in plan.points:
        assert f"{point.task.values['predicted_output_tokens_per_s']:.1f}" in text
    assert plan.start_s == {
        ("apex-a10", "vllm"): SERVER_START_S, ("apex-a10", "swiftllm"): START_S, ("apex-a10", "apex"): START_S
    }  # fmt: skip
    stopped = FigureOptions(backend="torch", jobs=1, plan=True, **options)
    assert run_jobs([job], stopped, quiet(), lambda *_: pytest.fail("a plan runs nothing")) == 0
    assert len(machine.profiled) == 1, "all systems share the profile of a setting"


def test_too_few_hours_name_those_that_do(on_card):
    on_card(T4)
    options = {"workloads": ("osc",), "output_lens": (100.0,)}
    job = job_on(NamedMachine("apex-t4"), **options)
    with pytest.raises(TooLittleTime, match=r"16 requests per point take ([\d.]+) hours") as refusal:
        printed_plan(job, hours=0.01, **options)
    needed = float(re.search(r"take ([\d.]+) hours", str(refusal.value))[1])
    with pytest.raises(TooLittleTime):
        printed_plan(job, hours=needed - 0.01, **options)
    _, plans = printed_plan(job, hours=needed, **options)
    assert all(16 <= point.task.lengths.spec.num_requests < 32 for point in plans["fig5"].points)


@pytest.mark.parametrize(
    ("card", "options", "words"),
    [
        (RTX_3060, {}, "weights 12.55 GiB"),
        (T4, {"setting": "apex-a10"}, "weights 14.96 GiB"),
        (T4, {"dtype": "bfloat16"}, "Tesla T4 has no bfloat16"),
        (T4, {"gpu_requests": 4}, "--num-gpu-blocks"),
    ],
)
def test_the_command_refuses_with_numbers(on_card, tmp_path, capsys, card, options, words):
    on_card(card)
    assert reproduce_fig5.main(FigureOptions(backend="torch", results_dir=tmp_path / "results", **options)) == 2
    printed = capsys.readouterr().out
    assert "error: " in printed and words in printed
    assert not (tmp_path / "results" / "fig5").exists(), "it ran"


def test_simulations_do_not_depend_on_the_card(on_card):
    from evaluation import reproduce_fig6, reproduce_fig7

    for figure in (reproduce_fig5, reproduce_fig6, reproduce_fig7):
        described = []
        for card in (None, RTX_3060):  # too small: only the simulated half is left
            on_card(card)
            options = FigureOptions(num_requests=20)
            simulated = make_job(figure.FIGURE, replace(options, backend="simulated"), quiet(), None)
            described.append(simulated.configuration["simulated"])
            if card is not None:
                both = make_job(figure.FIGURE, options, quiet(), NamedMachine("apex-t4"))
                described.append(both.configuration["simulated"])
                assert both.measured is None and set(both.configuration) == {"simulated"}
        assert all(json.dumps(one) == json.dumps(described[0]) for one in described)
        assert len(described[0]) > 20


def test_both_halves_by_default_on_a_card(on_card):
    on_card(T4)
    job = job_on(NamedMachine("apex-t4"), backend=None, num_requests=20, workloads=("osc",))
    alone = job_on(NamedMachine("apex-t4"), backend="simulated", num_requests=20, workloads=("osc",))
    assert job.configuration == alone.configuration and len(job.points) == len(alone.points) == 16  # two readings
    assert job.measured.most == (800,), "--num-requests is the simulation's"
    plan = job.measured.plan_with([16])
    described = job.measured.describe(plan.points)
    assert [point["key"] for point in described["points"]] == [point.key for point in plan.points]
    assert not {point.key for point in plan.points} & {point.key for point in job.points}
    other = replace(T4, total_bytes=T4.total_bytes + (1 << 30))
    on_card(other)
    elsewhere = job_on(NamedMachine("apex-t4"), num_requests=20, workloads=("osc",)).measured
    assert described != elsewhere.describe(plan.points), "another machine continues the run"


def test_vllm_is_our_engine_where_none_is_installed(on_card, monkeypatch):
    on_card(T4)
    console = quiet()
    job = job_on(NamedMachine("apex-t4"), console, workloads=("osc",), systems=SYSTEMS, output_lens=(50.0,))
    plan = job.measured.plan_with([16])
    assert {point.task.program for point in plan.points} == {None}
    text = " ".join(console.file.getvalue().split())
    assert "no vLLM here (scripts/install_vllm.sh --gpu installs it): `vllm` is our engine" in text


def test_small_is_measured_as_without_a_card(on_card):
    options = FigureOptions(backend="torch", setting="small")
    assert not planning.measures_settings(options, T4)
    assert planning.measures_settings(FigureOptions(), T4) and not planning.measures_settings(FigureOptions(), None)
    assert planning.measures_settings(FigureOptions(setting="apex-t4"), None)
    assert planning.measures_settings(FigureOptions(rehearse=True), None)


def test_an_engine_that_does_not_start_is_refused(on_card):
    from swiftllm.machine import InsufficientMemory

    on_card(T4)

    def profile(config):
        raise InsufficientMemory("the GPU's memory did not suffice: 3 blocks are missing")

    broken = SimpleNamespace(profile=profile)
    with pytest.raises(ValueError, match=r"the engine of setting apex-t4 does not start here: .* 3 blocks are missing"):
        job_on(broken, workloads=("osc",))
