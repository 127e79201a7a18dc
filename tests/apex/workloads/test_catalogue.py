"""Traces by name: a file where there is one, else draws that meet the published quantiles; what is said without one."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from apex.workloads import catalogue as traces
from apex.workloads.catalogue import Origin, Quantiles, load_trace
from apex.workloads.files import TraceRow, read_rows, write_rows
from apex.workloads.sources import SOURCES
from evaluation.results.paths import EXPERIMENTS_DIR

PUBLISHED = {  # workload: (input mean, p50, p90, p99), (output mean, p50, p90, p99) of the source
    "azure-conv": ((1610, 919, 3817, 6655), (104.6, 34, 328, 669)),  # means by the published histograms
    "azure-conv-2023": ((1155, 1020, 2734, 4142), (211, 129, 424, 601)),
    "azure-code": ((2048, 1469, 5188, 7436), (28, 13, 55, 252)),
    "livebench": ((453, 361, 1120, 2226), (537, 329, 1390, 2048)),
    "dolphin-r1": ((290, 200, 632, 1470), (2279, 1776, 4572, 7600)),
    "osc": ((372, 371, 514, 555), (45, 45, 56, 65)),
}


@pytest.fixture
def no_files(monkeypatch, tmp_path):
    """A machine without any trace file."""
    monkeypatch.setattr(traces, "trace_dirs", lambda first=None: [first or tmp_path])


def write_trace(folder, name="osc_neo_llama2.csv", rows=((0.0, 10, 3), (1.5, 20, 4), (4.0, 30, 5))):
    lines = ["arrival_s,input_tokens,output_tokens", *(f"{a},{i},{o}" for a, i, o in rows)]
    (folder / name).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("name", PUBLISHED)
def test_fitted_draws_meet_published_quantiles(name, no_files):
    trace = load_trace(name)
    assert trace.origin.kind == "fitted" and trace.origin.file is None and len(trace.origin.note) > 20
    rows = trace.sample(20_000, seed=3)
    for values, published in zip(
        ([row.input_tokens for row in rows], [row.output_tokens for row in rows]), PUBLISHED[name], strict=True
    ):
        assert np.mean(values) == pytest.approx(published[0], rel=0.05)
        assert np.percentile(values, [50, 90, 99]) == pytest.approx(published[1:], rel=0.03)


def test_fitted_draws_are_deterministic_and_keep_the_mean_of_few(no_files):
    trace = load_trace("livebench")
    assert trace.sample(30, seed=1) == trace.sample(30, seed=1) != trace.sample(30, seed=2)
    means = [np.mean([row.output_tokens for row in trace.sample(30, seed=seed)]) for seed in range(20)]
    assert np.std(means) < 0.05 * np.mean(means)  # plain draws of 30 would vary by about 18%


def test_fitted_inputs_and_outputs_are_independent(no_files):
    rows = load_trace("osc").sample(5000, seed=0)
    correlation = np.corrcoef([r.input_tokens for r in rows], [r.output_tokens for r in rows])[0, 1]
    assert abs(correlation) < 0.05


def test_file_is_preferred_and_keeps_its_origin(no_files, tmp_path):
    write_trace(tmp_path)
    trace = load_trace("osc", tmp_path)
    assert trace.origin == Origin("measured", trace.origin.note, "osc_neo_llama2.csv")
    assert sorted(row.input_tokens for row in trace.sample(3, seed=0)) == [10, 20, 30]
    assert {row.output_tokens for row in trace.sample(7, seed=0)} == {3, 4, 5}  # starts over at its end


def test_window_keeps_arrivals(no_files, tmp_path):
    write_trace(tmp_path)
    trace = load_trace("osc", tmp_path)
    assert [row.arrival_s for row in trace.window(3, seed=0)] == [0.0, 1.5, 4.0]
    assert trace.window(2, seed=0)[0].arrival_s == 0.0
    with pytest.raises(ValueError, match="fewer than the 4"):
        trace.window(4, seed=0)


def test_window_without_arrivals_says_what_to_do(no_files, tmp_path):
    with pytest.raises(ValueError, match="request rate"):
        load_trace("osc").window(2, seed=0)
    write_trace(tmp_path, rows=(("", 10, 3),))
    with pytest.raises(ValueError, match="has no arrivals"):
        load_trace("osc", tmp_path).window(1, seed=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "needs columns"),
        ("arrival_s,input_tokens,output_tokens\n", "no rows"),
        ("arrival_s,input_tokens,output_tokens\n,5,0\n", "at least 1 token"),
        ("arrival_s,input_tokens,output_tokens\n,5\n", "2 cells"),
    ],
)
def test_bad_file_is_named(tmp_path, text, message):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"bad.csv.*{message}"):
        read_rows(path)


@pytest.mark.parametrize(("name", "means"), [("dailymails", (1964, 397)), ("longbench-v2", (8952, 136))])
def test_shapes_meet_the_stated_means_and_their_longest_length(name, means, no_files):
    trace = load_trace(name)
    rows = trace.sample(5000, seed=1)
    assert trace.origin.kind == "synthetic" and rows == trace.sample(5000, seed=1) != trace.sample(5000, seed=2)
    assert np.mean([row.input_tokens for row in rows]) == pytest.approx(means[0], rel=0.02)
    assert np.mean([row.output_tokens for row in rows]) == pytest.approx(means[1], rel=0.02)
    assert max(row.input_tokens for row in rows) <= 12000
    with pytest.raises(ValueError, match="no arrivals"):
        trace.window(3, seed=0)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="known: azure-conv"):
        load_trace("no-such-workload")
    with pytest.raises(ValueError, match="does not exist"):
        load_trace("osc", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must rise"):
        Quantiles(((0, 5), (1, 3)))


NOT_FETCHED = ("multi-turn", "agents", "sharegpt", "dailymails", "longbench-v2")
"""Workloads of OmniServe's evaluation, of which scripts/download_traces.py knows no source."""


