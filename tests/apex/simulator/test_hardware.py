"""The profile tables made of hardware files."""

from __future__ import annotations

from itertools import pairwise
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apex.perf.model import PerfModel, ProfileTable
from apex.simulator.hardware_files import LayerShape, load_gpu, load_host, load_model_config
from apex.simulator.predicted_profile import (
    closest_layer,
    cpu_attention_gb_s,
    ends_s,
    gemm_s,
    gpu_attention_s,
    hardware_profile,
    linear_curve,
    prefill_attention_s,
    sheet_linear_s,
)
from swiftllm.model.config import ModelConfig
from tests.apex.simulator.machines import GPUS, LLAMA_2_7B, LLAMA_3_8B, profile, write_gpu

# -- linear layers ----------------------------------------------------------------------------------------------------

# Milliseconds of the four GEMMs of a layer as the measured tables have them (Vidur and forks; docs/simulator.md).
PUBLISHED_GEMM_MS = {
    ("t4", "llama-2-7b"): {1: 1.57, 64: 2.21, 128: 3.46, 512: 9.28},
    ("a10", "llama-3.1-8b"): {1: 0.93, 64: 1.03, 128: 1.08, 512: 3.77},
}
# GB/s of weights at one token, TFLOP/s at 4096 tokens.
PUBLISHED_RATES = {"t4": (257, 28), "a10": (469, 66), "a40": (557, 110), "a100": (1522, 223), "h100": (2595, 749)}


@pytest.mark.parametrize(("gpu", "model"), PUBLISHED_GEMM_MS)
def test_measured_layer_times(gpu: str, model: str) -> None:
    config = load_model_config(model)
    layer = closest_layer(load_gpu(gpu), LayerShape.from_config(config))
    table = profile(gpu, model=config)
    for tokens, gemm_ms in PUBLISHED_GEMM_MS[gpu, model].items():
        assert layer.gemm(tokens) * 1e3 == pytest.approx(gemm_ms, rel=0.05)
        # Norms, rotation, activation and additions come on top, a few percent.
        assert gemm_ms < table.linear(tokens) * 1e3 < 1.09 * gemm_ms


@pytest.mark.parametrize("gpu", PUBLISHED_RATES)
def test_rates_of_the_measured_cards(gpu: str) -> None:
    gb_s, tflops = PUBLISHED_RATES[gpu]
    card = load_gpu(gpu)
    shape = LayerShape.from_config(LLAMA_2_7B)
    layer, weights = closest_layer(card, shape), shape.gemm_weights
    assert 2 * weights / layer.gemm(1) / 1e9 == pytest.approx(gb_s, rel=0.04)
    assert 2 * weights * 4096 / layer.gemm(4096) / 1e12 == pytest.approx(tflops, rel=0.02)
    # and the fractions in its file say the same
    assert card["memory_bandwidth_gb_s"] * card["weight_read_fraction"] == pytest.approx(gb_s, rel=0.01)
    assert card["tensor_tflops"] * card["gemm_fraction"] == pytest.approx(tflops, rel=0.01)


@pytest.mark.parametrize("model", [LLAMA_2_7B, LLAMA_3_8B])
def test_a10_is_flat_until_128_and_steps_up_by_256(model: ModelConfig) -> None:
    linear = profile("a10", model=model).linear
    assert linear(128) < 1.35 * linear(1)
    assert linear(136) > 1.25 * linear(128)
    assert linear(256) > 1.6 * linear(128)
    assert linear(264) > 1.3 * linear(256)


def test_linear_knee_of_the_papers_machines() -> None:
    assert PerfModel(profile("a10"), 32).flat_linear_tokens == 128
    assert PerfModel(profile("t4"), 32).flat_linear_tokens < 32


def test_another_model_is_scaled_by_its_weights() -> None:
    card, small = load_gpu("h100"), LayerShape.from_config(LLAMA_2_7B)
    large = LayerShape.from_config(load_model_config("llama-3.1-70b"))
    factor = large.gemm_weights / small.gemm_weights
    for tokens in (1, 128, 2048):
        ratio = linear_curve(card, large, 2, 2048)(tokens) / linear_curve(card, small, 2, 2048)(tokens)
        assert ratio == pytest.approx(factor, rel=0.15)
    assert "scaled by" in profile("h100", model=load_model_config("llama-3.1-70b")).identity["linear"]
    assert profile("a10").identity["linear"] == "measured (Meta-Llama-3-8B)"


def test_beyond_the_table_time_grows_with_tokens() -> None:
    linear = profile("a10", max_tokens=20_000).linear
    assert linear.sizes[-1] >= 20_000
    assert linear(16_384) / linear(4096) == pytest.approx(4, rel=0.02)


