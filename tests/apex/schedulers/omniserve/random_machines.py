"""Small simulated machines drawn at random, and what requests of both classes get on them beside each other.

    python -m tests.apex.schedulers.omniserve.random_machines 90

runs so many machines and prints what holds on all of them.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from apex.perf.model import Curve
from apex.perf.online_correction import scaled_table
from swiftllm.core.plan import IterationPlan, StepResult
from swiftllm.core.request import Request, RequestRefused, SamplingParams, ServiceClass, Tier
from swiftllm.engine.engine import Engine
from tests.apex.schedulers.omniserve.random_load import BE, LS, simulated_engine
from tests.reference.linear_profile import LAYERS, flat_ends_table

PATIENCE = 100
"""``max_wait_iterations`` of these machines."""
PASS = 4 * (LAYERS + 1)
"""Iterations that a token of a CPU batch takes at most once it goes on, with a CPU of these speeds."""


@dataclass(frozen=True)
class Arrival:
    """A request of the load. ``aborted_s``: when its client hangs up, if it does."""

    name: str
    at_s: float
    prompt: int
    output: int
    service_class: ServiceClass
    aborted_s: float | None


@dataclass(frozen=True)
class Machine:
    settings: dict[str, object]
    arrivals: Sequence[Arrival]

    @staticmethod
    def draw(seed: int, urgent: int = 40) -> Machine:
        rng = random.Random(seed)
        token_s, knee_s = rng.choice((2e-6, 6e-6, 1.5e-5)), rng.choice((1e-3, 2e-3))
        gpu_token_s, cpu_token_s = rng.choice((2e-8, 1e-7)), rng.choice((5e-8, 3e-7))
        table = replace(
            flat_ends_table(gpu_token_s, cpu_token_s, cpu_start_s=1e-5),
            linear=Curve((1, 64, 1064), (knee_s, 1.1 * knee_s, 1.1 * knee_s + 1000 * token_s)),
            hand_over=Curve((1, 1001), (2e-5, rng.choice((1.2e-4, 1e-3)))),
            swap=Curve((0, 100), (1e-4, rng.choice((2e-3, 1e-2)))),
            iteration=Curve((0, 1000), (3e-4, 2.3e-3)),
        )
        iteration_s = LAYERS * knee_s
        blocks, seats = rng.choice((40, 80, 160, 300)), rng.choice((3, 6, 12, 64))
        longest, output = min(400, 16 * blocks // 3), rng.choice((20, 60))
        resident = min(seats, 16 * blocks / (0.6 * longest + output))  # of latency-sensitive requests, at most
        rate = rng.uniform(0.1, 0.5) * resident / (1.3 * iteration_s * output)
        arrivals, at_s = [], 0.0
        for number in range(urgent):
            at_s += rng.expovariate(rate)
            end_s = at_s + rng.uniform(0, 1) if rng.random() < 0.05 else None
            size = rng.randint(1, longest), rng.randint(1, 2 * output)
            arrivals.append(Arrival(f"urgent-{number}", at_s, *size, LS, end_s))
        for number in range(urgent // 3):
            start_s = rng.choice((0.0, rng.uniform(0, at_s)))
            end_s = rng.uniform(start_s, at_s) if rng.random() < 0.1 else None
            size = rng.randint(1, 2 * longest), rng.randint(1, 2 * output)
            arrivals.append(Arrival(f"rest-{number}", start_s, *size, BE, end_s))
        gpu_batch, cpu = rng.uniform(0.8, 1.2), rng.uniform(0.8, 1.2)
        return Machine(
            {
                "table": scaled_table(table, gpu_batch, cpu),
                "believed": table,
                "num_gpu_blocks": blocks,
                "num_cpu_blocks": rng.choice((60, 300, 2000)),
                "max_num_seqs": seats,
                "max_num_batched_tokens": rng.choice((64, 256, 512)),
                "tpot_slo_s": rng.choice((1.5, 2.5, 5.0)) * iteration_s,
                "ttft_slo_s": rng.choice((20, 60)) * iteration_s,
                "max_wait_iterations": PATIENCE,
            },
            sorted(arrivals, key=lambda arrival: arrival.at_s),
        )


class Waits:
    """How long requests wait for their next step, in iterations from when it is their turn."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.longest = {LS: 0, BE: 0}
        self._progress: dict[str, int] = {}  # the iteration in which each resident request last went on
        self._layers: dict[int, int] = {}
        self._turn: tuple[str, int] = ("", 0)
        self._urgent_since = 0

    def observe(self, iteration: int, plan: IterationPlan, result: StepResult) -> None:
        went_on = {*result.tokens, *(item.request.request_id for item in plan.prefills)}
        for cpu_batch in plan.cpu_batches:
            if result.stages.get(cpu_batch.cpu_batch_id, LAYERS) > self._layers.get(cpu_batch.cpu_batch_id, -1):
                went_on.update(request.request_id for request in cpu_batch.requests)
        self._layers = dict(result.stages)
        running, kv = self.engine.state.running, self.engine.kv
        # Without a block for its next token it is not the turn of a request: older ones hold the CPU tier.
        on_cpu = [r for r in running[Tier.CPU] if r.num_tokens <= r.num_kv_slots or kv.num_free(Tier.CPU)]
        resident = [r.request_id for r in (*on_cpu, *running[Tier.GPU].of_class(BE))]
        self._progress = {
            name: iteration if name in went_on else self._progress.get(name, iteration) for name in resident
        }
        if resident:
            first = min(resident, key=self._progress.__getitem__)
            if first != self._turn[0] or self._progress[first] == iteration:
                self._turn = (first, iteration)
            self.longest[BE] = max(self.longest[BE], iteration - self._turn[1])
        if not self._could_start():
            self._urgent_since = iteration
        self.longest[LS] = max(self.longest[LS], iteration - self._urgent_since)

    def _could_start(self) -> bool:
        """Whether the first waiting request is latency-sensitive, and best-effort requests hold what it lacks."""
        state, kv = self.engine.state, self.engine.kv
        if not state.waiting or state.waiting[0].service_class is not LS:
            return False
        urgent = state.running[Tier.GPU].of_class(LS)
        held = sum(map(kv.num_held, urgent))
        needed = kv.blocks_for(state.waiting[0].num_tokens) + len(urgent)
        return len(urgent) < state.limits.max_num_seqs and held + needed <= kv.capacity(Tier.GPU)


