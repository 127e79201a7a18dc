"""The simulated backend's clock: what each of its calls costs, and what waits for what."""

from __future__ import annotations

import pytest

from apex.perf.model import Curve, PerfModel, ProfileTable
from apex.simulator.virtual.backend import SimulatedBackend
from apex.simulator.virtual.cpu_path import Interconnect, Link, SimulatedWorker
from swiftllm.core.plan import GpuBatchItem, Swap
from swiftllm.core.request import Request, RequestStatus, SamplingParams, Tier
from swiftllm.kv.layer_groups import LayerGroups
from tests.reference.linear_profile import ENDS_S, LAYERS, flat_ends_table, linear_s


def make_backend(cpu_token_s: float = 1e-6, **options: object) -> SimulatedBackend:
    return SimulatedBackend(PerfModel(flat_ends_table(1e-7, cpu_token_s, cpu_start_s=0.0), LAYERS), **options)


def cpu_request(request_id: str, tokens: int) -> Request:
    request = Request(request_id, (1,) * tokens, SamplingParams(max_tokens=9), tier=Tier.CPU)
    request.status, request.num_uncomputed = RequestStatus.RUNNING, 1
    return request


def swap_of(blocks: int, source: Tier = Tier.GPU) -> Swap:
    return Swap(cpu_request("s", 5), source, tuple(range(blocks)), tuple(range(blocks)))


def test_swaps_cost_what_the_profile_says() -> None:
    backend = make_backend()
    assert backend.swap([]) is None
    assert backend.now() == 0.0
    out_s, in_s = 1e-4 + 25 * 2e-5, 1e-4 + 5 * 2e-5
    times = backend.swap([swap_of(10), swap_of(15), swap_of(5, Tier.CPU)])
    assert (times.start_s, times.end_s) == pytest.approx((0.0, out_s + in_s))
    assert backend.now() == 0.0
    assert backend.busy.to_host_s == pytest.approx(out_s)
    assert backend.busy.to_gpu_s == pytest.approx(in_s)
    assert backend.busy.gpu_s == 0.0
    again = backend.swap([swap_of(1)])  # no GPU batch has waited for the first ones
    assert backend.now() == again.start_s == times.end_s


@pytest.mark.parametrize("blocks", [1, 1000, 10_000])
def test_a_gpu_batch_waits_for_the_part_of_a_swap_that_its_layer_needs(blocks: int) -> None:
    def seconds(swaps: list[Swap]) -> tuple[list[float], float]:
        """How late each attention is over, and the whole."""
        backend = make_backend()
        backend.swap(swaps)
        gpu_batch, ends = backend.open_gpu_batch([GpuBatchItem(cpu_request("g", 100), 99, 1, Tier.GPU, False)]), []
        for layer in range(-1, LAYERS):
            backend.run_stage(layer, [gpu_batch])
            if layer + 1 < LAYERS:
                backend.gpu_attention(layer + 1, gpu_batch)
                ends.append(backend.now())
        return ends, backend.now()

    alone, all_alone_s = seconds([])
    late, all_s = seconds([swap_of(blocks)])
    swap_s, attention_s = 1e-4 + blocks * 2e-5, 1e-5 + 100e-7
    expected, shift_s = [], 0.0
    for layer, end_s in enumerate(alone):
        shift_s = max(shift_s, (layer + 1) / LAYERS * swap_s + attention_s - end_s)
        expected.append(end_s + shift_s)
    assert late == pytest.approx(expected)
    assert all_s == pytest.approx(all_alone_s + shift_s)
    assert (all_s == all_alone_s) == (blocks == 1)


def test_the_worker_takes_attention_tasks_in_order_while_the_gpu_goes_on() -> None:
    backend = make_backend()
    first, second = (
        backend.submit_cpu_attention(0, backend.open_cpu_batch([cpu_request(name, tokens)]))
        for name, tokens in (("a", 2000), ("b", 500))
    )
    gpu_batch = backend.open_gpu_batch([GpuBatchItem(cpu_request("g", 100), 99, 1, Tier.GPU, False)])
    backend.run_stage(0, [gpu_batch])
    assert backend.now() == pytest.approx(linear_s(1))
    assert not first.ready() and not second.ready()
    backend.run_stage(1, [gpu_batch])
    assert first.ready() and not second.ready()
    assert second.wait() == pytest.approx(5e-4)
    assert backend.now() == pytest.approx(2e-3 + 5e-4)
    assert first.wait() == pytest.approx(2e-3)  # it was done long ago
    assert backend.now() == pytest.approx(2.5e-3)
    assert backend.busy.cpu_s == pytest.approx(2.5e-3)


