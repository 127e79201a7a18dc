"""`make artifact` on AWS's instances, as far as it goes without their cards: no planned point takes more host memory
than there is."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from evaluation import artifact
from evaluation.planning import plan
from evaluation.run import Point
from evaluation.studies.figures import FigureJob
from evaluation.studies.papers import FigureOptions
from swiftllm.config import EngineConfig
from swiftllm.machine import GIB, Card
from tests.evaluation.papers_machines import A10G, T4, NamedMachine, on_machine

OF_NOMINAL, FREE_OF_TOTAL = 0.965, 0.95
"""What a kernel reports of an instance's GiB, and what a fresh system leaves of that."""
PROCESS_GIB, STAGED_GIB, OTHERS_GIB = 2.0, 0.5, 0.5
"""What there is at least beside an engine's pools: its process with CUDA, 256 MiB of pinned memory each way, others."""
ON_T4 = {"fig5", "fig6", "neo-fig6", "neo-fig9"}
ON_A10G = {"fig5", "fig6", "fig7", "neo-fig6", "neo-fig7", "neo-fig9"}
WITH_HOSTS = ON_A10G | {"neo-fig10a"}  # whose hosts are g5.2xlarge to g5.16xlarge
INSTANCES = {
    "g4dn.xlarge": (T4, 16, ON_T4),
    "g4dn.2xlarge": (T4, 32, ON_T4),
    "g4dn.4xlarge": (T4, 64, ON_T4),
    "g5.xlarge": (A10G, 16, ON_A10G),
    "g5.2xlarge": (A10G, 32, WITH_HOSTS),
    "g5.4xlarge": (A10G, 64, WITH_HOSTS),
    "g5.16xlarge": (A10G, 256, WITH_HOSTS),
}


def in_a_second(points: Sequence[Point], *_: object) -> tuple[list[Point], tuple[str, ...]]:
    """All fit the hours."""
    predicted = dict.fromkeys(plan.PREDICTED, 1.0)
    tasks = (replace(point.task, values={**point.task.values, **predicted}) for point in points)
    return [replace(point, task=task) for point, task in zip(points, tasks, strict=True)], ()


def figures_on(
    patch: pytest.MonkeyPatch, cache: Path, card: Card, total_gib: float, free_gib: float
) -> tuple[dict[str, FigureJob], str]:
    """The figures of `make artifact` on such a machine, and what was printed."""
    on_machine(patch, cache, card, free_gib, total_gib)
    patch.setattr(plan, "predict", in_a_second)
    console = Console(file=io.StringIO(), width=400)
    machine = NamedMachine("apex-t4" if card is T4 else "apex-a10")
    chosen = FigureOptions(hours=8.0, jobs=1, num_requests=20)
    jobs = artifact.make_jobs(chosen, console, machine)
    return {job.name: job for job in jobs}, console.file.getvalue()


def kv_block_bytes(model: str) -> int:
    shape = json.loads(Path(model, "config.json").read_text())
    head_dim = shape["hidden_size"] // shape["num_attention_heads"]
    return 16 * 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_dim * 2


def host_gib_of(engine: EngineConfig) -> float:
    """What such an engine takes of the host, by hand."""
    return engine.num_cpu_blocks * kv_block_bytes(engine.model) / GIB + PROCESS_GIB + STAGED_GIB + OTHERS_GIB


@pytest.mark.parametrize("instance", INSTANCES)
def test_no_planned_point_takes_more_host_memory_than_is_there(monkeypatch, tmp_path, instance):
    card, nominal_gib, figures = INSTANCES[instance]
    total_gib = OF_NOMINAL * nominal_gib
    free_gib = FREE_OF_TOTAL * total_gib
    jobs, _ = figures_on(monkeypatch, tmp_path, card, total_gib, free_gib)
    planned = {name: job.measured.plan_with(job.measured.most) for name, job in jobs.items() if job.measured}
    assert set(planned) == figures
    for name, planned_here in planned.items():
        for point in planned_here.points:
            engine = point.task.engine
            assert host_gib_of(engine) <= free_gib, (name, point.key)
            assert engine.num_cpu_blocks * 16 >= engine.max_model_len, "the longest request fits"
    if nominal_gib == 16:
        told = {words for job in jobs.values() if job.measured for s in job.measured.settings.values()
                for words in s.differences}  # fmt: skip
        assert any("of KV cache in host memory instead of" in words for words in told)


@pytest.mark.parametrize(("card", "free_gib", "room"), [(T4, 4.0, "192"), (A10G, 6.0, "15,232")], ids=["T4", "A10G"])
def test_a_machine_with_too_little_left_is_refused_with_numbers(monkeypatch, tmp_path, card, free_gib, room):
    """Others took most of 16 GiB: all is simulated, and the reason said."""
    jobs, printed = figures_on(monkeypatch, tmp_path, card, 15.4, free_gib)
    assert not any(job.measured for job in jobs.values()) and all(job.points for job in jobs.values())
    for part in (
        f"host memory has room for {room} tokens of KV cache, and its longest request has",
        f"of {free_gib:.1f} GiB available {3.9 if card is T4 else 4.1} are for all else",
        "end other programs, or take a machine with more memory",
    ):
        assert part in printed
