"""The points of `adaptive`: cases, cells of the map, cases under load, wrong tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from apex.perf.model import PerfModel
from apex.simulator.hardware_files import load_host
from apex.strategy import StrategyConfig
from evaluation.grid import IDEAS
from evaluation.options import experiment_settings
from evaluation.run import Point
from evaluation.studies.adaptive import ERROR, PARTS, Options, loaded_point, named_point, title_of, unloaded

SETTINGS = experiment_settings("adaptive")
SIZES = [{"output_len": 25, "num_requests": 4}, {"output_len": 300, "num_requests": 4}]
SMALL = {**SETTINGS["map"], "outputs": SIZES, "host_read_gb_s": [12, 120]}


def make(*names: str, quick: bool = True, **values: Any) -> list[Point]:
    """The points of these cases, by default of all, with values of fields."""
    return PARTS["cases"].points_of(options_of(*names, quick=quick, **values))


def options_of(*names: str, quick: bool = True, **values: Any) -> Options:
    only = (f"case={','.join(names)}",) if names else ()
    return Options(quick=quick, only=only, set=tuple(f"{name}={value}" for name, value in values.items()))


@pytest.fixture
def on_map(tmp_path: Path) -> Callable[..., list[Point]]:
    """The points of a section in place of the file's map."""

    def points(section: dict[str, Any] = SMALL, quick: bool = False, **values: Any) -> list[Point]:
        config = tmp_path / "adaptive.yaml"
        config.write_text(yaml.safe_dump({**SETTINGS, "map": section}))
        return PARTS["map"].points_of(replace(options_of(quick=quick, **values), config=config))

    return points


def test_checks_repeat_a_case_without_each_idea_in_adaptive_alone() -> None:
    points = PARTS["checks"].points_of(options_of("a10-u1000-500-120"))
    assert [point.key.removeprefix("a10-u1000-500-120-") for point in points] == [
        *("swiftllm", "neo", "apex", "adaptive"), *(f"{idea}-adaptive" for idea in IDEAS)
    ]  # fmt: skip
    cards = {point.task.hardware.gpu for point in PARTS["checks"].points_of(options_of("4090-u500-200-50"))}
    assert cards == {"RTX-4090"}


# -- cases ------------------------------------------------------------------------------------------------------------


def test_every_case_has_a_point_for_each_system() -> None:
    points = make()
    assert len(points) == len({point.key for point in points}) == 25 * 4
    assert {point.task.lengths.spec.num_requests for point in points} == {120}
    assert {point.task.system for point in points} == set(SETTINGS["system"])


def test_kernels_are_those_of_the_papers_unless_one_is_given() -> None:
    def kernels(**options: object) -> dict[str, str]:
        return {
            point.task.system: point.task.hardware.table.identity["cpu_kernel"]
            for point in make("t4-osc-50", **options)
        }

    assert kernels() == {"swiftllm": "native", "neo": "ispc", "apex": "llamafile", "adaptive": "llamafile"}
    assert set(kernels(kernel="ispc").values()) == {"ispc", "native"}  # swiftllm computes no attention on the CPU
    assert set(kernels(kernel="native").values()) == {"native"}


def test_a_hand_over_costs_the_gpu_batch_of_every_system() -> None:
    for microseconds in (0.0, 50.0):
        for point in make("t4-osc-50", hand_over_us=microseconds):
            model = PerfModel(point.task.hardware.table, point.task.hardware.num_layers)
            assert model.hand_over_s(1) == model.hand_over_s(300) == pytest.approx(microseconds * 1e-6)


@pytest.mark.parametrize("idea", IDEAS)
def test_an_idea_is_switched_off_in_adaptive_alone(idea: str) -> None:
    points = make("t4-osc-50", without=idea)
    changed = {
        point.task.system: point.task.values["without"] for point in points if point.task.strategy != StrategyConfig()
    }
    assert changed == {"adaptive": idea}


def test_unknown_names_are_refused() -> None:
    for options, message in (
        ({"only": ("case=a11",)}, "no case a11.*there are a10-u1000-500"),
        ({"set": ("system=neon",)}, "unknown system 'neon'"),
        ({"set": ("hand_over_us=-1",)}, "must not be negative"),
        ({"set": ("kernels=ispc",)}, "a place has no kernels; it may have .*kernel"),
        ({"only": ("t4-osc-50",)}, "--only t4-osc-50: write it as FIELD=VALUE"),
    ):
        with pytest.raises(ValueError, match=message):
            PARTS["cases"].points_of(Options(**options))


def test_a_case_is_named_by_its_machine_and_workload() -> None:
    titles = {panel["case"]: title_of(panel) for panel in SETTINGS["cases"]["panels"]}
    assert len(set(titles.values())) == 25
    assert titles["a10-35gbps-u1000-100"] == "A10, CPU 35 GB/s: 1000 in, 100 out"
    assert titles["neo-t4-osc-50"] == "T4 (g4dn.4xlarge): OSC, 50 out"
    assert titles["2xh100-azure-code"] == "2x H100: Azure code"


