"""Predictions of models with linear attention: what they count of weights, states, K and V."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch

from apex.cli import main
from apex.perf.model import FREE, PerfModel
from apex.simulator.backend import SimulatedBackend
from apex.simulator.hardware_files import LayerShape, load_gpu, load_host, load_link, load_model_config
from apex.simulator.predicted_machine import PredictedMachine, WeightPlacer, predict_machine
from apex.simulator.predicted_profile import (
    all_reduce_s,
    bits_per_element,
    cpu_attention_gb_s,
    crossing_bytes_per_row,
    linear_curve,
    packed_bytes,
    rule_flops,
    share_before_attention,
    with_experts,
)
from swiftllm.core.plan import StateCopy
from swiftllm.core.request import Request, SamplingParams
from swiftllm.machine import InsufficientMemory
from swiftllm.runtime.memory import check_weights
from tests.apex.simulator.machines import profile
from tests.reference.linear_profile import flat_ends_table

VOCABULARY, HEAD_DIM, KEYS, LINEAR_HEAD = 248_320, 256, 16 * 128, 128


@dataclass(frozen=True)
class Sizes:
    """Of a model, and its totals: bytes of all weights in 4 bits and of a request's states, and of K and V of a token
    in KiB."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    value_heads: int
    ffn: int
    weights_gb: float
    state_mb: float
    kv_kib: int
    experts: int = 0
    card: str = "rtx-3090"

    @property
    def full_attention(self) -> int:
        """Elements of its projections: gates and Q, K, V, and the output."""
        return self.hidden * HEAD_DIM * (2 * self.heads + 2 * self.kv_heads + self.heads)

    @property
    def linear_attention(self) -> int:
        """Queries, keys, values and gates; two numbers of a head; the output."""
        values = self.value_heads * LINEAR_HEAD
        return self.hidden * (2 * KEYS + values + values + 2 * self.value_heads + values)

    @property
    def common_ffn(self) -> int:
        """Where there are experts one of them is computed for all rows."""
        return 3 * self.hidden * self.ffn

    @property
    def matrices(self) -> int:
        """Elements of those of all layers, without routers."""
        return (
            self.layers // 4 * (self.full_attention + 3 * self.linear_attention)
            + self.layers * (1 + self.experts) * self.common_ffn
        )


MODELS = {
    "qwen3.5-27b": Sizes(64, 5120, 24, 4, 48, 17408, 17.8, 153.9, 64),
    "qwen3.5-35b-a3b": Sizes(40, 2048, 16, 2, 32, 512, 19.7, 64.4, 20, experts=256),
    "qwen3.5-9b": Sizes(32, 4096, 16, 4, 32, 12288, 7.7, 51.5, 32, card="t4"),
}


def machine_of(name: str, **options) -> PredictedMachine:
    return predict_machine(MODELS[name].card, "g4dn-4xlarge", name, "float16", weights="int4", **options)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_are_an_independent_sum(name: str) -> None:
    sizes, machine = MODELS[name], machine_of(name)
    model, shape = machine.model, LayerShape.from_config(machine.model)
    experts = shape.num_ffns * shape.num_experts * shape.ffn_weights
    assert model.num_layers * (shape.gemm_weights + experts) == sizes.matrices
    bits = bits_per_element(model.quantisation, sizes.hidden)
    predicted = model.num_layers * (packed_bytes(shape, model.quantisation) + experts * bits / 8)
    vocabulary = 2 * VOCABULARY * sizes.hidden * 2
    assert predicted + vocabulary == pytest.approx(sizes.weights_gb * 1e9, rel=5e-3)
    assert machine.weight_bytes == pytest.approx(sizes.weights_gb * 1e9, rel=5e-3)
    linear = sizes.layers * 3 // 4
    conv = 3 * (2 * KEYS + sizes.value_heads * LINEAR_HEAD) * 2
    assert model.state_bytes(2) == linear * (sizes.value_heads * LINEAR_HEAD**2 * 4 + conv)
    assert model.state_bytes(2) / 1e6 == pytest.approx(sizes.state_mb, abs=0.05)
    assert machine.budget(16).bytes_per_block == 16 * sizes.kv_kib * 1024
    assert sizes.kv_kib * 1024 == sizes.layers // 4 * 2 * sizes.kv_heads * HEAD_DIM * 2


