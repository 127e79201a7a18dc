"""The simulator against closed forms written down here, its accounts, and its clock."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from apex.config import StrategyConfig
from apex.perf_model import Curve, PerfModel, ProfileTable, Surface
from apex.simulated_backend import Interconnect, SimulatedBackend
from apex.simulation import SIMULATED_SYSTEMS, build_simulated
from swiftllm.engine import Engine
from swiftllm.plan import LaneItem, StepResult, Swap
from swiftllm.request import Request, RequestStatus, SamplingParams, Tier

LAYERS = 16
PROMPT = 1000
BLOCKS = 63  # of 16 tokens: one request of PROMPT tokens with a few more
ENDS_S = 8e-4


def linear_s(rows: float) -> float:
    return 1e-3 + 2e-7 * rows


def flat_ends_table(gpu_token_s: float, cpu_token_s: float, cpu_start_s: float = 2e-5) -> ProfileTable:
    """Laws simple enough to write closed forms with: everything is linear in its size."""

    def over_context(start_s: float, token_s: float) -> Surface:
        curves = [Curve((0, 1000), (start_s, start_s + n * 1000 * token_s)) for n in (1, 1001)]
        return Surface((1, 1001), tuple(curves))

    return ProfileTable(
        identity={},
        linear=Curve((1, 1001), (linear_s(1), linear_s(1001))),
        ends=Curve((1, 2), (ENDS_S, ENDS_S)),
        swap=Curve((0, 100), (1e-4, 2.1e-3)),
        prefill_attention=Surface((1, 2), (Curve((0, 1000), (1e-6, 1e-6)), Curve((0, 1000), (2e-6, 2e-6)))),
        gpu_attention=over_context(1e-5, gpu_token_s),
        cpu_attention=over_context(cpu_start_s, cpu_token_s),
    )


class Backlog:
    """An engine with an endless backlog of equal requests that fill both tiers, past its prefills."""

    def __init__(self, system: str, table: ProfileTable, num_gpu: int, num_cpu: int, **options: object) -> None:
        self.num_gpu, self.num_cpu = num_gpu, num_cpu
        self.engine = build_simulated(
            system,
            table,
            LAYERS,
            # Room to grow by a hundred tokens, and none for one more request.
            num_gpu_blocks=num_gpu * BLOCKS + 70,
            num_cpu_blocks=num_cpu * (BLOCKS + 20),
            max_num_seqs=num_gpu + num_cpu,
            max_num_batched_tokens=2048,
            **options,
        )
        for i in range(3 * (num_gpu + num_cpu)):
            self.engine.add_request(str(i), [1] * PROMPT, SamplingParams(max_tokens=300))
        running = self.engine.scheduler.running
        wanted = num_gpu + num_cpu
        self.run_until(lambda: sum(map(len, running.values())) == wanted and not any(map(is_prefilling, self.all())))

    def all(self) -> Iterable[Request]:
        return [request for queue in self.engine.scheduler.running.values() for request in queue]

    def run_until(self, condition) -> None:
        for _ in range(10_000):
            if condition():
                return
            self.engine.step()
        raise AssertionError(f"never came: {self.engine.state()}")

    def measure(self, iterations: int) -> tuple[float, dict[Tier, float]]:
        """Output tokens per second, and each tier's mean context per request."""
        engine = self.engine
        start_s, before = engine.now(), engine.stats().output_tokens
        prefilled = engine.stats().prefill_tokens
        contexts = self.contexts()
        for _ in range(iterations):
            engine.step()
        assert engine.stats().prefill_tokens == prefilled, "not decode-only"
        contexts = {tier: (context + self.contexts()[tier]) / 2 for tier, context in contexts.items()}
        return (engine.stats().output_tokens - before) / (engine.now() - start_s), contexts

    def contexts(self) -> dict[Tier, float]:
        running = self.engine.scheduler.running
        assert (len(running[Tier.GPU]), len(running[Tier.CPU])) == (self.num_gpu, self.num_cpu)
        return {tier: sum(r.num_tokens for r in queue) / max(1, len(queue)) for tier, queue in running.items()}