@given(gpu=st.sampled_from(GPUS), tokens=st.integers(1, 4096), more=st.integers(1, 1000), requests=st.integers(1, 500))
def test_more_work_takes_no_less_time(gpu: str, tokens: int, more: int, requests: int) -> None:
    model = MODEL_OF[gpu]
    assert model.linear_s(tokens) <= model.linear_s(tokens + more)
    assert model.outside_layers_s(tokens) <= model.outside_layers_s(tokens + more)
    assert model.swap_s(tokens) < model.swap_s(tokens + more)
    assert model.prefill_attention_s([(tokens, more)]) <= model.prefill_attention_s([(tokens + more, more)])
    assert model.prefill_attention_s([(tokens, more)]) <= model.prefill_attention_s([(tokens, 2 * more)])
    for attention_s in (model.gpu_attention_s, model.cpu_attention_s):
        context = requests * tokens
        assert attention_s(requests, context) < attention_s(requests, context + requests * more)
        assert attention_s(requests, context) < attention_s(requests + more, context + tokens * more)


MODEL_OF = {gpu: PerfModel(profile(gpu), 32) for gpu in GPUS}


# -- attention, swaps, ends -------------------------------------------------------------------------------------------


def test_gpu_attention_reads_the_kv_cache_near_peak_when_long_and_not_when_short() -> None:
    card, shape = load_gpu("a10"), LayerShape.from_config(LLAMA_3_8B)

    def fraction_of_peak(requests: int, context: int) -> float:
        seconds = gpu_attention_s(card, shape, 2, requests, context)
        return requests * context * shape.kv_elements * 2 / seconds / 600e9

    assert 0.75 < fraction_of_peak(64, 1000) < 0.9
    assert fraction_of_peak(16, 32) < 0.15


def test_attention_on_the_gpu_is_the_sum_of_its_documented_parts() -> None:
    card, shape = load_gpu("a10"), LayerShape.from_config(LLAMA_3_8B)
    kv_bytes = 64 * 1000 * shape.kv_elements * 2
    read_s = kv_bytes / (card["memory_bandwidth_gb_s"] * 1e9 * card["decode_attention_fraction"])
    starts_s = 64 * shape.num_kv_heads * card["decode_attention_request_head_ns"] * 1e-9
    fixed_s = card["decode_attention_fixed_us"] * 1e-6
    assert gpu_attention_s(card, shape, 2, 64, 1000) == pytest.approx(fixed_s + starts_s + read_s, rel=1e-12)
    flops = 4 * shape.num_heads * shape.head_dim * 512 * (1000 + 512)
    flops_per_s = card["tensor_tflops"] * 1e12 * card["gemm_fraction"] * card["prefill_attention_of_gemm"]
    expected_s = card["prefill_attention_fixed_us"] * 1e-6 + flops / flops_per_s
    assert prefill_attention_s(card, shape, 512, 1000) == pytest.approx(expected_s, rel=1e-12)


def test_a_host_may_read_slower_than_a_gigabyte_a_second() -> None:
    slow, fast = (profile("a10", cpu_bandwidth_gb_s=gb_s).cpu_attention(64, 1000) for gb_s in (0.5, 50.0))
    assert slow > 50 * fast


def test_tables_agree_with_the_formulas_between_their_points() -> None:
    card, shape = load_gpu("a10"), LayerShape.from_config(LLAMA_3_8B)
    model = PerfModel(profile("a10"), 32)
    for requests, context in ((1, 17), (40, 650), (300, 3000)):
        expected = gpu_attention_s(card, shape, 2, requests, context)
        assert model.gpu_attention_s(requests, requests * context) == pytest.approx(expected)
    for new, cached in ((100, 0), (700, 1500), (2048, 30_000)):
        expected = prefill_attention_s(card, shape, new, cached)
        assert model.prefill_attention_s([(new, cached)]) == pytest.approx(expected, rel=0.05)
    assert not model.extrapolated


@pytest.mark.parametrize("tokens", [1, 16, 32, 48, 768, 2048])
def test_tables_are_exact_at_powers_of_two_and_their_middles(tokens: int, tmp_path: Path) -> None:
    card, shape = load_gpu(write_gpu(tmp_path / "new.yaml")), LayerShape.from_config(LLAMA_3_8B)
    table = hardware_profile(card, load_host("dual-xeon-6342"), LLAMA_3_8B)
    assert table.linear(tokens) == pytest.approx(sheet_linear_s(card, shape, 2, tokens), rel=1e-9)
    expected = prefill_attention_s(card, shape, tokens, 0)
    assert table.prefill_attention(tokens, 0) == pytest.approx(expected, rel=1e-9)
    if tokens & (tokens - 1) == 0:
        assert table.ends(tokens) == pytest.approx(ends_s(card, LLAMA_3_8B, 2, tokens), rel=1e-9)