def test_a_synchronous_backend_waits_for_each_attention_task_as_it_is_submitted() -> None:
    backend = make_backend(synchronous=True)
    future = backend.submit_cpu_attention(0, backend.open_cpu_batch([cpu_request("a", 2000)]))
    assert backend.now() == pytest.approx(2e-3) and future.ready()
    assert future.wait() == pytest.approx(2e-3)
    assert backend.now() == pytest.approx(2e-3)
    assert backend.busy.gpu_s == 0.0


def test_whole_swaps_delay_the_gpu_batch_by_all_that_is_copied() -> None:
    def seconds(whole_swaps: bool, swaps: list[Swap], tier: Tier) -> float:
        backend = make_backend(whole_swaps=whole_swaps)
        backend.swap(swaps)
        prompt = GpuBatchItem(cpu_request("p", 40), 0, 40, tier, True)
        gpu_batch = backend.open_gpu_batch([prompt])
        assert backend.now() == pytest.approx(swap_s if whole_swaps and swaps else 0.0)
        for layer in range(-1, LAYERS):
            backend.run_stage(layer, [gpu_batch])
            if layer + 1 < LAYERS:
                backend.gpu_attention(layer + 1, gpu_batch)
        return backend.now()

    blocks = 10_000
    swap_s, stored_s = 1e-4 + blocks * 2e-5, 1e-4 + 3 * 2e-5  # 40 tokens are three blocks
    alone_s = seconds(False, [], Tier.GPU)
    assert seconds(False, [], Tier.CPU) == pytest.approx(alone_s)  # copied behind the layers
    assert seconds(True, [], Tier.GPU) == pytest.approx(alone_s)
    assert seconds(True, [], Tier.CPU) == pytest.approx(alone_s + stored_s)
    assert seconds(True, [swap_of(blocks)], Tier.GPU) == pytest.approx(alone_s + swap_s)
    assert seconds(False, [swap_of(blocks)], Tier.GPU) < alone_s + swap_s


def test_joined_batches_share_the_weights_and_steppers_do_not() -> None:
    backend = make_backend()
    gpu_batch = backend.open_gpu_batch([GpuBatchItem(cpu_request("g", 100), 99, 1, Tier.GPU, False)])
    cpu_batch = backend.open_cpu_batch([cpu_request(str(i), 10) for i in range(9)])
    backend.run_stage(0, [gpu_batch, cpu_batch])
    assert backend.now() == pytest.approx(linear_s(10))
    backend.run_stage(0, [gpu_batch])
    backend.run_stage(0, [cpu_batch])
    assert backend.now() == pytest.approx(linear_s(10) + linear_s(1) + linear_s(9))


def test_a_launch_is_the_least_an_operation_takes() -> None:
    backend = make_backend(launch_s=5e-3)
    gpu_batch = backend.open_gpu_batch([GpuBatchItem(cpu_request("g", 100), 99, 1, Tier.GPU, False)])
    backend.run_stage(0, [gpu_batch])
    backend.gpu_attention(1, gpu_batch)
    assert backend.now() == 1e-2
    assert backend.busy.gpu_s == pytest.approx(linear_s(1) + 1e-5 + 100e-7)


def test_only_requests_at_their_last_token_get_one() -> None:
    backend = make_backend()
    part, whole, decode = (cpu_request(name, 100) for name in ("part", "whole", "decode"))
    items = [GpuBatchItem(part, 0, 50, Tier.CPU, True), GpuBatchItem(whole, 0, 100, Tier.GPU, True)]
    gpu_batch = backend.open_gpu_batch([*items, GpuBatchItem(decode, 99, 1, Tier.GPU, False)])
    cpu_batch = backend.open_cpu_batch([cpu_request("cpu_batch", 10)])
    assert gpu_batch.num_rows == 151
    assert backend.run_stage(LAYERS - 2, [gpu_batch, cpu_batch]) == {}
    assert set(backend.run_stage(LAYERS - 1, [gpu_batch, cpu_batch])) == {"whole", "decode", "cpu_batch"}


