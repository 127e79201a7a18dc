"""Predictions with 4-bit weights: what they are made of, and what they say of a T4."""

from __future__ import annotations

import json
from dataclasses import replace
from math import hypot

import pytest

from apex.cli import main
from apex.simulator.hardware_files import Gpu, Host, LayerShape, load_gpu, load_host, load_model_config
from apex.simulator.predicted_machine import INT4, WeightPlacer, cpu_linear_curve, predict_machine
from apex.simulator.predicted_profile import (
    CPU_GAIN_ROWS,
    MOST_QUANTISED_ROWS,
    hardware_profile,
    linear_curve,
    packed_bytes,
    with_quantised_weights,
    with_quantised_weights_on_cpu,
)
from swiftllm.runtime.memory import weight_bytes

LLAMA_7B = load_model_config("llama-2-7b")
SHAPE = LayerShape.from_config(LLAMA_7B)


def with_figure(gpu: Gpu | Host, name: str, value: float) -> Gpu | Host:
    return replace(gpu, figures={**gpu.figures, name: replace(gpu.figures[name], value=value)})


def sheet(name: str) -> Gpu:
    return replace(load_gpu(name), layers=())


def test_the_kernel_and_the_simulator_agree_where_matrices_are_written_out() -> None:
    ops = pytest.importorskip("swiftllm.ops.triton.ops")
    assert ops.MOST_QUANTISED_ROWS == MOST_QUANTISED_ROWS


@pytest.mark.parametrize("card", ["t4", "a10", "h100"])
def test_codes_are_multiplied_up_to_some_rows_and_many_write_the_matrix_out(card) -> None:
    gpu = sheet(card)
    linear = linear_curve(gpu, SHAPE, 2, 2048)
    ours = with_quantised_weights(linear, gpu, SHAPE, 2, INT4)
    bytes_per_s = gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["weight_read_fraction"]
    read_s = packed_bytes(SHAPE, INT4) / (bytes_per_s * gpu["int4_read_fraction"])
    full_s = SHAPE.gemm_weights * 2 / bytes_per_s
    saved = linear(1) - ours(1)
    assert saved == pytest.approx(full_s - read_s, rel=0.02)
    assert ours(2048) - linear(2048) == pytest.approx(full_s + read_s, rel=1e-6)
    others_s = linear(1) - full_s  # a data sheet's elementwise work takes the same at each number of rows
    row_s = (linear(2048) - others_s) / 2048 / gpu["int4_multiply_fraction"]
    for rows, reads in ((16, 1), (128, 1), (129, 2), (256, 2), (512, 4)):
        assert ours(rows) == pytest.approx(others_s + hypot(reads * read_s, rows * row_s), rel=0.02), rows
        assert ours(rows) < linear(rows) + full_s + read_s, "written out it would be faster"
    assert list(ours.seconds) == sorted(ours.seconds)


def test_bytes_are_those_that_get_loaded() -> None:
    import torch

    model = replace(LLAMA_7B, quantisation=INT4)
    ends = 2 * LLAMA_7B.vocab_size * LLAMA_7B.hidden_size + LLAMA_7B.hidden_size
    norms = 2 * LLAMA_7B.num_layers * LLAMA_7B.hidden_size
    expected = LLAMA_7B.num_layers * packed_bytes(SHAPE, INT4) + 2 * (ends + norms)
    assert weight_bytes(model, torch.float16) == expected
    assert weight_bytes(LLAMA_7B, torch.float16) == 2 * LLAMA_7B.num_parameters


def test_a_t4_holds_eleven_times_the_kv_cache() -> None:
    """Of the whole card, 90% of 16 GB: 110 blocks beside 16-bit weights, about 1,253 beside 4-bit weights."""
    full, packed = (
        predict_machine("t4", "g4dn-4xlarge", "llama-2-7b", "float16", weights=weights) for weights in ("auto", "int4")
    )
    assert full.num_blocks(None, None, 16)[0] == 110
    assert packed.num_blocks(None, None, 16)[0] == pytest.approx(1253, rel=0.01)
    assert "an assumption" in packed.description and "4-bit" in packed.description
    assert "4-bit" not in full.description and "weights" not in full.table.identity


def test_a_t4_gains_at_least_six_times_in_the_simulation(tmp_path, capsys) -> None:
    rates = {}
    for weights, requests in (("auto", 12), ("int4", 90)):
        output = tmp_path / f"{weights}.json"
        arguments = ["--gpu", "t4", "--host", "g4dn-4xlarge", "--model", "llama-2-7b", "--system", "swiftllm"]
        lengths = ["--input-len", "200", "--output-len", "600", "--num-requests", str(requests)]
        assert main(["simulate", *arguments, *lengths, "--weights", weights, "--output", str(output)]) == 0
        (record,) = json.loads(output.read_text())
        rates[weights] = record["output_tokens_per_s"]
        assert ("an assumption" in capsys.readouterr().out) == (weights == "int4")
    assert rates["int4"] / rates["auto"] >= 6


def test_times_of_16_bit_weights_know_nothing_of_the_assumption() -> None:
    gpu, host = load_gpu("t4"), load_host("g4dn-4xlarge")
    table = hardware_profile(gpu, host, LLAMA_7B)
    for name in ("int4_read_fraction", "int4_multiply_fraction"):
        assert hardware_profile(with_figure(gpu, name, 0.5), host, LLAMA_7B) == table
    model = replace(LLAMA_7B, quantisation=INT4)
    slow, fast = (
        hardware_profile(with_figure(gpu, "int4_read_fraction", share), host, model).linear(1) for share in (0.5, 0.9)
    )
    assert table.linear(1) > slow > fast


def test_4_bit_weights_on_a_cpu_take_what_was_measured() -> None:
    """Gains of docs/features/quantisation.md; beyond 128 rows the last one."""
    host = load_host("g4dn-4xlarge")
    plain = cpu_linear_curve(host, SHAPE.gemm_weights, 2)
    ours = with_quantised_weights_on_cpu(plain, host)
    for rows, gain in zip((*CPU_GAIN_ROWS, 4096), (2.5, 1.8, 1.5, 1.0, 0.95, 0.9, 0.9), strict=True):
        assert plain(rows) / ours(rows) == pytest.approx(gain, rel=1e-12)
    assert plain(1) / ours(1) <= SHAPE.gemm_weights * 2 / packed_bytes(SHAPE, INT4), "faster than the bytes can be read"
    assert list(ours.seconds) == sorted(ours.seconds)


def test_stages_of_a_cpu_are_predicted_by_what_their_weights_are() -> None:
    full, packed = (
        WeightPlacer(predict_machine("t4", "g4dn-4xlarge", "llama-2-13b", "float16", weights=weights), 16)
        for weights in ("auto", "int4")
    )
    for rows, gain in ((1, 2.5), (128, 0.9)):
        assert full.costs(rows)[1].cpu_s / packed.costs(rows)[1].cpu_s == pytest.approx(gain, rel=1e-12)
    slower = replace(full.machine, host=with_figure(full.machine.host, "cpu_int4_gain_1", 1.0))
    assert WeightPlacer(slower, 16).costs(1) == full.costs(1)