def is_prefilling(request: Request) -> bool:
    return request.is_prefilling


# -- closed forms in this file's own words (DESIGN.md, section 5) ---------- -----------------------------


def test_gpu_only_throughput_is_its_closed_form() -> None:
    backlog = Backlog("swiftllm", flat_ends_table(1e-7, 1e-6), num_gpu=8, num_cpu=0)
    rate, context = backlog.measure(100)
    attention_s = 1e-5 + 8 * context[Tier.GPU] * 1e-7
    assert rate == pytest.approx(8 / (LAYERS * (linear_s(8) + attention_s) + ENDS_S), rel=0.01)


@pytest.mark.parametrize(("num_cpu", "cpu_token_s"), [(4, 1e-7), (12, 1e-7), (24, 5e-8)])
def test_neo_throughput_is_its_closed_form(num_cpu: int, cpu_token_s: float) -> None:
    """T = L (max(T_l0, T_c1) + max(T_l1 + T_g0, T_c0)); the CPU hides, so both maxima are the GPU's."""
    strategy = StrategyConfig(strategy="asymmetric-pipelining")
    table = flat_ends_table(3e-7, cpu_token_s)
    backlog = Backlog("neo", table, num_gpu=8, num_cpu=num_cpu, strategy=strategy)
    rate, context = backlog.measure(100)
    # Batch-1 takes as many as hide behind T_l0; the rest rides with the lane.
    request_s = cpu_token_s * context[Tier.CPU]
    in_1 = min(num_cpu, int((linear_s(8) - 2e-5) / request_s))
    linear_0, linear_1 = linear_s(8 + num_cpu - in_1), linear_s(in_1)
    gpu_0 = 1e-5 + 8 * context[Tier.GPU] * 3e-7
    cpu_0, cpu_1 = 2e-5 + request_s * (num_cpu - in_1), 2e-5 + request_s * in_1
    assert cpu_1 <= linear_0 and cpu_0 <= linear_1 + gpu_0
    layer_s = max(linear_0, cpu_1) + max(linear_1 + gpu_0, cpu_0)
    # Batch-1 pays for ends of its own, which the formula leaves out.
    assert rate == pytest.approx((8 + num_cpu) / (LAYERS * layer_s + ENDS_S), rel=0.02)


@pytest.mark.parametrize("num_cpu", [6, 16])
def test_overlap_throughput_is_its_closed_form(num_cpu: int) -> None:
    """Rides only: a layer an iteration, so L + 1 iterations a token, the embedding boundary being one."""
    strategy = StrategyConfig(strategy="asynchronous-overlap", max_cohorts=1)
    backlog = Backlog("apex", flat_ends_table(3e-7, 5e-7), num_gpu=8, num_cpu=num_cpu, strategy=strategy)
    cohorts = backlog.engine.scheduler._cohorts
    backlog.run_until(lambda: [len(c.members) for c in cohorts.values()] == [num_cpu])
    rate, context = backlog.measure(4 * (LAYERS + 1))
    attention_s = 1e-5 + 8 * context[Tier.GPU] * 3e-7
    ride_s = linear_s(8 + num_cpu) - linear_s(8)
    iteration_s = LAYERS * (linear_s(8) + attention_s) + ENDS_S + ride_s
    assert rate == pytest.approx((8 + num_cpu / (LAYERS + 1)) / iteration_s, rel=0.01)


def test_a_slow_cpu_never_holds_the_lane_up() -> None:
    """The CPU takes ten iterations for a layer; the iterations take what they take without it."""
    strategy = StrategyConfig(strategy="asynchronous-overlap")
    backlog = Backlog("apex", flat_ends_table(1e-7, 2e-4), num_gpu=8, num_cpu=2, strategy=strategy)
    executor, results = backlog.engine.executor, []
    run = executor.run
    executor.run = lambda plan: results.append(run(plan)) or results[-1]
    backlog.measure(100)
    assert any(result.cpu_busy_s > 0.1 for result in results), "the CPU should have worked"
    for result in results:
        assert result.lane_busy_s == result.duration_s  # nobody waited
        assert result.duration_s < LAYERS * (linear_s(10) + 1e-5 + 8 * 1300 * 1e-7) + ENDS_S


