"""Weights that are streamed or the CPU's: the same tokens in every placement, and no byte more than needed."""

from __future__ import annotations

import gc
import random
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from quantise import write_folder

import apex.build
from swiftllm.config import EngineConfig
from swiftllm.core.request import SamplingParams, Tier
from swiftllm.machine import InsufficientMemory
from swiftllm.model import stages
from swiftllm.model.config import ModelConfig
from swiftllm.model.placement import Place, Placement, all_resident, spread
from swiftllm.model.weight_memory import WeightSlots
from swiftllm.runtime.cpu_tier import InlineWorker
from swiftllm.runtime.memory import check_weights, stage_bytes, weight_bytes
from swiftllm.runtime.torch_backend import TorchBackend, open_torch_backend
from tests.reference.backend_driver import BackendDriver
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import FakeWorker, Hazard
from tests.swiftllm.runtime.test_streams import DRIVES, SYSTEMS, make_engine, outputs, prompts, serve

LAYERS = 4
STAGES = LAYERS + 1
PLACEMENTS = {
    "one streamed": spread(STAGES, 1, 0),
    "three streamed": spread(STAGES, 3, 0),
    "all streamed": spread(STAGES, STAGES, 0),
    "half on the CPU": spread(STAGES, 0, 3),
    "all on the CPU": spread(STAGES, 0, STAGES),
    "some of each": Placement((Place.STREAMED, Place.CPU, Place.RESIDENT, Place.STREAMED, Place.STREAMED)),
    "the embedding on the host": Placement((Place.RESIDENT,) * STAGES, embedding_on_host=True),
    "it and one on the host": Placement((Place.STREAMED, *[Place.RESIDENT] * LAYERS), embedding_on_host=True),
}
every_placement = pytest.mark.parametrize("name", PLACEMENTS)


@pytest.fixture(scope="module")
def model_dir(tiny_model_dir) -> Path:
    return tiny_model_dir(num_hidden_layers=LAYERS)


@pytest.fixture(autouse=True)
def matrices_span_chunks(monkeypatch):
    monkeypatch.setattr("swiftllm.model.stages.CHUNK_BYTES", 10_000)


def backend(model_dir: Path, placement: Placement, make_worker=InlineWorker) -> TorchBackend:
    sizes = {"num_gpu_blocks": 20, "num_cpu_blocks": 20, "max_num_batched_tokens": 64, "max_num_seqs": 6}
    config = EngineConfig(str(model_dir), dtype="float32", max_model_len=64, **sizes)
    return open_torch_backend(config, make_worker, placement=placement)


def tokens(backend: TorchBackend) -> list[list[int]]:
    return outputs(DRIVES["few swaps"](BackendDriver(backend)))


@pytest.fixture(scope="module")
def expected(model_dir) -> list[list[int]]:
    return tokens(backend(model_dir, all_resident(LAYERS)))


@every_placement
def test_a_host_gives_the_tokens_of_resident_weights(model_dir, expected, name):
    assert tokens(backend(model_dir, PLACEMENTS[name])) == expected


def tokens_on_fake(model_dir: Path, name: str, cuda) -> list[list[int]] | None:
    try:
        return tokens(backend(model_dir, PLACEMENTS[name], partial(FakeWorker, cuda)))
    except (Hazard, ValueError, AttributeError, RuntimeError) as error:
        print(error)
        return None


@pytest.mark.parametrize("seed", range(4))
@every_placement
def test_a_gpu_gives_the_tokens_of_resident_weights(model_dir, expected, name, seed):
    with fake_gpu(seed, can_capture=seed % 2 == 0) as cuda:
        assert tokens_on_fake(model_dir, name, cuda) == expected
    assert bool(cuda.replays) == (seed % 2 == 0)


def test_the_cpu_computes_no_padding_of_graphs(model_dir, monkeypatch):
    """Five rows fill a bucket of eight, which costs a GPU nothing and a CPU three more rows."""
    rows_computed, make = set(), stages.make_linear

    def make_counted(ops, weight, bias):
        linear = make(ops, weight, bias)

        def count(x, out=None):
            rows_computed.add(len(x) if x.device.type == "cpu" else None)
            return linear(x) if out is None else linear(x, out=out)

        return count

    monkeypatch.setattr(stages, "make_linear", make_counted)
    with fake_gpu(0) as cuda:
        driver = BackendDriver(backend(model_dir, PLACEMENTS["half on the CPU"]))
        driver.in_one_go = False
        requests = [driver.admit(str(i), range(3, 8), Tier.GPU, SamplingParams(max_tokens=3)) for i in range(5)]
        driver.prefill(requests)
        rows_computed.clear()
        driver.decode(requests)
    assert cuda.replays and rows_computed - {None} == {5}


def test_every_wait_for_weights_is_needed(model_dir, expected):
    with fake_gpu(0, can_capture=False) as cuda:
        tokens_on_fake(model_dir, "some of each", cuda)
    sites = [site for site in cuda.sites if "WeightSlots." in site or "compute_on_cpu" in site]
    sites = [site for site in sites if "__init__" not in site]  # a slot's memory has no owner before its first copy
    assert len(sites) >= 3, cuda.sites

    def is_noticed(site: str) -> bool:
        for seed in range(8):
            with fake_gpu(seed, can_capture=seed % 2 == 0, ignored=site) as cuda:
                if tokens_on_fake(model_dir, "some of each", cuda) != expected:
                    return True
        return False

    assert [site for site in sites if not is_noticed(site)] == []


