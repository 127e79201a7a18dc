"""Captured graphs: the right bucket, lanes that come and go, and rows that are only there to fill up."""

from __future__ import annotations

import random

import pytest
import torch

from swiftllm.config import EngineConfig
from swiftllm.graphs import BLOCK_BUCKETS, ROW_BUCKETS, LayerGraphs
from swiftllm.plan import LaneItem
from swiftllm.request import Request, SamplingParams, Tier
from swiftllm.torch_backend import TorchBackend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import FakeWorker

SAMPLING = SamplingParams(max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir):
    return tiny_model_dir(num_hidden_layers=2)


def make_driver(model_dir, cuda=None, **options) -> BackendDriver:
    config = {"dtype": "float32", "num_gpu_blocks": 60, "num_cpu_blocks": 20, "max_num_seqs": 8} | options
    worker = None if cuda is None else FakeWorker(cuda)
    return BackendDriver(TorchBackend(EngineConfig(str(model_dir), max_model_len=400, **config), worker))


def admit(driver: BackendDriver, lengths, tier: Tier = Tier.GPU) -> list[Request]:
    rng = random.Random(len(lengths))
    prompts = [[rng.randrange(3, 128) for _ in range(length)] for length in lengths]
    return [driver.admit(f"{tier.value} {i}", prompt, tier, SAMPLING) for i, prompt in enumerate(prompts)]


def decode_items(requests: list[Request]) -> list[LaneItem]:
    return [LaneItem(r, r.num_tokens - 1, 1, Tier.GPU, False) for r in requests]


def outputs(requests: list[Request]) -> list[list[int]]:
    return [request.output_token_ids for request in requests]


def used_buckets(backend: TorchBackend) -> set[tuple[int, int]]:
    """Rows and blocks (0: boundaries) of the graphs there are."""
    return {(rows, width) for _, _, _, rows, width in backend._graphs._graphs}


def test_a_batch_takes_the_smallest_bucket_that_holds_it(model_dir):
    with fake_gpu(0) as cuda:
        driver = make_driver(model_dir, cuda)
        requests = admit(driver, (5, 20, 300))
        driver.prefill(requests, 64)
        driver.decode(requests)
        assert used_buckets(driver.backend) == {(4, 0), (4, 64)}  # 300 tokens are 19 blocks; prefills found no bucket
        driver.decode(requests[:2])
        driver.decode(requests[:1])
        assert used_buckets(driver.backend) == {(4, 0), (4, 64), (2, 0), (2, 16), (1, 0), (1, 16)}
        captured = len(driver.backend._graphs._graphs)
        replays = cuda.replays
        driver.decode(requests)
        assert len(driver.backend._graphs._graphs) == captured
        assert cuda.replays - replays == 4  # two boundaries, two attentions: nothing else crosses the layers


def test_buckets_end_where_the_configuration_does(model_dir):
    with fake_gpu(0) as cuda:
        graphs = make_driver(model_dir, cuda, max_num_seqs=5).backend._graphs
    assert graphs._row_buckets == ROW_BUCKETS[:4] and graphs._block_buckets == BLOCK_BUCKETS[:2]
    assert graphs._lanes.token_ids.shape == (8,)


@pytest.mark.parametrize("seed", range(3))
def test_riders_overflow_the_buckets_and_come_back(model_dir, seed):
    """Seven lane rows fit the last bucket, eight, and three riders more do not: the lane leaves the frame at once."""
    results = []
    for on_fake in (False, True):

        def run(cuda=None) -> list[list[int]]:
            driver = make_driver(model_dir, cuda)
            lane, riders = admit(driver, (4, 9, 17, 3, 5, 8, 2)), admit(driver, (6, 18, 11), Tier.CPU)
            driver.prefill([*lane, *riders])
            for step in range(6):
                driver.decode([*lane, *(riders if step % 2 else riders[:1])])
            return outputs([*lane, *riders])

        if on_fake:
            with fake_gpu(seed) as cuda:
                results.append(run(cuda))
                assert cuda.replays
        else:
            results.append(run())
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", range(3))
def test_a_lane_that_another_one_displaces_keeps_what_it_holds(model_dir, seed):
    def run(cuda=None) -> dict[str, int]:
        driver = make_driver(model_dir, cuda)
        backend, requests = driver.backend, admit(driver, (4, 9, 17))
        driver.prefill(requests)
        driver.decode(requests)
        driver.decode(requests[2:])  # graphs for one row and for three are there
        lanes = [backend.open_lane(decode_items(requests[:2])), backend.open_lane(decode_items(requests[2:]))]
        for layer in (-1, 0):
            for lane in lanes:
                backend.boundary(layer, [lane])
            for lane in lanes:
                backend.gpu_attention(layer + 1, lane)
        return {k: token for lane in lanes for k, token in backend.boundary(1, [lane]).items()}

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
        driver.decode(requests)
        driver.decode(requests)
        assert used_buckets(driver.backend) == {(2, 0)}


def test_what_a_graph_computes_before_it_is_captured_counts(model_dir):
    """The first use of a bucket is launched piece by piece; capturing it afterwards changes nothing."""
    tokens = []
    for can_capture in (True, False):
        with fake_gpu(1, can_capture=can_capture) as cuda:
            driver = make_driver(model_dir, cuda)
            requests = admit(driver, (5, 20))
            driver.prefill(requests)
            driver.decode(requests)
            assert cuda.replays == 0
            tokens.append(outputs(requests))
    assert tokens[0] == tokens[1]


def test_a_frame_starts_with_rows_that_are_no_requests(model_dir):
    with fake_gpu(0) as cuda:
        graphs: LayerGraphs = make_driver(model_dir, cuda).backend._graphs
        cuda._synchronize()
        for frame in (graphs._lanes, graphs._cohorts):
            assert not torch.tensor(frame.seq_lens.tolist()).any() and not torch.tensor(frame.token_ids.tolist()).any()
