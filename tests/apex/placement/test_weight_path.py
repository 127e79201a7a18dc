"""The simulated stream of weights: bytes, slots, what goes first on the link, and who waits."""

from __future__ import annotations

import json

import pytest

from apex.cli import main
from apex.perf.model import Curve, PerfModel
from apex.simulator.backend import SimulatedBackend
from apex.simulator.links import (
    CHUNK_BYTES,
    Interconnect,
    SimulatedWeights,
    SimulatedWorker,
    StreamingLink,
    WeightStream,
)
from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request, RequestStatus, SamplingParams, Tier
from swiftllm.model.placement import Place, Placement
from tests.apex.placement.placements import decode, placer_of
from tests.reference.linear_profile import LAYERS, flat_ends_table, linear_s

BYTES = 100 * CHUNK_BYTES
RATE = BYTES / 0.05  # a stage crosses in 50 ms, a chunk in 0.5
STREAMED = Placement((Place.STREAMED,) * (LAYERS + 1))


def make_backend(placement: Placement = STREAMED, dram: float = float("inf")) -> SimulatedBackend:
    weights = SimulatedWeights(placement, (BYTES,) * (LAYERS + 1), Curve((1, 2), (0.02, 0.021)), hidden_bytes_per_row=0)
    link = Interconnect(RATE, 0, 1, dram_bytes_per_s=dram)
    return SimulatedBackend(PerfModel(flat_ends_table(0.0, 1e-6, 0.0), LAYERS), interconnect=link, weights=weights)


def request(tokens: int, tier: Tier) -> Request:
    made = Request("r", (1,) * tokens, SamplingParams(max_tokens=9), tier=tier)
    made.status, made.num_uncomputed = RequestStatus.RUNNING, 1
    return made


def gpu_batch_of(backend: SimulatedBackend):
    return backend.open_gpu_batch([GpuBatchItem(request(10, Tier.GPU), 9, 1, Tier.GPU, False)])


def test_stages_wait_for_their_copies_and_the_next_two_are_under_way() -> None:
    backend = make_backend()
    gpu_batch = gpu_batch_of(backend)
    for layer in range(4):
        backend.run_stage(layer - 1, [gpu_batch])
        assert backend.now() == pytest.approx(0.05 * (layer + 1) + linear_s(1) * (0.5 if layer == 0 else 1.0), abs=1e-3)
    assert not backend.holds_weights(0) and backend.holds_weights(2)


def test_who_crosses_the_same_stage_finds_the_weights() -> None:
    """A fresh CPU batch of NEO follows the GPU batch; a CPU batch elsewhere has a copy of its own."""
    backend = make_backend()
    gpu_batch = gpu_batch_of(backend)
    backend.run_stage(-1, [gpu_batch])
    before_s = backend.now()
    backend.run_stage(-1, [gpu_batch])
    assert backend.now() - before_s == pytest.approx(0.5 * linear_s(1))
    before_s = backend.now()
    backend.run_stage(9, [gpu_batch])
    assert backend.now() - before_s >= 0.05


def test_swaps_and_outputs_wait_for_a_chunk_not_for_a_stage() -> None:
    backend = make_backend()
    future = backend.submit_cpu_attention(0, backend.open_cpu_batch([request(3250, Tier.CPU)]))
    future.wait()
    assert backend.now() == pytest.approx(3.25e-3, abs=0.6e-3)
    times = backend.swap([Swap(request(5, Tier.CPU), Tier.CPU, (0,), (0,))])
    assert times.end_s <= 3.25e-3 + 2 * 0.5e-3 + 2e-4


def test_copies_slow_the_cpu_down() -> None:
    """The link takes a quarter of DRAM bandwidth."""
    backend = make_backend(dram=4 * RATE)
    future = backend.submit_cpu_attention(0, backend.open_cpu_batch([request(30_000, Tier.CPU)]))
    assert future.wait() == pytest.approx(0.03 / 0.75, rel=1e-6)


def test_the_cpu_computes_its_stages_and_nothing_is_copied_for_them() -> None:
    backend = make_backend(Placement((Place.CPU,) * (LAYERS + 1)))
    gpu_batch = gpu_batch_of(backend)
    for layer in range(-1, LAYERS):
        backend.run_stage(layer, [gpu_batch])
    assert backend.now() == pytest.approx(0.02 * (LAYERS + 1), rel=0.06)
    assert backend.streamed_bytes == 0.0 and backend.busy.cpu_s == pytest.approx(0.02 * (LAYERS + 1))


def test_free_running_cpu_batches_do_not_step_where_weights_would_be_copied_for_them() -> None:
    placer = placer_of("a10")
    engine = decode("adaptive", placer, Placement((Place.STREAMED,) * len(placer.stage_bytes)), 4, 60, 500).engine
    assert engine.executor.may_run_alone == engine.backend.holds_weights
    held = [layer for layer in range(-1, placer.machine.model.num_layers) if engine.backend.holds_weights(layer)]
    assert len(held) <= 1


