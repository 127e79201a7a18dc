"""Predicts a real run: the simulated engine serves its requests on its card, from the card's operator times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from apex.perf.model import ProfileTable
from apex.replay.loop import replay_requests
from apex.replay.records import ReplayRequest, RequestRecord
from apex.simulator.backend import Runtime
from apex.simulator.build import build_simulated
from evaluation.groundtruth.run_files import RealRun, RunRequest
from swiftllm.core.request import Tier

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
LONGEST = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """What a run comes to, measured or predicted: one entry per request in order of arrival, in seconds.

    ``start_s`` is when requests first held KV blocks; ``queued_s`` when the engine took them in.
    """

    queued_s: np.ndarray
    first_token_s: np.ndarray
    last_token_s: np.ndarray
    output_lens: np.ndarray
    preemptions: int | None = None
    running: np.ndarray | None = None
    waiting: np.ndarray | None = None

    def metrics(self) -> dict[str, float]:
        """Throughput in output tokens/s, TTFT and TPOT in seconds: mean and quantiles."""
        ttft = self.first_token_s - self.queued_s
        tpot = (self.last_token_s - self.first_token_s)[self.output_lens > 1] / (
            self.output_lens[self.output_lens > 1] - 1
        )
        result = {"tokens_per_s": self.output_lens.sum() / (self.last_token_s.max() - self.queued_s.min())}
        for name, values in (("ttft", ttft), ("tpot", tpot)):
            result[f"{name}_mean_s"] = values.mean()
            result |= {f"{name}_{label}_s": np.quantile(values, q) for label, q in QUANTILES.items()}
        return {name: float(value) for name, value in result.items()}


def measured_outcome(run: RealRun) -> Outcome:
    columns = zip(*((r.queued_s, r.first_token_s, r.last_token_s, r.output_len) for r in run.requests), strict=True)
    queued, first, last, lens = map(np.array, columns)
    return Outcome(
        queued,
        first,
        last,
        lens,
        running=np.array([sample.running for sample in run.load]),
        waiting=np.array([sample.waiting for sample in run.load]),
    )


def predict_run(
    run: RealRun,
    table: ProfileTable,
    num_layers: int,
    num_gpu_blocks: int,
    runtime: Runtime,
    *,
    prefix_caching: bool,
) -> Outcome:
    """Simulate the run's requests; the load is sampled at the run's times. Data-parallel ranks take them in turn."""
    parts = [
        _replay(
            run, run.requests[rank :: run.data_parallel], table, num_layers, num_gpu_blocks, runtime, prefix_caching
        )
        for rank in range(run.data_parallel)
    ]
    records = sorted((record for part in parts for record in part), key=lambda record: record.arrival_s)
    running, waiting = load_at([sample.time_s for sample in run.load], records)
    return Outcome(
        np.array([record.tier_history[0][0] for record in records]),
        np.array([record.first_token_s for record in records]),
        np.array([record.last_token_s for record in records]),
        np.array([record.output_len for record in records]),
        sum(record.num_preemptions for record in records),
        running,
        waiting,
    )


def _replay(
    run: RealRun,
    served: Sequence[RunRequest],
    table: ProfileTable,
    num_layers: int,
    num_gpu_blocks: int,
    runtime: Runtime,
    prefix_caching: bool,
) -> Sequence[RequestRecord]:
    """Serve requests by one engine.

    Raises:
        ValueError: one is refused, since the run's limits do not allow it.
    """
    engine = build_simulated(
        "vllm",
        table,
        num_layers,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=0,
        block_size=run.block_size,
        max_num_batched_tokens=run.max_num_batched_tokens,
        max_num_seqs=run.max_num_seqs,
        max_model_len=run.max_model_len or LONGEST,
        vocab_size=len(served) + 1,
        cached_tiers=(Tier.GPU,) if prefix_caching else (),
        runtime=runtime,
    )
    requests = [
        # The prompts are not known: every request has a token of its own, so that no two share a prefix.
        ReplayRequest(f"{index}", request.arrival_s, (index + 1,) * request.prompt_len, request.output_len)
        for index, request in enumerate(served)
    ]
    records = replay_requests(engine, requests, wait=engine.backend.sleep).records
    for record in records:
        if not record.completed:
            raise ValueError(f"{run.folder}: a request of {record.prompt_len} tokens is not served: {record.failure}")
    return records


def load_at(times_s: list[float], records: Sequence[RequestRecord]) -> tuple[np.ndarray, np.ndarray]:
    """Running and waiting requests at these times."""
    counts = {"running": np.zeros(len(times_s)), "waiting": np.zeros(len(times_s))}
    times = np.array(times_s)
    for record in records:
        ends = [*(time for time, _ in record.tier_history[1:]), record.finish_s]
        for (begin_s, tier), end_s in zip(record.tier_history, ends, strict=True):
            counts["waiting" if tier == "waiting" else "running"] += (begin_s <= times) & (times < end_s)
    return counts["running"], counts["waiting"]
