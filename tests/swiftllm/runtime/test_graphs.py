"""Captured graphs: the right bucket, GPU batches that come and go, and rows that are only there to fill up."""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.device import CudaDevice
from swiftllm.model.llama import LlamaModel
from swiftllm.runtime import torch_backend
from swiftllm.runtime.cpu_tier import InlineWorker
from swiftllm.runtime.graphs import LayerGraphs
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_device import DeviceTensor, FakeCuda
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import FakeWorker
from tests.reference.tiny_linear import make_tiny_linear

SAMPLING = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir):
    return tiny_model_dir(num_hidden_layers=2)


def make_driver(model_dir, cuda=None, **options) -> BackendDriver:
    config = {"dtype": "float32", "num_gpu_blocks": 60, "num_cpu_blocks": 20, "max_num_seqs": 8} | options
    worker = InlineWorker if cuda is None else partial(FakeWorker, cuda)
    return BackendDriver(open_torch_backend(EngineConfig(str(model_dir), max_model_len=400, **config), worker))


def admit(driver: BackendDriver, lengths, tier: Tier = Tier.GPU) -> list[Request]:
    rng = random.Random(len(lengths))
    prompts = [[rng.randrange(3, 128) for _ in range(length)] for length in lengths]
    return [driver.admit(f"{tier.value} {i}", prompt, tier, SAMPLING) for i, prompt in enumerate(prompts)]


def decode_items(requests: list[Request]) -> list[GpuBatchItem]:
    return [GpuBatchItem(r, r.num_tokens - 1, 1, Tier.GPU, False) for r in requests]


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


class CopyCounter(TorchDispatchMode):
    """Copies within the device, as they are launched; those in graphs are not."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves(args)):
            self.copies += [str(func)] if "copy" in str(func) or "clone" in str(func) else []
        return func(*args, **(kwargs or {}))


def attended(cuda: FakeCuda) -> Counter:
    """Rows and blocks of the decode attentions that the device has computed since the last call."""
    torch.cuda.synchronize()
    shapes = Counter(cuda.attended)
    cuda.attended.clear()
    return shapes


@pytest.mark.parametrize("in_one_go", [False, True])
def test_a_batch_takes_the_smallest_bucket_that_holds_it(model_dir, in_one_go):
    """Three stages and two attentions are five graphs, or a single one."""
    with fake_gpu(0) as cuda:
        driver = make_driver(model_dir, cuda)
        driver.in_one_go = in_one_go
        requests = admit(driver, (5, 20, 300))
        driver.prefill(requests, 64)
        assert not cuda.replays  # prompts found no bucket
        attended(cuda)
        for count, shape in ((3, (4, 64)), (2, (2, 16)), (1, (1, 16))):  # 300 tokens are 19 blocks
            before = cuda.replays
            driver.decode(requests[:count])
            assert attended(cuda) == {shape: 2}
            assert cuda.replays - before == (1 if in_one_go else 5)


def test_buckets_end_where_the_configuration_does(model_dir):
    """Each bucket's attention is computed once, on empty contexts, before it is captured."""
    with fake_gpu(0) as cuda:
        make_driver(model_dir, cuda, max_num_seqs=5)
        widest_iterations = {(5, 25), (5, 1)}
        assert attended(cuda).keys() - widest_iterations == set(product((1, 2, 4, 8), (16, 64)))


