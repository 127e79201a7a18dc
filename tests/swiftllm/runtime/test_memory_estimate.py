"""The plan of memory before anything is loaded: its parts are those the engine's own code takes, card by card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from apex.simulator.hardware_files import load_model_config
from apex.simulator.paper_settings import BLOCK_SIZE, PaperSetting, load_setting
from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.device import CONTEXT_BYTES, CudaDevice
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.machine import GIB, InsufficientMemory
from swiftllm.model.config import LinearSizes, ModelConfig
from swiftllm.model.llama import LlamaModel
from swiftllm.model.placement import all_resident
from swiftllm.model.quantisation import AWQ, QuantisationScheme
from swiftllm.model.stages import LoadedWeights
from swiftllm.model.weights import LlamaWeights, dummy_weights
from swiftllm.ops.cpu import CpuOps
from swiftllm.runtime.graphs import LayerGraphs
from swiftllm.runtime.memory import (
    HOST_HEADROOM_BYTES,
    MemoryBudget,
    WeightSizes,
    plan_blocks,
    weight_bytes,
    weights_advice,
)
from swiftllm.runtime.memory_estimate import activation_bytes, estimate_memory, widest_iteration
from swiftllm.sampling.sampler import Sampler
from tests.reference.meta_gpu import DEVICE, MetaGpu

# Memory in GiB as torch reports it, compute capability and multiprocessors.
T4, A10, A10G, L4 = (14.56, 75, 40), (22.06, 86, 72), (22.06, 86, 80), (21.95, 89, 58)
A100_40, H100, RTX_3060 = (39.39, 80, 108), (79.1, 90, 132), (11.64, 86, 28)
LLAMA_8B = load_model_config("llama-3.1-8b")
LLAMA_7B = load_model_config("llama-2-7b")
CONFIG = EngineConfig("m", block_size=16, max_num_batched_tokens=512, max_num_seqs=256, max_model_len=4096)


def fit_of(setting: PaperSetting, device_gib: float, host_gib: float = 256, **options: object) -> MemoryBudget:
    config = EngineConfig("m", block_size=BLOCK_SIZE, **{**vars(setting.limits), **options})
    sizes = {"device_bytes": int(device_gib * GIB), "host_bytes": int(host_gib * GIB)}
    return estimate_memory(config, setting.model_config, getattr(torch, setting.dtype), **sizes)


@dataclass
class Started:
    """The engine's start on a GPU that counts: bytes of the widest iteration and of buffers, and bytes left free."""

    activations: int
    left_free: int


