"""Settings of the papers: pools fit their machines; a GPU's product name and memory lead to the nearest setting."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apex.simulator.hardware_files import load_gpu, load_host
from apex.simulator.paper_settings import gpu_kind, load_setting, nearest_setting, setting_names


@pytest.mark.parametrize("name", setting_names())
def test_a_setting_fits_its_machine(name):
    """Weights and pool fit the GPU, the CPU pool fits the host, and the longest request fits the GPU pool."""
    setting = load_setting(name)
    config = setting.model_config
    pool_bytes = setting.num_gpu_blocks * 16 * config.kv_bytes_per_token(2)
    weight_bytes = config.num_parameters * 2
    assert pool_bytes + weight_bytes < load_gpu(setting.gpu)["memory_gb"] * setting.tensor_parallel * 1e9
    assert setting["cpu_kv_gb"] <= load_host(setting.host)["memory_gb"]
    assert setting.limits.max_model_len <= setting.num_gpu_blocks * 16
    if "beyond the model's positions" not in setting.figures["max_model_len"].origin:
        assert setting.limits.max_model_len <= config.max_position_embeddings
    assert all(figure.origin for figure in setting.figures.values())


def test_pools_of_the_papers():
    t4, a10 = load_setting("apex-t4"), load_setting("apex-a10")
    assert (t4.num_gpu_blocks, a10.num_gpu_blocks) == (54, 1650)
    assert (t4.min_gpu_blocks, a10.min_gpu_blocks) == (52, 1280)
    assert t4.max_gpu_blocks == (16e9 - 2 * 6_738_415_616) // (16 * 512 * 1024)  # Llama-2-7B: 6.74 G weights
    assert t4.num_cpu_blocks == 20 * 10**9 // (16 * 512 * 1024)  # Llama-2-7B: 0.5 MiB per token
    assert a10.num_cpu_blocks == 120 * 10**9 // (16 * 128 * 1024)


def test_as_apex_measured_cpu_attention_has_the_share_of_figure_1b_and_the_memory_of_table_1():
    for name, gpu_gb_s, blocks, host_gb in (("apex-t4", 272.0, 82, 180), ("apex-a10", 510.0, 1845, 250)):
        today, measured = load_setting(name), load_setting(f"{name}-as-measured")
        assert (today.reading, measured.reading) == ("with today's kernels", "as APEX measured")
        assert measured.like == name and measured.limits == today.limits and measured.host == today.host
        assert measured.gpu_attention_gb_s() == pytest.approx(gpu_gb_s)
        apex, neo = measured.cpu_attention_gb_s("apex"), measured.cpu_attention_gb_s("neo")
        assert apex / gpu_gb_s == pytest.approx(170 / 3031, rel=1e-3)  # Figure 1b
        assert apex / gpu_gb_s < 0.1 < today.cpu_attention_gb_s("apex") / gpu_gb_s  # sections 2.4, 3.2
        assert apex / neo == pytest.approx(2.0)  # section 4.1
        assert measured.num_gpu_blocks == blocks and measured["cpu_kv_gb"] == pytest.approx(0.9 * host_gb)
        assert measured.cpu_attention_gb_s("vllm") is None
    with pytest.raises(ValueError, match="states the speed of the kernels llamafile, ispc, not of native"):
        replace(measured, cpu_kernels={"apex": "native"}).cpu_attention_gb_s("apex")


def test_unknown_setting_lists_those_there_are():
    with pytest.raises(ValueError, match="apex-t4, apex-t4-as-measured, apex-a10"):
        load_setting("apex-b200")


def test_every_model_has_its_checkpoint():
    names = {load_setting(name).model: load_setting(name).hub_name for name in setting_names()}
    assert names["llama-2-7b"] == "meta-llama/Llama-2-7b-hf"
    assert names["llama-3.1-8b"] == "meta-llama/Llama-3.1-8B"
    assert all(hub.lower().removesuffix("-hf").endswith(model) for model, hub in names.items())


@pytest.mark.parametrize(
    ("product", "kind"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", "a10"),
        ("NVIDIA A10-24Q", "a10"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-PCIE-40GB", "a100"),
        ("NVIDIA A30", "a30"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA L4", None),
        ("Tesla T40 24GB", None),
        ("NVIDIA GeForce RTX 3060", None),
        ("", None),
    ],
)
def test_a_product_name_is_matched_by_whole_words(product, kind):
    assert gpu_kind(product) == kind


def test_the_nearest_setting_is_the_card_s_own_or_that_of_its_memory():
    assert nearest_setting("t4", 15 * 2**30) == "apex-t4"
    assert nearest_setting("a10", 22 * 2**30) == "apex-a10"
    assert nearest_setting("a10", 8 * 2**30, "neo") == "neo-a10"
    assert nearest_setting(None, 12 * 2**30) == "apex-t4"  # RTX 3060
    assert nearest_setting(None, 16 * 2**30, "neo") == "neo-t4"
    assert nearest_setting(None, 22 * 2**30) == "apex-a10"  # L4
    assert nearest_setting("h100", 80 * 2**30, "neo") == "neo-a10"
