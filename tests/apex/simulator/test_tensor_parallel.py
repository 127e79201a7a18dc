"""Tensor parallelism on predicted hardware: closed forms of a shard, its communication, and what does not divide."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from apex.perf.model import PerfModel
from apex.simulator.build import build_simulated
from apex.simulator.hardware_files import (
    HARDWARE_DIR,
    LayerShape,
    known_hardware,
    load_gpu,
    load_host,
    load_link,
    load_model_config,
)
from apex.simulator.predicted_machine import predict_machine
from apex.simulator.predicted_profile import (
    all_gather_s,
    all_reduce_s,
    cpu_attention_s,
    ends_s,
    gpu_attention_s,
    hardware_profile,
    linear_curve,
)
from swiftllm.core.request import SamplingParams, Tier

A100, HOST, PCIE = load_gpu("a100"), load_host("xeon-6342"), load_link("pcie-4")
PCIE_5 = load_link("pcie-5")
LLAMA_70B = load_model_config("llama-2-70b")
SHAPE = LayerShape.from_config(LLAMA_70B)


def profile(tensor_parallel: int, **options):
    return hardware_profile(
        A100, HOST, LLAMA_70B, dtype="bfloat16", tensor_parallel=tensor_parallel, link=PCIE, **options
    )


def test_models_have_the_published_sizes() -> None:
    assert LLAMA_70B.num_parameters == 68_976_648_192
    assert load_model_config("yi-34b").num_parameters == 34_388_917_248
    assert load_model_config("yi-34b").head_dim == LLAMA_70B.head_dim == 128


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_each_gpu_has_an_equal_part(n: int) -> None:
    shard = SHAPE.shard(n)
    assert shard.gemm_weights * n == SHAPE.gemm_weights
    assert shard.kv_elements * n == SHAPE.kv_elements
    assert shard.num_heads * n == SHAPE.num_heads and shard.hidden_size == SHAPE.hidden_size
    # The hidden state is whole on every GPU, so norms and additions are not divided.
    assert SHAPE.elementwise_elements <= n * shard.elementwise_elements <= SHAPE.elementwise_elements * n


def test_an_all_reduce_is_a_latency_and_bytes_at_a_rate() -> None:
    assert all_reduce_s(PCIE, 0, 2) == pytest.approx(30e-6)
    assert all_reduce_s(PCIE, 20e9, 2) == pytest.approx(1 + 30e-6)
    assert all_gather_s(PCIE, 20e9, 2) == pytest.approx(1 + 30e-6)
    assert all_gather_s(PCIE, 20e9, 4) == pytest.approx(3 + 30e-6)


def test_small_buffers_of_a_pair_have_a_kernel_of_their_own() -> None:
    below = 8 << 20
    assert all_reduce_s(PCIE_5, below - 16, 2) == pytest.approx(6e-6 + (below - 16) / 43e9)
    assert all_reduce_s(PCIE_5, below, 2) == pytest.approx(16e-6 + below / 35e9)
    assert all_reduce_s(PCIE_5, 16, 4) == pytest.approx(16e-6 + 16 / 35e9)  # of four cards none
    assert all_reduce_s(PCIE, 16, 2) == all_reduce_s(PCIE, 16, 4)  # nor where the link has no such figures


@pytest.mark.parametrize(("tokens", "latency_us", "gb_s"), [(1, 6, 43), (64, 6, 43), (511, 6, 43), (512, 16, 35),
                                                           (2000, 16, 35)])  # fmt: skip
def test_a_layer_has_exactly_two_all_reduces_by_the_figures_of_its_link(tokens: int, latency_us, gb_s) -> None:
    free = replace(
        PCIE_5,
        figures={
            name: replace(figure, value=1e30 if name.endswith("gb_s") else 0.0)
            for name, figure in PCIE_5.figures.items()
        },
    )
    tables = [
        hardware_profile(A100, HOST, LLAMA_70B, dtype="bfloat16", tensor_parallel=2, link=link)
        for link in (PCIE_5, free)
    ]
    added_s = tables[0].linear(tokens) - tables[1].linear(tokens)
    assert added_s == pytest.approx(2 * (latency_us * 1e-6 + tokens * 8192 * 2 / (gb_s * 1e9)), rel=1e-6)
    assert [table.ends for table in tables] == [tables[0].ends] * 2


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("requests", [1, 16, 64])
def test_an_iteration_is_the_sum_of_its_formulas(n: int, requests: int) -> None:
    prompt, layers = 500, LLAMA_70B.num_layers
    engine = build_simulated("vllm", profile(n), layers, num_gpu_blocks=9000, num_cpu_blocks=0)
    for i in range(requests):
        engine.add(engine.make_request(str(i), (0,) * prompt, SamplingParams(max_tokens=200)))
    decodes = engine.state.decoding[Tier.GPU]
    while len(decodes) < requests:
        engine.step()
    context = sum(request.num_tokens for request in decodes) / requests
    start_s = engine.now()
    engine.step()
    shard = SHAPE.shard(n)
    linear_s = linear_curve(A100, shard, 2, 2048)(requests) + 2 * all_reduce_s(PCIE, requests * 8192 * 2, n)
    attention_s = gpu_attention_s(A100, shard, 2, requests, context)
    expected_s = layers * (linear_s + attention_s) + ends_s(A100, LLAMA_70B, 2, requests, n)
    assert engine.now() - start_s == pytest.approx(expected_s + HOST["iteration_overhead_ms"] * 1e-3, rel=1e-9)


def test_swaps_and_crossings_use_the_gpu_batches_of_every_gpu_and_the_host_is_shared() -> None:
    one, four = profile(1), profile(4)
    latency_s = A100["transfer_latency_us"] * 1e-6
    assert four.swap(1000) - latency_s == pytest.approx((one.swap(1000) - latency_s) / 4)
    # Bytes of K and V of a token; GB/s of CPU attention and of PCIe.
    rates = (2.0 * SHAPE.kv_elements, 100.0, 25.0)
    way_s, way_of_four_s = (cpu_attention_s(HOST, SHAPE, 2, *rates, 64, 0, n) for n in (1, 4))
    hand_over_s = HOST["hand_over_us"] * 1e-6
    assert way_of_four_s - hand_over_s == pytest.approx((way_s - hand_over_s) / 4)
    reading_s, reading_of_four_s = (cpu_attention_s(HOST, SHAPE, 2, *rates, 64, 900, n) for n in (1, 4))
    assert reading_of_four_s - way_of_four_s == pytest.approx(reading_s - way_s)


def test_more_gpus_are_faster_until_communication_takes_over() -> None:
    linear = [PerfModel(profile(n), 80).linear_s for n in (1, 2, 4)]
    assert linear[0](64) > linear[1](64) > linear[2](64)
    slow = replace(PCIE, figures={**PCIE.figures, "all_reduce_gb_s": replace(PCIE.figures["all_reduce_gb_s"], value=1)})
    table = hardware_profile(A100, HOST, LLAMA_70B, dtype="bfloat16", tensor_parallel=4, link=slow)
    assert table.linear(2048) > linear[0](2048)


def test_one_gpu_needs_no_link_and_has_the_same_table() -> None:
    alone = hardware_profile(A100, HOST, LLAMA_70B, dtype="bfloat16")
    assert alone == profile(1)
    assert alone.identity["tensor_parallel"] == "1" and "link" not in alone.identity
    assert profile(2).identity["link"] == "PCIe 4.0"


@pytest.mark.parametrize(
    ("n", "message"),
    [
        (0, "must be at least 1"),
        (16, r"tensor_parallel=16 does not divide num_kv_heads=8: take a divisor"),
        (3, r"does not divide num_heads=64, num_kv_heads=8, intermediate_size=28672"),
    ],
)
def test_what_does_not_divide_is_named(n: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile(n)


def test_several_gpus_need_a_link() -> None:
    with pytest.raises(ValueError, match="needs the link"):
        hardware_profile(A100, HOST, LLAMA_70B, tensor_parallel=2)
    with pytest.raises(ValueError, match=r"--tensor-parallel 2 needs --link, .*: nvlink-4, pcie-3, pcie-4"):
        predict_machine("a100", "xeon-6342", "llama-2-70b", "bfloat16", tensor_parallel=2)


def test_the_pool_is_what_all_gpus_hold_beside_the_weights() -> None:
    machine = predict_machine("a100", "xeon-6342", "llama-2-70b", "bfloat16", tensor_parallel=4, link_name="pcie-4")
    gpu_blocks, cpu_blocks = machine.num_blocks(None, None, 16)
    token_bytes = LLAMA_70B.kv_bytes_per_token(2)
    assert gpu_blocks == int((4 * 80e9 * 0.9 - 2 * LLAMA_70B.num_parameters) / (16 * token_bytes))
    assert cpu_blocks == int(int(400e9 / (16 * token_bytes)) * 0.5)
    assert "4x A100-SXM-80GB over PCIe 4.0 and Xeon Gold 6342" in machine.description
    small = predict_machine("a100", "xeon-6342", "llama-2-70b", "bfloat16")
    with pytest.raises(ValueError, match=r"has 80 GB.*more of them \(--tensor-parallel\)"):
        small.num_blocks(None, None, 16)
    pair = predict_machine("t4", "g4dn-12xlarge", "llama-2-70b", "float16", tensor_parallel=2, link_name="pcie-3")
    with pytest.raises(ValueError, match=r"a smaller --model or --weights int4$"):  # weights are streamed to one GPU
        pair.num_blocks(None, None, 16)


def test_links_are_known_by_their_files() -> None:
    assert known_hardware("link") == ["nvlink-4", "pcie-3", "pcie-4", "pcie-5"]
    machine = predict_machine(
        "rtx-pro-6000", "xeon-6342", "llama-2-70b", "bfloat16", tensor_parallel=2, link_name="pcie-5"
    )
    assert machine.table.identity["link"] == "PCIe 5.0"
    assert load_gpu("rtx-pro-6000").link == "pcie-5" and load_gpu("a100").link is None
    with pytest.raises(ValueError, match="--link: no link 'pcie-6': known are nvlink-4, pcie-3, pcie-4, pcie-5"):
        predict_machine("a100", "xeon-6342", "llama-2-70b", "bfloat16", tensor_parallel=2, link_name="pcie-6")


def test_a_link_with_some_of_the_figures_of_small_buffers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    lines = (HARDWARE_DIR / "pcie-5.yaml").read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "small_all_reduce_gpus" not in line))
    with pytest.raises(ValueError, match=r"own\.yaml lacks small_all_reduce_gpus, which belong to small_"):
        load_link(path)