def test_long_prefills_are_off_by_4_percent_at_most(tmp_path: Path) -> None:
    card, shape = load_gpu(write_gpu(tmp_path / "new.yaml")), LayerShape.from_config(LLAMA_3_8B)
    table = hardware_profile(card, load_host("dual-xeon-6342"), LLAMA_3_8B, max_tokens=20_000)
    for tokens in range(4096, 20_000, 500):
        expected = prefill_attention_s(card, shape, tokens, 0)
        assert expected <= table.prefill_attention(tokens, 0) * (1 + 1e-9) <= 1.042 * expected


def test_contexts_from_one_token_to_128k_are_in_the_table() -> None:
    model = PerfModel(profile("a10"), 32)
    for attention_s in (model.gpu_attention_s, model.cpu_attention_s):
        attention_s(1, 1)
        attention_s(4, 4 * 131_072)
    model.prefill_attention_s([(16, 0), (16, 131_072)])
    assert not model.extrapolated


def test_cpu_attention_is_kv_bytes_over_the_given_bandwidth() -> None:
    kv_bytes = 100 * 1250 * LayerShape.from_config(LLAMA_3_8B).kv_elements * 2
    model = PerfModel(profile("a10", cpu_bandwidth_gb_s=50), 32)
    assert model.cpu_attention_s(100, 100 * 1250) == pytest.approx(kv_bytes / 50e9, rel=0.03)
    assert model.cpu_attention_s(1, 1) > 50e-6  # the hand-over
    assert model.table.identity["cpu_attention_gb_s"] == "50"


def test_kernel_and_host_set_the_cpu_bandwidth() -> None:
    gqa, mha = LayerShape.from_config(LLAMA_3_8B), LayerShape.from_config(LLAMA_2_7B)
    host = load_host("dual-xeon-6342")
    share_gb_s = 409.6 * 0.8 / 48  # less than the 17 GB/s that a core reads alone
    core_gb_s = 1 / (1 / (17 * 0.72) - 1 / 17 + 1 / share_gb_s)
    assert cpu_attention_gb_s(host, "native", gqa) == pytest.approx(48 * core_gb_s)
    assert cpu_attention_gb_s(host, "ispc", gqa) < cpu_attention_gb_s(host, "ispc", mha)
    assert cpu_attention_gb_s(host, "ispc", gqa) < cpu_attention_gb_s(host, "native", gqa)
    rates = [cpu_attention_gb_s(load_host(f"g5-{n}xlarge"), "native", gqa) for n in (4, 8, 16)]
    assert all(high == pytest.approx(2 * low, rel=0.01) for low, high in pairwise(rates))


def test_swaps_go_at_the_rate_of_the_slower_end() -> None:
    block_bytes = LLAMA_3_8B.kv_bytes_per_token(2) * 16
    for host, gb_s in (("dual-xeon-6342", 0.8 * 31.5), ("dual-xeon-6130", 0.8 * 15.75)):
        swap = profile("a10", host).swap
        assert (swap(200) - swap(100)) == pytest.approx(100 * block_bytes / (gb_s * 1e9))


def test_ends_hold_the_logits_and_the_host() -> None:
    logits_bytes = LLAMA_3_8B.vocab_size * LLAMA_3_8B.hidden_size * 2
    assert profile("a10").ends(1) == pytest.approx(logits_bytes / 470e9, rel=0.02)
    assert PerfModel(profile("a10"), 32).outside_layers_s(1) == pytest.approx(1e-3 + logits_bytes / 470e9, rel=0.02)


def test_embedding_rows_are_read_and_written() -> None:
    card, hidden = load_gpu("a10"), LLAMA_3_8B.hidden_size
    logits_s = gemm_s(card, LLAMA_3_8B.vocab_size * hidden, 2, 1000)
    embedding_s = 2 * 1000 * hidden * 2 / (card["memory_bandwidth_gb_s"] * 1e9 * card["weight_read_fraction"])
    assert ends_s(card, LLAMA_3_8B, 2, 1000) - logits_s == pytest.approx(embedding_s)


def test_no_work_takes_no_time() -> None:
    model = PerfModel(profile("t4"), 32)
    assert model.linear_s(0) == model.gpu_attention_s(0, 0) == model.cpu_attention_s(0, 0) == model.swap_s(0) == 0
    assert model.prefill_attention_s([]) == 0
    assert 0 < model.linear_s(1) < inf


def test_a_table_is_written_and_read_back(tmp_path: Path) -> None:
    table = profile("a10")
    (tmp_path / "table.json").write_text(table.as_json())
    assert ProfileTable.load(tmp_path / "table.json", table.identity) == table


@pytest.mark.parametrize(
    ("gpu", "options", "message"),
    [
        ("t4", {"dtype": "bfloat16"}, "T4; take float16"),
        ("a10", {"dtype": "float32"}, "float32"),
        ("a10", {"cpu_kernel": "magic"}, "known are ispc, llamafile, native"),
        ("a10", {"cpu_bandwidth_gb_s": 0}, "must be positive"),
    ],
)
def test_what_is_not_calibrated_is_refused(gpu: str, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile(gpu, **options)
