"""The backend on a CPU: every way through the tiers gives the tokens of a model that keeps no cache at all."""

import random

import pytest
import torch
from transformers import LlamaForCausalLM

import pacpu
from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.machine import InsufficientMemory, available_host_bytes
from swiftllm.ops.cpu import CpuOps
from swiftllm.ops.interface import Ops
from swiftllm.runtime.cpu_tier import InlineWorker
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver

NUM_TOKENS = 12
SAMPLING = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPT_LENS = (1, 5, 16, 17, 40, 70)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 128) for _ in range(n)] for n in PROMPT_LENS]


@pytest.fixture
def make_driver(tiny_model_dir):
    def make(make_worker=InlineWorker, **options) -> BackendDriver:
        defaults = {"device": "cpu", "dtype": "float32", "num_gpu_blocks": 40, "num_cpu_blocks": 40}
        config = EngineConfig(str(tiny_model_dir()), **{**defaults, **options})
        return BackendDriver(open_torch_backend(config, make_worker))

    return make


@pytest.fixture(scope="module")
def expected(tiny_model_dir) -> list[list[int]]:
    """Greedy tokens of transformers, computing everything anew for each token."""
    judge = LlamaForCausalLM.from_pretrained(tiny_model_dir(), dtype=torch.float32)
    outputs = []
    for prompt in prompts():
        tokens = list(prompt)
        for _ in range(NUM_TOKENS):
            with torch.inference_mode():
                tokens.append(judge(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax().item())
        outputs.append(tokens[len(prompt) :])
    return outputs


def admit_all(driver: BackendDriver, tier_of) -> list[Request]:
    return [driver.admit(f"r{i}", p, tier_of(i), SAMPLING) for i, p in enumerate(prompts())]


def outputs(requests) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


TIERS = {
    "gpu": lambda i: Tier.GPU,
    "cpu": lambda i: Tier.CPU,
    "mixed": lambda i: list(Tier)[i % 2],
}


@pytest.mark.parametrize("block_size", [16, 8])
@pytest.mark.parametrize("chunk", [None, 7], ids=["whole prefill", "chunked prefill"])
@pytest.mark.parametrize("tier_of", TIERS.values(), ids=TIERS.keys())
def test_greedy_tokens_equal_transformers_without_cache(make_driver, expected, tier_of, chunk, block_size):
    driver = make_driver(block_size=block_size, num_gpu_blocks=64, num_cpu_blocks=64)
    requests = admit_all(driver, tier_of)
    driver.prefill(requests, chunk)
    while requests[0].output_len < NUM_TOKENS:
        driver.decode(requests)
    assert outputs(requests) == expected


def test_torch_operations_give_the_same_tokens(make_driver, expected, monkeypatch):
    monkeypatch.setattr("swiftllm.runtime.execution_context.select_ops", lambda *_: Ops())
    driver = make_driver()
    requests = admit_all(driver, TIERS["gpu"])
    driver.prefill(requests, 9)
    while requests[0].output_len < NUM_TOKENS:
        driver.decode(requests)
    assert outputs(requests) == expected


def test_prefills_and_decodes_share_a_gpu_batch_with_joined_batches(make_driver, expected):
    """Requests come in one by one: each iteration has a prefill chunk, decodes of the others, and a CPU batch."""
    driver = make_driver()
    requests = admit_all(driver, TIERS["mixed"])
    done_prefilling: list[Request] = []
    for request in requests:
        for start in range(0, request.prompt_len, 32):
            count = min(32, request.prompt_len - start)
            running = [r for r in done_prefilling if r.output_len < NUM_TOKENS]
            items = [GpuBatchItem(request, start, count, request.tier, True)]
            decodes = [GpuBatchItem(r, r.num_tokens - 1, 1, Tier.GPU, False) for r in running if r.tier is Tier.GPU]
            driver.run(decodes + items, [r for r in running if r.tier is Tier.CPU])
        done_prefilling.append(request)
    while any(r.output_len < NUM_TOKENS for r in requests):
        driver.decode([r for r in requests if r.output_len < NUM_TOKENS])
    assert outputs(requests) == expected


def test_a_recomputed_request_goes_on_where_it_stopped(make_driver, expected):
    driver = make_driver()
    requests = admit_all(driver, TIERS["mixed"])
    driver.prefill(requests)
    for _ in range(5):
        driver.decode(requests)
    for tier, pool in driver.backend.kv_pools.tensors.items():
        pool.fill_(torch.nan)
        assert any(r.tier is tier for r in requests)
    driver.prefill(requests, chunk=13)
    while requests[0].output_len < NUM_TOKENS:
        driver.decode(requests)
    assert outputs(requests) == expected


def test_requests_that_change_tiers_keep_their_tokens(make_driver, expected):
    driver = make_driver()
    requests = admit_all(driver, TIERS["mixed"])
    driver.prefill(requests)
    rng = random.Random(1)
    while requests[0].output_len < NUM_TOKENS:
        driver.move([r for r in requests if rng.random() < 0.5])
        driver.decode(requests)
    assert outputs(requests) == expected


def test_swaps_are_bit_exact_and_touch_nothing_else(make_driver):
    driver = make_driver(num_gpu_blocks=20, num_cpu_blocks=30)
    backend, pools = driver.backend, driver.backend.kv_pools.tensors
    for pool in pools.values():
        pool.copy_(torch.randn(pool.shape))
    pools[Tier.GPU][0, 3, 0, 0, 0, 0] = torch.nan
    before = {tier: pool.clone() for tier, pool in pools.items()}
    request = Request("r", (1,), SAMPLING)
    there, back = (19, 3, 0, 7), (5, 28, 11, 0)
    backend.swap([Swap(request, Tier.GPU, there, back)])
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(pools[Tier.CPU][:, list(back)], before[Tier.GPU][:, list(there)], **same)
    others = [b for b in range(30) if b not in back]
    torch.testing.assert_close(pools[Tier.CPU][:, others], before[Tier.CPU][:, others], **same)
    torch.testing.assert_close(pools[Tier.GPU], before[Tier.GPU], **same)
    pools[Tier.GPU][:, list(there)] = torch.nan
    backend.swap([Swap(request, Tier.CPU, back, there), Swap(request, Tier.CPU, (), ())])
    torch.testing.assert_close(pools[Tier.GPU], before[Tier.GPU], **same)


def test_a_swap_may_fill_blocks_that_an_earlier_one_emptied(make_driver):
    driver = make_driver(num_gpu_blocks=2, num_cpu_blocks=2)
    pools = driver.backend.kv_pools.tensors
    for value, (tier, block) in enumerate([(Tier.GPU, 0), (Tier.CPU, 0)]):
        pools[tier][:, block] = float(value)
    out, into = (Request(name, (1,), SAMPLING) for name in ("out", "into"))
    driver.backend.swap([Swap(out, Tier.GPU, (0,), (1,)), Swap(into, Tier.CPU, (0,), (0,))])
    assert torch.all(pools[Tier.CPU][:, 1] == 0) and torch.all(pools[Tier.GPU][:, 0] == 1)


@pytest.mark.parametrize("drop_at", [-1, 0, 1])
def test_a_cpu_batch_goes_on_without_dropped_rows(make_driver, expected, drop_at):
    """Requests 1 and 4 leave the CPU batch between two layers of the first decode."""
    driver = make_driver()
    backend = driver.backend
    requests = admit_all(driver, TIERS["cpu"])
    driver.prefill(requests)
    cpu_batch, gone = backend.open_cpu_batch(requests), frozenset({"r1", "r4"})
    for layer in range(-1, backend.num_layers - 1):
        if layer == drop_at:
            cpu_batch = backend.drop_rows(cpu_batch, gone)
        backend.run_stage(layer, [cpu_batch])
        backend.submit_cpu_attention(layer + 1, cpu_batch).wait()
    assert cpu_batch.num_rows == 4
    tokens = backend.run_stage(backend.num_layers - 1, [cpu_batch])
    assert tokens == {r.request_id: expected[i][1] for i, r in enumerate(requests) if r.request_id not in gone}
    assert backend.drop_rows(cpu_batch, frozenset(tokens)).num_rows == 0


def test_rows_can_be_dropped_after_the_last_attention(make_driver, expected):
    driver = make_driver()
    backend = driver.backend
    requests = admit_all(driver, TIERS["cpu"])
    driver.prefill(requests)
    cpu_batch = backend.open_cpu_batch(requests)
    for layer in range(-1, backend.num_layers - 1):
        backend.run_stage(layer, [cpu_batch])
        backend.submit_cpu_attention(layer + 1, cpu_batch).wait()
    cpu_batch = backend.drop_rows(cpu_batch, frozenset({"r0", "r5"}))
    tokens = backend.run_stage(backend.num_layers - 1, [cpu_batch])
    assert tokens == {f"r{i}": expected[i][1] for i in (1, 2, 3, 4)}


def test_cpu_batches_at_different_layers_cross_apart(make_driver, expected):
    """Two CPU batches, the second one layer behind, as asynchronous overlap moves them."""
    driver = make_driver()
    backend = driver.backend
    requests = admit_all(driver, TIERS["cpu"])
    driver.prefill(requests)
    cpu_batches = {0: backend.open_cpu_batch(requests[:3]), 1: backend.open_cpu_batch(requests[3:])}
    tokens = {}
    for time in range(-1, backend.num_layers + 1):
        for delay, cpu_batch in cpu_batches.items():
            layer = time - delay
            if -1 <= layer < backend.num_layers:
                tokens.update(backend.run_stage(layer, [cpu_batch]))
            if -1 <= layer < backend.num_layers - 1:
                backend.submit_cpu_attention(layer + 1, cpu_batch).wait()
    assert tokens == {f"r{i}": tokens_of[1] for i, tokens_of in enumerate(expected)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_takes_every_path(make_driver, dtype):
    """Both tiers hold the same numbers, so the tokens agree across tiers except at near-ties of the logits."""
    by_tier = []
    for tier_of in (TIERS["gpu"], TIERS["cpu"]):
        driver = make_driver(dtype=dtype)
        requests = admit_all(driver, tier_of)
        driver.prefill(requests, 20)
        while requests[0].output_len < NUM_TOKENS:
            driver.decode(requests)
        by_tier.append(outputs(requests))
    assert by_tier[0] == by_tier[1]


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)], ids=str)
def test_decode_operations_agree(heads):
    num_heads, num_kv_heads = heads
    torch.manual_seed(0)
    lens = torch.tensor([1, 16, 17, 33, 50], dtype=torch.int32)
    tables = torch.randperm(24, dtype=torch.int32)[:20].view(5, 4)
    cache = torch.full((24, num_kv_heads, 2, 16, 32), torch.nan)
    for row, length in enumerate(lens.tolist()):
        for position in range(length - 1):
            slot = cache[tables[row, position // 16], :, :, position % 16]
            slot.copy_(torch.randn(slot.shape))
    new = torch.randn(5, num_heads + 2 * num_kv_heads, 32).split((num_heads, num_kv_heads, num_kv_heads), 1)
    results = []
    for ops in (Ops(), CpuOps()):
        kv_layer, out = cache.clone(), torch.full((5, num_heads, 32), torch.nan)
        ops.decode_attention(*new, kv_layer, tables, lens, out, 32**-0.5)
        results.append((kv_layer, out))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)


def test_gpu_batches_without_sampling_rows_give_no_token(make_driver):
    driver = make_driver()
    request = driver.admit("r", prompts()[4], Tier.GPU, SAMPLING)
    assert driver.run([GpuBatchItem(request, 0, 20, Tier.GPU, True)]) == {}
    assert driver.run([GpuBatchItem(request, 20, 20, Tier.GPU, True)]).keys() == {"r"}


def test_a_decode_from_the_cpu_tier_is_no_gpu_batch_work(make_driver):
    driver = make_driver()
    request = driver.admit("r", [5, 6], Tier.CPU, SAMPLING)
    with pytest.raises(ValueError, match="CPU batch"):
        driver.backend.open_gpu_batch([GpuBatchItem(request, 1, 1, Tier.CPU, False)])


def test_the_worker_gets_every_cpu_attention_and_its_errors_come_out_of_wait(make_driver):
    layers: list[int] = []
    closed: list[bool] = []

    class Watched(InlineWorker):
        def submit(self, task, arrived, send_back=None):
            layers.append(task.layer)
            return super().submit(task, arrived, send_back)

        def close(self):
            closed.append(True)

    driver = make_driver(Watched)
    request = driver.admit("r", prompts()[3], Tier.CPU, SAMPLING)
    driver.prefill([request])
    driver.decode([request])
    assert layers == list(range(driver.backend.num_layers))
    cpu_batch = driver.backend.open_cpu_batch([request])
    driver.backend.run_stage(-1, [cpu_batch])
    cpu_batch.block_tables = cpu_batch.block_tables + 1000
    future = driver.backend.submit_cpu_attention(0, cpu_batch)
    with pytest.raises(ValueError, match="block"):
        future.wait()
    driver.backend.close()
    assert closed


def test_seeded_sampling_is_the_same_in_both_tiers(make_driver):
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True)
    drawn = []
    for tier in Tier:
        driver = make_driver()
        request = driver.admit(f"on {tier.value}", prompts()[3], tier, sampling)
        driver.prefill([request])
        while request.output_len < NUM_TOKENS:
            driver.decode([request])
        drawn.append(request.output_token_ids)
    assert drawn[0] == drawn[1]