@pytest.mark.parametrize("name", ["three streamed", "all streamed", "some of each"])
@pytest.mark.parametrize("variant", SYSTEMS)
def test_systems_send_each_stage_once_an_iteration(model_dir, monkeypatch, name, variant):
    """GPU batches, joined CPU batches and fresh CPU batches of an iteration share a copy. CPU batches without a GPU
    batch may need their own."""
    placement, made = PLACEMENTS[name], []
    some_prompts = prompts((7, 19, 3, 22, 12, 15))
    expected = serve(make_engine(model_dir, "swiftllm"), some_prompts)
    make_backend = partial(apex.build.make_backend)

    def make_placed(config, make_worker=InlineWorker, **_) -> TorchBackend:
        made.append(make_backend(config, make_worker, placement))
        return made[-1]

    monkeypatch.setattr("apex.build.make_backend", make_placed)
    monkeypatch.setattr("swiftllm.build.make_backend", make_placed)
    with fake_gpu(5) as cuda:
        engine = make_engine(model_dir, variant)
        sent = bytes_by_iteration(engine, made[0].model.weights.slots)
        assert serve(engine, some_prompts) == expected
    assert cuda.replays
    sizes = stage_bytes(made[0].model_config, torch.float32)
    streamed = sum(size for size, place in zip(sizes, placement.places, strict=True) if place is Place.STREAMED)
    # An iteration without a GPU batch may leave the stream anywhere.
    in_order = [num_bytes for (had, _), (has, num_bytes) in pairwise(sent) if had and has]
    assert len(in_order) >= 3
    assert in_order == [streamed] * len(in_order)


def bytes_by_iteration(engine, stream: WeightSlots) -> list[tuple[bool, int]]:
    """Of the iterations that follow, whether they have a GPU batch, and the bytes they send."""
    found: list[tuple[bool, int]] = []
    run = engine.executor.run

    def counted(plan):
        before = stream.bytes_sent
        result = run(plan)
        found.append((bool(plan.gpu_batch), stream.bytes_sent - before))
        return result

    engine.executor.run = counted
    return found


def test_packed_weights_are_streamed_packed(model_dir, tmp_path):
    write_folder(model_dir, tmp_path / "packed", "gptq", 32, act_order=True)
    expected = tokens(backend(tmp_path / "packed", all_resident(LAYERS)))
    with fake_gpu(1) as cuda:
        placed = backend(tmp_path / "packed", PLACEMENTS["some of each"], partial(FakeWorker, cuda))
        assert tokens(placed) == expected
    sizes = stage_bytes(placed.model_config, torch.float32)
    assert max(sizes) < max(stage_bytes(ModelConfig.from_folder(model_dir), torch.float32)) / 3


def test_smollm2_with_half_of_its_stages_on_the_cpu(smollm2_dir, monkeypatch):
    """And a quarter streamed. The GPU batch's CPU and the stages' are one here; the rows go the same way as on a
    GPU."""
    monkeypatch.undo()  # chunks of the usual size
    layers = ModelConfig.from_folder(smollm2_dir).num_layers
    draw = random.Random(3)
    requests = [[draw.randrange(1000, 40000) for _ in range(9 + i)] for i in range(4)]

    def greedy(placement: Placement) -> list[list[int]]:
        driver = BackendDriver(backend(smollm2_dir, placement))
        how = SamplingParams(max_tokens=6, ignore_eos=True)
        admitted = [driver.admit(str(i), p, list(Tier)[i % 2], how) for i, p in enumerate(requests)]
        driver.prefill(admitted, 32)
        while admitted[0].output_len < how.max_tokens:
            driver.decode(admitted)
        return [request.output_token_ids for request in admitted]

    half = spread(layers + 1, (layers + 1) // 4, (layers + 1) // 2)
    assert greedy(half) == greedy(all_resident(layers))


def test_the_device_holds_what_is_resident_and_two_slots(model_dir):
    model = ModelConfig.from_folder(model_dir)
    sizes, whole = stage_bytes(model, torch.float32), weight_bytes(model, torch.float32)
    others = whole - sum(sizes)
    placement = PLACEMENTS["three streamed"]
    needed = others + sum(sizes[i] for i, p in enumerate(placement.places) if p is Place.RESIDENT) + 2 * max(sizes)
    check_weights(model, torch.float32, needed, placement)
    with pytest.raises(InsufficientMemory):
        check_weights(model, torch.float32, needed - 1, placement)
    needed = whole - model.vocab_size * model.hidden_size * 4
    check_weights(model, torch.float32, needed, PLACEMENTS["the embedding on the host"])
    with pytest.raises(InsufficientMemory):
        check_weights(model, torch.float32, needed - 1, PLACEMENTS["the embedding on the host"])


def test_an_embedding_on_the_host_takes_no_device_memory_and_is_let_go_with_the_model(model_dir):
    allocated = {}
    with fake_gpu(0) as cuda:
        for on_host in (False, True):
            resident = replace(all_resident(LAYERS), embedding_on_host=on_host)
            placed = backend(model_dir, resident, partial(FakeWorker, cuda))
            assert placed.graphs is not None and len(cuda.runtime.mapped) == on_host
            torch.cuda.synchronize()
            allocated[on_host] = cuda.allocated
            model = placed.model_config
            placed.close()
            del placed
            gc.collect()
    assert not cuda.runtime.mapped
    assert allocated[False] - allocated[True] == model.vocab_size * model.hidden_size * 4