# -- accounts ---------------------------------------------------------------------------------------------------------


def mixed_engine(system: str, interconnect: Interconnect | None = None) -> tuple[Engine, list[Request]]:
    engine = build_simulated(
        system,
        flat_ends_table(3e-7, 5e-7),
        4,
        num_gpu_blocks=40,
        num_cpu_blocks=200,
        max_num_seqs=32,
        launch_s=1e-4,
        interconnect=interconnect,
    )
    draw = random.Random(7)
    requests = [
        engine.add_request(str(i), [1] * draw.randint(1, 300), SamplingParams(max_tokens=draw.randint(1, 120)))
        for i in range(60)
    ]
    return engine, requests


PCIE = Interconnect(1e9, qkv_bytes_per_row=12_288, out_bytes_per_row=8_192, latency_s=1e-5, dram_bytes_per_s=4e9)


@pytest.mark.parametrize("interconnect", [None, PCIE], ids=["no link", "link"])
@pytest.mark.parametrize("system", SIMULATED_SYSTEMS)
def test_tokens_blocks_and_busy_times_add_up(system: str, interconnect: Interconnect | None) -> None:
    engine, requests = mixed_engine(system, interconnect)
    results: list[StepResult] = []
    run = engine.executor.run
    engine.executor.run = lambda plan: results.append(run(plan)) or results[-1]
    while engine.has_unfinished():
        engine.step()
        engine.kv.check()
    assert all(request.output_len == request.sampling.max_tokens for request in requests)
    stats, busy, makespan_s = engine.stats(), engine.backend.busy, engine.now()
    assert stats.output_tokens == sum(request.sampling.max_tokens for request in requests)
    assert engine.state()["blocks_used"] == {"gpu": 0, "cpu": 0}
    assert stats.duration_s == pytest.approx(makespan_s)  # no time passes outside iterations
    assert busy.cpu_s == pytest.approx(stats.cpu_busy_s)
    waited_s = stats.duration_s - stats.lane_busy_s
    assert busy.gpu_s + waited_s <= makespan_s * (1 + 1e-9)
    for seconds in (busy.gpu_s, busy.cpu_s, busy.to_host_s, busy.to_gpu_s):
        assert 0.0 <= seconds <= makespan_s * (1 + 1e-9)
    if system in ("neo", "fastdecode", "apex"):
        assert busy.cpu_s > 0
    for request in requests:
        assert request.token_times_s == sorted(request.token_times_s)
        assert request.token_times_s[-1] <= makespan_s


@pytest.mark.parametrize("system", SIMULATED_SYSTEMS)
def test_the_same_run_gives_the_same_bits(system: str) -> None:
    def times() -> list[list[float]]:
        engine, requests = mixed_engine(system, PCIE)
        while engine.has_unfinished():
            engine.step()
        return [request.token_times_s for request in requests]

    assert times() == times()


PRINT_TOKEN_TIMES = """
from tests.apex.test_simulated_backend import PCIE, SIMULATED_SYSTEMS, mixed_engine
for system in SIMULATED_SYSTEMS:
    engine, requests = mixed_engine(system, PCIE)
    while engine.has_unfinished():
        engine.step()
    print(system, [[time.hex() for time in request.token_times_s] for request in requests])
"""