def workloads_named(settings: object) -> set[str]:
    """Every value of a key `workload`, or of a workload's `name`, at any depth."""
    if isinstance(settings, list):
        return set().union(*map(workloads_named, settings))
    if not isinstance(settings, dict):
        return set()
    values = (settings[key] for key in ("workload", "name") if key in settings)
    own = {name for value in values for name in (value if isinstance(value, list) else [value])}
    return own.union(*map(workloads_named, settings.values()))


def test_every_workload_of_the_figures_can_be_drawn_and_its_original_fetched(no_files):
    figures = [path for path in EXPERIMENTS_DIR.glob("*.yaml") if path.stem not in ("papers", "workloads")]
    named = set().union(*(workloads_named(yaml.safe_load(path.read_text())) for path in figures))
    assert {"azure-code", "osc"} <= named <= set(traces.load_catalogue())
    for name in traces.load_catalogue():
        assert load_trace(name).sample(10, seed=0)
        assert traces.fetchable(name) or name in NOT_FETCHED


def test_every_fetched_trace_belongs_to_a_workload():
    assert {source for name in traces.load_catalogue() for source in traces.fetchable(name)} == set(SOURCES)


@pytest.mark.parametrize("name", [name for name in traces.load_catalogue() if name.startswith("azure")])
def test_missing_arrivals_name_the_command_that_fetches_them(name, no_files, tmp_path):
    with pytest.raises(ValueError, match=r"scripts/download_traces\.py") as raised:
        load_trace(name).window(2, seed=0)
    (source,) = [source for source in SOURCES if str(raised.value).endswith(source.name)]
    write_trace(tmp_path, source.file)
    assert len(load_trace(name, tmp_path).window(2, seed=0)) == 2


def test_no_command_is_named_where_the_original_has_no_arrivals_either(no_files):
    with pytest.raises(ValueError, match=r"\(Poisson\)$"):
        load_trace("osc").window(2, seed=0)


def test_rows_are_read_as_they_were_written(tmp_path):
    rows = (TraceRow(5, 6, 0.0), TraceRow(7, 8, 1.25), TraceRow(1, 1))
    with_prefixes = (TraceRow(600, 6, 0.0, segments=((1, 512), (2, 512))), TraceRow(512, 8, 1.0, segments=((1, 512),)))
    write_rows(tmp_path / "prefixes.csv", with_prefixes, {})
    assert read_rows(tmp_path / "prefixes.csv") == with_prefixes
    assert len(with_prefixes[0].prompt) == 600
    write_rows(tmp_path / "folder" / "some.csv", rows, {"name": "some"})
    assert read_rows(tmp_path / "folder" / "some.csv") == rows
    assert json.loads((tmp_path / "folder" / "some.json").read_text()) == {"name": "some"}
