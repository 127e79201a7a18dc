"""Prefills of each tier have times of their own: in the profile, in what schedulers predict, in the online correction.

A made-up GPU has no times. Here an operation takes as long as it has copies to the CPU tier and back to do.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from apex.perf import profiler
from apex.perf.gpu_batch_load import GpuBatchLoad
from apex.perf.model import Curve, PerfModel, ProfileMismatch, ProfileTable, Surface
from apex.perf.online.correction import scaled_table
from apex.perf.online.iteration_times import gpu_batch_span
from apex.perf.profile_cache import make_workbench
from apex.perf.profiler import SizeGrid, measure_seconds, table_from_seconds
from apex.perf.workbench import Workbench
from apex.schedulers.hybrid import gpu_batch_s
from apex.schedulers.omniserve.times import PromptLeft, with_prompts
from apex.simulator.virtual.backend import SimulatedBackend
from swiftllm.config import EngineConfig
from swiftllm.core.plan import GpuBatchItem, IterationPlan
from swiftllm.core.request import Request, SamplingParams, Tier
from swiftllm.runtime.kv_transfers import KVTransfers
from swiftllm.runtime.torch_backend import open_torch_backend
from tests.reference.fake_gpu import fake_gpu
from tests.reference.fake_streams import FakeWorker
from tests.reference.linear_profile import flat_ends_table
from tests.reference.tiny_model import make_tiny_llama

LAYERS = 4
SMALL = SizeGrid(
    linear_tokens=(1, 4), sampled_rows=(1, 2), swapped_blocks=(1, 2), prefill_tokens=(1, 8, 24),
    prefill_cached=(0, 1, 40), decode_requests=(1, 2), decode_contexts=(4, 40), prefill_chunks_counts=(2,),
    iteration_requests=(1, 2),
)  # fmt: skip
ALONE_S, COPY_S = 1.0, 0.25  # whose sums are exact


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=LAYERS)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Transfers of prefills since the last timed operation began; each takes COPY_S beside ALONE_S."""
    done: list[str] = []

    def counted(name: str) -> None:
        transfer = getattr(KVTransfers, name)
        monkeypatch.setattr(KVTransfers, name, lambda self, *of: done.append(name) or transfer(self, *of))

    def time_s(self, run) -> float:
        done.clear()
        run()
        return ALONE_S + len(done) * COPY_S

    counted("store_rows")
    counted("take_contexts")
    monkeypatch.setattr(Workbench, "_time_s", time_s)
    monkeypatch.setattr(profiler, "ROUNDS", 3)
    return done


