"""The simulator's throughput against closed forms in this file's own words (DESIGN.md, section 5)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from apex.perf.model import ProfileTable
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from swiftllm.core.request import Request, SamplingParams, Tier
from tests.reference.linear_profile import ENDS_S, LAYERS, flat_ends_table, linear_s

PROMPT = 1000
BLOCKS = 63  # of 16 tokens: one request of PROMPT tokens with a few more


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
            self.engine.add(self.engine.make_request(str(i), [1] * PROMPT, SamplingParams(max_tokens=300)))
        running = self.engine.state.running
        wanted = num_gpu + num_cpu
        self.run_until(lambda: sum(map(len, running.values())) == wanted and not any(map(is_prefilling, self.all())))

    def all(self) -> Iterable[Request]:
        return [request for queue in self.engine.state.running.values() for request in queue]

    def run_until(self, condition) -> None:
        for _ in range(10_000):
            if condition():
                return
            self.engine.step()
        raise AssertionError(f"never came: {self.engine.status()}")

    def measure(self, iterations: int) -> tuple[float, dict[Tier, float]]:
        """Output tokens per second, and each tier's mean context per request."""
        engine = self.engine
        start_s, before = engine.now(), engine.stats().output_tokens
        prefilled = engine.stats().prompt_tokens
        contexts = self.contexts()
        for _ in range(iterations):
            engine.step()
        assert engine.stats().prompt_tokens == prefilled, "not decode-only"
        contexts = {tier: (context + self.contexts()[tier]) / 2 for tier, context in contexts.items()}
        return (engine.stats().output_tokens - before) / (engine.now() - start_s), contexts

    def contexts(self) -> dict[Tier, float]:
        running = self.engine.state.running
        assert (len(running[Tier.GPU]), len(running[Tier.CPU])) == (self.num_gpu, self.num_cpu)
        return {tier: sum(r.num_tokens for r in queue) / max(1, len(queue)) for tier, queue in running.items()}


def is_prefilling(request: Request) -> bool:
    return request.is_prefilling


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
    # Batch-1 takes as many as hide behind T_l0; the rest joins with the GPU batch.
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
    """Joins only: a layer an iteration, so L + 1 iterations a token, the embedding stage being one."""
    strategy = StrategyConfig(strategy="asynchronous-overlap", max_cpu_batches=1)
    backlog = Backlog("apex", flat_ends_table(3e-7, 5e-7), num_gpu=8, num_cpu=num_cpu, strategy=strategy)
    backlog.run_until(lambda: [len(c.request_ids) for c in backlog.engine.executor.cpu_batches] == [num_cpu])
    rate, context = backlog.measure(4 * (LAYERS + 1))
    attention_s = 1e-5 + 8 * context[Tier.GPU] * 3e-7
    joined_s = linear_s(8 + num_cpu) - linear_s(8)
    iteration_s = LAYERS * (linear_s(8) + attention_s) + ENDS_S + joined_s
    assert rate == pytest.approx((8 + num_cpu / (LAYERS + 1)) / iteration_s, rel=0.01)


def test_a_slow_cpu_never_holds_the_gpu_batch_up() -> None:
    """The CPU takes ten iterations for a layer; the iterations take what they take without it."""
    strategy = StrategyConfig(strategy="asynchronous-overlap")
    backlog = Backlog("apex", flat_ends_table(1e-7, 2e-4), num_gpu=8, num_cpu=2, strategy=strategy)
    executor, results = backlog.engine.executor, []
    run = executor.run
    executor.run = lambda plan: results.append(run(plan)) or results[-1]
    backlog.measure(100)
    assert any(result.cpu_busy_s > 0.1 for result in results), "the CPU should have worked"
    for result in results:
        assert result.gpu_batch_busy_s == result.duration_s  # nobody waited
        assert result.duration_s < LAYERS * (linear_s(10) + 1e-5 + 8 * 1300 * 1e-7) + ENDS_S
