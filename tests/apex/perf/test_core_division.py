"""Dividing the cores between a GPU batch on the CPU and CPU attention: what is measured, and what is made of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import apex.perf.machine_profile
from apex.build import build_system, open_backend
from apex.perf.machine_profile import (
    ROUNDS,
    DecodeMix,
    DecodeRates,
    fastest,
    full_load,
    make_workbench,
    measure_divisions,
)
from swiftllm.config import EngineConfig
from swiftllm.core.request import Tier
from swiftllm.kv.block_pool import LayerGroups
from swiftllm.runtime import execution_context
from swiftllm.runtime.execution_context import CoreDivision
from swiftllm.scheduling.validation import SchedulerLimits
from tests.reference.fake_gpu import fake_gpu
from tests.reference.tiny_model import make_tiny_llama

ALL, HALF = CoreDivision(4, 4, ""), CoreDivision(2, 2, "")


@pytest.mark.parametrize(
    ("gpu", "cpu", "max_num_seqs", "max_model_len", "expected"),
    [
        (100, 300, 40, 500, DecodeMix(10, 30, 160)),  # ten blocks for each of 40 fill both tiers
        (100, 300, 40, 50, DecodeMix(25, 15, 50)),  # the model takes four blocks: 25 of 40 fit the GPU tier
        (400, 300, 40, 100, DecodeMix(40, 0, 100)),  # all fit the GPU tier
        (1000, 3000, 400, 500, DecodeMix(16, 48, 160)),  # a larger batch is cut down
        (0, 30, 3, 500, DecodeMix(0, 3, 160)),
        (2, 1, 8, 500, DecodeMix(2, 1, 16)),  # not a block for each
        (5, 4, 1, 500, DecodeMix(1, 0, 80)),  # no request can be in both tiers
    ],
)
def test_the_load_fills_the_tiers(gpu, cpu, max_num_seqs, max_model_len, expected):
    limits = SchedulerLimits(512, max_num_seqs, max_model_len)
    assert full_load({Tier.GPU: gpu, Tier.CPU: cpu}, LayerGroups(16), limits) == expected


@pytest.mark.parametrize(
    ("all_cores", "half", "expected"),
    [
        (DecodeRates(130, 180), DecodeRates(100, 200), ALL),  # gains 1.3 with one load, loses 1.1 with the other
        (DecodeRates(110, 100), DecodeRates(100, 200), HALF),
        (DecodeRates(130, 50), DecodeRates(100, 125), ALL),  # the CPU tier can be left alone: 130 of both tiers, too
        (DecodeRates(0, 90), DecodeRates(0, 100), HALF),
        (DecodeRates(110, 0), DecodeRates(100, 0), ALL),
    ],
)
def test_both_loads_count_alike(all_cores, half, expected):
    chosen = fastest([ALL, HALF], [all_cores, half])
    assert (chosen.gpu_batch_threads, chosen.cpu_threads) == (expected.gpu_batch_threads, expected.cpu_threads)


def test_the_choice_is_explained():
    chosen = fastest([ALL, HALF], [DecodeRates(130.2, 180), DecodeRates(100, 199.9)])
    told = "measured: GPU tier full 130 tokens/s, both tiers full 180 tokens/s; with 2 threads 100 and 200"
    assert chosen.reason == told
    chosen = fastest([ALL, HALF], [DecodeRates(0, 90), DecodeRates(0, 100)])
    assert chosen.reason == "measured: both tiers full 100 tokens/s; with 4 threads 90"


class MadeUpBench:
    """Iterations whose seconds follow from the division in effect and from the requests."""

    def __init__(self, warm_up_s: float = 9.0) -> None:
        self.division: CoreDivision | None = None
        self.turns: list[CoreDivision] = []
        self.warm_up_s = warm_up_s

    def use(self, division: CoreDivision) -> None:
        self.division = division
        self.turns.append(division)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        yield

    def decodes(self, on_gpu: int, on_cpu: int, context: int):
        runs: dict[CoreDivision, int] = {}

        def sample() -> float:
            runs[self.division] = runs.get(self.division, 0) + 1
            if runs[self.division] == 1:
                return self.warm_up_s
            return (on_gpu + 2 * on_cpu) / self.division.gpu_batch_threads

        return sample


def test_divisions_take_turns_and_the_first_round_warms_up():
    bench = MadeUpBench()
    rates = measure_divisions(bench.use, bench, [ALL, HALF], DecodeMix(3, 1, 50), lambda done, what: None)
    assert rates == [DecodeRates(4.0, 16 / 5), DecodeRates(2.0, 8 / 5)]
    assert bench.turns == [ALL, HALF] * (ROUNDS + 1)
    rates = measure_divisions(bench.use, bench, [ALL], DecodeMix(0, 1, 50), lambda done, what: None)
    assert rates == [DecodeRates(0.0, 2.0)]


def test_a_slow_model_gets_one_round(monkeypatch):
    monkeypatch.setattr(apex.perf.machine_profile, "ENOUGH_S", 0.0)
    bench = MadeUpBench()
    measure_divisions(bench.use, bench, [ALL, HALF], DecodeMix(3, 1, 50), lambda done, what: None)
    assert bench.turns == [ALL, HALF] * 2


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)


@pytest.fixture
def two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(execution_context, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # pacpu's threads alone: they sleep when idle


def config(model_dir: Path, **options) -> EngineConfig:
    sizes = {"num_gpu_blocks": 12, "num_cpu_blocks": 36, "max_num_seqs": 8, **options}
    return EngineConfig(str(model_dir), device="cpu", dtype="float32", **sizes)


def kept_rates(cache: Path) -> dict[Path, list[dict[str, float]]]:
    """What was measured of divisions, by the file that holds it."""
    kept = {path: json.loads(path.read_text()) for path in cache.rglob("*.json")}
    return {path: content["rates"] for path, content in kept.items() if "rates" in content}


def keep_rates(path: Path, *rates: float) -> None:
    """Have the cache say that the divisions reach these rates."""
    made_up = [{"gpu_tier": rate, "both_tiers": rate} for rate in rates]
    path.write_text(json.dumps({**json.loads(path.read_text()), "rates": made_up}))


def test_the_choice_is_measured_once_and_told(model_dir, two_cores, tmp_path, monkeypatch):
    monkeypatch.setattr(apex.perf.machine_profile, "ENOUGH_S", 0.0)
    open_backend(config(model_dir)).close()
    ((path, (one, other)),) = kept_rates(tmp_path).items()
    assert min(*one.values(), *other.values()) > 0.0
    keep_rates(path, 1.0, 2.0)
    with closing(build_system("apex", config(model_dir))) as engine:
        told = engine.describe()
    assert (told["gpu_batch_threads"], told["cpu_threads"]) == (1, 1)
    assert told["gpu_batch"].startswith("1 thread (measured: GPU tier full 2 tokens/s")
    keep_rates(path, 2.0, 1.0)
    made_up = kept_rates(tmp_path)
    with closing(open_backend(config(model_dir))) as backend:
        assert (backend.cores.gpu_batch_threads, backend.cores.cpu_threads) == (2, 2)
    assert kept_rates(tmp_path) == made_up
    open_backend(config(model_dir), measure_again=True).close()
    assert kept_rates(tmp_path).keys() == made_up.keys() and kept_rates(tmp_path) != made_up
    open_backend(config(model_dir, num_gpu_blocks=13, max_num_seqs=7)).close()
    assert len(kept_rates(tmp_path)) == 2
    with closing(open_backend(config(model_dir, gpu_batch_threads=1))) as backend:
        assert backend.cores.reason == "as asked for"
    with closing(build_system("swiftllm", config(model_dir))) as engine:
        assert engine.describe()["gpu_batch"] == "2 threads (one for every core)"


@pytest.mark.parametrize(("on_gpu", "on_cpu"), [(3, 4), (0, 5), (2, 0), (2, 1)])
def test_an_iteration_decodes_every_request(model_dir, monkeypatch, on_gpu, on_cpu):
    with closing(open_backend(config(model_dir))) as backend:
        bench, stage, tokens = make_workbench(config(model_dir), backend), backend.run_stage, []

        def noted(layer, batches):
            given = stage(layer, batches)
            tokens.extend(given)
            return given

        monkeypatch.setattr(backend, "run_stage", noted)
        with bench.in_use():
            sample = bench.decodes(on_gpu, on_cpu, 20)
            for _ in range(2):
                tokens.clear()
                assert sample() > 0
                assert len(set(tokens)) == len(tokens) == on_gpu + on_cpu


def test_what_is_measured_reads_memory_that_has_been_written(model_dir):
    """Host memory nobody has written is one page of zeros, which the caches hold."""
    with closing(open_backend(config(model_dir))) as backend:
        for pool in backend.kv_pools.tensors.values():
            pool.fill_(torch.nan)
        make_workbench(config(model_dir), backend)
        assert not any(pool.isnan().any() for pool in backend.kv_pools.tensors.values())


def test_beside_a_gpu_the_threads_of_cpu_attention_are_measured_once_and_told(model_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("APEX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(apex.perf.machine_profile, "ENOUGH_S", 0.0)
    monkeypatch.setattr(execution_context, "usable_cores", lambda: 4)
    monkeypatch.setattr(execution_context, "physical_cores", lambda: 2)
    sizes = {"num_gpu_blocks": 12, "num_cpu_blocks": 36, "max_num_seqs": 8, "max_model_len": 64}
    options = EngineConfig(str(model_dir), dtype="float32", **sizes)
    with fake_gpu(0, can_capture=False, measure_cores=True):
        open_backend(options).close()
        ((path, rates),) = kept_rates(tmp_path).items()
        assert len(rates) == 3 and all(rate["both_tiers"] > 0.0 for rate in rates)
        keep_rates(path, 1.0, 2.0, 1.5)
        with closing(open_backend(options)) as backend:
            assert (backend.cores.gpu_batch_threads, backend.cores.cpu_threads) == (1, 1)
        told = "1 thread (a GPU computes it; CPU attention has 1 thread, measured: GPU tier full 2 tokens/s"
        assert backend.cores.gpu_batch_input().startswith(told)
        with closing(open_backend(replace(options, cpu_threads=2))) as backend:
            assert backend.cores.reason == "a GPU computes it"
        with closing(open_backend(replace(options, num_cpu_blocks=0))) as backend:
            assert backend.cores.cpu_threads == 3
    assert len(kept_rates(tmp_path)) == 1