@pytest.mark.parametrize("name", MODELS)
def test_a_decoded_token_reads_and_writes_its_states_whichever_tier_has_its_kv(name: str) -> None:
    """On the GPU with its attention, and where the CPU attends as what its batch costs the GPU."""
    machine = machine_of(name)
    gpu, model = machine.gpu, PerfModel(machine.table, machine.model.num_layers)
    bytes_per_s = gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["weight_read_fraction"]
    of_states = 2 * machine.model.state_bytes(2) / bytes_per_s
    for requests in (2, 40):
        added = model.hand_over_s(requests) - model.hand_over_s(1)
        assert model.num_layers * added == pytest.approx((requests - 1) * of_states)
        kv_s = requests * 8000 * MODELS[name].kv_kib * 1024 / model.num_layers
        kv_s /= gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["decode_attention_fraction"]
        heads_s = requests * MODELS[name].kv_heads * gpu["decode_attention_request_head_ns"] * 1e-9
        fixed_s = gpu["decode_attention_fixed_us"] * 1e-6
        attention_s = fixed_s + heads_s + kv_s + model.hand_over_s(requests)
        assert model.gpu_attention_s(requests, requests * 8000) == pytest.approx(attention_s)


def test_a_search_of_placements_counts_the_states_of_requests_of_both_tiers() -> None:
    machine = machine_of("qwen3.5-9b", max_num_seqs=16)
    placer, model = WeightPlacer(machine, 16), PerfModel(machine.table, machine.model.num_layers)
    added_s = placer.other_s(4, 1000, 12) - placer.other_s(4, 1000, 4)
    added_s -= model.outside_layers_s(12) - model.outside_layers_s(4)
    bytes_per_s = machine.gpu["memory_bandwidth_gb_s"] * 1e9 * machine.gpu["weight_read_fraction"]
    assert added_s > 8 * 2 * machine.model.state_bytes(2) / bytes_per_s
    assert added_s == pytest.approx(model.num_layers * model.hand_over_s(8))


def test_a_prompt_passes_its_states_on_once_in_64_tokens() -> None:
    """And not at each token: 27B's would take longer than all of its weights."""
    machine = machine_of("qwen3.5-27b")
    gpu, linear = machine.gpu, machine.model.linear
    without = profile("rtx-3090", "g4dn-4xlarge", replace(machine.model, linear=None))
    bytes_per_s = gpu["memory_bandwidth_gb_s"] * 1e9 * gpu["weight_read_fraction"]
    flops_per_s = gpu["tensor_tflops"] * 1e12 * gpu["gemm_fraction"] * gpu["prefill_attention_of_gemm"]
    for tokens in (64, 2048):
        state_s = tokens / 64 * 2 * linear.state_bytes(2) / bytes_per_s
        rule_s = tokens * rule_flops(linear) / flops_per_s
        wanted = 3 * (gpu["prefill_attention_fixed_us"] * 1e-6 + state_s + rule_s)
        added = machine.table.prefill_attention(tokens, 5000) - without.prefill_attention(tokens, 5000)
        assert added == pytest.approx(wanted)
        assert state_s + rule_s < machine.table.linear(tokens) / 3


def test_the_stage_before_all_layers_has_those_of_linear_attention() -> None:
    for name, sizes in MODELS.items():
        if not sizes.experts:
            shape = LayerShape.from_config(load_model_config(name))
            after = sizes.hidden * HEAD_DIM * sizes.heads + sizes.common_ffn
            assert share_before_attention(shape) == pytest.approx(1 - after / (4 * sizes.matrices / sizes.layers))
            assert machine_of(name).table.first_share == share_before_attention(shape)
    assert 0.75 < machine_of("qwen3.5-35b-a3b").table.first_share < 0.77


