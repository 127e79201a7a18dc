"""The figures measured over HTTP (--backend http), from the command line to the files, against a fake server."""

from __future__ import annotations

import json
import time

import pytest
import tyro

from apex.workloads.requests import load_prompt_tokens
from evaluation import reproduce_fig5, reproduce_fig6, reproduce_fig7
from evaluation.experiments.papers.options import FigureOptions
from evaluation.results.folder import read_records, records_file
from tests.evaluation.fake_server import FakeServer, token_by_token


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 5000}))
    yield folder
    load_prompt_tokens.cache_clear()


def options(model, tmp_path, **changes):
    base = {"model": model, "results_dir": tmp_path / "results", "num_requests": 3, "scale": 0.02, "backend": "http"}
    return FigureOptions(**{**base, "ready_timeout_s": 0.3, **changes})


def test_a_figure_from_its_command_to_its_files(model, tmp_path, capsys):
    def slower(exchange, body, index):
        time.sleep(0.05)
        token_by_token(exchange, body, index)

    with FakeServer() as apex, FakeServer(slower) as vllm:
        url = (f"vllm={vllm.url}/v1", f"apex={apex.url}/")
        chosen = options(model, tmp_path, url=url, workloads=("osc", "livebench"))
        assert reproduce_fig5.main(chosen) == 0
        sent = len(apex.requests)
        prompts = [tuple(body["prompt"]) for _, body in apex.requests]
        assert reproduce_fig5.main(chosen) == 0
        assert len(apex.requests) == sent  # finished points are not measured again
        apex.pages["/version"] = (200, {"version": "10.0"})
        assert reproduce_fig5.main(options(model, tmp_path, url=url, workloads=("livebench",))) == 0
        assert len(apex.requests) > sent  # another server
    folder = next((tmp_path / "results" / "fig5").glob("*/points/osc*.json")).parent.parent
    summary = json.loads((folder / "summary.json").read_text())
    assert [record["system"] for record in summary] == ["vllm", "apex"] * 4
    for record in summary:
        assert record["backend"] == "http" and record["baseline"] == "vllm" and record["model"] == "Tiny-Llama"
        assert record["completed"] == 3 and record["failed"] == 0 and record["gpu"] is None
        assert record["gpu_batch_busy_fraction"] is None and record["cpu_busy_fraction"] is None
    assert summary[0]["server"] == f"{vllm.url} (version 9.9)" and summary[0]["ttft_s_mean"] >= 0.05
    assert sent == 4 * (2 + 3) and len({prompt[:2] for prompt in prompts}) == sent  # no cached prefix, warm-up included
    records = read_records(records_file(folder, "osc-out48-apex"))
    assert [len(record["token_times_s"]) for record in records] == [record["wanted_output_len"] for record in records]
    assert (folder / "figure.png").stat().st_size > 20_000
    found = json.loads((folder / "provenance.json").read_text())["configuration"]["http"]
    task = found["points"][0]["task"]
    assert task["server"]["version"] == "9.9" and "engine" not in task
    printed = capsys.readouterr().out
    assert "MEASURED over HTTP" in printed and "SIMULATED" not in printed


@pytest.mark.parametrize(("figure", "swept"), [(reproduce_fig6, "request_rate"), (reproduce_fig7, "output_len")])
def test_the_other_figures(model, tmp_path, figure, swept):
    with FakeServer() as fake:
        assert figure.main(options(model, tmp_path, url=(f"swiftllm={fake.url}",))) == 0
    latest = tmp_path / "results" / figure.FIGURE.name / "latest"
    summary = json.loads((latest / "summary.json").read_text())
    assert len({record[swept] for record in summary}) == 3 and {record["backend"] for record in summary} == {"http"}
    assert (latest / "figure.png").is_file()


def test_a_point_that_nothing_came_of_is_tried_again(model, tmp_path, capsys):
    with FakeServer(lambda exchange, *_: exchange.refuse(500, {"error": {"message": "no memory"}})) as fake:
        chosen = options(model, tmp_path, url=(f"apex={fake.url}",), workloads=("livebench",))
        assert reproduce_fig5.main(chosen) == 1
        assert "completed none of 2 requests; the first: HTTP 500: no memory" in capsys.readouterr().out
        fake.behave = token_by_token
        assert reproduce_fig5.main(chosen) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "--url NAME=http://127.0.0.1:8000"),
        ({"url": ("127.0.0.1:8000",)}, "write it as NAME=http://HOST:PORT"),
        ({"url": ("a=http://h:1", "a=http://h:2")}, "a name of its own"),
        ({"url": ("a=http://h:1",), "systems": ("b",)}, "--systems b"),
        ({"url": ("a=http://h:1",), "num_gpu_blocks": 5}, "--num-gpu-blocks"),
        ({"url": ("a=http://h:1",), "backend": "torch"}, "--backend http"),
        ({"url": ("a=http://h:1",), "sensitivity": "cpu_bandwidth=20..300"}, "--backend simulated"),
        ({"url": ("a=http://127.0.0.1:9",)}, "`vllm serve MODEL --port 9`"),
    ],
)
def test_an_option_that_does_not_fit_is_one_line(model, tmp_path, capsys, changes, words):
    assert reproduce_fig5.main(options(model, tmp_path, **changes)) == 2
    printed = capsys.readouterr().out
    assert printed.startswith("error: ") and words in printed


def test_the_command_line_takes_several_servers():
    chosen = tyro.cli(
        reproduce_fig7.Options, args=["--backend", "http", "--url", "vllm=http://h:1", "--url", "apex=http://h:2"]
    )
    assert chosen.url == ("vllm=http://h:1", "apex=http://h:2")
