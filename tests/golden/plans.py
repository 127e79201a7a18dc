"""Plans of every system under seeded workloads, on predicted and on fake hardware, as digests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from apex.perf.model import Curve, ProfileTable, Surface
from apex.simulator.backend import OWN_ENGINE, PLACEHOLDER_TOKEN, Runtime, vllm_runtime
from apex.simulator.build import build_simulated
from apex.strategy import StrategyConfig
from swiftllm.core.plan import IterationPlan
from swiftllm.core.request import RequestRefused, SamplingParams, ServiceClass, Tier
from swiftllm.engine.engine import Engine
from tests.golden.record import all_used_blocks_are_freed, described, digest, unfinished, watch_plans
from tests.reference.fake_backend import VOCABULARY, expected_output
from tests.reference.fake_engine import fake_engine
from tests.reference.linear_profile import LAYERS, flat_ends_table

SYSTEMS = (
    "vllm", "swiftllm", "neo", "fastdecode", "apex", "adaptive", "omniserve", "omniserve-stepping", "sarathi",
    "llumnix",
)  # fmt: skip
GPU_ONLY = ("vllm", "swiftllm", "llumnix")
WITH_TARGETS = ("omniserve", "omniserve-stepping", "sarathi")
OTHER_CPU_TIMES = (
    "free-hand-over", "slow-hand-over", "slow-cpu", "fast-cpu", "wrong-table", "all-on-cpu", "dear-riders",
)  # fmt: skip
OTHER_TARGETS = ("tight-targets", "full-gpu-targets", "many-riders", "dear-riders")
ONLY_OF = {"withheld-blocks": "llumnix", "planned-ahead": "vllm"}
TABLE = replace(
    flat_ends_table(gpu_token_s=2e-8, cpu_token_s=1.5e-7, cpu_start_s=1e-5),
    hand_over=Curve((1, 1001), (2e-5, 1.2e-4)),
    iteration=Curve((0, 1000), (3e-4, 2.3e-3)),
)
SLOW_HAND_OVER = replace(TABLE, hand_over=Curve((1, 1001), (2e-4, 1.2e-2)))
FREE_HAND_OVER = flat_ends_table(gpu_token_s=2e-8, cpu_token_s=1.5e-7, cpu_start_s=1e-5)
SLOW_CPU = flat_ends_table(gpu_token_s=2e-8, cpu_token_s=2e-6)
FAST_CPU = flat_ends_table(gpu_token_s=2e-7, cpu_token_s=2e-8)


def slower_cpu(table: ProfileTable, factor: float) -> ProfileTable:
    """The table of a machine whose CPU attention takes ``factor`` times as long."""
    slow = tuple(Curve(curve.sizes, tuple(factor * s for s in curve.seconds)) for curve in table.cpu_attention.curves)
    return replace(table, cpu_attention=Surface(table.cpu_attention.firsts, slow))


@dataclass(frozen=True)
class Workload:
    """Requests at random over so many iterations, then to the end, on one machine.

    ``at_once`` requests are there at the start; as many iterations' draws are made for them.
    ``believed`` is the table that schedulers predict from, if it is not the machine's. With ``host_blocks`` the CPU
    tier has more pools, on hosts that die and return, and the hardware is the fake one. Requests that leave a CPU batch
    together free their blocks in no fixed order; where that happens, swaps are described without ``numbered_blocks``.
    With ``num_texts`` prompts begin with what earlier requests asked and were answered, which may be cached in the
    ``cached_tiers``. ``runtime`` is what runs `vllm`.
    """

    table: ProfileTable = TABLE
    believed: ProfileTable | None = None
    num_gpu_blocks: int = 80
    num_cpu_blocks: int = 600
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    iterations: int = 80
    at_once: int = 0
    arrival_share: float = 0.3
    abort_share: float = 0.03
    best_effort_share: float = 0.3
    longest_prompt: int = 300
    longest_output: int = 60
    host_blocks: tuple[int, ...] = ()
    numbered_blocks: bool = True
    num_texts: int = 0
    cached_tiers: tuple[Tier, ...] = ()
    runtime: Runtime = OWN_ENGINE
    strategy: dict[str, Any] = field(default_factory=lambda: {"disable_admission_control": True})


WORKLOADS = {
    "mixed": Workload(),
    "one-class": Workload(best_effort_share=0.0, abort_share=0.0),
    "tiny-gpu": Workload(num_gpu_blocks=26, longest_prompt=100, longest_output=40),
    "tiny-both": Workload(num_gpu_blocks=30, num_cpu_blocks=40, longest_prompt=150),
    "no-cpu": Workload(num_cpu_blocks=0, num_gpu_blocks=60),
    "few-seats": Workload(max_num_seqs=4, arrival_share=0.15),
    "aborts": Workload(abort_share=0.2, num_gpu_blocks=40),
    "free-hand-over": Workload(table=FREE_HAND_OVER),
    "slow-hand-over": Workload(table=SLOW_HAND_OVER, num_gpu_blocks=40, arrival_share=0.6),
    "long-queue": Workload(
        num_gpu_blocks=40, num_cpu_blocks=90, arrival_share=1.0, iterations=60, best_effort_share=0.0, longest_output=40
    ),
    "wrong-table": Workload(table=slower_cpu(TABLE, 2.9), believed=TABLE, best_effort_share=0.5),
    "slow-cpu": Workload(table=SLOW_CPU, num_gpu_blocks=50),
    "fast-cpu": Workload(table=FAST_CPU, num_gpu_blocks=40, num_cpu_blocks=2000, longest_output=80),
    "small-chunks": Workload(max_num_batched_tokens=64, arrival_share=0.15),
    "tight-targets": Workload(
        best_effort_share=0.6, strategy={"tpot_slo_s": 0.03, "ttft_slo_s": 1.0, "slo_margin": 0.1}
    ),
    "full-gpu-targets": Workload(
        num_gpu_blocks=45, iterations=160, arrival_share=0.25, best_effort_share=0.7, longest_prompt=200,
        strategy={"tpot_slo_s": 0.025, "ttft_slo_s": 0.3, "slo_margin": 0.1},
    ),
    "many-riders": Workload(
        table=SLOW_CPU, num_gpu_blocks=60, iterations=120, arrival_share=0.5, best_effort_share=0.9, longest_prompt=100,
        longest_output=40, strategy={"tpot_slo_s": 0.0195, "ttft_slo_s": 5.0, "slo_margin": 0.0},
    ),
    "dear-riders": Workload(
        table=SLOW_HAND_OVER, num_gpu_blocks=60, arrival_share=0.5, best_effort_share=0.6, longest_prompt=100,
        longest_output=40, strategy={"tpot_slo_s": 0.0185, "ttft_slo_s": 5.0, "slo_margin": 0.0},
    ),
    "forced-overlap": Workload(strategy={"strategy": "asynchronous-overlap", "disable_admission_control": True}),
    "forced-pipelining": Workload(strategy={"strategy": "asymmetric-pipelining", "disable_admission_control": True}),
    "impatient": Workload(
        strategy={"max_wait_iterations": 5, "min_cpu_request_ratio": 0.0, "disable_admission_control": True}
    ),
    "lost-hosts": Workload(
        num_gpu_blocks=14, num_cpu_blocks=30, host_blocks=(35, 38), longest_prompt=40, longest_output=30,
        max_num_seqs=16, max_num_batched_tokens=32, iterations=150, best_effort_share=0.5,
    ),
    "all-on-cpu": Workload(
        num_gpu_blocks=4, num_cpu_blocks=2500, max_num_batched_tokens=2048, at_once=40, iterations=40,
        longest_prompt=1000, longest_output=30,
    ),
    "aborts-and-deaths": Workload(
        num_gpu_blocks=14, num_cpu_blocks=30, host_blocks=(35, 38), longest_prompt=40, longest_output=30,
        max_num_seqs=16, max_num_batched_tokens=32, iterations=120, arrival_share=0.5, abort_share=0.3,
        best_effort_share=0.5, numbered_blocks=False,
    ),
    "prefixes-on-gpu": Workload(
        num_gpu_blocks=50, num_cpu_blocks=60, num_texts=3, cached_tiers=(Tier.GPU,), arrival_share=0.5
    ),
    "prefixes-in-both-tiers": Workload(
        num_gpu_blocks=40, num_cpu_blocks=50, num_texts=3, cached_tiers=tuple(Tier), arrival_share=0.5,
        longest_prompt=200,
    ),
    "prefixes-and-deaths": Workload(
        num_gpu_blocks=14, num_cpu_blocks=30, host_blocks=(35, 38), num_texts=3, cached_tiers=tuple(Tier),
        longest_prompt=40, longest_output=20, max_num_seqs=16, max_num_batched_tokens=32, iterations=120,
        best_effort_share=0.5,
    ),
    "withheld-blocks": Workload(
        num_gpu_blocks=45, arrival_share=0.5, best_effort_share=0.7, longest_prompt=200, longest_output=40
    ),
    "planned-ahead": Workload(
        num_gpu_blocks=60, max_num_seqs=6, num_texts=3, cached_tiers=(Tier.GPU,), runtime=vllm_runtime(6),
        abort_share=0.1,
    ),
}  # fmt: skip


def applies(system: str, name: str) -> bool:
    """Whether the system has the strategy that the workload forces, the tier that it needs, and what it is about."""
    workload = WORKLOADS[name]
    if name in OTHER_CPU_TIMES and system in (*GPU_ONLY, "sarathi"):
        return False
    if name in OTHER_TARGETS and system not in WITH_TARGETS:
        return False
    if system == "fastdecode" and not workload.num_cpu_blocks:
        return False
    if name in ONLY_OF and system != ONLY_OF[name]:
        return False
    if system == "fastdecode" and workload.cached_tiers == (Tier.GPU,):
        return False
    forced = workload.strategy.get("strategy")
    pipelines = forced == "asymmetric-pipelining" and system in ("neo", "fastdecode")
    return forced is None or system in ("apex", "adaptive") or pipelines


def digests(system: str, workload: Workload, seed: int = 0) -> dict[str, Any]:
    """The number of plans, the seconds they took, and digests of the first 10, the first 100 and all of them."""
    plans: list[str] = []
    numbered = workload.numbered_blocks
    engine = run(system, workload, random.Random(seed), lambda plan: plans.append(repr(described(plan, numbered))))
    return {
        "plans": len(plans),
        "seconds": engine.now(),
        **{str(most): digest(plans[:most]) for most in (10, 100)},
        "all": digest(plans),
    }


def run(
    system: str, workload: Workload, rng: random.Random, see: Callable[[IterationPlan], None] = lambda plan: None
) -> Engine:
    """Serve the workload to its end; ``see`` is given every plan as it was made. Both pools must end empty."""
    engine = _engine(system, workload)
    watch_plans(engine, see)
    texts: list[tuple[int, ...]] = [()] * workload.num_texts
    for number in range(workload.at_once):
        _arrivals(engine, workload, rng, number, texts)
    for number in range(workload.at_once, workload.at_once + workload.iterations):
        _arrivals(engine, workload, rng, number, texts)
        _deaths(engine, workload, rng)
        engine.step()
    for _ in range(100_000):
        if not engine.has_unfinished():
            break
        engine.step()
    assert not engine.has_unfinished(), engine.status()
    engine.state.begin_plan()  # one that is made beside an iteration frees what has ended before it
    all_used_blocks_are_freed(engine)
    return engine


def _engine(system: str, workload: Workload) -> Engine:
    strategy = None if system in GPU_ONLY else StrategyConfig(**workload.strategy)
    pools = {"num_gpu_blocks": workload.num_gpu_blocks, "num_cpu_blocks": workload.num_cpu_blocks}
    pools["cached_tiers"] = workload.cached_tiers
    if workload.host_blocks:
        limits = {"max_tokens": workload.max_num_batched_tokens, "max_num_seqs": workload.max_num_seqs}
        return fake_engine(system, **pools, **limits, host_blocks=workload.host_blocks, strategy=strategy)
    limits = {"max_num_batched_tokens": workload.max_num_batched_tokens, "max_num_seqs": workload.max_num_seqs}
    return build_simulated(
        system, workload.table, LAYERS, **pools, **limits, strategy=strategy,
        scheduler_table=workload.believed, runtime=workload.runtime,
    )  # fmt: skip


def _arrivals(
    engine: Engine, workload: Workload, rng: random.Random, number: int, texts: list[tuple[int, ...]]
) -> None:
    # Always as many draws, so that the load is the same whatever a system refuses.
    arrives, aborts, which = rng.random() < workload.arrival_share, rng.random() < workload.abort_share, rng.random()
    prompt_len, output = rng.randint(1, workload.longest_prompt), rng.randint(1, workload.longest_output)
    best_effort = rng.random() < workload.best_effort_share
    if arrives:
        prompt = _next_prompt(workload, rng, texts, output) if texts else (0,) * prompt_len
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        service_class = ServiceClass.BEST_EFFORT if best_effort else ServiceClass.LATENCY_SENSITIVE
        try:
            engine.add(engine.make_request(f"r{number}", prompt, sampling, service_class=service_class))
        except RequestRefused:
            return
    alive = unfinished(engine)
    if aborts and alive:
        engine.abort(alive[int(which * len(alive))].request_id)


def _next_prompt(
    workload: Workload, rng: random.Random, texts: list[tuple[int, ...]], output_len: int
) -> tuple[int, ...]:
    """A prompt that begins as one of the texts does. The text then goes on with it and with its output."""
    which, own = rng.randrange(len(texts)), rng.choices(range(2, VOCABULARY), k=workload.longest_prompt)
    num_own, share = rng.randint(1, workload.longest_prompt // 4), rng.choice((0.0, 0.5, 1.0, 1.0))
    num_shared = min(int(share * len(texts[which])), workload.longest_prompt - num_own)
    prompt = (*texts[which][:num_shared], *own[:num_own])
    answer = (PLACEHOLDER_TOKEN,) * output_len
    if workload.host_blocks:
        answer = expected_output(prompt, output_len, ignore_eos=True)
    texts[which] = (*prompt, *answer)
    return prompt


def _deaths(engine: Engine, workload: Workload, rng: random.Random) -> None:
    if not workload.host_blocks:
        return
    dies, after, revived = rng.random() < 0.1, rng.randrange(1, 30), rng.random() < 0.1
    host = rng.randint(1, len(workload.host_blocks))
    if dies:
        engine.backend.hosts.plan_death(host, after)
    if revived:
        engine.backend.hosts.revive(host)
