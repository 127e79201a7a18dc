"""One row of each record that is up to date comes out again, to the bit."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from evaluation import (
    reproduce_fig5,
    reproduce_fig6,
    reproduce_fig7,
    reproduce_neo,
)
from evaluation.drivers import run_point
from evaluation.options import experiment_settings
from evaluation.results.folder import read_json
from evaluation.run import Point
from evaluation.studies import adaptive, machines
from evaluation.studies.figures import make_job, neo_jobs
from evaluation.studies.papers import FigureOptions
from tests.golden.tasks import undescribed

RECORDS = Path(__file__).parents[2] / "docs/records"
SAMPLES: dict[str, dict[str, object]] = {
    "fig5": {"system": "apex", "workload": "osc", "output_len": 50.0, "setting": "apex-t4-as-measured"},
    "fig6": {"system": "apex", "gpu": "T4", "workload": "osc", "request_rate": 3.2, "setting": "apex-t4"},
    "fig7": {"system": "adaptive", "output_len": 50.0, "setting": "apex-a10"},
    "neo-fig6": {"system": "neo", "gpu": "T4", "request_rate": 2.8},
    "neo-fig7": {"system": "vllm"},
    "neo-fig8": {"system": "fastdecode", "output_len": 10.0},
    "neo-fig9": {"system": "adaptive", "gpu": "A10", "output_len": 10.0},
    "neo-fig10a": {"system": "neo", "output_len": 10.0, "setting": "neo-g5-8xlarge"},
    "adaptive": {"system": "neo", "case": "2xh100-u2000-25"},
    "machines": {"system": "swiftllm", "case": "4xt4-llama-2-7b-tp1-250-500"},
}
"""What picks the row: one that takes a second or two, and each system once or more."""
NOT_SAMPLED = {
    **dict.fromkeys(("compare_vllm", "compare_vllm_amd", "compare_vllm_two_cores"), "measured on a machine"),
    **dict.fromkeys(
        ("ablation", "bench_server_overhead", "fig1", "pacpu", "pacpu-batches", "validate"), "measured on a machine"
    ),
    **dict.fromkeys(("quality", "quality-answers"), "measured on a machine"),
    "int8": "tests/evaluation/test_reproduce_int8.py computes a row of it",
    "prefix": "tests/evaluation/test_reproduce_prefix.py computes a row of it",
}


def test_every_record_is_sampled_or_says_why_not() -> None:
    assert {path.name for path in RECORDS.iterdir() if path.is_dir()} == SAMPLES.keys() | NOT_SAMPLED.keys()


@pytest.mark.parametrize("record", SAMPLES)
def test_a_row_comes_out_again_to_the_bit(record: str) -> None:
    gpu = SAMPLES[record].get("gpu")  # only its points are made, if there are many
    rows = read_json(RECORDS / record / "summary.json")
    rows = [row for row in rows if row["backend"] == "simulated" and gpu in (None, row["gpu"])]
    points = points_of_record(record, gpu and gpu.lower())
    assert len(points) == len(rows)  # in the same order
    chosen = [(point, row) for point, row in zip(points, rows, strict=True) if SAMPLES[record].items() <= row.items()]
    ((point, row),) = chosen
    now = dict(run_point(point, record, Console(file=io.StringIO())).values)
    compared = (row.keys() & now.keys()) - {"wall_s"}
    assert len(compared) > 40
    assert {name: now[name] for name in compared} == {name: row[name] for name in compared}


def points_of_record(record: str, gpu: str | None) -> Sequence[Point]:
    with undescribed():
        if record == "machines":
            return machines.STUDY.points_of(machines.Options())
        if record == "adaptive":
            return adaptive.PARTS["cases"].points_of(adaptive.Options())
        if record.startswith("neo-fig"):
            figure = (record.removeprefix("neo-fig"),)
            options = reproduce_neo.Options(backend="simulated", figure=figure, gpu=gpu)
            (job,) = neo_jobs(experiment_settings("neo"), options, None, None)
        else:
            figure = {"fig5": reproduce_fig5, "fig6": reproduce_fig6, "fig7": reproduce_fig7}[record[:4]].FIGURE
            options = FigureOptions(backend="simulated", gpu=gpu)
            job = make_job(figure, options, None, None)
        return job.points
