"""The benchmarks' command lines, and the summary of the server overhead benchmark."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from apex.cli.options import parse_options
from benchmarks.bench_server_overhead import COLUMNS, ClientStream, Options, TooFewTokens, main, summarise
from evaluation.results.folder import markdown_table
from evaluation.results.paths import REPO_ROOT
from evaluation.results.rows import MEASURED, kind_of


@pytest.mark.parametrize("name", ["bench_scheduler", "bench_batches"])
def test_an_argument_it_does_not_know_is_refused(name):
    command = [sys.executable, f"benchmarks/{name}.py", "--no-such-option"]
    result = subprocess.run(command, cwd=REPO_ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "--no-such-option" in result.stderr


@pytest.mark.parametrize(
    "name",
    [
        *(
            f"benchmarks.bench_{name}"
            for name in (
                "batches",
                "pacpu",
                "remote",
                "scheduler",
                "server_overhead",
            )
        ),
        *(f"evaluation.reproduce_{name}" for name in ("fig5", "fig6", "fig7", "neo")),
        *(f"evaluation.{name}" for name in ("calibrate", "compare_vllm", "load_test", "report", "soak")),
        "scripts.ablation",
        "scripts.download_traces",
    ],
)
def test_help_shows_no_default_that_is_none(name, capsys):
    with pytest.raises(SystemExit) as end:
        parse_options(importlib.import_module(name).Options, arguments=["--help"])
    words = capsys.readouterr().out
    assert end.value.code == 0 and "--help" in words
    assert not any(nothing in words for nothing in ("(default: None)", "(default: )", "{None}|"))


def stream(name: str, times_s: list[float]) -> ClientStream:
    """A stream that was sent at 0 s, with tokens arriving at these times."""
    parts = [
        f'data: {{"id": "{name}", "choices": [0], "usage": {{"completion_tokens": {number}}}}}\n\n'.encode()
        for number in range(1, len(times_s) + 1)
    ]
    return ClientStream(connection=None, times_s=times_s, parts=parts)


def test_added_is_counted_while_all_streams_are_open():
    options = Options(streams=2, output_len=4)
    ready = {"a-0": [1.0, 2.0, 3.0, 4.0], "b-0": [3.0, 4.0, 5.0, 6.0]}  # both are open from 3 s to 4 s
    late = {"a-0": [0.9, 0.9, 0.001, 0.002], "b-0": [0.001, 0.002, 0.9, 0.9]}
    streams = [stream(name[0], [at + by for at, by in zip(ready[name], late[name], strict=True)]) for name in ready]
    record = summarise(options, 5.0, streams, ready)
    assert record["added_ms_max"] == pytest.approx(2.0) and record["added_ms_p50"] == pytest.approx(1.5)
    assert record["added_ms_p99_of_all"] > 800 and record["fraction_all_open"] == 0.5
    assert record["per_token_ms_p50"] == pytest.approx((4.002 + 6.9) / 2 / 4 * 1e3)
    assert record["output_tokens_per_s"] == pytest.approx(8 / 6.9) and kind_of(record) == MEASURED
    titles, _, values = markdown_table([record | {"round": 1}], COLUMNS).splitlines()
    assert "| pace |" in titles and "per-token latency" in titles and values.startswith("| 5 ms | 1 | 1.50 |")


def test_streams_too_short_to_be_open_together_are_told_of(tmp_path, monkeypatch, capsys):
    ready = {"a-0": [1.0, 2.0], "b-0": [3.0, 4.0]}

    def measure(options: Options, pace_ms: float) -> dict:
        return summarise(options, pace_ms, [stream(name[0], times_s) for name, times_s in ready.items()], ready)

    options = Options(streams=2, output_len=2, results_dir=tmp_path)
    with pytest.raises(TooFewTokens):
        measure(options, 0.0)
    monkeypatch.setattr("benchmarks.bench_server_overhead.measure", measure)
    assert main(options) == 2
    assert "use more tokens than --output-len 2" in capsys.readouterr().err