def test_other_processes_give_the_same_bits() -> None:
    root = Path(__file__).resolve().parents[2]
    printed = [
        subprocess.run(
            [sys.executable, "-c", PRINT_TOKEN_TIMES],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert printed[0].count("\n") == len(SIMULATED_SYSTEMS)


@pytest.mark.parametrize("system", SIMULATED_SYSTEMS)
def test_aborts_in_mid_flight_leave_the_pools_empty(system: str) -> None:
    engine, requests = mixed_engine(system)
    draw = random.Random(3)
    while engine.has_unfinished():
        engine.step()
        victim = draw.choice(requests)
        if draw.random() < 0.3 or engine.stats().iterations > 120:
            engine.abort(victim.request_id)
    assert any(request.finish_reason.value == "abort" for request in requests)
    assert engine.state()["blocks_used"] == {"gpu": 0, "cpu": 0}
    assert engine.executor.is_idle


# -- the clock --------------------------------------------------------------------------------------------------------


def make_backend(cpu_token_s: float = 1e-6, **options: object) -> SimulatedBackend:
    return SimulatedBackend(PerfModel(flat_ends_table(1e-7, cpu_token_s, cpu_start_s=0.0), LAYERS), **options)


def cpu_request(request_id: str, tokens: int) -> Request:
    request = Request(request_id, (1,) * tokens, SamplingParams(max_tokens=9), tier=Tier.CPU)
    request.status, request.num_computed_tokens = RequestStatus.RUNNING, tokens - 1
    return request


def swap_of(blocks: int, source: Tier = Tier.GPU) -> Swap:
    return Swap(cpu_request("s", 5), source, tuple(range(blocks)), tuple(range(blocks)))


def test_swaps_cost_what_the_profile_says() -> None:
    backend = make_backend()
    backend.swap([])
    assert backend.now() == 0.0
    backend.swap([swap_of(10), swap_of(15)])
    assert backend.now() == pytest.approx(1e-4 + 25 * 2e-5)
    assert backend.busy.to_host_s == backend.now()
    backend.swap([swap_of(5, Tier.CPU)])
    assert backend.busy.to_gpu_s == pytest.approx(1e-4 + 5 * 2e-5)
    assert backend.busy.gpu_s == 0.0


def test_the_worker_takes_tickets_in_order_while_the_gpu_goes_on() -> None:
    backend = make_backend()
    first, second = (
        backend.submit_cpu_attention(0, backend.open_cohort([cpu_request(name, tokens)]))
        for name, tokens in (("a", 2000), ("b", 500))
    )
    lane = backend.open_lane([LaneItem(cpu_request("g", 100), 99, 1, Tier.GPU, False)])
    backend.boundary(0, [lane])
    assert backend.now() == pytest.approx(linear_s(1))
    assert not first.ready() and not second.ready()
    backend.boundary(1, [lane])
    assert first.ready() and not second.ready()
    assert second.wait() == pytest.approx(5e-4)
    assert backend.now() == pytest.approx(2e-3 + 5e-4)
    assert first.wait() == pytest.approx(2e-3)  # it was done long ago
    assert backend.now() == pytest.approx(2.5e-3)
    assert backend.busy.cpu_s == pytest.approx(2.5e-3)


def test_riders_share_the_weights_and_steppers_do_not() -> None:
    backend = make_backend()
    lane = backend.open_lane([LaneItem(cpu_request("g", 100), 99, 1, Tier.GPU, False)])
    cohort = backend.open_cohort([cpu_request(str(i), 10) for i in range(9)])
    backend.boundary(0, [lane, cohort])
    assert backend.now() == pytest.approx(linear_s(10))
    backend.boundary(0, [lane])
    backend.boundary(0, [cohort])
    assert backend.now() == pytest.approx(linear_s(10) + linear_s(1) + linear_s(9))


def test_a_launch_is_the_least_an_operation_takes() -> None:
    backend = make_backend(launch_s=5e-3)
    lane = backend.open_lane([LaneItem(cpu_request("g", 100), 99, 1, Tier.GPU, False)])
    backend.boundary(0, [lane])
    backend.gpu_attention(1, lane)
    assert backend.now() == 1e-2
    assert backend.busy.gpu_s == pytest.approx(linear_s(1) + 1e-5 + 100e-7)


def test_only_requests_at_their_last_token_get_one() -> None:
    backend = make_backend()
    part, whole, decode = (cpu_request(name, 100) for name in ("part", "whole", "decode"))
    items = [LaneItem(part, 0, 50, Tier.CPU, True), LaneItem(whole, 0, 100, Tier.GPU, True)]
    lane = backend.open_lane([*items, LaneItem(decode, 99, 1, Tier.GPU, False)])
    cohort = backend.open_cohort([cpu_request("cohort", 10)])
    assert lane.num_rows == 151
    assert backend.boundary(LAYERS - 2, [lane, cohort]) == {}
    assert set(backend.boundary(LAYERS - 1, [lane, cohort])) == {"whole", "decode", "cohort"}


def test_rows_cross_pcie_both_ways() -> None:
    link = Interconnect(1e6, qkv_bytes_per_row=3000, out_bytes_per_row=1000, latency_s=1e-3)
    backend = make_backend(interconnect=link)
    requests = [cpu_request(str(i), 500) for i in range(2)]
    first = backend.submit_cpu_attention(0, backend.open_cohort(requests))
    second = backend.submit_cpu_attention(0, backend.open_cohort(requests))
    assert second.wait() == pytest.approx(1e-3)
    # q, k, v of both, one after the other (7 ms each), the second's attention (1 ms), its output (3 ms)
    assert backend.now() == pytest.approx(14e-3 + 1e-3 + 3e-3)
    first.wait()
    assert backend.busy.to_host_s == pytest.approx(14e-3)
    assert backend.busy.to_gpu_s == pytest.approx(6e-3)


def test_transfers_take_dram_bandwidth_from_the_cpu() -> None:
    link = Interconnect(1e9, qkv_bytes_per_row=0, out_bytes_per_row=0, dram_bytes_per_s=4e9)
    swap_s = 1e-4 + 100 * 2e-5
    # A long ticket loses a quarter of the swap's time; the one behind it starts that much later.
    backend = make_backend(interconnect=link)
    cohort = backend.open_cohort([cpu_request("c", 10_000)])
    first, second = (backend.submit_cpu_attention(0, cohort) for _ in range(2))
    backend.swap([swap_of(100)])
    assert backend.now() == pytest.approx(swap_s)
    assert first.wait() == pytest.approx(10e-3 + swap_s / 4)
    assert backend.now() == pytest.approx(10e-3 + swap_s / 4)
    assert second.wait() == pytest.approx(10e-3)
    assert backend.now() == pytest.approx(20e-3 + swap_s / 4)
    # A short one runs beside the swap from start to end, at three quarters of its speed.
    backend = make_backend(interconnect=link)
    ticket = backend.submit_cpu_attention(0, backend.open_cohort([cpu_request("c", 900)]))
    backend.swap([swap_of(100)])
    assert ticket.ready()
    assert ticket.wait() == pytest.approx(900e-6 / 0.75)


def test_a_link_cannot_outrun_the_memory_behind_it() -> None:
    with pytest.raises(ValueError, match="dram_bytes_per_s"):
        Interconnect(25e9, 1, 1, dram_bytes_per_s=20e9)


def test_unknown_systems_and_empty_pools_are_refused() -> None:
    table = flat_ends_table(1e-7, 1e-7)
    with pytest.raises(ValueError, match="swiftllm, neo"):
        build_simulated("orca", table, 2, num_gpu_blocks=1, num_cpu_blocks=1)
    with pytest.raises(ValueError, match="no blocks"):
        build_simulated("neo", table, 2, num_gpu_blocks=0, num_cpu_blocks=0)


def test_the_last_boundary_is_for_sampled_rows_and_the_host_holds_up_the_lane() -> None:
    """A chunk that ends no prompt pays nothing at the last boundary; the host costs what the table says."""
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
    assert taken_s(lambda: backend.open_lane([LaneItem(request, 0, 20, Tier.GPU, True)])) == pytest.approx(1e-3)
    chunk, whole = (backend.open_lane([LaneItem(request, 0, n, Tier.GPU, True)]) for n in (20, 50))
    assert taken_s(lambda: backend.boundary(-1, [chunk])) == pytest.approx(0.25 * linear_s(20))
    assert taken_s(lambda: backend.boundary(LAYERS - 1, [chunk])) == 0
    assert taken_s(lambda: backend.boundary(LAYERS - 1, [whole])) == pytest.approx(0.75 * linear_s(1) + ENDS_S)
    cohort = backend.open_cohort([request])
    assert taken_s(lambda: backend.submit_cpu_attention(0, cohort)) == pytest.approx(5e-3)