def test_four_layers_take_four_times_the_fixed_times() -> None:
    """Of elementwise operations on a card without a table, and of experts."""
    shape = LayerShape.from_config(load_model_config("qwen3.5-35b-a3b"))
    gpu = replace(load_gpu("t4"), layers=())
    one = replace(shape, linear=None)
    ours, alone = (linear_curve(gpu, each, 2, 2048) for each in (shape, one))
    fixed_s = gpu["elementwise_fixed_us"] * 1e-6
    read_s = (shape.gemm_weights - one.gemm_weights) * 2 / (gpu["memory_bandwidth_gb_s"] * 1e9)
    assert ours(1) - alone(1) == pytest.approx(3 * fixed_s + read_s / gpu["weight_read_fraction"], rel=0.01)
    experts = [with_experts(curve, gpu, each, 2, None)(1) - curve(1) for curve, each in ((ours, shape), (alone, one))]
    assert experts[0] == pytest.approx(4 * experts[1])


def test_q_k_and_v_cross_to_the_cpu_without_the_gates() -> None:
    shape = LayerShape.from_config(load_model_config("qwen3.5-27b"))
    assert crossing_bytes_per_row(shape, 2) == (24 + 2 * 4 + 24) * HEAD_DIM * 2


def test_cpu_attention_has_the_figure_of_its_group() -> None:
    """Other dense models keep that with which their results were recorded."""
    host = load_host("g4dn-4xlarge")
    dense = LayerShape.from_config(load_model_config("qwen2.5-7b"))  # 28 heads on 4
    shapes = {name: LayerShape.from_config(load_model_config(name)) for name in MODELS}
    by_group = ("qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b")
    for kernel in ("native", "ispc", "llamafile"):
        of_4, of_6, of_8 = (cpu_attention_gb_s(host, kernel, shapes[name]) for name in by_group)
        assert of_4 == cpu_attention_gb_s(host, kernel, dense) > of_6 > of_8
    with pytest.raises(ValueError, match="int8 attention was not measured with 6 query heads on a KV head"):
        cpu_attention_gb_s(host, "native", shapes["qwen3.5-27b"], "int8")


def test_states_take_the_memory_that_the_engine_gives_them() -> None:
    name, seqs = "qwen3.5-27b", 16
    machine = machine_of(name, max_num_seqs=seqs)
    states = seqs * machine.model.state_bytes(2)
    blocks = {count: machine_of(name, max_num_seqs=count).num_blocks(None, None, 16)[0] for count in (0, seqs)}
    assert blocks[0] - blocks[seqs] == pytest.approx(states / machine.budget(16).bytes_per_block, abs=1)
    fit = (machine.budget(16).device_bytes - machine.weight_bytes) // machine.model.state_bytes(2)
    with pytest.raises(InsufficientMemory, match=f"set max_num_seqs to {fit:.0f} or less") as refused:
        machine_of(name, max_num_seqs=1024).num_blocks(None, None, 16)
    with pytest.raises(InsufficientMemory) as of_engine:
        check_weights(machine.model, torch.float16, int(machine.budget(16).device_bytes), max_num_seqs=1024)
    assert str(refused.value) == str(of_engine.value)
    whole = predict_machine("rtx-3090", "g4dn-4xlarge", name, "float16", max_num_seqs=30)
    assert whole.in_4_bits(16) is None, "the states of so many fit beside streamed weights alone"
    assert replace(whole, max_num_seqs=seqs).in_4_bits(16) == machine.budget(16)
    placed = WeightPlacer(machine, 16)
    assert placed.gpu_kv_bytes(0) == machine.budget(16).device_bytes - states


def test_snapshots_have_a_fifth_of_the_cpu_tier() -> None:
    machine = machine_of("qwen3.5-27b", max_num_seqs=8)
    whole = machine.num_blocks(None, None, 16)[1]
    cpu = machine.beside_snapshots(whole)
    states, each = machine.states(cpu, 16, caches=True), machine.model.state_bytes(2)
    of_snapshots, of_blocks = states.num_snapshots * each, cpu * machine.budget(16).host_block_bytes
    assert of_snapshots / (of_snapshots + of_blocks) == pytest.approx(0.2, abs=0.01)
    assert of_snapshots + of_blocks <= whole * machine.budget(16).host_block_bytes
    assert machine.states(cpu, 16, caches=False).num_snapshots == 0
    gb_s = float(machine.table.identity["pcie_gb_s"])
    assert states.copy_s == pytest.approx(machine.gpu["transfer_latency_us"] * 1e-6 + each / (gb_s * 1e9))
    dense = predict_machine("a10", "g5-4xlarge", "llama-3.1-8b", "float16")
    assert dense.states(100, 16, caches=True) is None and dense.beside_snapshots(100) == 100


