"""What fits and what does not, with made-up numbers of bytes and on a made-up GPU."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from quantise import write_folder
from transformers import Qwen2Config, Qwen3Config

from apex.simulator.hardware_files import load_model_config
from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.device import CudaDevice, HostDevice
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.kv.tensors import INT8, KVPools, block_bytes, tier_formats
from swiftllm.machine import GIB, InsufficientMemory
from swiftllm.model.config import ModelConfig
from swiftllm.model.weights import load_weights
from swiftllm.runtime.memory import check_weights, plan_blocks, weight_bytes
from swiftllm.runtime.memory_estimate import estimate_memory, widest_iteration
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_device import FakeCuda
from tests.reference.fake_gpu import fake_gpu

MIB = 1 << 20
BLOCK = 2 * MIB
EXACT = dict.fromkeys(Tier, BLOCK)


def plan(device_gib: float | None, host_gib: float, each=EXACT, **options):
    config = EngineConfig("model", **options)
    return plan_blocks(config, each, int(host_gib * GIB), None if device_gib is None else int(device_gib * GIB))


def test_a_gpu_gets_what_is_left_and_the_host_half():
    assert plan(3, 100).num_blocks == {Tier.GPU: 3 * 512, Tier.CPU: 50 * 512}


def test_given_numbers_of_blocks_are_taken():
    assert plan(3, 100, num_gpu_blocks=54, num_cpu_blocks=7).num_blocks == {Tier.GPU: 54, Tier.CPU: 7}
    assert plan(-1, 100, num_gpu_blocks=0).num_blocks[Tier.GPU] == 0


def test_blocks_too_many_beside_their_snapshots_are_told_how_many_fit():
    """With so many less, the plan fits."""
    state = 150 * MIB
    for number in (900, 1000, 20_000):
        config = EngineConfig("model", num_cpu_blocks=number, num_gpu_blocks=1)
        with pytest.raises(InsufficientMemory, match=r"with snapshots of states, .* blocks less") as error:
            plan_blocks(config, EXACT, 2 * GIB, GIB, state)
        fewer = number - int(re.search(r"ask for (\d+) blocks less", str(error.value))[1])
        assert 500 < fewer < number
        plan_blocks(replace(config, num_cpu_blocks=fewer), EXACT, 2 * GIB, GIB, state)


def test_on_a_host_both_tiers_share_its_memory():
    blocks = plan(None, 2).num_blocks
    assert blocks == {Tier.GPU: 256, Tier.CPU: 512}
    with pytest.raises(InsufficientMemory, match=r"num_gpu_blocks \+ num_cpu_blocks = 1000 blocks .* 232 blocks less"):
        plan(None, 2, num_gpu_blocks=500, num_cpu_blocks=500)


@pytest.mark.parametrize(
    "device_gib, host_gib, options, message",
    [
        (1, 100, {"num_gpu_blocks": 522}, r"1.02 GiB of GPU memory and 1.00 GiB is available: ask for 10 blocks less"),
        (1, 4, {"num_cpu_blocks": 1802}, r"host memory and 3.50 GiB is available: ask for 10 blocks less"),
        (-0.25, 100, {}, r"leave no room .* 0.25 GiB are missing for the first"),
        (-1, 100, {"num_gpu_blocks": 1}, r"0.00 GiB is available: ask for 1 blocks less"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_shortfall(device_gib, host_gib, options, message):
    with pytest.raises(InsufficientMemory, match=message):
        plan(device_gib, host_gib, **options)


def test_snapshots_take_a_fifth_of_the_cpu_tier():
    """Of what a host gives by default; beside given numbers of blocks a quarter of their bytes. Without a CPU tier or a
    prefix cache there are none."""
    state = 150 * MIB

    def tier(device_gib: float | None, host_gib: float, **options) -> tuple[int, int]:
        config = EngineConfig("model", num_gpu_blocks=1, **options)
        device = None if device_gib is None else int(device_gib * GIB)
        plan = plan_blocks(config, EXACT, int(host_gib * GIB), device, state)
        return plan.num_blocks[Tier.CPU], plan.num_snapshots

    assert tier(3, 100) == (40 * 512, 10 * 1024 // 150)
    assert tier(3, 100, num_cpu_blocks=40 * 512) == (40 * 512, 10 * 1024 // 150)
    assert tier(None, 8) == (1638, 5)
    assert tier(3, 100, num_cpu_blocks=0) == (0, 0) and tier(3, 100, num_cpu_blocks=100) == (100, 0)
    assert tier(3, 100, enable_prefix_caching=False) == (50 * 512, 0)
    assert tier(3, 11, num_cpu_blocks=8 * 512) == (8 * 512, 13)
    with pytest.raises(InsufficientMemory, match=r"takes 11.\d\d GiB of host memory"):
        tier(3, 11, num_cpu_blocks=9 * 512)


def test_the_plan_says_what_the_tiers_hold():
    gpu, cpu = plan(1, 100, num_cpu_blocks=10_000, block_size=16).describe(100, LayerGroups(16))
    assert gpu == "GPU tier: 512 blocks of 16 = 8,192 tokens, 1.00 GiB, 73.1 requests of 100 tokens"
    assert cpu.startswith("CPU tier: 10,000 blocks of 16 = 160,000 tokens, 19.53 GiB, 1,428.6 requests")


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"kind": Qwen2Config},
        {"kind": Qwen3Config},
    ],
)
def test_the_bytes_of_weights_are_those_that_get_loaded(tiny_model_dir, overrides):
    folder = tiny_model_dir(**overrides)
    model = ModelConfig.from_folder(folder)
    for dtype in (torch.float32, torch.float16):
        weights = load_weights(folder, model, "cpu", dtype)
        tensors = {t.data_ptr(): t for t in [weights.embedding, weights.lm_head, weights.final_norm]}
        tensors |= {t.data_ptr(): t for layer in weights.layers for t in vars(layer).values() if t is not None}
        assert weight_bytes(model, dtype) == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("layout, act_order", [("awq", False), ("gptq", True), ("compressed-tensors", False)])
def test_the_bytes_of_quantised_weights_are_those_that_get_loaded(tiny_model_dir, tmp_path, layout, act_order):
    write_folder(tiny_model_dir(), tmp_path / "model", layout, 32, act_order=act_order)
    model = ModelConfig.from_folder(tmp_path / "model")
    weights = load_weights(tmp_path / "model", model, "cpu", torch.float16)
    taken = sum(tensor.nbytes for tensor in weights.by_checkpoint_name(model).values())
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down):
            parts = matrix if isinstance(matrix, tuple) else (matrix,)
            taken += sum(part.nbytes for part in parts)
            taken -= 4 * sum(part.in_features for part in parts[1:] if act_order)  # orders that differ are few
    assert weight_bytes(model, torch.float16) == taken


def test_a_host_tier_of_int8_holds_about_twice_the_blocks():
    """Of the plan, of the estimate, and of what its tensors take."""
    model = replace(load_model_config("llama-2-7b"), num_layers=2)
    config = EngineConfig("m", cpu_kv_dtype="int8", num_gpu_blocks=3)
    each = block_bytes(tier_formats(config, torch.float16), model, 16)
    assert each[Tier.GPU] == model.kv_bytes_per_token(2) * 16
    assert each[Tier.CPU] == INT8.token_bytes(model) * 16 == each[Tier.GPU] * 264 // 512  # a scale is 4 of 132 bytes
    for device_gib in (1.0, None):
        ways = dict.fromkeys(Tier, each[Tier.GPU]), each
        exact, small = (plan(device_gib, 4, way, num_gpu_blocks=3).num_blocks[Tier.CPU] for way in ways)
        assert small / exact > 1.93
        sizes = {"device_bytes": device_gib and 8 * GIB, "host_bytes": 16 * GIB}
        ways = replace(config, cpu_kv_dtype="auto"), config
        wide, fit = (estimate_memory(way, model, torch.float16, **sizes) for way in ways)
        assert fit.max_cpu_blocks / wide.max_cpu_blocks > 1.93 and fit.max_gpu_blocks == wide.max_gpu_blocks
        fit.check(0, fit.max_cpu_blocks)
        with pytest.raises(InsufficientMemory):
            fit.check(0, fit.max_cpu_blocks + 1)
    needed = 3 * each[Tier.GPU] + 5 * each[Tier.CPU]
    chosen, formats = plan(None, 4, each, num_gpu_blocks=3, num_cpu_blocks=5), tier_formats(config, torch.float16)
    pools = KVPools(model, chosen, torch.device("cpu"), formats)
    assert sum(pool.nbytes for pool in pools.tensors.values()) == needed


def test_a_model_that_is_too_large_says_by_how_much(tiny_model_dir):
    model = ModelConfig.from_folder(tiny_model_dir())
    needed = weight_bytes(model, torch.float32)
    check_weights(model, torch.float32, needed)
    with pytest.raises(InsufficientMemory, match=r"float32 .* GiB are missing; free memory"):
        check_weights(model, torch.float32, needed - 1)


def test_nothing_is_loaded_of_a_model_that_is_too_large(tiny_model_dir, monkeypatch):
    monkeypatch.setattr(HostDevice, "free_bytes", lambda self: 1000)
    monkeypatch.setattr("swiftllm.runtime.torch_backend.open_weights", lambda *_: pytest.fail("loaded"))
    with pytest.raises(InsufficientMemory, match="the model's weights take"):
        open_torch_backend(EngineConfig(str(tiny_model_dir()), device="cpu"))


def gpu_blocks(model_dir, total_bytes: int, **options) -> tuple[int, int]:
    """Blocks on a GPU of so many bytes, and those of them that are in use when the backend is built."""
    with fake_gpu(0) as cuda:
        cuda.total_bytes = total_bytes
        backend = open_torch_backend(
            EngineConfig(str(model_dir), dtype="float32", num_cpu_blocks=1, max_model_len=256, **options)
        )
        return backend.num_gpu_blocks, cuda.allocated


def test_blocks_fill_the_gpu_beside_weights_and_the_widest_iteration(tiny_model_dir):
    """The larger GPU batches can be, the fewer blocks there are, and room for them is left."""
    total = 64 * MIB
    narrow, used_narrow = gpu_blocks(tiny_model_dir(), total, max_num_batched_tokens=16, max_num_seqs=16)
    wide, used_wide = gpu_blocks(tiny_model_dir(), total, max_num_batched_tokens=2048, max_num_seqs=16)
    assert 0 < wide < narrow
    assert used_wide < used_narrow < 0.97 * total
    with pytest.raises(InsufficientMemory, match="GPU"):
        gpu_blocks(tiny_model_dir(), total, max_num_batched_tokens=2048, num_gpu_blocks=narrow)


def test_a_full_gpu_batch_with_joined_batches_takes_no_more_than_the_widest_iteration(tiny_model_dir):
    rows, context = 1024, 64
    config = EngineConfig(
        str(tiny_model_dir()),
        dtype="float32",
        num_gpu_blocks=rows // 16 + 8,
        num_cpu_blocks=64,
        max_num_batched_tokens=rows,
        max_num_seqs=32,
        max_model_len=context,
    )
    with fake_gpu(0, can_capture=False) as cuda:
        backend = open_torch_backend(config)
        driver = BackendDriver(backend)
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        joined = [driver.admit(f"cpu{i}", range(3, 20), Tier.CPU, sampling) for i in range(16)]
        driver.prefill(joined)
        prompts = [driver.admit(f"gpu{i}", range(3, 65), Tier.GPU, sampling) for i in range(16)]
        items = [GpuBatchItem(request, 0, request.num_tokens, Tier.GPU, True) for request in prompts]

        def peak(work) -> int:
            before = cuda.peak = cuda.allocated
            work()
            return cuda.peak - before

        widest = peak(lambda: widest_iteration(backend.model, backend.sampler, config, torch.float32))
        taken = peak(lambda: driver.run(items, joined))
        assert 0.5 * widest < taken <= widest


def prompts_of(driver: BackendDriver, tier: Tier, count: int, length: int) -> list[GpuBatchItem]:
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [driver.admit(f"{tier.value} prompt {i}", [5] * length, tier, sampling) for i in range(count)]
    return [GpuBatchItem(request, 0, length, tier, True) for request in requests]


def test_all_gpu_blocks_leave_room_for_cpu_batches_that_have_ridden_with_full_gpu_batches(tiny_model_dir):
    """Each waits for its attention after it has joined one stage, while the next full GPU batch goes on."""
    config = EngineConfig(
        str(tiny_model_dir()), dtype="float32", num_cpu_blocks=64, max_num_batched_tokens=2048, max_num_seqs=16,
        max_model_len=256,
    )  # fmt: skip
    with fake_gpu(0, can_capture=False, total_bytes=64 * MIB):
        driver = BackendDriver(open_torch_backend(config))
        backend, gpu_batch, cpu_batches = driver.backend, prompts_of(driver, Tier.GPU, 8, 254), []
        joined = [driver.admit(f"r{i}", range(3, 20), Tier.CPU, SamplingParams(max_tokens=2)) for i in range(8)]
        driver.prefill(joined)
        for joined_batch in joined:
            cpu_batches.append(backend.open_cpu_batch([joined_batch]))
            backend.run_stage(-1, [backend.open_gpu_batch(gpu_batch), cpu_batches[-1]])
        assert len(driver.run(gpu_batch)) == len(gpu_batch)


@pytest.mark.parametrize("seed", range(2))
def test_a_full_gpu_batch_for_the_cpu_tier_with_joined_batches_takes_no_more_than_the_widest_iteration(
    tiny_model_dir, seed
):
    """However late its K and V are copied to the host."""
    config = EngineConfig(
        str(tiny_model_dir(num_hidden_layers=8, intermediate_size=512, num_key_value_heads=4)), dtype="float32",
        num_gpu_blocks=1, num_cpu_blocks=100, max_num_batched_tokens=1024, max_num_seqs=16, max_model_len=66,
    )  # fmt: skip
    with fake_gpu(seed, can_capture=False) as cuda:
        backend = open_torch_backend(config)
        driver = BackendDriver(backend)
        sampling = SamplingParams(max_tokens=2, ignore_eos=True)
        joined = [driver.admit(f"r{i}", range(3, 20), Tier.CPU, sampling) for i in range(4)]
        driver.prefill(joined)
        gpu_batch = prompts_of(driver, Tier.CPU, 16, 64)

        def peak(work) -> int:
            torch.cuda.synchronize()
            before = cuda.peak = cuda.allocated
            work()
            return cuda.peak - before

        widest = peak(lambda: widest_iteration(backend.model, backend.sampler, config, torch.float32))
        taken = peak(lambda: driver.run(gpu_batch, joined))
        assert taken <= widest


def test_a_gpu_too_small_for_activations_says_so(tiny_model_dir):
    with pytest.raises(InsufficientMemory, match="lower max_num_batched_tokens"):
        gpu_blocks(tiny_model_dir(), 2 * MIB, max_num_batched_tokens=4096)


def test_what_is_left_free_is_measured_at_its_peak():
    """Of bytes reserved: what lies between those allocated is not free. The thread that serves has products of its
    own, with a workspace of cuBLAS that the thread that measures does not take."""
    with FakeCuda(0, total_bytes=1000 * MIB) as cuda:
        device = CudaDevice()

        def work() -> None:
            first = torch.empty(50 * MIB, dtype=torch.float16, device="meta")
            del first
            torch.empty(30 * MIB, dtype=torch.float16, device="meta")

        workspace = 8 * MIB + 128 * 1024  # of cuBLAS on this card
        assert device.left_free(work) == 1000 * MIB - 100 * MIB - 50 * MIB - workspace

        def with_gaps() -> None:
            cuda.gaps = 25 * MIB
            work()

        for _ in range(2):
            assert device.left_free(with_gaps) == 1000 * MIB - 125 * MIB - 50 * MIB - workspace

        def too_much() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

        with pytest.raises(InsufficientMemory, match=re.escape("lower max_num_batched_tokens")):
            device.left_free(too_much)
