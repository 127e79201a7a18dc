"""The script that compares replicas with tensor parallelism, on a small machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from apex.simulator.hardware.files import LayerShape, load_host, load_model_config
from apex.simulator.prediction.host_times import cpu_attention_gb_s
from evaluation.options import experiment_settings
from evaluation.studies import machines
from evaluation.studies.machines import IDEAL, share_of_host, with_machine_totals

MACHINE = {
    "machine": "2x A10G",
    "gpu": "a10",
    "num_gpus": 2,
    "link": "pcie-4",
    "host": "g5-12xlarge",
    "model": "llama-3.1-8b",
    "dtype": "float16",
    "tensor_parallel": [1, 2],
}
SETTINGS = {
    "seed": 0,
    "fills_of_gpu_tier": 0,
    "least_requests": 6,
    "cpu_kernel": "native",
    "lengths": [{"input_len": 40, "output_len": 20}],
    "runs": experiment_settings("machines")["runs"],
    "panels": [MACHINE],
}


def run(folder: Path, **changes) -> int:
    config = folder / "machines.yaml"
    config.write_text(yaml.safe_dump(SETTINGS | changes))
    return machines.main(machines.Options(jobs=1, config=config, results_dir=folder))


def test_the_table_has_a_row_for_each_way_and_is_printed_again_from_its_folder(tmp_path, capsys) -> None:
    assert run(tmp_path) == 0
    printed = capsys.readouterr().out
    table = printed[printed.index("SIMULATED: output tokens") : printed.index("summary, raw records")]
    assert "2 x 1 GPU" in table and "1 x 2 GPU" in table and IDEAL not in table
    (summary,) = (tmp_path / "machines").glob("[0-9a-f]*/summary.json")
    rows = {(row["tensor_parallel"], row["run"]): row for row in json.loads(summary.read_text())}
    assert set(rows) == {(1, "swiftllm"), (1, "adaptive"), (2, "swiftllm"), (2, "adaptive"), (2, IDEAL)}
    assert rows[1, "swiftllm"]["machine_tokens_per_s"] == 2 * rows[1, "swiftllm"]["output_tokens_per_s"]
    assert rows[2, "swiftllm"]["machine_tokens_per_s"] == rows[2, "swiftllm"]["output_tokens_per_s"]
    assert rows[1, "swiftllm"]["all_reduce_share"] is None
    assert 0 < rows[2, "swiftllm"]["all_reduce_share"] < 1
    assert rows[2, IDEAL]["output_tokens_per_s"] > rows[2, "swiftllm"]["output_tokens_per_s"]
    assert machines.main(machines.Options(from_folder=summary.parent)) == 0
    assert capsys.readouterr().out == table


def test_a_model_that_does_not_fit_is_said(tmp_path, capsys) -> None:
    assert run(tmp_path, panels=[MACHINE | {"model": "qwen2.5-32b", "num_gpus": 4, "tensor_parallel": [1, 4]}]) == 0
    assert "not possible: 2x A10G, 4 replicas: qwen2.5-32b takes 65" in capsys.readouterr().out


def test_so_many_requests_as_fill_the_gpu_tier(tmp_path, capsys) -> None:
    config = tmp_path / "machines.yaml"
    config.write_text(yaml.safe_dump(SETTINGS))
    points = machines.STUDY.points_of(machines.Options(config=config, set=("fills_of_gpu_tier=2",)))
    assert len(points) == 5 and not capsys.readouterr().out
    for point in points:
        tokens = point.task.num_gpu_blocks * point.task.block_size
        assert len(point.task.lengths.rows) == pytest.approx(2 * tokens / 60, abs=1)


@pytest.mark.parametrize("engines", [1, 2, 4])
def test_engines_share_a_host_equally(engines: int) -> None:
    host = load_host("g5-12xlarge")
    part = share_of_host(host, engines)
    shape = LayerShape.from_config(load_model_config("llama-3.1-8b"))
    for figure in ("memory_gb", "cores"):
        assert part[figure] * engines == pytest.approx(host[figure])
    whole = cpu_attention_gb_s(host, "native", shape)
    assert cpu_attention_gb_s(part, "native", shape) * engines == pytest.approx(whole)
    assert part["pcie_gb_s"] == host["pcie_gb_s"]


def test_a_rate_that_is_missing_leaves_its_ratios_open() -> None:
    row = {"case": "a", "run": "swiftllm", "output_tokens_per_s": None, "replicas": 4}
    (done,) = with_machine_totals([row])
    assert done["machine_tokens_per_s"] is None and done["ratio_to_gpu_only"] is None