@pytest.mark.parametrize("seed", range(3))
def test_joined_batches_overflow_the_buckets_and_come_back(model_dir, seed):
    """Seven GPU batch rows fit the last bucket, eight, and three joined CPU batches more do not: the GPU batch leaves
    the frame at once."""
    results = []
    for on_fake in (False, True):

        def run(cuda=None) -> list[list[int]]:
            driver = make_driver(model_dir, cuda)
            gpu_batch, joined = admit(driver, (4, 9, 17, 3, 5, 8, 2)), admit(driver, (6, 18, 11), Tier.CPU)
            driver.prefill([*gpu_batch, *joined])
            for step in range(6):
                driver.decode([*gpu_batch, *(joined if step % 2 else joined[:1])])
            return outputs([*gpu_batch, *joined])

        if on_fake:
            with fake_gpu(seed) as cuda:
                results.append(run(cuda))
                assert cuda.replays
        else:
            results.append(run())
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", range(3))
def test_whole_iterations_and_single_layers_may_take_turns(model_dir, seed):
    def run(cuda=None) -> list[list[int]]:
        driver = make_driver(model_dir, cuda)
        gpu_batch, joined = admit(driver, (4, 9, 17)), admit(driver, (6, 18), Tier.CPU)
        driver.prefill([*gpu_batch, *joined])
        for count, stage_of_joined in ((3, []), (3, joined), (2, []), (1, joined), (3, []), (3, [])):
            before = None if cuda is None else cuda.replays
            driver.decode([*gpu_batch[:count], *stage_of_joined])
            assert cuda is None or stage_of_joined or cuda.replays == before + 1
        return outputs([*gpu_batch, *joined])

    expected = run()
    with fake_gpu(seed) as cuda:
        assert run(cuda) == expected


def test_a_gpu_batch_with_a_prompt_does_not_cross_in_one_go(model_dir):
    with fake_gpu(0) as cuda:
        driver = make_driver(model_dir, cuda)
        decoding, prompt = admit(driver, (5, 6))
        driver.prefill([decoding])
        items = [GpuBatchItem(prompt, 0, 6, Tier.GPU, is_prefill=True), *decode_items([decoding])]
        assert driver.backend.run_full_graph(driver.backend.open_gpu_batch(items)) is None


@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_batch_that_another_one_displaces_keeps_what_it_holds(model_dir, seed):
    def run(cuda=None) -> dict[str, int]:
        driver = make_driver(model_dir, cuda)
        backend, requests = driver.backend, admit(driver, (4, 9, 17))
        driver.prefill(requests)
        driver.decode(requests)
        driver.decode(requests[2:])  # graphs for one row and for three are there
        gpu_batches = [
            backend.open_gpu_batch(decode_items(requests[:2])),
            backend.open_gpu_batch(decode_items(requests[2:])),
        ]
        for layer in (-1, 0):
            for gpu_batch in gpu_batches:
                backend.run_stage(layer, [gpu_batch])
            for gpu_batch in gpu_batches:
                backend.gpu_attention(layer + 1, gpu_batch)
        return {k: token for gpu_batch in gpu_batches for k, token in backend.run_stage(1, [gpu_batch]).items()}

    expected = run()
    with fake_gpu(seed) as cuda:
        assert run(cuda) == expected
        assert cuda.replays


def test_without_operations_that_pass_over_empty_rows_attention_is_not_captured(model_dir, monkeypatch):
    monkeypatch.setattr("tests.reference.fake_gpu.FakeOps.takes_empty_rows", False)
    with fake_gpu(0) as cuda:
        driver = make_driver(model_dir, cuda)
        requests = admit(driver, (5, 20))
        driver.prefill(requests)
        attended(cuda)
        driver.decode(requests)
        assert attended(cuda) == {(2, 2): 2} and cuda.replays == 3


def decoded(driver: BackendDriver) -> list[list[int]]:
    requests = admit(driver, (5, 20, 9))
    driver.prefill(requests)
    for count in (3, 3, 2, 1):
        driver.decode(requests[:count])
    return outputs(requests)


@pytest.mark.parametrize("captures", [0, 17])
def test_where_capturing_fails_everything_is_launched_piece_by_piece(model_dir, monkeypatch, captures):
    """The graphs there are go too: a lost one may have taken what they need."""
    capture, left = CudaDevice.capture, [None] * captures

    def refuse(self, work):
        if not left:
            raise RuntimeError("operation not permitted when stream is capturing")
        left.pop()
        return capture(self, work)

    monkeypatch.setattr(CudaDevice, "capture", refuse)
    with fake_gpu(0) as cuda:
        with pytest.warns(UserWarning, match="one by one, since they cannot be captured: operation not permitted"):
            driver = make_driver(model_dir, cuda)
        tokens = decoded(driver)
        assert not cuda.replays
    assert tokens == decoded(make_driver(model_dir))