@dataclass(frozen=True)
class Outcome:
    """``kept`` and ``offered``: latency-sensitive requests within both targets, and all of them."""

    kept: int
    offered: int
    longest_wait: dict[ServiceClass, int]


def run(machine: Machine, system: str, *, alone: bool = False) -> Outcome:
    """Serve the load to its end, without best-effort requests if ``alone``.

    Raises:
        AssertionError: a request lost or gained a token, or blocks stay in use.
    """
    engine = simulated_engine(system, **machine.settings)
    arrivals = [a for a in machine.arrivals if not alone or a.service_class is LS]
    arrivals.reverse()
    hang_ups = sorted(((a.aborted_s, a.name) for a in arrivals if a.aborted_s is not None), reverse=True)
    requests: dict[str, Request] = {}
    refused: set[str] = set()
    told: dict[str, int] = {}
    waits, iteration = Waits(engine), 0
    while arrivals or engine.has_unfinished():
        while arrivals and arrivals[-1].at_s <= engine.now():
            arrival = arrivals.pop()
            sampling = SamplingParams(max_tokens=arrival.output, ignore_eos=True)
            try:
                request = engine.make_request(
                    arrival.name, (0,) * arrival.prompt, sampling, arrival.at_s, arrival.service_class
                )
                requests[arrival.name] = engine.add(request)
            except RequestRefused:
                refused.add(arrival.name)
        while hang_ups and hang_ups[-1][0] <= engine.now():
            engine.abort(hang_ups.pop()[1])
        if not engine.has_unfinished():
            engine.backend.sleep(max(0.0, arrivals[-1].at_s - engine.now()) if arrivals else 0.0)
            continue
        for output in engine.step():
            told[output.request_id] = told.get(output.request_id, 0) + len(output.new_token_ids)
        iteration += 1
        if iteration % 10 == 0:
            engine.kv.check_blocks()
        assert iteration < 100_000, engine.status()
        if engine.last_iteration is not None:
            waits.observe(iteration, *engine.last_iteration)
    assert not any(pool.num_used for pool in engine.kv.block_pools.values()) and not engine.executor.cpu_batches
    for name, request in requests.items():
        assert told.get(name, 0) == request.output_len == len(request.token_times_s)
        assert request.finish_reason.value == "abort" or request.output_len == request.sampling.max_tokens
    offered = [a.name for a in machine.arrivals if a.service_class is LS and a.aborted_s is None]
    slo = engine.scheduler.slo
    kept = [name for name in offered if name in requests and all(slo.met_by(requests[name]).values())]
    return Outcome(len(kept), len(offered), waits.longest)


def main() -> int:
    """Returns the exit status: 1 if a request waits too long, or a system loses more than a point on all machines."""
    broken = False
    for system in ("omniserve", "omniserve-stepping"):
        alone_kept = kept = offered = worst = 0
        waited = {LS: 0, BE: 0}
        for seed in range(int(sys.argv[1])):
            machine = Machine.draw(seed)
            alone, beside = run(machine, system, alone=True), run(machine, system)
            alone_kept, kept, offered = alone_kept + alone.kept, kept + beside.kept, offered + alone.offered
            worst = max(worst, alone.kept - beside.kept)
            waited = {name: max(waited[name], beside.longest_wait[name]) for name in waited}
        print(f"{system}: of {offered} latency-sensitive requests", end=" ")
        print(f"{alone_kept / offered:.2%} are within targets alone,", end=" ")
        print(f"{kept / offered:.2%} beside best effort; at most {worst} fewer on one machine;", end=" ")
        print(f"longest waits {waited[LS]} and {waited[BE]} iterations", flush=True)
        broken |= alone_kept - kept > 0.01 * offered or waited[LS] > PATIENCE or waited[BE] > PATIENCE + PASS
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
