"""The bound: its parts are below what they stand for, simulated runs below it, and its prices are of small changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from apex.perf.model import Curve, PerfModel, ProfileTable, Surface, decode_bound
from apex.replay.loop import replay_requests
from apex.replay.records import ReplayRequest
from apex.simulator import bound as bounds
from apex.simulator.bound import Affine, BoundMachine, BoundWorkload, Hull, bound, solve, square_tangents, why_no_bound
from apex.simulator.build import build_simulated

LAYERS, BLOCK = 4, 16


def surface(fixed_s: float, request_s: float, token_s: float) -> Surface:
    curves = (Curve((1, 4096), tuple(fixed_s + n * (request_s + c * token_s) for c in (1, 4096))) for n in (1, 256))
    return Surface((1, 256), tuple(curves))


def table() -> ProfileTable:
    sizes = (1, 64, 100, 256, 300, 2048)
    return ProfileTable(
        {},
        linear=Curve(sizes, (1e-3, 1.1e-3, 1.6e-3, 3e-3, 4.2e-3, 24e-3)),  # with steps, so that it is not convex
        ends=Curve((1, 256), (1e-3, 2e-3)),
        swap=Curve((1, 64), (1e-4, 1e-3)),
        prefill_attention=Surface((1, 2048), (Curve((0, 2048), (1e-5, 2e-5)), Curve((0, 2048), (2e-3, 4e-3)))),
        gpu_attention=surface(2e-5, 1e-6, 2e-9),
        cpu_attention=surface(5e-5, 1e-6, 2e-8),
        iteration=Curve((1, 256), (1e-3, 1e-3)),
    )


def requests() -> list[tuple[int, int]]:
    rng = np.random.default_rng(7)
    return [
        (int(prompt), int(out)) for prompt, out in zip(rng.integers(20, 200, 60), rng.integers(5, 90, 60), strict=True)
    ]


MACHINE = BoundMachine(table(), LAYERS, 80 * BLOCK, 600 * BLOCK, 512, 256)


@pytest.mark.parametrize("size", [1, 40, 100, 256, 299, 300, 1000, 2048])
def test_tangents_are_below_the_curve(size: int) -> None:
    linear = table().linear
    hull = Hull(linear, linear.sizes)
    assert hull(size) <= linear(size) + 1e-12
    assert all(fixed + each * size <= linear(size) + 1e-12 for fixed, each in hull.tangents())
    assert all(fixed + each * size <= size * hull(size) + 1e-9 for fixed, each in hull.row_tangents(2048.0))
    assert max(fixed + each * size for fixed, each in hull.tangents()) > 0.8 * hull(size)


def test_tangents_are_below_the_square() -> None:
    sizes = np.linspace(0, 500, 100)
    below = [max(fixed + each * size for fixed, each in square_tangents(500.0)) for size in sizes]
    assert (below <= sizes**2 + 1e-9).all()
    assert (np.array(below) >= 0.85 * sizes**2)[sizes > 20].all()


def test_an_affine_table_is_its_own_lower_bound() -> None:
    found = Affine.below(surface(5e-5, 1e-6, 2e-8), 256.0, (10.0, 4000.0))
    assert (found.fixed_s, found.request_s, found.token_s) == pytest.approx((5e-5, 1e-6, 2e-8), rel=1e-6)


def test_of_a_bent_table_the_affine_function_is_nowhere_above() -> None:
    bent = Surface((1, 8, 64), tuple(Curve((1, 100, 1000), (a, 2 * a, 3 * a)) for a in (1e-4, 2e-4, 9e-4)))
    found = Affine.below(bent, 64.0, (1.0, 1000.0))
    for n in (1, 4, 8, 30, 64):
        for context in (1, 50, 100, 500, 1000):
            assert found.fixed_s + n * found.request_s + n * context * found.token_s <= bent(n, context) + 1e-12


def test_no_decodes_have_less_context_than_the_shortest_and_no_first_ones_more_than_the_longest() -> None:
    workload, rng = BoundWorkload.of(requests()), np.random.default_rng(3)
    for _ in range(50):
        done = [int(rng.integers(0, out)) for _, out in requests()]
        tokens = sum(done)
        context = sum(sum(prompt + k for k in range(1, n + 1)) for (prompt, _), n in zip(requests(), done, strict=True))
        assert max(a + b * tokens for a, b in workload.shortest_contexts) <= context + 1e-6
        assert min(a + b * tokens for a, b in workload.longest_means) >= context - 1e-6


@pytest.mark.parametrize("system", ["swiftllm", "vllm", "neo", "fastdecode", "apex", "adaptive"])
def test_no_system_exceeds_the_bound(system: str, bound_of: Callable[[int], float]) -> None:
    for gpu_blocks in (80, 20):
        engine = build_simulated(
            system, table(), LAYERS, num_gpu_blocks=gpu_blocks, num_cpu_blocks=600, max_num_batched_tokens=512
        )
        replayed = [ReplayRequest(str(i), 0.0, (0,) * prompt, out) for i, (prompt, out) in enumerate(requests())]
        result = replay_requests(engine, replayed, wait=engine.backend.sleep)
        assert all(record.completed for record in result.records)
        rate = sum(out for _, out in requests()) / result.wall_s
        assert rate <= bound_of(gpu_blocks)
        assert system != "adaptive" or rate > 0.4 * bound_of(gpu_blocks)  # nor is it far away


@pytest.fixture(scope="module")
def bound_of() -> Callable[[int], float]:
    known: dict[int, float] = {}

    def of(gpu_blocks: int) -> float:
        if gpu_blocks not in known:
            machine = replace(MACHINE, gpu_tokens=gpu_blocks * BLOCK)
            known[gpu_blocks] = bound(machine, BoundWorkload.of(requests())).tokens_per_s
        return known[gpu_blocks]

    return of


def test_the_gpu_has_no_more_time_for_cpu_attention_than_what_each_task_costs_it() -> None:
    """As the states of linear attention do: they are on the GPU whoever attends."""
    costly = replace(table(), hand_over=Curve((1, 256), (4e-4, 256 * 4e-4)))
    machine, of_cpu = replace(MACHINE, table=costly, gpu_tokens=20 * BLOCK), BoundWorkload.of(requests())
    limit = bound(machine, of_cpu).tokens_per_s
    engine = build_simulated(
        "fastdecode", costly, LAYERS, num_gpu_blocks=20, num_cpu_blocks=600, max_num_batched_tokens=512
    )
    replayed = [ReplayRequest(str(i), 0.0, (0,) * prompt, out) for i, (prompt, out) in enumerate(requests())]
    wall_s = replay_requests(engine, replayed, wait=engine.backend.sleep).wall_s
    assert of_cpu.output_tokens / wall_s <= limit
    # All but what fits the GPU's memory is attended by the CPU, and its tasks alone take most of the GPU's time.
    assert limit < 0.8 * bound(replace(machine, table=table()), of_cpu).tokens_per_s
    without, _, on_cpu = decode_bound(table(), LAYERS, 100, (0, 600 * BLOCK), 60)
    with_tasks = decode_bound(costly, LAYERS, 100, (0, 600 * BLOCK), 60)[0]
    assert with_tasks < 0.8 * without and with_tasks <= on_cpu / (LAYERS * on_cpu * 4e-4)


def test_the_bound_is_below_the_rate_of_the_gpu_and_that_of_the_cpu_together() -> None:
    """Decodes alone, each at the best size of any batch: a coarser bound that is easy to see."""
    workload, model = BoundWorkload.of(requests()), PerfModel(table(), LAYERS)
    tokens = workload.prompt_tokens + workload.output_tokens - workload.num_requests
    least_s = tokens * (LAYERS - 1) * min(model.linear_s(n) / n for n in range(1, 513))
    assert bound(MACHINE, workload).tokens_per_s <= workload.output_tokens / least_s


def test_gains_are_those_of_a_little_more() -> None:
    workload = BoundWorkload.of(requests())
    shares, seconds = bounds.SHARES, 0.5
    solved = solve(MACHINE, workload, seconds, shares)
    for field in ("gpu_speed", "cpu_speed", "gpu_tokens"):
        richer = replace(MACHINE, **{field: getattr(MACHINE, field) * (1 + bounds.STEP)})
        by_price = bounds._more_done(solved, bounds.program_of(richer, workload, seconds, shares)) * bounds.STEP
        assert solve(richer, workload, seconds, shares).part - solved.part == pytest.approx(by_price, rel=0.1, abs=2e-7)


def test_more_of_a_resource_never_lowers_the_bound() -> None:
    found = bound(MACHINE, BoundWorkload.of(requests()))
    assert all(gain > -1e-3 * found.tokens_per_s for gain in found.gains.values())
    assert found.binding == max(found.gains, key=lambda name: found.gains[name])
    assert found.lines()[0].endswith(f"{found.gains[found.binding]:+,.1f} tok/s")


def test_what_the_program_lacks_is_said() -> None:
    none = dict.fromkeys(("weights_off_gpu", "several_hosts", "windows", "arrivals", "prefixes"), False)
    assert why_no_bound(**none) == ""
    assert "windows" in why_no_bound(**{**none, "windows": True})
