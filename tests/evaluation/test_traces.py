from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest

from evaluation import traces
from evaluation.paths import REPO_ROOT
from evaluation.traces import FittedTrace, Origin, load_trace

PUBLISHED = {  # workload: (input mean, p50, p90, p99), (output mean, p50, p90, p99) of the source
    "azure-conv": ((1610, 919, 3817, 6655), (104.6, 34, 328, 669)),  # means by the published histograms
    "azure-conv-2023": ((1155, 1020, 2734, 4142), (211, 129, 424, 601)),
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
    assert {row.output_tokens for row in trace.sample(7, seed=0)} == {3, 4, 5}  # starts over past its end


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
        traces.read_rows(path)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match="known: azure-conv"):
        load_trace("sharegpt")
    with pytest.raises(ValueError, match="does not exist"):
        load_trace("osc", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="must rise"):
        FittedTrace("x", "x", Origin("fitted", ""), ((0, 5), (1, 3)), ((0, 1), (1, 2)))


def test_downloaded_traces_are_found_by_their_file_names(monkeypatch):
    path = REPO_ROOT / "scripts" / "download_traces.py"
    spec = importlib.util.spec_from_file_location("download_traces", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "download_traces", module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    known = {source["file"] for entry in traces.catalogue().values() for source in entry["sources"]}
    assert {f"{source.stem}.csv" for source in module.SOURCES} <= known