def measured(folder: Path, gpu: int, cpu: int) -> ProfileTable:
    options = {"num_gpu_blocks": gpu, "num_cpu_blocks": cpu, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    with fake_gpu(0) as cuda:
        config = EngineConfig(str(folder), device="cpu", dtype="float32", block_size=4, **options)
        backend = open_torch_backend(config, partial(FakeWorker, cuda))
        (seconds,) = measure_seconds(make_workbench(config, backend), 64, SMALL)
        backend.close()
    return table_from_seconds(seconds, {})


def seconds_of(surface: Surface) -> set[float]:
    return {seconds for curve in surface.curves for seconds in curve.seconds}


@pytest.mark.parametrize(("gpu", "cpu"), [(40, 200), (200, 40)])
def test_the_profile_has_prefills_of_both_tiers_whichever_is_larger(
    model_dir: Path, copies, gpu: int, cpu: int
) -> None:
    table = measured(model_dir, gpu, cpu)
    assert seconds_of(table.prefill_attention) == {ALONE_S}
    for curve in table.prefill_attention_cpu_tier.curves:
        stored_s, *loaded_s = curve.seconds
        assert stored_s == ALONE_S + COPY_S and set(loaded_s) == {ALONE_S + 2 * COPY_S}
    assert table.prefill_shared_s == pytest.approx(ALONE_S)  # a GPU batch of two chunks is timed in the GPU tier


@pytest.mark.parametrize(
    ("gpu", "cpu", "alone_s"), [(40, 0, {ALONE_S}), (0, 40, {ALONE_S + COPY_S, ALONE_S + 2 * COPY_S})]
)
def test_with_one_tier_the_profile_has_its_prefills(model_dir: Path, copies, gpu: int, cpu: int, alone_s) -> None:
    table = measured(model_dir, gpu, cpu)
    assert seconds_of(table.prefill_attention) == alone_s
    assert table.prefill_attention_cpu_tier is None


# -- predictions ------------------------------------------------------------------------------------------------------


def by_size(token_s: float, cached_s: float) -> Surface:
    """Seconds that are linear in new tokens and in cached ones."""
    return Surface((0, 1000), tuple(Curve((0, 1000), (n * token_s, n * token_s + 1000 * cached_s)) for n in (0, 1000)))


ON_GPU, TO_CPU = by_size(1e-6, 0.0), by_size(3e-6, 5e-6)
TABLE = replace(
    flat_ends_table(1e-8, 1e-8), prefill_attention=ON_GPU, prefill_attention_cpu_tier=TO_CPU, prefill_shared_s=1e-5
)
MODEL = PerfModel(TABLE, LAYERS)


def prefill(name: str, new: int, cached: int, tier: Tier) -> GpuBatchItem:
    request = Request(name, (5,) * (cached + new), SamplingParams(), frozenset(), 0.0, 0)
    return GpuBatchItem(request, cached, new, tier, is_prefill=True)


def test_chunks_of_each_tier_are_predicted_by_its_times_and_are_a_launch_of_their_own() -> None:
    chunks = [(100, 0), (50, 20), (100, 0)]
    gpu_s = 100e-6 + 50e-6 + 100e-6 - 2 * 1e-5
    assert MODEL.prefill_attention_s(chunks) == pytest.approx(gpu_s)
    cpu_s = 3 * 50e-6 + 20 * 5e-6
    assert MODEL.prefill_attention_s(chunks, [(50, 20)]) == pytest.approx(100e-6 + 100e-6 - 1e-5 + cpu_s)
    assert MODEL.prefill_attention_s(chunks, [(100, 0)]) == pytest.approx(100e-6 + 50e-6 - 1e-5 + 3 * 100e-6)
    assert MODEL.prefill_attention_s([(50, 20)], [(50, 20)]) == pytest.approx(cpu_s)
    assert MODEL.prefill_attention_s([]) == 0.0


def test_without_times_of_the_cpu_tier_all_chunks_count_alike() -> None:
    model = PerfModel(replace(TABLE, prefill_attention_cpu_tier=None), LAYERS)
    chunks = [(100, 0), (50, 20), (100, 0)]
    assert model.prefill_attention_s(chunks, chunks) == model.prefill_attention_s(chunks)


def test_a_gpu_batch_knows_the_tier_of_its_chunks() -> None:
    items = [prefill("a", 100, 0, Tier.GPU), prefill("b", 100, 0, Tier.CPU), prefill("c", 50, 20, Tier.CPU)]
    load = GpuBatchLoad.from_items(items)
    assert load == GpuBatchLoad.from_builder(IterationPlan(prefills=tuple(items)))
    assert load.chunks == ((100, 0), (100, 0), (50, 20)) and load.cpu_tier_chunks == ((100, 0), (50, 20))
    attention_s = 100e-6 + (300e-6 + 150e-6 + 100e-6 - 1e-5)
    assert load.prefill_attention_s(MODEL) == pytest.approx(attention_s)
    assert load.gpu_attention_s(MODEL) == pytest.approx(attention_s)
    for item, left in zip(items, (((100, 0), (50, 20)), ((50, 20),), ((100, 0),)), strict=True):
        assert load.without(item).cpu_tier_chunks == left
        assert len(load.without(item).chunks) == 2
    saved_s = gpu_batch_s(MODEL, load) - gpu_batch_s(MODEL, load.without(items[1]))
    assert saved_s > gpu_batch_s(MODEL, load) - gpu_batch_s(MODEL, load.without(items[0]))


def test_prompts_that_may_go_on_are_predicted_in_their_tier() -> None:
    empty = GpuBatchLoad(0, 0, 0, 0, ())
    load = with_prompts(empty, [PromptLeft(30, 5), PromptLeft(40, 0, Tier.CPU), PromptLeft(9, 0)], 75)
    assert load.chunks == ((30, 5), (40, 0), (5, 0)) and load.cpu_tier_chunks == ((40, 0),)


@pytest.mark.parametrize("tier", Tier)
def test_the_online_correction_expects_the_times_of_the_tier(tier: Tier) -> None:
    plan = IterationPlan(prefills=(prefill("a", 100, 50, tier),))
    span = gpu_batch_span(MODEL, plan, ())
    other = gpu_batch_span(PerfModel(replace(TABLE, prefill_attention=by_size(0.0, 0.0)), LAYERS), plan, ())
    expected_s = {Tier.GPU: LAYERS * 100e-6, Tier.CPU: 0.0}[tier]
    assert span.least - other.least == pytest.approx(expected_s)
    scaled = PerfModel(scaled_table(TABLE, 3.0, 1.0), LAYERS)
    load = GpuBatchLoad.from_builder(plan)
    assert load.gpu_attention_s(scaled) == pytest.approx(3 * load.gpu_attention_s(MODEL))


def test_a_simulation_counts_the_context_of_the_cpu_tier_once() -> None:
    """A measured table has its way to the GPU in the attention; a predicted one leaves it to the simulated link."""
    item = prefill("a", 100, 50, Tier.CPU)
    for table, counted in ((TABLE, False), (replace(TABLE, prefill_attention_cpu_tier=None), True)):
        gpu_batch = SimulatedBackend(PerfModel(table, LAYERS)).open_gpu_batch([item])
        assert (gpu_batch.context_s > 0) == counted


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [TABLE, replace(TABLE, prefill_attention_cpu_tier=None)])
def test_a_table_is_kept_with_the_times_of_both_tiers(tmp_path: Path, table: ProfileTable) -> None:
    (tmp_path / "table.json").write_text(table.as_json())
    assert ProfileTable.load(tmp_path / "table.json", table.identity) == table


def test_a_table_with_one_tier_of_prefills_is_to_be_measured_again(tmp_path: Path) -> None:
    raw = json.loads(TABLE.as_json()) | {"version": 5}
    del raw["prefill_attention_cpu_tier"]
    (tmp_path / "table.json").write_text(json.dumps(raw))
    with pytest.raises(ProfileMismatch, match="has another format: run `apex profile` again"):
        ProfileTable.load(tmp_path / "table.json", TABLE.identity)