@pytest.mark.parametrize("name", MODELS)
def test_two_gpus_have_half_of_each_state_and_two_sums_in_each_layer(name: str) -> None:
    one, two, slow = (
        machine_of(name, max_num_seqs=8, tensor_parallel=gpus, link_name=link)
        for gpus, link in ((1, None), (2, "pcie-4"), (2, "pcie-3"))
    )
    whole, part = (LayerShape.of_rank(one.model, gpus) for gpus in (1, 2))
    assert 2 * part.gemm_weights == whole.gemm_weights and 2 * part.ffn_weights == whole.ffn_weights
    of_state = [machine.table.hand_over(9) - machine.table.hand_over(1) for machine in (one, two)]
    assert of_state[0] == pytest.approx(2 * of_state[1])
    sums_s = [all_reduce_s(load_link(link), 64 * part.hidden_size * 2, 2) for link in ("pcie-3", "pcie-4")]
    added_s = slow.table.linear(64) - two.table.linear(64)
    assert added_s == pytest.approx(4 * 2 * (sums_s[0] - sums_s[1])) and added_s > 0
    states = [machine.states(1000, 16, caches=True) for machine in (one, two)]
    latency_s = one.gpu["transfer_latency_us"] * 1e-6
    assert states[0].copy_s - latency_s == pytest.approx(2 * (states[1].copy_s - latency_s))
    assert states[0].num_snapshots == states[1].num_snapshots
    # The weights are on both together once, and so are the states of all requests.
    assert two.budget(16).usable_bytes - one.budget(16).usable_bytes == pytest.approx(one.budget(16).device_bytes)


def test_a_stage_waits_for_the_copies_of_its_states() -> None:
    """A quarter of two copies of 3 s before the first of four layers, and no stage after the last one."""
    backend = SimulatedBackend(PerfModel(flat_ends_table(1e-9, 1e-9), 4), state_copy_s=3.0)
    backend.swap(())
    backend.copy_states([StateCopy(0, 0, saves=True), StateCopy(0, 1, saves=False)])
    assert (backend.busy.to_host_s, backend.busy.to_gpu_s) == (3.0, 3.0)
    requests = [Request("one", (0,) * 8, SamplingParams(max_tokens=4))]
    assert backend.run_full_graph(backend.open_cpu_batch(requests)) is None
    arrived = []
    for stage in range(-1, 4):
        backend.run_stage(stage, [backend.open_cpu_batch(requests)])
        arrived.append(backend.now())
    assert arrived == pytest.approx([1.5, 3.0, 4.5, 6.0, 6.0], rel=1e-3)


def test_a_dense_model_has_nothing_of_this() -> None:
    table = profile("a10")
    assert table.hand_over is FREE
    assert "linear" not in table.identity["model"]
    model = load_model_config("llama-3.1-8b")
    assert LayerShape.of_rank(model, 2) == LayerShape.from_config(model.shard(2))


@pytest.mark.parametrize("system", ["swiftllm", "adaptive"])
def test_the_command_simulates_one(system: str, tmp_path) -> None:
    path = tmp_path / "rows.json"
    flags = ["--gpu", "t4", "--host", "g4dn-4xlarge", "--model", "qwen3.5-9b", "--weights", "int4"]
    flags += ["--max-num-seqs", "16", "--num-requests", "24", "--input-len", "300", "--output-len", "40"]
    rates = []
    for gpu_blocks in ("1200", "200"):
        assert (
            main(["simulate", *flags, "--num-gpu-blocks", gpu_blocks, "--system", system, "--output", str(path)]) == 0
        )
        (row,) = json.loads(path.read_text())
        assert (row["completed"], row["failed"]) == (24, 0)
        assert row["output_tokens_per_s"] < row["bound_tokens_per_s"]
        rates.append(row["output_tokens_per_s"])
    assert rates[0] > rates[1], "less KV cache on the GPU does not help"