def test_sizes_are_reported_and_zero_gpu_blocks_are_legal(make_driver):
    backend = make_driver(num_gpu_blocks=0, num_cpu_blocks=6).backend
    model = backend.model_config
    assert (backend.num_gpu_blocks, backend.num_cpu_blocks, backend.block_size) == (0, 6, 16)
    assert backend.kv_bytes_per_block == model.num_layers * model.num_kv_heads * 2 * 16 * model.head_dim * 4
    pool = backend.kv_pools.tensors[Tier.CPU]
    assert pool.nbytes == 6 * backend.kv_bytes_per_block
    assert (backend.cpu_kernel, backend.dtype) == (pacpu.default_kernel("float32"), torch.float32)
    assert backend.cores.cpu_threads >= 1 and backend.device_name


def test_default_sizes_follow_the_memory(make_driver, monkeypatch):
    monkeypatch.setattr("swiftllm.runtime.torch_backend.available_host_bytes", lambda: 2 << 20)
    monkeypatch.setattr("swiftllm.runtime.memory.HOST_HEADROOM_BYTES", 0)
    backend = make_driver(num_gpu_blocks=None, num_cpu_blocks=None).backend
    assert backend.num_gpu_blocks == (2 << 20) // 4 // backend.kv_bytes_per_block
    assert backend.num_cpu_blocks == (2 << 20) // 2 // backend.kv_bytes_per_block