@contextmanager
def started(
    model: ModelConfig,
    card: tuple[float, int, int],
    config: EngineConfig,
    num_layers: int | None = None,
    residual_dtype: torch.dtype | None = None,
) -> Iterator[Started]:
    gib, *processor = card
    model = replace(model, num_layers=num_layers or model.num_layers)
    with MetaGpu(int(gib * GIB), CONTEXT_BYTES) as gpu:
        ops = gpu.ops(*processor)
        empty = LlamaWeights.empty(model, DEVICE, torch.float16)
        if model.quantisation is not None:
            empty.empty_quantised(model, DEVICE, torch.float16)
        weights = LoadedWeights(model, empty, ops)
        after_weights = gpu.allocated
        llama = LlamaModel(model, weights, ops, config.max_model_len, residual_dtype)
        device = CudaDevice()
        max_blocks = -(-config.max_model_len // config.block_size)
        graphs = LayerGraphs(
            gpu,
            llama,
            torch.float16,
            max_rows=config.max_num_seqs,
            max_blocks=max_blocks,
            layer_groups=LayerGroups.of(model, config.block_size),
            placement=all_resident(model.num_layers),
        )
        free = device.left_free(lambda: widest_iteration(llama, Sampler(0, gpu), config, torch.float16))
        yield Started(gpu.peak - after_weights, free)
        del graphs


ALTERNATING = replace(LLAMA_8B, num_layers=2, windows=(128, None))
ALIKE = replace(LLAMA_8B, num_layers=2, windows=(128, 128))
HYBRID = replace(  # as Qwen3.5-9B
    LLAMA_8B, num_heads=16, num_kv_heads=4, head_dim=256, intermediate_size=12288,
    linear=LinearSizes(3, 16, 32, 128, 128, 4),
)  # fmt: skip


@pytest.mark.parametrize(
    "model",
    [LLAMA_7B, LLAMA_8B, ALTERNATING, ALIKE, HYBRID],
    ids=["7b", "8b", "alternating windows", "windows", "linear attention"],
)
@pytest.mark.parametrize(
    ("rows", "requests", "context"),
    [(832, 1024, 832), (20480, 1024, 20480), (512, 256, 4096), (2048, 16, 32768), (8192, 64, 1024), (64, 8, 512)],
)
def test_the_estimate_of_activations_is_what_the_widest_iteration_takes(model, rows, requests, context):
    config = EngineConfig("m", max_num_batched_tokens=rows, max_num_seqs=requests, max_model_len=context)
    model = replace(model, num_layers=2)
    estimate = activation_bytes(model, 2, 2, rows=rows, requests=requests, context=context, on_host=False)
    with started(model, H100, config) as start:
        beside_states = estimate - requests * model.state_bytes(2)  # which it has none of
        assert 0.99 * start.activations <= beside_states <= 1.15 * start.activations


@pytest.mark.parametrize(("rows", "requests", "context"), [(8192, 64, 1024), (512, 256, 4096)])
def test_residuals_in_float32_are_counted(rows, requests, context):
    """Those of a GPU batch, and of the buffers of graphs."""
    config = EngineConfig("m", max_num_batched_tokens=rows, max_num_seqs=requests, max_model_len=context)
    how = {"rows": rows, "requests": requests, "context": context, "on_host": False}
    narrow, wide = (activation_bytes(LLAMA_8B, 2, itemsize, **how) for itemsize in (2, 4))
    taken = []
    for dtype in (torch.float16, torch.float32):
        with started(LLAMA_8B, H100, config, num_layers=2, residual_dtype=dtype) as start:
            taken.append(start.activations)
    assert wide - narrow == (rows + 2 * requests) * LLAMA_8B.hidden_size * 2
    assert taken[1] - taken[0] == pytest.approx(wide - narrow, rel=0.02)
    fits = [estimate_memory(config, LLAMA_8B, torch.float16, device_bytes=H100[0] * GIB, host_bytes=64 * GIB,
                            residual_dtype=dtype) for dtype in (None, torch.float32)]  # fmt: skip
    assert fits[1].activation_bytes - fits[0].activation_bytes == wide - narrow


@pytest.mark.parametrize(
    ("rows", "requests", "context"), [(832, 1024, 832), (576, 256, 4096), (512, 256, 4096), (192, 16, 512)]
)
@pytest.mark.parametrize("card", [T4, A10], ids=["t4", "a10"])
@pytest.mark.filterwarnings("ignore:Triton has no tensor cores")
def test_quantised_weights_stay_packed_and_are_written_out_one_at_a_time(card, rows, requests, context):
    model = replace(LLAMA_7B, quantisation=QuantisationScheme(AWQ, 128))
    config = EngineConfig("m", max_num_batched_tokens=rows, max_num_seqs=requests, max_model_len=context)
    fit = estimate_memory(config, model, torch.float16, device_bytes=int(card[0] * GIB), host_bytes=64 * GIB)
    with started(model, card, config) as start:
        assert 0.97 * start.activations <= fit.activation_bytes
        if card is T4 or rows > 512:  # an A10 multiplies codes of up to 512 rows and takes less
            assert fit.activation_bytes <= 1.15 * start.activations
        assert fit.max_gpu_blocks * fit.bytes_per_block == pytest.approx(start.left_free, rel=0.03)
    assert fit.max_gpu_blocks > 900


@pytest.mark.parametrize(
    ("sizes", "rows", "requests", "context"),
    [
        ({"intermediate_size": 4096}, 2048, 16, 256),  # gate and up
        ({"vocab_size": 50_000}, 512, 512, 128),  # logits
        ({"num_kv_heads": 8, "vocab_size": 32_000}, 256, 256, 256),
    ],
)
def test_it_is_also_what_torch_allocates_on_a_cpu(sizes, rows, requests, context):
    small = {"num_layers": 2, "hidden_size": 256, "num_heads": 8, "num_kv_heads": 2, "head_dim": 32}
    model = replace(LLAMA_8B, **{**small, "intermediate_size": 512, "vocab_size": 1000, **sizes})
    weights = LoadedWeights(model, dummy_weights(model, torch.device("cpu"), torch.float32, 0), CpuOps())
    llama = LlamaModel(model, weights, CpuOps(), context)
    config = EngineConfig("m", max_num_batched_tokens=rows, max_num_seqs=requests, max_model_len=context)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        widest_iteration(llama, Sampler(), config, torch.float32)
    allocated = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    estimate = activation_bytes(model, 4, 4, rows=rows, requests=requests, context=context, on_host=True)
    assert 0.95 * peak <= estimate - llama.rotary_table.nbytes <= 1.1 * peak


@pytest.mark.parametrize(
    ("name", "card"),
    [("apex-t4", T4), ("neo-t4", T4), ("apex-a10", A10), ("apex-a10", A10G), ("neo-a10", A10G), ("apex-a10", L4)],
)
def test_the_engine_starts_with_the_pools_of_the_papers(name, card):
    """All of the start's accounting, in full size: weights, buffers, widest iteration, headroom, pool."""
    setting = load_setting(name)
    pools = {"num_gpu_blocks": setting.num_gpu_blocks, "num_cpu_blocks": setting.num_cpu_blocks}
    config = EngineConfig("m", block_size=BLOCK_SIZE, **vars(setting.limits), **pools)
    fit = fit_of(setting, card[0])
    fit.check(**pools)
    with started(setting.model_config, card, config) as start:
        plan = plan_blocks(config, dict.fromkeys(Tier, fit.bytes_per_block), fit.host_bytes, start.left_free)
        assert plan.num_blocks == {Tier.GPU: setting.num_gpu_blocks, Tier.CPU: setting.num_cpu_blocks}
        most = start.left_free // fit.bytes_per_block
        assert 0.9 * most <= fit.max_gpu_blocks <= most  # never more than the engine then allows


@pytest.mark.parametrize(
    ("name", "card", "least", "most"),
    [
        ("apex-t4", T4, 54, 110),
        ("apex-a10", A10G, 1650, 2250),
        ("apex-a10", L4, 1650, 2200),
        ("apex-a10", A100_40, 9000, 11_500),
        ("apex-a10", H100, 27_000, 31_000),
        ("neo-2xh100", H100, 0, 0),
        ("apex-a10", T4, 0, 0),
        ("apex-t4", RTX_3060, 0, 0),
    ],
)
def test_blocks_by_card(name, card, least, most):
    assert least <= fit_of(load_setting(name), card[0]).max_gpu_blocks <= most


def test_a_card_too_small_for_the_weights_says_so_with_numbers():
    fit = fit_of(load_setting("apex-t4"), RTX_3060[0])
    message = (
        r"the GPU has 11.64 GiB of memory. Needed are weights 12.55 GiB, activations 0.2\d GiB, 1.00 GiB for CUDA and "
        r"headroom, and 0.42 GiB for num_gpu_blocks = 54 blocks; 0 blocks fit. The weights alone do not fit: "
        r"give --weights-gpu-memory auto: 2.2 GiB or more of them would be in host memory, where 255.5 GiB are free, "
        r"or take 4-bit weights, 3.6 GiB, which fit"
    )
    with pytest.raises(InsufficientMemory, match=message):
        fit.check(54, 0)


def test_too_large_a_pool_says_what_fits():
    fit = fit_of(load_setting("apex-a10"), A10G[0])
    most = fit.max_gpu_blocks
    fit.check(most, 0)
    with pytest.raises(InsufficientMemory, match=rf"{most:,} blocks fit. Set num_gpu_blocks to {most:,}"):
        fit.check(most + 1, 0)
    crowded = fit_of(load_setting("apex-a10"), A10G[0], max_num_batched_tokens=200_000)
    with pytest.raises(InsufficientMemory, match=r"0 blocks fit\. Lower max_num_batched_tokens"):
        crowded.check(1, 0)


def test_the_host_s_pool_is_held_against_the_host():
    fit = fit_of(load_setting("apex-a10"), A10G[0], host_gib=60)
    assert fit.max_cpu_blocks == (60 * GIB - fit.host_headroom_bytes) // (2 << 20)
    fit.check(1650, fit.max_cpu_blocks)
    with pytest.raises(
        InsufficientMemory,
        match=r"the host has 60.00 GiB .* 4.14 GiB for the engine's process,.* 111.76 GiB for num_cpu_blocks = 57,220",
    ):
        fit.check(1650, 57_220)


def test_the_host_s_reserve_covers_process_graphs_and_pinned_buffers():
    """Each part by hand: at most 256 MiB wait each way; torch rounds pinned memory up to powers of two."""
    for name, layer_mib, cpu_batches_mib in (("apex-t4", 13, 64), ("apex-a10", 80, 40)):
        fit = fit_of(load_setting(name), A10G[0])
        pinned_gib = 2 * (2 * (256 + layer_mib) + cpu_batches_mib) / 1024
        assert fit.host_headroom_bytes / GIB == pytest.approx(2.0 + 0.25 + 0.5 + pinned_gib, abs=0.01)
    assert fit_of(load_setting("apex-t4"), A10G[0]).host_headroom_bytes > 5 * HOST_HEADROOM_BYTES


def test_without_a_card_the_host_holds_everything():
    host_bytes = 20 * GIB
    fit = estimate_memory(CONFIG, LLAMA_7B, torch.float16, device_bytes=None, host_bytes=host_bytes)
    rest = host_bytes - fit.weight_bytes - fit.activation_bytes - HOST_HEADROOM_BYTES
    assert fit.max_gpu_blocks == fit.max_cpu_blocks == rest // fit.bytes_per_block > 0
    half = fit.max_cpu_blocks // 2
    fit.check(half, half)
    with pytest.raises(InsufficientMemory, match=r"num_gpu_blocks \+ num_cpu_blocks = .* Lower both"):
        fit.check(half, fit.max_cpu_blocks)
    small = estimate_memory(CONFIG, LLAMA_7B, torch.float32, device_bytes=None, host_bytes=host_bytes)
    with pytest.raises(InsufficientMemory, match=r"weights 25\.10 GiB"):
        small.check(0, 0)


def test_weights_that_do_not_fit_are_refused_without_a_gpu_pool_too():
    with pytest.raises(InsufficientMemory, match="give --weights-gpu-memory auto"):
        fit_of(load_setting("apex-t4"), RTX_3060[0]).check(0, 100)


@pytest.mark.parametrize(
    ("device_gib", "host_gib", "auto", "four_bit"),
    [
        (16, 256, True, "which fit"),  # 12.5 GiB are the 16-bit weights, 3.6 the 4-bit ones
        (6, 9.5, True, "which fit"),
        (6, 4, False, "which fit"),
        (3, 4, False, "with --weights-gpu-memory auto"),
        (3, 11, True, "with --weights-gpu-memory auto"),
        (3, 0.7, False, None),
        (0.2, 100, False, None),  # less than the vocabulary takes
    ],
)
def test_advice_is_what_both_tiers_allow(device_gib, host_gib, auto, four_bit):
    advice = weights_advice(WeightSizes.of(LLAMA_7B, torch.float16), int(device_gib * GIB), int(host_gib * GIB))
    assert ("give --weights-gpu-memory auto" in advice) == auto
    assert four_bit is None or f"take 4-bit weights, 3.6 GiB, {four_bit}" in advice
    assert ("take a smaller model" in advice) == (not auto and four_bit is None)


def test_advice_names_no_4_bits_where_weights_have_them_or_groups_do_not_divide_them():
    quantised = replace(LLAMA_7B, quantisation=QuantisationScheme(AWQ, 128))
    odd = replace(LLAMA_7B, intermediate_size=LLAMA_7B.intermediate_size + 1)
    for model in (quantised, odd):
        assert WeightSizes.of(model, torch.float16).four_bit is None
    narrow = replace(LLAMA_7B, intermediate_size=LLAMA_7B.intermediate_size + 32)
    packed = weight_bytes(replace(narrow, quantisation=QuantisationScheme(AWQ, 32)), torch.float16)
    assert WeightSizes.of(narrow, torch.float16).four_bit == packed