def test_where_another_rank_fails_to_capture_there_are_no_graphs_here(model_dir, monkeypatch):
    """Ranks must have the same graphs, as these hold their collectives. Both launch the same, captured or not."""
    refuse = CudaDevice.capture
    shapes = []

    def among_others(*where, **how) -> LayerGraphs:
        return LayerGraphs(*where, **how | {"all_agree": lambda is_well: False})

    for fails_here in (False, True):
        with fake_gpu(0) as cuda, monkeypatch.context() as patch:

            def raise_or_capture(device, work, fails_here=fails_here):
                if fails_here:
                    raise RuntimeError("out of memory")
                return refuse(device, work)

            patch.setattr(torch_backend, "LayerGraphs", among_others)
            patch.setattr(CudaDevice, "capture", raise_or_capture)
            why = "out of memory" if fails_here else "another rank failed to capture"
            with pytest.warns(UserWarning, match=f"one by one, since they cannot be captured: {why}"):
                driver = make_driver(model_dir, cuda)
            assert not len(driver.backend.graphs)
            shapes.append(attended(cuda))
            tokens = decoded(driver)
            assert not cuda.replays
        assert tokens == decoded(make_driver(model_dir))
    assert shapes[0] == shapes[1]


def test_graphs_take_no_more_memory_than_they_may(model_dir, monkeypatch):
    with fake_gpu(0) as cuda:
        per_graph = cuda.total_bytes // 600
        monkeypatch.setattr(
            CudaDevice, "free_bytes", lambda device: cuda.total_bytes - cuda.captures * per_graph - (1 << 28)
        )
        with pytest.warns(UserWarning, match="filled up to 2, 8 rows: 24 graphs take 40 MiB"):
            driver = make_driver(model_dir, cuda)
        driver.in_one_go = False
        attended(cuda)
        tokens = decoded(driver)
        assert attended(cuda) == {(8, 16): 4, (2, 16): 4}
        assert cuda.replays == 20
    assert tokens == decoded(make_driver(model_dir))


def test_the_host_never_waits_in_a_copy(model_dir):
    """Tokens, log-probabilities and all that a draw needs cross in pinned memory; who waits, waits for an event."""
    hows = (
        {},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {5: 1.0}},
        {"temperature": 1.0, "min_p": 0.1, "frequency_penalty": 0.5},
    )
    for can_capture in (True, False):
        with fake_gpu(0, can_capture=can_capture) as cuda:
            driver = make_driver(model_dir, cuda)
            before = cuda.synchronisations
            for logprobs in (None, 3):
                for tier in Tier:
                    settings = [SamplingParams(max_tokens=9, logprobs=logprobs, **how) for how in hows]
                    requests = [
                        driver.admit(f"{tier} {i} {logprobs}", (3, 4), tier, how) for i, how in enumerate(settings)
                    ]
                    driver.prefill(requests)
                    driver.decode(requests)
                    driver.decode(requests)
            assert cuda.synchronisations == before


def test_closing_gives_the_graphs_back(model_dir):
    with fake_gpu(0) as cuda:
        make_driver(model_dir, cuda).backend.close()
        assert cuda.lost_graphs == cuda.captures > 0


def test_joined_batches_are_copied_into_a_stage_at_once_and_out_of_it_at_once(model_dir):
    """However many there are: two launches beside the graph's, not five each."""
    with fake_gpu(0) as cuda:
        driver = make_driver(model_dir, cuda)
        gpu_batch, joined = admit(driver, (4, 9)), admit(driver, (6, 18, 11), Tier.CPU)
        driver.prefill([*gpu_batch, *joined])
        backend = driver.backend
        batches = [
            backend.open_gpu_batch(decode_items(gpu_batch)),
            *(backend.open_cpu_batch([joined_batch]) for joined_batch in joined),
        ]
        backend.run_stage(-1, batches)
        torch.cuda.synchronize()
        with CopyCounter() as counter:
            backend.run_stage(0, batches)
        assert len(counter.copies) == 2, counter.copies