def test_a_faster_cpu_and_fewer_prompts_raise_the_bound() -> None:
    names = ("a10-20gbps-u1000-500", "a10-35gbps-u1000-500", "a10-60gbps-u1000-500", "a10-u1000-500")
    bounds = [make(name, system="adaptive")[0].task.values["bound_tokens_per_s"] for name in names]
    assert bounds == sorted(bounds) and bounds[-1] > 2 * bounds[0]


# -- the map ----------------------------------------------------------------------------------------------------------


def test_every_cell_has_every_system_once(on_map) -> None:
    points = on_map()
    assert len({point.key for point in points}) == len(points)
    # GPU-only systems have a point for each length; the others one for each length, bandwidth and kernel.
    assert Counter(point.task.system for point in points) == {"swiftllm": 2, "neo": 8, "apex": 8, "adaptive": 8}
    assert {p.task.values["host_read_gb_s"] for p in points if p.task.system == "swiftllm"} == {None}
    assert {p.task.values["kernel"] for p in on_map(kernel="ispc")} == {None, "ispc"}


def test_a_kernel_reads_what_its_arithmetic_leaves(on_map) -> None:
    """Seconds per GB: reading, and the arithmetic, measured on a core alone, which reads 17 GB/s."""
    host = load_host("dual-xeon-6342")
    rates = {
        (p.task.values["kernel"], p.task.system): p.task.values["cpu_bandwidth_gb_s"]
        for p in on_map()
        if p.task.values["host_read_gb_s"] == 120
    }
    for (kernel, system), rate in rates.items():
        own = {"neo": "ispc", "apex": "llamafile", "adaptive": "llamafile"}[system]
        fraction = host[f"{own if kernel == 'own' else kernel}_avx512_gqa"]
        assert rate == pytest.approx(1 / (1 / 120 + (1 / fraction - 1) / 17 / 48))
    assert rates["own", "neo"] < rates["own", "adaptive"] == rates["own", "apex"] < rates["native", "neo"] < 120


def test_the_cells_are_no_cases(on_map) -> None:
    """Their seed and their lengths are others, so that nothing was chosen to fit them."""
    points = on_map({**SETTINGS["map"], "host_read_gb_s": [12]}, quick=True)
    assert {p.task.lengths.spec.seed for p in points}.isdisjoint(p.task.lengths.spec.seed for p in make())
    machines = {(p.task.values["setting"], p.task.lengths.spec.name, p.task.lengths.spec.output_len) for p in make()}
    assert machines.isdisjoint(
        (p.task.values["setting"], p.task.lengths.spec.name, p.task.lengths.spec.output_len) for p in points
    )
    assert len({p.task.lengths.spec.output_len for p in points}) == 7
    assert {p.task.lengths.spec.num_requests for p in points} == {120}


def test_the_bound_is_that_of_the_cell_s_cpu(on_map) -> None:
    bounds = {
        (p.task.values["kernel"], p.task.values["host_read_gb_s"]): p.task.values["bound_tokens_per_s"]
        for p in on_map()
        if p.task.values["case"] == "out300"
    }
    assert bounds.pop((None, None)) is None
    assert bounds["own", 12] <= bounds["native", 12] < bounds["own", 120] < bounds["native", 120]


# -- under load, and with wrong tables --------------------------------------------------------------------------------


def test_loads_are_fractions_of_what_neo_serves() -> None:
    places = PARTS["latency"].places(options_of("t4-osc-50"))
    at_once = named_point(("t4-osc-50",), unloaded(places[0]))
    assert at_once.task.system == "neo" and at_once.task.lengths.spec.request_rate is None
    points = [loaded_point(place, 2.5 * place["load"]) for place in places]
    assert [(p.task.lengths.spec.request_rate, p.task.system) for p in points] == [
        (rate, system) for rate in (1.25, 2.0, 2.5) for system in ("neo", "apex", "adaptive")
    ]
    for point in points:
        pairs = zip(point.task.lengths.rows, at_once.task.lengths.rows, strict=True)
        assert all((a.input_tokens, a.output_tokens) == (b.input_tokens, b.output_tokens) for a, b in pairs)
    assert len({point.key for point in points}) == len(points)


def test_the_machine_stays_and_what_is_believed_changes() -> None:
    points = PARTS["wrong-tables"].points_of(options_of("t4-osc-50"))
    errors = SETTINGS["wrong_tables"]["error"]
    assert len({point.key for point in points}) == len(points) == 1 + 3 * len(errors)
    machines = {id(point.task.hardware.table) for point in points if point.task.system == "adaptive"}
    assert len(machines) == 1
    believed_by_error = set()
    for point in points:
        task = point.task
        factor, correction = (task.values[field] for field in ERROR)
        if factor in (None, 1.0):
            assert task.believed is None
            continue
        machine, believed = (PerfModel(table, 32) for table in (task.hardware.table, task.believed))
        assert machine.cpu_attention_s(64, 64_000) == pytest.approx(factor * believed.cpu_attention_s(64, 64_000))
        assert machine.linear_s(100) == believed.linear_s(100)
        assert task.strategy.disable_online_correction is not correction
        if task.system == "adaptive":
            believed_by_error.add(task.believed.cpu_attention)
    assert len(believed_by_error) == len({error["actual_over_believed"] for error in errors} - {1.0})