@pytest.mark.parametrize("system", ["swiftllm", "fastdecode", "neo", "apex", "adaptive"])
def test_every_iteration_streams_the_weights_once(system: str) -> None:
    placer = placer_of("a10")
    placement = Placement((Place.STREAMED,) * len(placer.stage_bytes))
    num_cpu = 0 if system == "swiftllm" else 60
    found = decode(system, placer, placement, 4, num_cpu, prompt=500)
    assert found.streamed_bytes == pytest.approx(sum(placer.stage_bytes), rel=0.01)


def test_placed_weights_need_an_interconnect() -> None:
    weights = SimulatedWeights(STREAMED, (BYTES,) * (LAYERS + 1), Curve((1, 2), (0.0, 0.0)), 0)
    with pytest.raises(ValueError, match="interconnect"):
        SimulatedBackend(PerfModel(flat_ends_table(0.0, 1e-6), LAYERS), weights=weights)


def simulate(tmp_path, *flags: str) -> list[dict]:
    output = tmp_path / "rows.json"
    machine = ["--gpu", "t4", "--host", "g4dn-4xlarge", "--model", "llama-2-13b"]
    lengths = ["--input-len", "300", "--output-len", "100", "--num-requests", "40"]
    assert main(["simulate", *machine, *lengths, *flags, "--output", str(output)]) == 0
    return json.loads(output.read_text())


def test_a_model_that_does_not_fit_runs_from_the_command_line(tmp_path, capsys) -> None:
    gpu_only, neo = simulate(tmp_path, "--system", "swiftllm", "neo", "--weights-gpu-memory", "auto")
    assert "streamed" in gpu_only["placement"] and "streamed" in neo["placement"]
    assert neo["output_tokens_per_s"] > gpu_only["output_tokens_per_s"]
    assert "ms an iteration" in capsys.readouterr().out


def test_more_memory_for_weights_means_fewer_blocks(tmp_path) -> None:
    (little,), (much,) = (
        simulate(tmp_path, "--system", "swiftllm", "--weights-gpu-memory", memory) for memory in ("3", "9")
    )
    assert little["num_gpu_blocks"] > much["num_gpu_blocks"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--weights-gpu-memory", "14"), "take less, or auto"),
        (("--weights-gpu-memory", "0.1"), "give at least 0.31"),
        (("--weights-gpu-memory", "-1"), "from 0 on, or auto"),
        (("--weights-gpu-memory", "auto", "--num-gpu-blocks", "99999"), "exceeds the memory"),
        (("--weights-gpu-memory", "auto", "--model", "llama-3.1-70b"), "4-bit weights"),
        (("--weights-gpu-memory", "auto", "--tensor-parallel", "2", "--link", "pcie-3"), "leave out"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(capsys, flags: tuple[str, ...], words: str) -> None:
    machine = ["--gpu", "t4", "--host", "g4dn-4xlarge", "--model", "llama-2-13b", "--system", "swiftllm"]
    assert main(["simulate", *machine, *flags]) == 2
    assert words in "".join(capsys.readouterr())


def test_the_cpu_computes_a_stage_in_its_share_of_a_whole_one() -> None:
    """The first and the last have a part of a layer's weights each."""
    sizes = (25.0, *(100.0,) * (LAYERS - 1), 75.0)
    weights = SimulatedWeights(STREAMED, sizes, Curve((1, 11), (0.02, 0.03)), hidden_bytes_per_row=0)
    assert [weights.cpu_s(layer, 1) for layer in (-1, 0, LAYERS - 2, LAYERS - 1)] == pytest.approx(
        [0.005, 0.02, 0.02, 0.015]
    )
    assert weights.cpu_s(-1, 11) == pytest.approx(0.0075)


def test_a_copy_begins_no_earlier_than_its_slot_is_free() -> None:
    """Of two slots one holds the stage that the GPU works on, however long that takes."""
    link = StreamingLink(RATE)
    weights = SimulatedWeights(STREAMED, (BYTES,) * (LAYERS + 1), Curve((1, 2), (0.02, 0.021)), hidden_bytes_per_row=0)
    stream = WeightStream(weights, link, SimulatedWorker(link, 0.0))
    assert stream.enter(-1, 0.0) == pytest.approx(0.05)
    stream.leave(1.0)
    assert stream.enter(0, 1.0) == 1.0
    stream.leave(1.001)
    assert stream.enter(1, 1.001) == pytest.approx(1.05)
    stream.leave(1.06)
    assert stream.enter(2, 1.06) == pytest.approx(1.10)