# -- models with linear attention --------------------------------------------------------------------------------------


def run_linear(folder, cuda=None) -> tuple[list[list[int]], torch.Tensor]:
    """Prompts, also a short one beside decodes; decodes with CPU batches in every stage, alone and in one go; CPU
    batches that take turns. Returns the tokens, and residuals of those before the last stage."""
    driver = make_driver(folder, cuda)
    model, requests = driver.backend.model, [*admit(driver, (4, 9, 3)), *admit(driver, (6, 18), Tier.CPU)]
    driver.backend.state_slots = {request.request_id: slot for slot, request in enumerate(requests, 2)}
    pools = model.states.recurrent, model.states.conv
    for pool in pools:
        # Memory of the device is NaN until something writes to it.
        assert cuda is None or pool.cpu().isnan().all(), "a capture has a state"
        pool.fill_(torch.nan)
    gpu_batch, joined = requests[:3], requests[3:]
    driver.prefill([*gpu_batch[:2], *joined])
    driver.run([GpuBatchItem(gpu_batch[2], 0, 3, Tier.GPU, is_prefill=True), *decode_items(gpu_batch[:2])], joined)
    for count, stage_of_joined in ((3, joined), (3, []), (2, joined[:1]), (1, []), (0, joined), (3, joined[1:])):
        driver.decode([*gpu_batch[:count], *stage_of_joined])
    residuals = torch.stack([take_turns(driver, joined) for _ in range(3)])
    for pool in pools:
        is_untouched = pool.cpu().isnan().flatten(2).all(2)
        assert is_untouched[:, [0, 1, 7]].all() and not is_untouched[:, 2:7].any(), "padding has a state"
    return outputs(requests), residuals


def take_turns(driver: BackendDriver, requests: list[Request]) -> torch.Tensor:
    """A token of each, in CPU batches of their own that cross each stage one after the other. Returns their residuals
    before the last stage."""
    backend = driver.backend
    cpu_batches = [backend.open_cpu_batch([request]) for request in requests]
    for layer in (-1, 0):
        for cpu_batch in cpu_batches:
            backend.run_stage(layer, [cpu_batch])
        for cpu_batch in cpu_batches:
            backend.submit_cpu_attention(layer + 1, cpu_batch).wait()
    residuals = torch.cat([cpu_batch.residual.cpu() for cpu_batch in cpu_batches])
    for request, cpu_batch in zip(requests, cpu_batches, strict=True):
        request.append_token(backend.run_stage(1, [cpu_batch])[request.request_id], 0.0)
    return residuals


@pytest.mark.parametrize(("name", "seed"), [("Qwen3_5", 0), ("Qwen3Next", 1)])
def test_states_go_on_in_graphs_as_without(tmp_path, name, seed):
    """A rider's gates and its slot go with its row, padding has no state, and prompts are launched piece by piece."""
    folder = make_tiny_linear(tmp_path, name)
    expected, right = run_linear(folder)
    with fake_gpu(seed) as cuda:
        tokens, residuals = run_linear(folder, cuda)
        assert tokens == expected
        torch.testing.assert_close(residuals, right, rtol=0, atol=5e-3)  # of numbers around 10
        assert cuda.replays == 5 + 1 + 5 + 1 + 3 + 5 + 3 * 2 * 3  # three stages and two attentions, or all at once


def test_padding_goes_to_no_expert_of_any_stage(tmp_path, monkeypatch):
    """Layers of linear attention have some in the first stage, too."""
    told, in_pieces = [], LlamaModel._in_pieces

    def noting(self, mlp, rows, num_rows):
        told.append(num_rows)
        return in_pieces(self, mlp, rows, num_rows)

    with fake_gpu(0) as cuda:
        graphs = make_driver(make_tiny_linear(tmp_path, "Qwen3_5Moe"), cuda).backend.graphs
        graphs.close()
        monkeypatch.setattr(LlamaModel, "_in_pieces", noting)
        graphs.capture(graphs._gpu_layers)
    assert told and all(num_rows is not None for num_rows in told)