def test_a_cache_that_does_not_fit_is_refused_with_the_shortfall(make_driver, monkeypatch):
    monkeypatch.setattr("swiftllm.runtime.torch_backend.available_host_bytes", lambda: 2 << 20)
    monkeypatch.setattr("swiftllm.runtime.memory.HOST_HEADROOM_BYTES", 0)
    per_block = make_driver(num_gpu_blocks=1, num_cpu_blocks=1).backend.kv_bytes_per_block
    fitting = (2 << 20) // per_block
    make_driver(num_gpu_blocks=10, num_cpu_blocks=fitting - 10)
    with pytest.raises(InsufficientMemory, match="ask for 3 blocks less"):
        make_driver(num_gpu_blocks=13, num_cpu_blocks=fitting - 10)


def test_available_memory_is_a_plausible_number():
    assert 64 << 20 < available_host_bytes() < 1 << 50


@pytest.mark.parametrize(
    "options, message",
    [({"cpu_kernel": "nonesuch"}, "nonesuch"), ({"device": "cuda"}, "no GPU")],
)
def test_what_is_not_there_is_refused(make_driver, options, message):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match=message):
        make_driver(**options)


def test_auto_dtype_is_one_the_cpu_computes_fast(make_driver, monkeypatch):
    for flag, dtype in (("avx2", torch.float32), ("avx512_bf16", torch.bfloat16)):
        monkeypatch.setattr("swiftllm.runtime.execution_context.cpu_flags", lambda flag=flag: frozenset({flag}))
        assert make_driver(dtype="auto").backend.dtype is dtype


def test_dummy_weights_need_config_alone(tiny_model_dir, tmp_path):
    (tmp_path / "config.json").write_text((tiny_model_dir() / "config.json").read_text())
    config = EngineConfig(str(tmp_path), device="cpu", load_format="dummy", num_gpu_blocks=8, num_cpu_blocks=8)
    driver = BackendDriver(open_torch_backend(config))
    request = driver.admit("r", [5, 6, 7], Tier.GPU, SAMPLING)
    driver.prefill([request])
    driver.decode([request])
    assert request.output_len == 2