def test_a_single_layer_ends_in_tokens() -> None:
    backend = SimulatedBackend(PerfModel(flat_ends_table(1e-7, 1e-6), 1))
    gpu_batch = backend.open_gpu_batch([GpuBatchItem(cpu_request("g", 100), 99, 1, Tier.GPU, False)])
    assert backend.run_stage(-1, [gpu_batch]) == {}
    assert set(backend.run_stage(0, [gpu_batch])) == {"g"}
    assert backend.now() == pytest.approx(linear_s(1) + ENDS_S)


def test_rows_cross_pcie_both_ways() -> None:
    link = Interconnect(1e6, qkv_bytes_per_row=3000, out_bytes_per_row=1000, latency_s=1e-3)
    backend = make_backend(interconnect=link)
    requests = [cpu_request(str(i), 500) for i in range(2)]
    first = backend.submit_cpu_attention(0, backend.open_cpu_batch(requests))
    second = backend.submit_cpu_attention(0, backend.open_cpu_batch(requests))
    assert second.wait() == pytest.approx(1e-3)
    # q, k, v of both, one after the other (7 ms each), the second's attention (1 ms), its output (3 ms)
    assert backend.now() == pytest.approx(14e-3 + 1e-3 + 3e-3)
    first.wait()
    assert backend.busy.to_host_s == pytest.approx(14e-3)
    assert backend.busy.to_gpu_s == pytest.approx(6e-3)


def test_a_attention_task_tells_when_it_crossed_and_when_it_was_computed() -> None:
    link = Interconnect(1e6, qkv_bytes_per_row=3000, out_bytes_per_row=1000, latency_s=1e-3)
    backend = make_backend(interconnect=link)
    future = backend.submit_cpu_attention(0, backend.open_cpu_batch([cpu_request("a", 500)]))
    future.wait()
    times = future.times()
    assert times.to_host == pytest.approx((0.0, 4e-3))
    assert (times.start_s, times.done_s) == pytest.approx((4e-3, 4.5e-3))
    assert times.to_gpu == pytest.approx((4.5e-3, 6.5e-3)) and times.ready_s == pytest.approx(6.5e-3)


def test_without_a_link_nothing_crosses_and_swaps_leave_the_cpu_alone() -> None:
    backend = make_backend()
    future = backend.submit_cpu_attention(0, backend.open_cpu_batch([cpu_request("c", 10_000)]))
    backend.swap([swap_of(100)])
    assert future.wait() == pytest.approx(10e-3) and backend.now() == pytest.approx(10e-3)
    assert future.times().to_host is None and future.times().to_gpu is None


def test_transfers_take_dram_bandwidth_from_the_cpu() -> None:
    link = Interconnect(1e9, qkv_bytes_per_row=0, out_bytes_per_row=0, dram_bytes_per_s=4e9)
    swap_s = 1e-4 + 100 * 2e-5
    # A long attention task loses a quarter of the swap's time; the one behind it starts that much later.
    backend = make_backend(interconnect=link)
    cpu_batch = backend.open_cpu_batch([cpu_request("c", 10_000)])
    first, second = (backend.submit_cpu_attention(0, cpu_batch) for _ in range(2))
    assert backend.swap([swap_of(100)]).end_s == pytest.approx(swap_s)
    assert first.wait() == pytest.approx(10e-3 + swap_s / 4)
    assert backend.now() == pytest.approx(10e-3 + swap_s / 4)
    assert second.wait() == pytest.approx(10e-3)
    assert backend.now() == pytest.approx(20e-3 + swap_s / 4)
    # A short one runs beside the swap from start to end, at three quarters of its speed.
    backend = make_backend(interconnect=link)
    future = backend.submit_cpu_attention(0, backend.open_cpu_batch([cpu_request("c", 900)]))
    backend.swap([swap_of(100)])
    backend.sleep(swap_s)
    assert future.ready()
    assert future.wait() == pytest.approx(900e-6 / 0.75)


def test_a_task_loses_bandwidth_for_the_rest_of_its_time_at_most() -> None:
    """Late on the clock, and by hand: half of the bandwidth is gone while a link is busy."""
    worker = SimulatedWorker(Link(), dram_share=0.5)
    nearly_done = worker.submit(10.0, 1.0, 0.0, None)
    behind = worker.submit(10.0, 1.0, 0.0, None)
    worker.slow_down(10.9, 20.0)  # 0.1 s of work is left: it takes 0.2 s
    assert nearly_done.done_s == pytest.approx(11.1)
    assert (behind.start_s, behind.done_s) == pytest.approx((11.1, 13.1))


def test_a_transfer_after_the_end_of_a_task_leaves_it_as_it_was() -> None:
    worker = SimulatedWorker(Link(), dram_share=0.5)
    done = worker.submit(1.0, 1.0, 0.0, None)
    worker.slow_down(2.5, 4.0)
    assert done.done_s == 2.0


def test_a_link_may_be_slow() -> None:
    assert Interconnect(0.5, 1, 1, dram_bytes_per_s=1.0).transfer_s(2) == 4.0


def test_a_link_cannot_outrun_the_memory_behind_it() -> None:
    with pytest.raises(ValueError, match="dram_bytes_per_s"):
        Interconnect(25e9, 1, 1, dram_bytes_per_s=20e9)


def test_the_last_stage_is_for_sampled_rows_and_the_host_holds_up_the_gpu_batch() -> None:
    """A chunk that ends no prompt pays nothing at the last stage; the host costs what the table says."""
    table = ProfileTable(
        **{
            **vars(flat_ends_table(1e-7, 1e-6)),
            "first_share": 0.25,
            "iteration": Curve((1, 2), (3e-3, 4e-3)),
            "hand_over": Curve((1, 2), (5e-3, 5e-3)),
        }
    )
    backend = SimulatedBackend(PerfModel(table, LAYERS))
    request = Request("a", (1,) * 50, SamplingParams(max_tokens=5), tier=Tier.GPU)

    def taken_s(run) -> float:
        before_s = backend.clock_s
        run()
        return backend.clock_s - before_s

    assert taken_s(lambda: backend.swap(())) == pytest.approx(2e-3)  # an iteration of no request
    assert taken_s(lambda: backend.open_gpu_batch([GpuBatchItem(request, 0, 20, Tier.GPU, True)])) == pytest.approx(
        1e-3
    )
    chunk, whole = (backend.open_gpu_batch([GpuBatchItem(request, 0, n, Tier.GPU, True)]) for n in (20, 50))
    assert taken_s(lambda: backend.run_stage(-1, [chunk])) == pytest.approx(0.25 * linear_s(20))
    assert taken_s(lambda: backend.run_stage(LAYERS - 1, [chunk])) == 0
    assert taken_s(lambda: backend.run_stage(LAYERS - 1, [whole])) == pytest.approx(0.75 * linear_s(1) + ENDS_S)
    cpu_batch = backend.open_cpu_batch([request])
    assert taken_s(lambda: backend.submit_cpu_attention(0, cpu_batch)) == pytest.approx(5e-3)


@pytest.mark.parametrize("cached", [None, {Tier.CPU: 99_984}])
def test_a_chunk_waits_for_earlier_tokens_of_the_cpu_tier_layer_by_layer(cached: dict[Tier, int] | None) -> None:
    """Those of its own prompt, or of a cached prefix. Each layer's part is copied while the layer before computes; what
    takes longer than that is waited for."""

    def seconds(tier: Tier, start: int = 99_990) -> float:
        backend, request = make_backend(), cpu_request("c", start + 10)
        request.cached_tokens = cached
        gpu_batch = backend.open_gpu_batch([GpuBatchItem(request, start, 10, tier, True)])
        for layer in range(-1, LAYERS):
            backend.run_stage(layer, [gpu_batch])
            if layer + 1 < LAYERS:
                backend.gpu_attention(layer + 1, gpu_batch)
        return backend.now()

    copy_s = 1e-4 + -(-99_990 // 16) * 2e-5
    layer_s = (seconds(Tier.GPU) - ENDS_S) / LAYERS
    assert copy_s / LAYERS > layer_s, "the copy is what takes longer"
    waited = seconds(Tier.CPU) - seconds(Tier.GPU)
    assert copy_s - LAYERS * layer_s - ENDS_S <= waited < copy_s
    assert seconds(Tier.CPU, 0) == seconds(Tier.GPU, 0), "the first chunk has nothing to wait for"


def test_earlier_tokens_beyond_a_window_are_not_copied() -> None:
    """Two groups, one of which keeps three blocks of 16 tokens: of 1,000 tokens 63 blocks and 3 are copied."""
    groups = LayerGroups(16, (None, 33))
    item = GpuBatchItem(cpu_request("c", 1010), 1000, 10, Tier.CPU, True)
    assert make_backend(groups=groups).open_gpu_batch([item]).context_s == pytest.approx(
        (1e-4 + (63 + 3) * 2e-5) / LAYERS
    )
